"""What a person sees: lines without a terminal, the bar on one, and the tables."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping

import pytest
from rich.console import Console, RenderableType

from coterie.config import Recipe, parse_recipe
from coterie.display import RunDisplay, before_after, minutes, percent, score_table, step_line, success_cell
from coterie.evaluate import Score
from coterie.train import StepReport
from coterie.types import Json

METRICS: dict[str, Json] = {
    "success_selected": 0.25,
    "reward/team": 0.5,
    "reward/tool": 0.125,
    "reward/planner": None,
    "episodes_failed": 0,
}


def recipe(**tables: Mapping[str, Json]) -> Recipe:
    base: dict[str, Json] = {
        "env": {"name": "plan_path"},
        "policies": {"p": {"model": "tiny"}},
        "team": {"tool": "p", "planner": "p"},
        "train": {"steps": 10},
        "eval": {"every": 5, "tasks": 7, "final_tasks": 9},
    }
    return parse_recipe({**base, **tables}, "test")


class Clock:
    """A clock that is set by hand."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def report(step: int, steps: int = 10) -> StepReport:
    return StepReport(step=step, steps=steps, metrics=METRICS, time_s=0.0, tokens_per_s=1234.4)


def score(success: float, temperature: float, failed: int = 0) -> Score:
    return Score(
        split="test",
        tasks=9,
        plays=1,
        temperature=temperature,
        failed=failed,
        success=success,
        ci95=(0.1, 0.3),
        pass_at_k={},
        reward_ci95=None,
        reward_team=None,
        rounds=None,
        by_label={},
        label_ci95={},
        metrics={},
    )


def drawn(table: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue()


def lines_of(out: io.StringIO) -> list[str]:
    return out.getvalue().splitlines()


# ---- lines ----


def test_without_a_terminal_steps_are_told_every_few_seconds_and_the_last_one_always() -> None:
    out, clock = io.StringIO(), Clock()
    with RunDisplay(Console(file=out), recipe(), clock=clock) as display:
        for step in range(10):
            clock.now_s = 2.0 * step
            display.step(report(step))
    steps = [line for line in lines_of(out) if line.startswith("training ")]
    # told at 0 s, then at the first step 5 s or more later: 6 s, 12 s, and the last one at 18 s
    assert [line.split(":")[0] for line in steps] == [
        "training 1/10",
        "training 4/10",
        "training 7/10",
        "training 10/10",
    ]


def test_a_step_line_says_success_reward_per_role_speed_and_time_left() -> None:
    out, clock = io.StringIO(), Clock()
    with RunDisplay(Console(file=out), recipe(), clock=clock) as display:
        display.step(report(4))
        clock.now_s = 60.0
        display.step(report(5))
    # from 5 to 6 of 10 done it took 60 s, so the 4 that are left take 240 s; before that there is nothing to go by
    assert lines_of(out)[-2].endswith("1234 tokens/s")
    assert lines_of(out)[-1] == (
        "training 6/10: 25.0% of selected paths solved, reward tool 0.12, 1234 tokens/s, 4:00 left"
    )


def test_failed_episodes_and_updates_that_did_not_happen_are_never_silent() -> None:
    assert "3 episodes failed" in step_line({**METRICS, "episodes_failed": 3}, 1.0)
    assert "1 policies not updated, nothing to learn from" in step_line({**METRICS, "updates_empty": 1}, 1.0)
    assert "2 policies not updated, gradient not finite" in step_line({**METRICS, "updates_skipped": 2}, 1.0)
    out = io.StringIO()
    with RunDisplay(Console(file=out), recipe()) as display:
        display.score("after_greedy", score(0.2, 0.0, failed=2))
    assert lines_of(out)[-1] == (
        "after greedy: 20.0% solved, 95% interval 10.0% to 30.0% (9 tasks of test, greedy, 2 episodes failed)"
    )


def test_each_stage_is_announced_when_it_begins() -> None:
    out, clock = io.StringIO(), Clock()
    with RunDisplay(Console(file=out), recipe(imitate={"steps": 2, "episodes": 30}), clock=clock) as display:
        display.imitate("p", 1, 2, 1.5)
        display.imitate("p", 2, 2, 1.25)
        display.stop()
        display.step(report(4))
        display.stop()
        display.step(report(9))
        display.stop()
    stages = [line for line in lines_of(out) if ":" not in line]
    assert stages == [
        "the scripted experts play 30 episodes to learn from",
        "warm start of p",
        "evaluation before training on 9 tasks of test, sampled and greedy",
        "training",
        "validation on 7 tasks of validation",
        "training",
        "evaluation after training on 9 tasks of test, sampled and greedy",
    ]
    assert "warm start of p 2/2: loss 1.250, 0:00 left" in lines_of(out)


def test_a_run_that_goes_on_says_so_instead_of_naming_the_warm_start() -> None:
    out = io.StringIO()
    with RunDisplay(Console(file=out), recipe(imitate={"steps": 2}), resumed=True):
        pass
    assert lines_of(out) == ["going on from the last checkpoint"]


def test_lines_are_never_wrapped_so_that_logs_can_be_searched() -> None:
    out = io.StringIO()
    with RunDisplay(Console(file=out, width=20), recipe()) as display:
        display.score("before", score(0.2, 1.0))
    assert lines_of(out)[-1].startswith("before: 20.0% solved")
    assert lines_of(out)[-1].endswith("temperature 1)")


def test_on_a_terminal_a_bar_is_drawn_and_scores_stay() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with RunDisplay(console, recipe()) as display:
        display.step(report(0))
        display.score("validation", score(0.2, 1.0))
    text = out.getvalue()
    assert "1/10" in text
    assert "1234 tokens/s" in text
    assert "validation: 20.0% solved" in text


# ---- numbers ----


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (125.0, "2:05"), (3725.0, "1:02:05")])
def test_durations_are_readable(seconds: float, text: str) -> None:
    assert minutes(seconds) == text


def test_a_missing_number_is_a_dash_and_never_a_zero() -> None:
    """OBS-01: absent is not 0."""
    assert percent(math.nan) == "-"
    assert success_cell({}, "") == "-"
    assert success_cell({"success": None}, "") == "-"
    assert "planner" not in step_line(METRICS, 1.0)


# ---- tables ----


def rows(success: float, detour: float) -> dict[str, Json]:
    return {
        "tasks": 9,
        "success": success,
        "success_ci95": [0.1, 0.3],
        "by/path=detour/success": detour,
        "by/path=detour/tasks": 4,
        "by/path=detour/success_ci95": [0.0, 0.75],
    }


def test_before_and_after_stand_side_by_side_sampled_and_greedy_and_by_label() -> None:
    summary: dict[str, Json] = {
        "steps": 10,
        "before": rows(0.2, 0.25),
        "after": rows(0.8, 0.5),
        "before_greedy": rows(0.1, 0.0),
        "after_greedy": rows(0.9, 1.0),
    }
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in drawn(before_after(summary)).splitlines()]
    assert [row for row in cells if row] == [
        ["all", "9", "sampled", "20.0% [10.0, 30.0]", "80.0% [10.0, 30.0]"],
        ["", "", "greedy", "10.0% [10.0, 30.0]", "90.0% [10.0, 30.0]"],
        ["path=detour", "4", "sampled", "25.0% [0.0, 75.0]", "50.0% [0.0, 75.0]"],
        ["", "", "greedy", "0.0% [0.0, 75.0]", "100.0% [0.0, 75.0]"],
    ]


def test_a_summary_without_an_evaluation_is_drawn_with_dashes() -> None:
    text = drawn(before_after({"steps": 1, "after": rows(0.8, 0.5)}))
    assert "80.0%" in text
    assert "-" in text


def test_one_evaluation_shows_its_labels_and_pass_at_k() -> None:
    text = drawn(score_table({**rows(0.2, 0.25), "pass@1": 0.2, "pass@4": 0.6}, "Title"))
    assert "20.0% [10.0, 30.0]" in text
    assert "25.0% [0.0, 75.0]" in text
    assert "60.0%" in text
