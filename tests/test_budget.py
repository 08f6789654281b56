"""A budget of tokens: where a run ends, how its learning rate falls, when it validates, and how it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.config import OptimizerTable
from coterie.credit import CreditRule, assign
from coterie.evaluate import difference_of
from coterie.provenance import code_version
from coterie.record import read_rows
from coterie.runs import changed_schedules, is_finished, resume, start
from coterie.stepper import learning_rate
from coterie.testing import play_once
from coterie.types import Episode
from learning_toys import numbers, quiet, snapshot, toy_recipe

LINEAR = "policies.main.optimizer.schedule=linear"


def tokens_of(run_dir: Path) -> list[float]:
    return [numbers(row, "tokens_generated") for row in read_rows(run_dir / "metrics.jsonl")]


def test_a_run_ends_with_the_step_in_which_its_tokens_are_used_up(tmp_path: Path) -> None:
    start(toy_recipe("train.steps=9"), tmp_path / "long", quiet())
    tokens = tokens_of(tmp_path / "long")
    budget = int(sum(tokens[:2])) + 1  # one more than two steps generate: the third step is made, a fourth is not
    start(toy_recipe("train.steps=9", f"train.max_generated_tokens={budget}"), tmp_path / "short", quiet())
    assert tokens_of(tmp_path / "short") == tokens[:3]
    summary = json.loads((tmp_path / "short" / "summary.json").read_text())
    assert (summary["steps"], summary["tokens_generated"]) == (3, sum(tokens[:3]))
    assert summary["code"] == code_version()
    assert is_finished(tmp_path / "short", None)
    solved = read_rows(tmp_path / "short" / "solved" / "after.jsonl")
    assert [row["task"] for row in solved] == [f"test-{i}" for i in range(4)]
    assert sum(numbers(row, "solved") for row in solved) / 4 == summary["after"]["success"]


def test_a_learning_rate_falls_by_whichever_of_steps_and_tokens_is_nearer_to_its_end() -> None:
    linear = OptimizerTable(lr=1.0, schedule="linear")
    assert learning_rate(linear, 1, 4) == 0.75
    assert learning_rate(linear, 1, 4, spent=0.2) == 0.75
    assert learning_rate(linear, 1, 4, spent=0.5) == 0.5
    assert learning_rate(linear, 1, 4, spent=1.5) == 0.0
    assert learning_rate(OptimizerTable(lr=1.0, warmup_steps=2), 0, 4, spent=0.9) == 0.5


def test_a_run_with_a_budget_that_is_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    settings = (
        "train.steps=9",
        "train.max_generated_tokens=350",
        "train.save_every=1",
        LINEAR,
        "eval.every_tokens=150",
    )
    start(toy_recipe(*settings), tmp_path / "whole", quiet())
    rows = read_rows(tmp_path / "whole" / "metrics.jsonl")
    rates = [numbers(row, "policy/main/lr") for row in rows]
    before = [sum(tokens_of(tmp_path / "whole")[:step]) for step in range(len(rows))]
    assert rates == pytest.approx([0.01 * (1.0 - tokens / 350) for tokens in before])
    begun = iter(range(100))
    listener = quiet()

    class AbandonedError(Exception):
        pass

    def give_up(report: object) -> None:
        if next(begun) == 1:
            raise AbandonedError

    with pytest.raises(AbandonedError):
        start(toy_recipe(*settings), tmp_path / "cut", replace(listener, step=give_up))
    resume(tmp_path / "cut", None, listener, accept_changes=False)
    assert snapshot(tmp_path / "cut") == snapshot(tmp_path / "whole")


def test_validations_by_tokens_come_after_the_steps_that_pass_a_multiple(tmp_path: Path) -> None:
    start(toy_recipe("train.steps=5", "eval.every_tokens=150"), tmp_path / "run", quiet())
    tokens = tokens_of(tmp_path / "run")
    total, due = 0.0, []
    for step, count in enumerate(tokens[:-1], start=1):  # the last step is followed by the final evaluation instead
        if (total + count) // 150 > total // 150:
            due.append(step)
        total += count
    rows = read_rows(tmp_path / "run" / "eval.jsonl")
    assert [row["step"] for row in rows if row["name"] == "validation"] == due
    assert 1 <= len(due) < 4


def test_final_plays_are_those_of_the_sampled_evaluations_only(tmp_path: Path) -> None:
    start(toy_recipe("train.steps=1", "eval.final_plays=3"), tmp_path / "run", quiet())
    plays = {row["name"]: row["plays"] for row in read_rows(tmp_path / "run" / "eval.jsonl")}
    assert plays == {"before": 3, "before_greedy": 1, "after": 3, "after_greedy": 1}


def test_a_changed_budget_is_told_where_a_schedule_ends_with_it() -> None:
    old, new = toy_recipe(LINEAR), toy_recipe(LINEAR, "train.max_generated_tokens=50")
    assert "train.max_generated_tokens, none -> 50" in changed_schedules(old, new)[0]
    assert changed_schedules(toy_recipe(), toy_recipe("train.max_generated_tokens=50")) == ()


def test_sets_that_compare_answers_to_different_prompts_are_counted() -> None:
    """Two rounds of one role: grouped by task they are one set over two prompts, by task and prompt two sets of one."""

    def credited(group_by: str) -> tuple[int, int]:

        episode: Episode = play_once("learning_toys:Letters", ["a", "b"], options={"rounds": 1})
        turns = tuple(
            replace(turn, peers="all" if group_by == "task" else str(turn.prompt_ids)) for turn in episode.turns
        )
        report = assign([replace(episode, turns=turns)], CreditRule(by_episode=True))
        return report.peer_sets, report.peer_sets_mixed_prompts

    assert credited("task") == (1, 1)
    assert credited("prompt") == (2, 0)


def test_a_paired_difference_is_over_the_tasks_that_both_have() -> None:
    found = difference_of({"a": 1.0, "b": 0.5, "c": 0.0}, {"a": 0.5, "b": 0.5, "d": 1.0})
    assert (found.tasks, found.differing, found.success) == (2, 1, 0.25)
