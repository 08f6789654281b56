"""Run all threats in one tier and write what is wrong as JSON: for users other than the one who runs the tests.

Usage: play_threats.py TIER [UID]. With a user id, this process becomes that user first.
"""

from __future__ import annotations

import json
import os
import sys

if len(sys.argv) > 2:
    os.setgroups([])
    os.setresgid(*3 * [int(sys.argv[2])])
    os.setresuid(*3 * [int(sys.argv[2])])
    os.chdir("/")

from coterie.errors import ConfigError
from coterie.sandbox.pool import SandboxPool
from sandbox.threats import THREATS, wrong


def main() -> None:
    tier = "A" if sys.argv[1] == "A" else "C"
    try:
        pool = SandboxPool(1, tier=tier)
    except ConfigError as error:
        sys.stdout.write(json.dumps({"refused": str(error)}))
        return
    with pool:
        faults = {
            name: wrong(threat, pool.run_now(threat.program, threat.stdin, threat.limits))
            for name, threat in THREATS.items()
            if tier in threat.tiers
        }
    sys.stdout.write(
        json.dumps({"uid": os.getuid(), "layers": pool.layers, "faults": {k: v for k, v in faults.items() if v}})
    )


if __name__ == "__main__":
    main()
