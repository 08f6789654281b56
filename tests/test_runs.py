"""Run folders: whatever stops a run, going on gives the bytes of the run that never stopped."""

from __future__ import annotations

import json
import random
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.config import dump_recipe
from coterie.durable import RunLock
from coterie.errors import CheckpointError, ConfigError, TrainError
from coterie.faults import VARIABLE, InjectedFaultError
from coterie.lineup import assemble, check_env_fits
from coterie.record import read_rows
from coterie.runs import changed_schedules, check_changes, load_weights, open_run, refuse_begun, resume, start
from coterie.tensors import load_tensors
from coterie.train import Listener
from learning_toys import MIX, PER_ROLE, WARM, Child, quiet, snapshot, toy_recipe

EVALS = ("eval.every=1", "train.save_every=2")
Reference = Callable[..., tuple[Path, Mapping[str, bytes]]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return (folder, snapshot) of the run with these settings that nothing ever stopped; made once."""
    made: dict[tuple[str, ...], tuple[Path, Mapping[str, bytes]]] = {}

    def of(*settings: str) -> tuple[Path, Mapping[str, bytes]]:
        if settings not in made:
            run_dir = tmp_path_factory.mktemp("reference") / "run"
            start(toy_recipe(*settings), run_dir, quiet())
            made[settings] = (run_dir, snapshot(run_dir))
        return made[settings]

    return of


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in read_rows(run_dir / "events.jsonl") if row["event"] == kind]


def abandon_in_step(step: int) -> Listener:
    """Return a listener that raises while step ``step`` is being played."""
    steps = iter(range(10_000))
    done = [next(steps)]

    def stop() -> None:
        if done[0] == step:
            raise KeyboardInterrupt

    listener = quiet()
    return Listener(
        step=lambda report: done.__setitem__(0, report.step + 1),
        score=listener.score,
        imitate=listener.imitate,
        stop=stop,
    )


# ---- equal bytes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [EVALS, (*PER_ROLE, *WARM)], ids=["shared", "per-role-warm"])
def test_the_same_recipe_twice_gives_equal_bytes(
    settings: tuple[str, ...], tmp_path: Path, reference: Reference
) -> None:
    """Invariant 8, in another process: metrics, evaluations, episodes, weights and optimiser state."""
    assert Child(tmp_path / "run", settings).exit_code() == 0
    assert snapshot(tmp_path / "run") == reference(*settings)[1]


def test_another_seed_gives_another_run(tmp_path: Path, reference: Reference) -> None:
    start(toy_recipe(*EVALS, "seed=1"), tmp_path / "run", quiet())
    assert snapshot(tmp_path / "run")["metrics.jsonl"] != reference(*EVALS)[1]["metrics.jsonl"]


def test_the_first_draws_after_resuming_are_those_of_that_step_and_not_of_the_first(
    tmp_path: Path, reference: Reference
) -> None:
    """CKPT-02."""
    run_dir, straight = reference(*EVALS)
    with pytest.raises(KeyboardInterrupt):
        start(toy_recipe(*EVALS), tmp_path / "run", abandon_in_step(2))
    resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert snapshot(tmp_path / "run") == straight
    firsts = [read_rows(run_dir / "episodes" / f"step-{step}.jsonl")[0]["turns"][0]["text"] for step in (0, 2)]
    again = read_rows(tmp_path / "run" / "episodes" / "step-2.jsonl")[0]["turns"][0]["text"]
    assert again == firsts[1] != firsts[0]


@pytest.mark.parametrize(
    "settings",
    [EVALS, (*PER_ROLE, *WARM), MIX, (*MIX, *WARM)],
    ids=["shared", "per-role-warm", "mix", "mix-warm"],
)
@pytest.mark.parametrize("step", [1, 3])
def test_a_run_stopped_in_a_step_and_resumed_equals_the_one_that_never_stopped(
    step: int, settings: tuple[str, ...], tmp_path: Path, reference: Reference
) -> None:
    """CKPT-01: shared and per role; the checkpoint is of step 0 or 2, the step that was cut short is redone."""
    with pytest.raises(KeyboardInterrupt):
        start(toy_recipe(*settings), tmp_path / "run", abandon_in_step(step))
    resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert snapshot(tmp_path / "run") == reference(*settings)[1]
    assert [row["step"] for row in read_rows(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3], "OBS-06"
    times = [row["time_s"] for row in read_rows(tmp_path / "run" / "timings.jsonl")]
    assert times == sorted(times), "OBS-06: the clock goes on"
    assert len(events(tmp_path / "run", "resumed")) == 1


def test_the_summary_of_a_resumed_run_knows_its_warm_start(tmp_path: Path, reference: Reference) -> None:
    settings = (*PER_ROLE, *WARM)
    with pytest.raises(KeyboardInterrupt):
        start(toy_recipe(*settings), tmp_path / "run", abandon_in_step(3))
    summary = resume(tmp_path / "run", None, quiet(), accept_changes=False)
    expected = json.loads((reference(*settings)[0] / "summary.json").read_text())
    process = {"minutes", "minutes_with_warm_start_and_evaluation", *(key for key in summary if "memory" in key)}
    assert {k: v for k, v in summary.items() if k not in process} == {
        k: v for k, v in expected.items() if k not in process
    }
    assert summary["peak_memory_mb"] >= summary["peak_memory_mb_by_phase"]["load"] > 0.0
    assert set(summary["imitation_loss"]) == {"main", "other"}


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    start(toy_recipe(), tmp_path / "run", quiet())
    before = snapshot(tmp_path / "run")
    resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert snapshot(tmp_path / "run") == before


# ---- kills ------------------------------------------------------------------------------------------------------

FAULTS = (
    "rollout-batch:0", "update:1", "metrics:2", "rollout-batch:3", "ckpt-tmp:0", "ckpt-tmp:2", "ckpt-before-rename:2",
    "ckpt-after-rename:4", "ckpt-before-prune:4", "ckpt-prune:0", "best-between-renames:3",
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_killed_at_a_point_and_resumed_equals_the_one_that_was_not(
    fault: str, tmp_path: Path, reference: Reference
) -> None:
    """Reliability rows 1, 4 and 5: SIGKILL, then resume until done."""
    code = Child(tmp_path / "run", EVALS, fault=fault).exit_code()
    if fault != "best-between-renames:3":  # reached only where that validation is a new best
        assert code == -signal.SIGKILL
    assert Child(tmp_path / "run", EVALS).exit_code() == 0
    assert snapshot(tmp_path / "run") == reference(*EVALS)[1]


def test_kills_at_random_instants_leave_no_trace(tmp_path: Path, reference: Reference) -> None:
    """Row 1: five runs are shot somewhere between start and end, one after the other, then one goes through."""
    rng, shot = random.Random(4), 0
    for _ in range(5):
        child = Child(tmp_path / "run", EVALS, slow_s=0.02)
        child.send_after(signal.SIGKILL, rng.uniform(0.3, 1.6))
        shot += child.exit_code() == -signal.SIGKILL
    assert shot >= 1
    assert Child(tmp_path / "run", EVALS).exit_code() == 0
    assert snapshot(tmp_path / "run") == reference(*EVALS)[1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_ends_with_its_code_and_resuming_is_exact(
    number: signal.Signals, code: int, tmp_path: Path, reference: Reference
) -> None:
    """Rows 2 and 3: wherever it arrives, in warm start, evaluation or a step."""
    rng, codes = random.Random(code), []
    for _ in range(3):
        child = Child(tmp_path / "run", EVALS, slow_s=0.02)
        child.wait_until_playing()
        child.send_after(number, rng.uniform(0.0, 0.8))
        codes.append(child.exit_code())
    assert code in codes
    assert set(codes) <= {0, code}
    assert Child(tmp_path / "run", EVALS).exit_code() == 0
    assert snapshot(tmp_path / "run") == reference(*EVALS)[1]
    assert len(events(tmp_path / "run", "stopped")) == codes.count(code)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    """Rows 2 and 3: the batch it is in would take 30 s."""
    child = Child(tmp_path / "run", slow_s=30.0)
    child.wait_until_playing()
    child.send(signal.SIGTERM)
    child.process.join(0.3)
    assert child.process.is_alive()
    child.send(signal.SIGTERM)
    child.process.join(10)
    assert child.process.exitcode == 143


@pytest.mark.parametrize("batch", [2, 6, 10, 15, 24, 34, 42, 46])
def test_an_evaluation_that_was_interrupted_is_made_up_for(batch: int, tmp_path: Path, reference: Reference) -> None:
    """A signal in the evaluations before, while and after training (or in a step): no row is lost or double.

    4 batches per play: 8 before training, 9 or 10 per step and its validation, 8 after training, about 48 in all.
    """
    seen = iter(range(10_000))

    def stop() -> None:
        if next(seen) == batch:
            signal.raise_signal(signal.SIGTERM)

    listener = quiet()
    with pytest.raises(BaseException, match="SIGTERM") as caught:
        start(
            toy_recipe(*EVALS),
            tmp_path / "run",
            Listener(step=listener.step, score=listener.score, imitate=listener.imitate, stop=stop),
        )
    assert type(caught.value).__name__ == "StopRequestedError"
    resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert snapshot(tmp_path / "run") == reference(*EVALS)[1]


def test_a_signal_in_the_warm_start_is_heard(tmp_path: Path, reference: Reference) -> None:
    settings = (*PER_ROLE, *WARM)
    listener = quiet()

    def second(name: str, step: int, steps: int, loss: float) -> None:
        if step == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(BaseException, match="SIGTERM"):
        start(
            toy_recipe(*settings),
            tmp_path / "run",
            Listener(step=listener.step, score=listener.score, imitate=second, stop=listener.stop),
        )
    assert not (tmp_path / "run" / "eval.jsonl").exists()
    resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert snapshot(tmp_path / "run") == reference(*settings)[1]


@pytest.mark.parametrize("how", ["stopped", "failed"])
def test_after_a_warm_start_that_did_not_end_the_same_command_starts_again(
    how: str, tmp_path: Path, reference: Reference
) -> None:
    settings = (*PER_ROLE, *WARM)
    listener = quiet()

    def end(name: str, step: int, steps: int, loss: float) -> None:
        if step == 2:
            raise KeyboardInterrupt if how == "stopped" else TrainError("loss nan")

    unlucky = Listener(step=listener.step, score=listener.score, imitate=end, stop=listener.stop)
    with pytest.raises((KeyboardInterrupt, TrainError)):
        start(toy_recipe(*settings), tmp_path / "run", unlucky)
    start(toy_recipe(*settings), tmp_path / "run", quiet())
    assert snapshot(tmp_path / "run") == reference(*settings)[1]


def test_a_folder_with_a_checkpoint_or_anything_else_is_not_started_in_again(tmp_path: Path) -> None:
    (tmp_path / "recipe.json").touch()
    (tmp_path / "checkpoints" / ".tmp-step_00000000-1").mkdir(parents=True)
    refuse_begun(tmp_path)
    for kept in ("checkpoints/step_00000000", "metrics.jsonl", "note.txt"):
        (tmp_path / kept).mkdir()
        with pytest.raises(ConfigError, match="is not empty; nothing was changed"):
            refuse_begun(tmp_path)
        (tmp_path / kept).rmdir()
    (tmp_path / "recipe.json").unlink()
    with pytest.raises(ConfigError, match="is not empty; nothing was changed"):
        refuse_begun(tmp_path)


# ---- disks ------------------------------------------------------------------------------------------------------


def test_a_full_disk_at_a_checkpoint_ends_the_run_and_keeps_the_last_good_one(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 9."""
    monkeypatch.setenv(VARIABLE, "ckpt-tmp:2:enospc")
    with pytest.raises(CheckpointError, match=r"checkpoint of step 2 could not be written.*No space left.*it resumes"):
        start(toy_recipe(*EVALS), tmp_path / "run", quiet())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step_*")] == ["step_00000000"]
    monkeypatch.delenv(VARIABLE)
    resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert snapshot(tmp_path / "run") == reference(*EVALS)[1]


def test_an_unexpected_error_in_a_step_ends_the_run_and_is_not_swallowed(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "update:3:exc")
    with pytest.raises(InjectedFaultError):
        start(toy_recipe(*EVALS), tmp_path / "run", quiet())
    monkeypatch.delenv(VARIABLE)
    resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert snapshot(tmp_path / "run") == reference(*EVALS)[1]


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def test_a_damaged_newest_checkpoint_is_told_once_and_the_older_one_used(
    tmp_path: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 6 and CKPT-06; row 8: stray folders are ignored."""
    monkeypatch.setenv(VARIABLE, "update:3:exc")
    with pytest.raises(InjectedFaultError):
        start(toy_recipe(*EVALS), tmp_path / "run", quiet())
    monkeypatch.delenv(VARIABLE)
    folder = tmp_path / "run" / "checkpoints"
    damage(folder / "step_00000002" / "main" / "weights.safetensors")
    (folder / "step_30.tmp").mkdir()
    (folder / "step_x").touch()
    resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert snapshot(tmp_path / "run") == reference(*EVALS)[1]
    told = events(tmp_path / "run", "checkpoint_quarantined")
    assert [event["name"] for event in told] == ["step_00000002"]
    assert [event["step"] for event in events(tmp_path / "run", "resumed")] == [0]


def test_with_only_damaged_checkpoints_a_run_does_not_start_over(tmp_path: Path) -> None:
    """Row 7."""
    start(toy_recipe(), tmp_path / "run", quiet())
    for path in (tmp_path / "run" / "checkpoints").glob("step_*"):
        damage(path / "main" / "weights.safetensors")
    with pytest.raises(CheckpointError, match=r"no usable checkpoint, only damaged ones.*start over in another"):
        resume(tmp_path / "run", None, quiet(), accept_changes=False)


def test_metrics_without_any_checkpoint_are_not_overwritten(tmp_path: Path) -> None:
    start(toy_recipe(), tmp_path / "run", quiet())
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match="has metrics but no checkpoint"):
        resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


# ---- folders and recipes ----------------------------------------------------------------------------------------


def test_a_folder_that_holds_something_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("mine")
    with pytest.raises(ConfigError, match=r"is not empty; nothing was changed. Give another --out"):
        start(toy_recipe(), tmp_path, quiet())
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]
    with pytest.raises(ConfigError, match="is a file"):
        start(toy_recipe(), note, quiet())
    assert note.read_text() == "mine"


def test_what_cannot_work_is_refused_before_a_folder_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    for setting, message in (
        ("env.rounds=two", "rounds"),
        ("env.round=2", "did you mean 'rounds'"),
        ("team.third=main", "no such role"),
        ("sampling.max_tokens=32", "no room for a prompt"),
        ("env.size=2", r"eval.tasks = 4: split 'validation' .* has 2 tasks"),
        ("policies.main.train=frozen", r"no policy would be trained: \['main'\] are all frozen"),
        ("trackers=['mlflow']", r"pip install 'coterie\[mlflow\]'"),
    ):
        with pytest.raises(ConfigError, match=message):
            start(toy_recipe(setting), tmp_path / "run", quiet())
        assert not (tmp_path / "run").exists(), setting


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no run \(recipe.json is missing\)"):
        resume(tmp_path, None, quiet(), accept_changes=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_in_use_by_another_process_is_refused(tmp_path: Path) -> None:
    """Row 11."""
    start(toy_recipe("train.steps=1"), tmp_path / "run", quiet())
    before = snapshot(tmp_path / "run")
    with RunLock(tmp_path / "run"), pytest.raises(ConfigError, match="is in use by pid"):
        resume(tmp_path / "run", None, quiet(), accept_changes=False)
    assert snapshot(tmp_path / "run") == before


def test_a_resumed_run_with_another_recipe_is_refused_or_asked_about(tmp_path: Path) -> None:
    """Row 12: incompatible keys are refused, compatible ones need --accept-changes."""
    run_dir = tmp_path / "run"
    start(toy_recipe("train.steps=2"), run_dir, quiet())
    for setting in (
        "policies.main.optimizer.lr=0.02",
        "train.steps_per_batch=2",
        "seed=3",
        "sampling.num_candidates=5",
    ):
        key = setting.partition("=")[0]
        for accept in (False, True):
            with pytest.raises(ConfigError, match=rf"cannot change while it runs \({key}\)"):
                resume(run_dir, toy_recipe("train.steps=2", setting), quiet(), accept_changes=accept)
    longer = toy_recipe("train.steps=3", "eval.tasks=5")
    with pytest.raises(ConfigError, match=r"(?s)eval.tasks: 4 -> 5.*train.steps: 2 -> 3.*--accept-changes"):
        resume(run_dir, longer, quiet(), accept_changes=False)
    summary = resume(run_dir, longer, quiet(), accept_changes=True)
    assert summary["steps"] == 3
    assert [row["step"] for row in read_rows(run_dir / "metrics.jsonl")] == [0, 1, 2]
    resume(run_dir, longer, quiet(), accept_changes=False)


@pytest.mark.parametrize(
    ("schedule", "until", "remark"),
    [("linear", 9, True), ("cosine", 9, True), ("constant", 9, False), ("linear", 2, False)],
)
def test_the_difference_says_where_other_steps_are_another_schedule(schedule: str, until: int, remark: bool) -> None:
    """4 -> 6 steps; a policy whose last update is in step 2 either way keeps its schedule."""
    settings = (*PER_ROLE, f"policies.other.optimizer.schedule={schedule}", f"policies.other.train_until={until}")
    old, new = toy_recipe(*settings), toy_recipe(*settings, "train.steps=6")
    shown = "policies.other: the LIKE schedule ends after 4 -> 6 updates; the learning rate of every later step"
    remarks = changed_schedules(old, new)
    assert [text.startswith(shown.replace("LIKE", schedule)) for text in remarks] == [True] * remark
    pattern = r"(?s)train.steps: 4 -> 6" + (r"\n  policies.other: the .*" if remark else r"\n") + "Add --accept-changes"
    with pytest.raises(ConfigError, match=pattern):
        check_changes(dump_recipe(old), dump_recipe(new), accept=False, remarks=remarks)
    check_changes(dump_recipe(old), dump_recipe(new), accept=True, remarks=remarks)


def test_only_whole_keys_count_as_compatible() -> None:
    """``train.steps`` may change, ``train.steps_per_batch`` may not, though it begins alike."""
    old = {"train": {"steps": 1, "steps_per_batch": 1, "keep": 1}, "eval": {"every": 1}, "description": "a"}
    new = {"train": {"steps": 2, "steps_per_batch": 1, "keep": 2}, "eval": {"every": 2}, "description": "b"}
    check_changes(old, new, accept=True)
    check_changes(old, old, accept=False)
    with pytest.raises(ConfigError, match=r"\(train.steps_per_batch\)"):
        check_changes(old, {**old, "train": {"steps": 1, "steps_per_batch": 2, "keep": 1}}, accept=True)
    with pytest.raises(ConfigError, match=r"keep: 1 -> '\(absent\)'"):
        check_changes(old, {**old, "train": {"steps": 1, "steps_per_batch": 1}}, accept=False)


def test_a_run_in_which_too_many_episodes_fail_stops_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"(?s)3 of 3 episodes failed, allowed is a share of 0.2.*no play of train-0"):
        start(toy_recipe("env.broken=1"), tmp_path / "run", quiet())
    assert len(events(tmp_path / "run", "episode_failed")) == 9, "3 episodes, 3 attempts each"
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# ---- policies that share a model --------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
def test_a_checkpoint_holds_adapters_alone_and_a_warm_model_once(warm: bool, reference: Reference) -> None:
    run_dir, files = reference(*MIX, *WARM) if warm else reference(*MIX)
    own = {"weights.safetensors", "optimizer.safetensors", "learner.json"}
    folder = "checkpoints/step_00000004"
    names = {name: {key.rpartition("/")[2] for key in files if key.startswith(f"{folder}/{name}/")} for name in "ab"}
    assert names["a"] == own | {"reference.safetensors"} | ({"resident.safetensors"} if warm else set())
    assert names["b"] == own
    assert {key.split("/")[2] for key in files if key.startswith(folder) and key.count("/") == 3} == {"main", "a", "b"}
    saved = load_tensors(run_dir / folder / "b" / "weights.safetensors")
    assert sum(tensor.numel() for tensor in saved.values()) == 8 * (32 + 16 + 40 + 40)


@pytest.mark.parametrize("warm", [False, True])
def test_an_opened_run_plays_each_policy_as_it_was_trained(warm: bool, reference: Reference) -> None:
    """CKPT-07: logits of each policy; before and after differ for the trained ones."""
    settings = (*MIX, *WARM) if warm else MIX
    run_dir, _ = reference(*settings)
    opened, fresh = open_run(run_dir), assemble(check_env_fits(toy_recipe(*settings)))
    rows = read_rows(run_dir / "metrics.jsonl")
    assert {name: policy.version for name, policy in opened.policies.items()} == {
        "main": rows[3]["policy/main/version"],
        "a": rows[3]["policy/a/version"],
        "b": rows[3]["policy/b/version"],
        "frozen": 0,
    }
    for name, policy in opened.policies.items():
        before = fresh.policies[name]
        same = all(torch.equal(w, before.weights()[n]) for n, w in policy.weights().items())
        assert same == (name == "frozen"), name
    saved = load_tensors(run_dir / "checkpoints" / "step_00000004" / "a" / "weights.safetensors")
    assert all(torch.equal(weight, saved[name]) for name, weight in opened.policies["a"].weights().items())
    changed = [not torch.equal(w, fresh.policies["a"].model_weights()[n])
               for n, w in opened.policies["a"].model_weights().items()]  # fmt: skip
    assert any(changed) == warm


def test_the_adapter_of_another_role_is_refused(tmp_path: Path, reference: Reference) -> None:
    """CKPT-07: exchanged by hand or by mistake, their tensors would fit."""
    run_dir, _ = reference(*MIX)
    lineup = open_run(run_dir)
    with pytest.raises(CheckpointError, match="holds the state of policy 'a', expected that of 'b'"):
        load_weights(lineup.policies["b"], run_dir / "checkpoints" / "step_00000004" / "a")
