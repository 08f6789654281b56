"""The same on Ray: a cluster of two nodes on this machine, whose workers are killed and stopped while they work."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from coterie.cluster.placement import Layout
from coterie.errors import ConfigError
from coterie.hardware import HardwareTable
from coterie.record import read_rows
from coterie.runs import resume, start
from learning_toys import PER_ROLE, quiet, toy_recipe

pytest.importorskip("ray", reason="ray is not installed: pip install 'coterie[ray]'")
from coterie.cluster.start import connected, refused

pytestmark = [pytest.mark.timeout(900)]
LIMIT_S = 800
"""Catches what hangs; nothing here is measured."""
LIGHT = "env.name=letters:Letters"
"""The env without the rest of the toys, which load torch: a worker that plays it starts at once."""
RAY = ("hardware.backend=ray", "hardware.env_workers=2", LIGHT)
SHARED = (*RAY, "hardware.update_workers=2")
LORA = ("policies.main.train=lora",)
KINDS = {"environment": "EnvWorker", "rollout": "EngineWorker", "update": "LearnerWorker"}
# Batches 9 to 28 are those of training, five a step. The state is saved before the first step and after every other.
KILLED = {place: (kind, signal.SIGKILL) for place, kind in zip((11, 14, 17), KINDS.values(), strict=True)}
STOPPED = {place: (kind, signal.SIGSTOP) for place, kind in zip((20, 23, 26), KINDS.values(), strict=True)}
NEAR = 1e-3
"""Of numbers that several update workers and one have written: sums in another order, then the steps after them."""

Strikes = Mapping[int, tuple[str, int]]


def run_of(out: Path, settings: Sequence[str], strikes: Strikes | None = None) -> dict[str, Any]:
    """Return a run of a plan of ``ray_driver``."""
    return {"out": str(out), "settings": [*settings], "strikes": dict(strikes or {})}


def drive(runs: Sequence[Mapping[str, Any]], *, shared: bool) -> subprocess.CompletedProcess[str]:
    """Train in a process of its own, on one cluster for all runs or on one for each."""
    command = [sys.executable, str(Path(__file__).parent / "ray_driver.py")]
    plan = json.dumps({"shared": shared, "runs": runs})
    return subprocess.run([*command, plan], capture_output=True, text=True, check=False, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of all runs on the cluster that they share."""
    folder = tmp_path_factory.mktemp("ray")
    plan = [
        run_of(folder / "one", RAY),
        run_of(folder / "two", [*PER_ROLE, *RAY]),
        run_of(folder / "shared", SHARED),
        run_of(folder / "shared-lora", [*LORA, *SHARED], {16: ("LearnerWorker", signal.SIGKILL)}),
        run_of(folder / "lost", [*RAY, "hardware.deadline_s=8", "hardware.max_restarts=20"], KILLED | STOPPED),
    ]
    done = drive(plan, shared=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run in one process."""
    start(toy_recipe(), tmp_path_factory.mktemp("local") / "run", quiet())
    return tmp_path_factory.getbasetemp() / "local0" / "run"


def equal(one: Path, other: Path) -> bool:
    """Return whether two runs have the same numbers, byte for byte."""
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in ("metrics.jsonl", "eval.jsonl"))


def near(one: Path, other: Path) -> None:
    """Assert that two runs have the same numbers but for rounding."""
    rows, others = read_rows(one / "metrics.jsonl"), read_rows(other / "metrics.jsonl")
    assert len(rows) == len(others) == 4
    for row, expected in zip(rows, others, strict=True):
        assert row == pytest.approx(expected, rel=NEAR, abs=NEAR)


def lost(run: Path) -> set[tuple[str, str]]:
    """Return which kinds of workers a run has lost, and how."""
    rows = [row for row in read_rows(run / "events.jsonl") if row["event"] == "worker_lost"]
    return {
        (str(row["worker"]).split(" ")[0], "killed" if " died over " in str(row["error"]) else "silent") for row in rows
    }


def alive(pids: Sequence[int]) -> list[int]:
    """Return the processes that still run; one that has ended may stay in the table until somebody asks for it."""
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                left.append(pid)
    return left


def test_two_nodes_write_the_bytes_of_one_process(runs: Path, local: Path) -> None:
    assert equal(runs / "one", local)
    assert lost(runs / "one") == set()


def test_two_nodes_write_the_bytes_of_one_process_with_a_policy_for_each_role(runs: Path, tmp_path: Path) -> None:
    start(toy_recipe(*PER_ROLE), tmp_path / "run", quiet())
    assert equal(runs / "two", tmp_path / "run")


def test_a_worker_of_every_kind_is_killed_and_then_stopped_in_training_and_the_numbers_stay(
    runs: Path, local: Path
) -> None:
    assert equal(runs / "lost", local)
    assert lost(runs / "lost") == {(kind, how) for kind in KINDS for how in ("killed", "silent")}


def test_two_update_workers_train_as_one_does_and_one_goes_on_from_their_checkpoint(runs: Path, local: Path) -> None:
    near(runs / "shared", local)
    before = (runs / "shared" / "metrics.jsonl").read_bytes()
    resume(runs / "shared", toy_recipe(LIGHT, "train.steps=5"), quiet(), accept_changes=True)
    after = (runs / "shared" / "metrics.jsonl").read_bytes()
    assert after.startswith(before)
    assert [row["step"] for row in read_rows(runs / "shared" / "metrics.jsonl")] == [0, 1, 2, 3, 4]


def test_two_update_workers_of_an_adapter_begin_again_when_one_of_them_is_killed(runs: Path, tmp_path: Path) -> None:
    start(toy_recipe(*LORA), tmp_path / "run", quiet())
    near(runs / "shared-lora", tmp_path / "run")
    assert lost(runs / "shared-lora") == {("update", "killed")}


def test_an_address_where_nobody_is_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for address, message in (
        ("127.0.0.1:1", "no Ray cluster at 127.0.0.1:1: nothing takes connections there"),
        ("ray://10.0.0.1:10001", "'ray://10.0.0.1:10001': expected HOST:PORT"),
        ("auto", "'auto': expected HOST:PORT"),
    ):
        hardware = HardwareTable(backend="ray", address=address)
        with pytest.raises(ConfigError, match=message), connected(hardware, Layout(pools=(), env_workers=1), 0):
            pytest.fail("there is no such cluster")


def test_a_cluster_that_will_not_have_this_process_is_told_from_one_that_is_not_there() -> None:
    token, version = ConnectionError("Failed to connect to Ray cluster"), RuntimeError("Version mismatch: Ray: 2.59.0")
    token.__cause__ = RuntimeError(
        "Last connection error: Traceback ... AuthenticationError: RPC error: InvalidAuthToken"
    )
    assert "Copy ~/.ray/auth_token of its head" in str(refused("10.0.0.1:6379", token))
    assert "Traceback" not in str(refused("10.0.0.1:6379", token))
    assert "install the same on all machines. Version mismatch: Ray: 2.59.0" in str(refused("10.0.0.1:6379", version))
    assert "Ray cannot connect to the cluster at 10.0.0.1:6379: no" in str(refused("10.0.0.1:6379", ValueError("no")))


def test_without_the_cluster_the_run_ends_with_a_clear_error_and_leaves_nothing_running(tmp_path: Path) -> None:
    """The head goes while all workers answer, in a run that would be over before anyone waits for long."""
    settings = [*RAY, "hardware.local_nodes=2", "train.steps=200"]
    done = drive([run_of(tmp_path / "run", settings, {9: ("gcs_server", signal.SIGKILL)})], shared=False)
    assert done.returncode != 0
    assert "TrainError: the Ray cluster at 127.0.0.1" in done.stderr
    assert "--resume" in done.stderr
    assert "Traceback" not in done.stderr.rpartition("TrainError")[2]
    assert alive(json.loads((tmp_path / "run.pids").read_text())) == []
