"""Runs on a Ray cluster, one after the other, in a process of their own: ``python ray_driver.py PLAN``.

Ray keeps threads and settings in a process that has used it, and a cluster takes seconds to start, so the runs of a
plan share both. The plan is JSON: ``shared`` says whether a cluster is started for all of its ``runs``, or by each.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil

sys.path[:0] = [str(Path(__file__).parent.parent)]

from coterie.cluster.entry import prepare  # noqa: E402
from coterie.cluster.placement import Layout  # noqa: E402
from coterie.hardware import HardwareTable  # noqa: E402
from coterie.runs import start  # noqa: E402
from learning_toys import quiet, toy_recipe  # noqa: E402

GONE_S = 3.0
"""A head that is gone for so long is given up here; a user's run waits longer."""


def striker(strikes: Mapping[str, tuple[str, int]], pids: Path) -> Callable[[], None]:
    """Return what is called before every batch, counted from 1: a strike sends the first process of a name a signal."""
    batches = 0

    def strike() -> None:
        nonlocal batches
        batches += 1
        name, number = strikes.get(str(batches), ("", 0))
        if batches == 1 or name:
            family = psutil.Process().children(recursive=True)
            pids.write_text(json.dumps([process.pid for process in family]))
            victims = [process for process in family if name and name in "".join(process.cmdline()[:1])]
            for victim in victims[:1]:
                os.kill(victim.pid, number)

    return strike


def main(plan: Mapping[str, Any]) -> None:
    hardware = HardwareTable(backend="ray", local_nodes=2, local_cpus=4)
    prepare(hardware)
    from coterie.cluster import actors
    from coterie.cluster.start import started_here

    actors._GONE_S = GONE_S
    place = started_here(hardware, Layout(pools=(), env_workers=1), 200 * 2**20)
    with place if plan["shared"] else nullcontext() as address:
        if address is not None:
            os.environ["RAY_ADDRESS"] = address
        for run in plan["runs"]:
            out = Path(run["out"])
            stop = striker(run["strikes"], out.with_suffix(".pids"))
            start(toy_recipe(*run["settings"]), out, dataclasses.replace(quiet(), stop=stop))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
