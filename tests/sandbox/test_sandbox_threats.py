"""The table of threats: every program gets its verdict and none gets through, in both tiers, as root and as nobody."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from coterie.errors import ConfigError
from coterie.sandbox.pool import SandboxPool
from sandbox.threats import THREATS, wrong

ROOT = Path(__file__).parent.parent.parent
NOBODY = 65534


@pytest.fixture(scope="module", params=["A", "C"])
def pool(request: pytest.FixtureRequest) -> Iterator[SandboxPool]:
    tier: Literal["A", "C"] = request.param
    try:
        pool = SandboxPool(1, tier=tier)
    except ConfigError as error:
        pytest.skip(f"this host does not allow tier {tier}: {error}")
    with pool:
        yield pool


@pytest.mark.parametrize("name", THREATS)
def test_the_verdict_is_right_and_nothing_gets_through(name: str, pool: SandboxPool) -> None:
    threat = THREATS[name]
    if pool.tier not in threat.tiers:
        pytest.skip(f"is about tier {threat.tiers}")
    assert wrong(threat, pool.run_now(threat.program, threat.stdin, threat.limits)) == []


def python_for_all() -> str | None:
    """Return a Python of this version that every user may run."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (f"/usr/bin/{version}", f"/usr/local/bin/{version}", shutil.which(version)):
        real = Path(os.path.realpath(path)) if path and os.path.exists(path) else None
        if real and all(parent.stat().st_mode & 0o005 == 0o005 for parent in [real, *real.parents]):
            return str(real)
    return None


@pytest.mark.parametrize("tier", ["A", "C"])
def test_an_ordinary_user_has_the_same_walls(tier: str) -> None:
    python = python_for_all()
    if os.getuid() != 0 or python is None:
        pytest.skip("only root can become somebody else, and needs a Python that everybody may run")
    if not all(parent.stat().st_mode & 0o005 == 0o005 for parent in [ROOT, *ROOT.parents]):
        pytest.skip(f"{ROOT} cannot be read by other users")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), *site.getsitepackages()])
    done = subprocess.run(
        [python, str(Path(__file__).parent / "play_threats.py"), tier, str(NOBODY)],
        env={"PYTHONPATH": path, "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    if "refused" in told:
        pytest.skip(f"this host does not allow tier {tier} to an ordinary user: {told['refused']}")
    assert told["faults"] == {}
    assert told["uid"] == NOBODY
    assert "own user id" not in told["layers"]
