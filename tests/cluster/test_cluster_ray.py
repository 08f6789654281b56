"""The same on Ray: a cluster of two nodes on this machine, whose workers are killed and stopped while they work."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from coterie.record import read_rows
from coterie.runs import start
from learning_toys import PER_ROLE, quiet, toy_recipe

pytest.importorskip("ray", reason="ray is not installed: pip install 'coterie[ray]'")
pytestmark = [pytest.mark.timeout(900)]
RAY = ("hardware.backend=ray", "hardware.local_nodes=2", "hardware.env_workers=2")
LIMIT_S = 800
"""Catches what hangs; nothing here is measured."""
KINDS = ("EnvWorker", "EngineWorker", "LearnerWorker")

_DRIVER = """
    import dataclasses, os, sys
    sys.path[:0] = {paths!r}
    from pathlib import Path
    import psutil
    from coterie.runs import start
    from learning_toys import quiet, toy_recipe

    strikes = {strikes!r}  # what is done before the n-th batch: (part of a command line, signal)
    batches = 0

    def stop() -> None:
        global batches
        batches += 1
        part, number = strikes.get(batches, ("", 0))
        if part:
            family = psutil.Process().children(recursive=True)
            victims = [p for p in family if any(part in word for word in p.cmdline()[:1])]
            os.kill(victims[0].pid, number)

    start(toy_recipe(*{settings!r}), Path({out!r}), dataclasses.replace(quiet(), stop=stop))
"""


def train(
    out: Path, *settings: str, strikes: Mapping[int, tuple[str, int]] | None = None
) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own: Ray keeps threads and settings in the one that has used it."""
    here = Path(__file__).parent
    code = textwrap.dedent(_DRIVER).format(
        paths=[str(here), str(here.parent)], settings=settings, out=str(out), strikes=dict(strikes or {})
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=LIMIT_S)


def equal(one: Path, other: Path) -> bool:
    """Return whether two runs have the same numbers, byte for byte."""
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in ("metrics.jsonl", "eval.jsonl"))


@pytest.mark.parametrize("settings", [(), PER_ROLE], ids=["one", "two"])
def test_two_nodes_write_the_bytes_of_one_process(settings: tuple[str, ...], tmp_path: Path) -> None:
    start(toy_recipe(*settings), tmp_path / "local", quiet())
    done = train(tmp_path / "ray", *settings, *RAY)
    assert done.returncode == 0, done.stderr
    assert equal(tmp_path / "local", tmp_path / "ray")


@pytest.mark.parametrize("number", [9, 19], ids=["killed", "stopped"])
def test_a_worker_of_every_kind_is_lost_in_turn_and_the_numbers_stay(number: int, tmp_path: Path) -> None:
    """Batches 5 and 7 are of the evaluation before training, batch 9 is of the first step, before its update."""
    start(toy_recipe(), tmp_path / "local", quiet())
    strikes = {place: (kind, number) for place, kind in zip((5, 7, 9), KINDS, strict=True)}
    done = train(tmp_path / "ray", *RAY, "hardware.deadline_s=30", strikes=strikes)
    assert done.returncode == 0, done.stderr
    assert equal(tmp_path / "local", tmp_path / "ray")
    lost = [row["worker"] for row in read_rows(tmp_path / "ray" / "events.jsonl") if row["event"] == "worker_lost"]
    assert {str(worker).split(" ")[0] for worker in lost} == {"environment", "rollout", "update"}


def test_without_the_cluster_the_run_ends_with_a_clear_error(tmp_path: Path) -> None:
    done = train(tmp_path / "ray", *RAY, strikes={9: ("gcs_server", 9)})
    assert done.returncode != 0
    assert "the Ray cluster at 127.0.0.1" in done.stderr
    assert "--resume" in done.stderr
