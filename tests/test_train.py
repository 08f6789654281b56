"""The loop: what a step plays, trains and reports."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.checkpoint import CheckpointStore
from coterie.errors import TrainError
from coterie.lineup import TaskStream, assemble, check_env_fits
from coterie.record import Recorder, read_rows
from coterie.runs import start
from coterie.train import Run, flat_tasks, num_tokens, samples_by_policy, step_metrics
from coterie.types import Turn
from learning_toys import MIX, PER_ROLE, Letters, LettersOptions, numbers, quiet, toy_recipe

REQUIRED = {
    "step", "success_selected", "reward/team", "reward/first", "reward/second", "peer_sets", "peer_sets_zero_variance",
    "peer_sets_short", "turns", "turns_truncated", "episodes_failed", "rewards_invalid", "tokens_generated",
    "tokens_trained",
}  # fmt: skip
PER_POLICY = {"version", "loss", "grad_norm", "entropy", "clip_fraction", "mismatch", "lr", "changed"}
REQUIRED_EVAL = {"name", "step", "split", "tasks", "plays", "temperature", "success", "success_ci95", "episodes_failed"}


def trained(tmp_path: Path, *settings: str) -> list[dict[str, Any]]:
    """Return the metrics of a run with these settings."""
    start(toy_recipe(*settings), tmp_path / "run", quiet())
    return read_rows(tmp_path / "run" / "metrics.jsonl")


@pytest.fixture
def run_of(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Return what makes a run with some settings that is ready to play its first step."""
    with contextlib.ExitStack() as stack:

        def make(*settings: str) -> Run:
            recorder = stack.enter_context(Recorder(tmp_path))
            run = Run(assemble(check_env_fits(toy_recipe(*settings))), tmp_path, recorder, quiet())
            run.warm_start()
            return run

        yield make


def episode_rows(run_dir: Path, step: int) -> list[dict[str, Any]]:
    return read_rows(run_dir / "episodes" / f"step-{step}.jsonl")


# ---- what is reported -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [(), PER_ROLE], ids=["shared", "per-role"])
def test_metrics_and_evaluations_have_the_required_keys(settings: tuple[str, ...], tmp_path: Path) -> None:
    rows = trained(tmp_path, *settings, "eval.every=2")
    policies = ["main", "other"] if settings else ["main"]
    wanted = REQUIRED | {f"policy/{name}/{key}" for name in policies for key in PER_POLICY}
    assert [wanted - set(row) for row in rows] == [set()] * 4
    evals = read_rows(tmp_path / "run" / "eval.jsonl")
    assert [REQUIRED_EVAL - set(row) for row in evals] == [set()] * len(evals)
    assert [(row["name"], row["step"]) for row in evals] == [
        ("before", 0), ("before_greedy", 0), ("validation", 2), ("after", 4), ("after_greedy", 4),
    ]  # fmt: skip


def test_metrics_hold_no_number_of_a_clock(tmp_path: Path) -> None:
    """Two runs are compared by bytes; seconds, minutes and rates stand in timings.jsonl."""
    rows = trained(tmp_path)
    assert [key for row in rows for key in row if key.endswith("_s") or "time" in key or "second_" in key] == []
    timings = read_rows(tmp_path / "run" / "timings.jsonl")
    assert [set(row) for row in timings] == [{"step", "time_s", "rollout_s", "update_s", "tokens_per_s"}] * 4


def test_the_counts_of_a_step_are_those_of_its_episodes(tmp_path: Path) -> None:
    """3 tasks x 2 rounds x 2 roles x 4 candidates: 48 turns in 12 peer sets; tokens add up over roles (OBS-04)."""
    rows = trained(tmp_path)
    for row in rows:
        turns = [turn for episode in episode_rows(tmp_path / "run", row["step"]) for turn in episode["turns"]]
        assert (row["turns"], row["peer_sets"], row["peer_sets_short"]) == (48, 12, 0)
        assert len(turns) == 48
        assert row["tokens_generated"] == sum(turn["num_completion_tokens"] for turn in turns)
        assert row["tokens/first"] + row["tokens/second"] == row["tokens_generated"] == row["tokens_trained"]
        assert row["turns_truncated"] == sum(turn["stop_reason"] in ("length", "context") for turn in turns)
        for role in ("first", "second"):
            values = [turn["team"] + turn["local"] for turn in turns if turn["role"] == role]
            assert row[f"reward/{role}"] == pytest.approx(sum(values) / 24)
    assert [row["policy/main/version"] for row in rows] == [1, 2, 3, 4]


def test_the_played_candidate_is_the_best_and_the_episode_goes_on_from_it(tmp_path: Path) -> None:
    trained(tmp_path)
    for episode in episode_rows(tmp_path / "run", 1):
        for act in range(4):
            turns = [turn for turn in episode["turns"] if turn["act"] == act]
            played = [turn["value"] for turn in turns if turn["played"]]
            assert played == [max(turn["value"] for turn in turns)]


def test_success_and_reward_are_means_over_episodes_and_not_over_turns(tmp_path: Path) -> None:
    """OBS-04."""
    for row in trained(tmp_path):
        episodes = episode_rows(tmp_path / "run", row["step"])
        assert row["success_selected"] == pytest.approx(sum(e["success"] for e in episodes) / 3)
        assert row["reward/team"] == pytest.approx(sum(e["team"] for e in episodes) / 3)


# ---- rewards that teach nothing, or are none --------------------------------------------------------------------


def test_steps_of_equal_rewards_are_reported_as_empty_and_move_nothing(
    tmp_path: Path, run_of: Callable[..., Run]
) -> None:
    """Row 22 and invariant 9."""
    run = run_of("env.mood=flat")
    before = {name: weight.clone() for name, weight in run.lineup.policies["main"].model.named_parameters()}
    run.train()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["updates_empty"], row["peer_sets_zero_variance"], row["policy/main/version"]) for row in rows] == [
        (1, 12, 0)
    ] * 4
    assert [(row["policy/main/changed"], row["policy/main/loss"]) for row in rows] == [(0.0, None)] * 4
    assert all(torch.equal(w, before[n]) for n, w in run.lineup.policies["main"].model.named_parameters())


def test_rewards_that_are_no_number_are_masked_and_counted(tmp_path: Path) -> None:
    """Row 20: no verdict, no training of that turn; the others of its set are compared with each other."""
    rows = trained(tmp_path, "env.mood=gaps")
    assert sum(row["rewards_invalid"] for row in rows) > 4
    for row in rows:
        turns = [turn for episode in episode_rows(tmp_path / "run", row["step"]) for turn in episode["turns"]]
        missing = [turn for turn in turns if turn["value"] is None]
        assert len(missing) == row["rewards_invalid"]
        assert [turn["advantage"] for turn in missing] == [None] * len(missing)
        valued = [turn for turn in turns if turn["value"] is not None]
        assert row["tokens_trained"] == sum(turn["num_completion_tokens"] for turn in valued)
        assert all(math.isfinite(turn["advantage"]) for turn in valued)
        for peers in {turn["peers"] for turn in valued}:
            total = sum(turn["advantage"] for turn in valued if turn["peers"] == peers)
            assert total == pytest.approx(0.0, abs=1e-6)
        assert math.isfinite(numbers(row, "policy/main/loss"))


def test_a_failed_episode_below_the_limit_is_counted_and_trains_nothing(tmp_path: Path) -> None:
    """1 of 6 tasks cannot be played; 5 episodes are trained."""
    rows = trained(tmp_path, "env.broken=6", "train.tasks_per_step=6")
    assert [(row["episodes_failed"], row["turns"]) for row in rows] == [(1, 80)] * 4
    failed = [e for step in range(4) for e in episode_rows(tmp_path / "run", step) if e["failure"]]
    assert [e["task"] for e in failed] == ["train-0", "train-6", "train-12", "train-18"]
    assert [(e["turns"], e["attempts"], e["success"], e["team"]) for e in failed] == [([], 3, None, None)] * 4


def test_refill_replaces_tasks_that_taught_nothing_by_fresh_ones(run_of: Callable[..., Run]) -> None:
    run = run_of("env.mood=lazy", "train.refill=2", "env.rounds=1", "train.tasks_per_step=4")
    first = run.play(0)
    plain = run_of("env.mood=lazy", "env.rounds=1", "train.tasks_per_step=4").play(0)
    flat = sorted(flat_tasks(plain.credit))
    assert flat, "the toy was meant to have flat tasks"
    count = min(2, len(flat))
    assert first.refilled == count
    ids = [episode.key.task_id for episode in first.episodes]
    expected = [task for task in ("train-0", "train-1", "train-2", "train-3") if task not in flat[:count]]
    assert ids == [*expected, *[f"train-{4 + i}" for i in range(count)]]
    assert run.stream.position == 4 + count
    assert {credit.turn.episode.task_id for credit in first.credit.credits} == set(ids)
    dropped = num_tokens([episode for episode in plain.episodes if episode.key.task_id in flat[:count]])
    assert first.replaced_tokens == dropped > 0
    row = step_metrics(0, first, {})
    assert row["tokens_generated"] == num_tokens(first.episodes) + dropped


def test_refill_is_off_by_default(run_of: Callable[..., Run]) -> None:
    run = run_of("env.mood=flat")
    assert run.play(0).refilled == 0
    assert run.stream.position == 3


# ---- what each policy is given ----------------------------------------------------------------------------------


def test_every_trainable_turn_goes_to_the_policy_that_sampled_it_played_or_not(run_of: Callable[..., Run]) -> None:
    """Invariant 4."""
    run = run_of(*PER_ROLE)
    played = run.play(0)
    samples = samples_by_policy(played.credit.credits, run.learners)
    assert {name: len(items) for name, items in samples.items()} == {"main": 24, "other": 24}
    assert {item.role for item in samples["main"]} == {"first"}
    assert {item.role for item in samples["other"]} == {"second"}
    turns: list[Turn] = [turn for episode in played.episodes for turn in episode.turns if turn.policy == "main"]
    assert Counter(item.completion_ids for item in samples["main"]) == Counter(turn.completion_ids for turn in turns)


def test_a_frozen_policy_draws_one_candidate_and_is_never_trained(tmp_path: Path, run_of: Callable[..., Run]) -> None:
    run = run_of(*PER_ROLE, "policies.other.train=frozen")
    before = [weight.clone() for weight in run.lineup.policies["other"].model.parameters()]
    run.train()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["turns"] for row in rows] == [3 * 2 * (4 + 1)] * 4
    assert not any(key.startswith("policy/other/") for row in rows for key in row)
    assert list(run.learners) == ["main"]
    after = run.lineup.policies["other"].model.parameters()
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_turns_without_an_advantage_are_no_samples(run_of: Callable[..., Run]) -> None:
    run = run_of()
    credits = run.play(0).credit.credits
    odd = [replace(credits[0], advantage=None), replace(credits[1], turn=replace(credits[1].turn, trainable=False))]
    assert len(samples_by_policy([*odd, *credits[2:]], {"main": None})["main"]) == len(credits) - 2


def test_a_policy_whose_gradient_is_not_finite_stops_the_run_after_a_few_and_not_before(
    tmp_path: Path, run_of: Callable[..., Run]
) -> None:
    """OPT-02 and row 21: skipped updates are counted per step, the other policy learns on."""
    run = run_of(*PER_ROLE, "train.max_skipped_updates=2")
    weight = next(run.lineup.policies["other"].model.parameters())
    weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(TrainError, match=r"policy 'other': 2 updates in a row had a non-finite gradient"):
        run.train()
    [row] = read_rows(tmp_path / "metrics.jsonl")
    assert (row["updates_skipped"], row["policy/other/version"], row["policy/main/version"]) == (1, 0, 1)
    assert row["nonfinite"] == {"policy/other/grad_norm": "nan"}


# ---- chains -----------------------------------------------------------------------------------------------------

FLAT_GRPO = ("sampling.mode=chain", 'credit.group_by=["task"]', "credit.return=final")


def test_flat_grpo_gives_one_value_per_episode_and_compares_the_episodes_of_a_task(tmp_path: Path) -> None:
    """ADV-08: 3 tasks x 4 episodes; advantages are those of the 4 outcomes, whether it took 2, 4 or 6 turns."""
    rows = trained(tmp_path, *FLAT_GRPO, "env.early=true", "env.rounds=3")
    assert [(row["peer_sets"], row["peer_sets_short"]) for row in rows] == [(3, 0)] * 4
    assert {len(episode["turns"]) for episode in episode_rows(tmp_path / "run", 0)} == {2, 4, 6}
    assert rows[-1]["policy/main/version"] == 4
    by_task: dict[str, list[Mapping[str, Any]]] = {}
    for episode in episode_rows(tmp_path / "run", 0):
        by_task.setdefault(episode["task"], []).append(episode)
    assert len(by_task) == 3
    for group in by_task.values():
        values = [episode["team"] for episode in group]
        mean = sum(values) / 4
        std = math.sqrt(sum((value - mean) ** 2 for value in values) / 4)
        for episode, value in zip(group, values, strict=True):
            expected = (value - mean) / (std + 1e-6) if std else 0.0
            assert [turn["advantage"] for turn in episode["turns"]] == pytest.approx([expected] * len(episode["turns"]))
            assert [turn["value"] for turn in episode["turns"]] == pytest.approx([value] * len(episode["turns"]))


def test_the_episodes_of_a_chain_draw_differently_from_the_first_token_on(tmp_path: Path) -> None:
    trained(tmp_path, *FLAT_GRPO, "train.steps=1")
    texts = [episode["turns"][0]["text"] for episode in episode_rows(tmp_path / "run", 0)]
    assert len(set(texts)) > 8


@pytest.mark.parametrize("returns", ["turn", "discounted", "final"])
def test_chains_train_with_every_return_and_grouping(returns: str, tmp_path: Path) -> None:
    rows = trained(tmp_path, "sampling.mode=chain", f"credit.return={returns}", "train.steps=2")
    assert [row["peer_sets"] for row in rows] == [3 * 2 * 2] * 2
    assert rows[-1]["policy/main/version"] == 2


# ---- evaluation and the stream of tasks -------------------------------------------------------------------------


def test_evaluating_does_not_disturb_training(tmp_path: Path) -> None:
    trained(tmp_path / "without")
    trained(tmp_path / "with", "eval.every=1", "eval.plays=2", "eval.tasks=5")
    a, b = (tmp_path / name / "run" / "metrics.jsonl" for name in ("without", "with"))
    assert a.read_bytes() == b.read_bytes()


def test_the_best_validation_is_kept_with_its_weights(tmp_path: Path) -> None:
    trained(tmp_path, "eval.every=1", "eval.plays=4")
    scores = [row["success"] for row in read_rows(tmp_path / "run" / "eval.jsonl") if row["name"] == "validation"]
    best = CheckpointStore(tmp_path / "run").best()
    assert best is not None
    assert best.meta["success"] == max(scores)
    assert best.step == 1 + scores.index(max(scores)), "the first of equals"
    learner = json.loads((best.path / "main" / "learner.json").read_text())
    assert learner["counters"]["version"] == best.step


def test_every_task_of_a_finite_env_is_trained_once_per_epoch(tmp_path: Path) -> None:
    """CKPT-04: 9 tasks, 3 per step: 3 steps are one epoch, in an order of its own each time."""
    trained(tmp_path, "env.size=9", "train.steps=6")
    seen = [[e["task"] for e in episode_rows(tmp_path / "run", step)] for step in range(6)]
    first, second = ([task for step in seen[start : start + 3] for task in step] for start in (0, 3))
    assert sorted(first) == sorted(second) == [f"train-{i}" for i in range(9)]
    assert first != second


def test_a_stream_goes_on_from_its_position_whatever_was_taken_before() -> None:
    env = Letters(LettersOptions(size=5))
    straight = [task.id for task in TaskStream(env, "train", 7).take(12)]
    stream = TaskStream(env, "train", 7, position=4)
    assert [task.id for count in (1, 3, 4) for task in stream.take(count)] == straight[4:]
    assert sorted(straight[:5]) == sorted(straight[5:10]) == [f"train-{i}" for i in range(5)]
    assert [task.id for task in TaskStream(env, "train", 8).take(5)] != straight[:5]


def test_an_endless_stream_counts_up() -> None:
    assert [task.id for task in TaskStream(Letters(), "train", 0, position=2).take(3)] == [
        "train-2", "train-3", "train-4",
    ]  # fmt: skip


def test_a_task_that_recurs_in_a_step_is_played_as_two_episodes(tmp_path: Path, run_of: Callable[..., Run]) -> None:
    """4 of 5 tasks per step: the second step holds the end of one epoch and the start of the next."""
    run = run_of("env.size=5", "train.tasks_per_step=4", "seed=1", "train.steps=5")
    run.train()
    for step in range(5):
        keys = [episode["episode"] for episode in episode_rows(tmp_path, step)]
        assert len(set(keys)) == 4
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["peer_sets"] for row in rows] == [16] * 5


# ---- leaks ------------------------------------------------------------------------------------------------------


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_thirty_steps_leave_no_file_and_no_thread_open(tmp_path: Path) -> None:
    """Row 31."""
    trained(tmp_path / "warm", "train.steps=1")
    before = open_files(), threading.active_count()
    trained(tmp_path / "long", "train.steps=30", "env.rounds=1", "train.tasks_per_step=1", 'trackers=["tensorboard"]')
    assert (open_files(), threading.active_count()) == before
    kept: Sequence[Path] = list((tmp_path / "long" / "run" / "checkpoints").iterdir())
    assert sorted(path.name for path in kept) == ["step_00000028", "step_00000030"]


# ---- several policies, and plans --------------------------------------------------------------------------------


def test_off_its_steps_a_policy_plays_one_candidate_per_act_and_takes_no_step(tmp_path: Path) -> None:
    """3 tasks of 2 rounds: 6 acts per role and step, of 4 candidates where the role's policy is trained."""
    rows = trained(tmp_path, *PER_ROLE, "policies.main.train_until=3", "policies.other.update_every=2")
    assert [row.get("policies_resting") for row in rows] == [["other"], None, ["other"], ["main"]]
    assert [row["turns"] for row in rows] == [24 + 6, 24 + 24, 24 + 6, 6 + 24]
    assert [row["peer_sets"] for row in rows] == [6, 12, 6, 6]
    for name, versions in (("main", [1, 2, 3, None]), ("other", [None, 1, None, 2])):
        assert [row.get(f"policy/{name}/version") for row in rows] == versions
        assert [row.get(f"policy/{name}/lr") is None for row in rows] == [version is None for version in versions]
    for row in rows:
        turns = [turn for episode in episode_rows(tmp_path / "run", row["step"]) for turn in episode["turns"]]
        resting = {"main": "first", "other": "second"}.get((row.get("policies_resting") or [""])[0])
        assert [turn["advantage"] for turn in turns if turn["role"] == resting] == [None] * (6 if resting else 0)
    assert [row["updates_empty"] for row in rows] == [0] * 4


def test_two_policies_take_turns(tmp_path: Path) -> None:
    settings = ("policies.main.update_every=2", "policies.main.update_offset=0", "policies.other.update_every=2")
    rows = trained(tmp_path, *PER_ROLE, *settings)
    assert [row.get("policies_resting") for row in rows] == [["other"], ["main"], ["other"], ["main"]]
    assert [rows[step]["policy/main/version"] for step in (0, 2)] == [1, 2]
    assert [rows[step]["policy/other/version"] for step in (1, 3)] == [1, 2]


def test_the_schedule_of_a_policy_ends_with_its_own_last_update(tmp_path: Path) -> None:
    """Linear from 0.01 to 0 over 2 updates: 0.01 and 0.005; over 3: 0.01, 0.00667, 0.00333."""
    rows = trained(
        tmp_path, *PER_ROLE, "policies.other.update_every=2", "policies.main.train_until=3",
        "policies.main.optimizer.schedule=linear", "policies.other.optimizer.schedule=linear",
    )  # fmt: skip
    assert [rows[step]["policy/other/lr"] for step in (1, 3)] == pytest.approx([0.01, 0.005])
    assert [rows[step]["policy/main/lr"] for step in (0, 1, 2)] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3])


def test_a_mixture_of_policies_trains_each_by_itself(run_of: Callable[..., Run], tmp_path: Path) -> None:
    """A whole model, two adapters, a frozen policy: versions, what moved, and sampler and learner agree."""
    run = run_of(*MIX)
    policies = run.lineup.policies
    before = {name: [w.clone() for w in policy.weights().values()] for name, policy in policies.items()}
    shared = [w.clone() for w in policies["frozen"].model_weights().values()]
    run.train()
    assert {name: policy.version for name, policy in policies.items()} == {"main": 4, "a": 4, "b": 2, "frozen": 0}
    for name in ("main", "a", "b"):
        assert not all(torch.equal(x, y) for x, y in zip(policies[name].weights().values(), before[name], strict=True))
    assert all(torch.equal(x, y) for x, y in zip(policies["frozen"].model_weights().values(), shared, strict=True))
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert all(value < 1e-5 for row in rows for key, value in row.items() if key.endswith("/mismatch"))
    assert rows[0]["policy/a/kl"] == 0.0
    assert [row.get("policies_resting") for row in rows] == [["b"], None, ["b"], None]
    turns = [turn for episode in episode_rows(tmp_path, 1) for turn in episode["turns"]]
    assert Counter(turn["policy"] for turn in turns) == {"main": 24, "a": 24, "b": 24, "frozen": 6}
