"""Mixtures: tasks by weight, each played by its own env, reported apart; wrong ones refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.config import dump_recipe, parse_recipe
from coterie.credit import CreditRule, assign
from coterie.env import make_env
from coterie.errors import ConfigError
from coterie.lineup import check_env_fits
from coterie.testing import play_once
from coterie.train import Played, step_metrics
from coterie.types import Json

PATHS = {"name": "plan_path", "size": 4, "style": "compact", "max_moves": 2, "max_rounds": 1, "weight": 3.0}
SUMS = {"name": "math", "tool": "none", "style": "compact", "max_rounds": 1}
OPTIONS: dict[str, Json] = {"envs": [PATHS, SUMS]}


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "envs": [PATHS, SUMS],
        "policies": {"main": {"model": "tiny"}},
        "team": {"tool": "main", "planner": "main", "reasoner": "main"},
        "train": {"steps": 1},
    } | changes


def test_tasks_are_drawn_by_weight_the_same_in_parts() -> None:
    env = make_env("mixed", OPTIONS)
    tasks = env.tasks("train", 0, 400)
    shares = [task.data["env"] for task in tasks].count("plan_path") / 400
    assert 0.68 < shares < 0.82
    assert make_env("mixed", OPTIONS).tasks("train", 100, 50) == tasks[100:150]
    assert len({task.id for task in tasks}) == 400
    inner = [task for task in tasks if task.data["env"] == "math"]
    own = make_env("math", {key: value for key, value in SUMS.items() if key != "name"}).tasks("train", 0, len(inner))
    assert [task.data["task"] for task in inner] == [dict(task.data) for task in own], "each env's tasks in order"


def test_an_episode_is_played_by_its_own_env_and_says_which() -> None:
    env = make_env("mixed", OPTIONS)
    task = next(task for task in env.tasks("test", 0, 50) if task.data["env"] == "math")
    episode = play_once("mixed", ["7", "7"], options=OPTIONS, task=task)
    assert [turn.role for turn in episode.turns] == ["tool", "reasoner"]
    assert episode.outcome is not None
    assert episode.outcome.labels == {"env": "math"}
    assert episode.outcome.metrics["math/rounds"] == 1
    path = next(task for task in env.tasks("test", 0, 50) if task.data["env"] == "plan_path")
    played = play_once("mixed", ["UU", "UU"], options=OPTIONS, task=path)
    assert [turn.role for turn in played.turns] == ["tool", "planner"]
    assert played.outcome is not None
    assert set(played.outcome.labels) == {"env", "plan_path/path", "plan_path/length"}


def test_a_file_that_is_used_up_begins_anew_in_training_and_ends_an_evaluation(tmp_path: Path) -> None:
    rows = "\n".join(f'{{"problem": "What is {n} + 1?", "answer": "{n + 1}"}}' for n in range(30))
    (tmp_path / "a.jsonl").write_text(rows)
    listed = {"name": "math", "label": "listed", "data": [str(tmp_path / "a.jsonl")], "tool": "none"}
    env = make_env("mixed", {"envs": [listed, SUMS]})
    alone = make_env("math", {"data": listed["data"], "tool": "none"})
    size = alone.num_tasks("train") or 0
    tasks = [task for task in env.tasks("train", 0, 6 * size) if task.data["env"] == "listed"]
    first = tasks[:size]
    assert len({task.data["id"] for task in first}) == size, "every one before any again"
    assert len({task.id for task in tasks}) == len(tasks)
    assert tasks[size].id.endswith("@1")
    assert env.num_tasks("train") is None
    count = env.num_tasks("test")
    assert count is not None
    tested = [task for task in env.tasks("test", 0, 1000) if task.data["env"] == "listed"]
    assert len(tested) == alone.num_tasks("test")
    assert len(env.tasks("test", 0, 1000)) == count


def test_a_recipe_with_envs_is_resolved_and_read_back_equal() -> None:
    resolved = check_env_fits(parse_recipe(recipe(), "r"))
    dumped = dump_recipe(resolved)
    assert dumped["env"]["name"] == "mixed"
    assert dumped["env"]["envs"][1]["format_reward"] == 0.1, "defaults of the parts are visible"
    assert check_env_fits(parse_recipe(dumped, "r")) == resolved


def test_a_training_step_reports_each_env_apart() -> None:
    env = make_env("mixed", OPTIONS)
    tasks = {str(task.data["env"]): task for task in env.tasks("train", 0, 50)}
    episodes = tuple(play_once("mixed", ["7", "7"], options=OPTIONS, task=task) for task in tasks.values())
    credit = assign(episodes, CreditRule(by_episode=True))
    row = step_metrics(0, Played(episodes=episodes, credit=credit, refilled=0, replaced_tokens=0), {})
    assert {key for key in row if "/math" in key or "/plan_path" in key} == {
        "success_selected/math",
        "success_selected/plan_path",
        "reward/team/math",
        "reward/team/plan_path",
    }
    assert row["success_selected/plan_path"] == 0.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"env": {"name": "math"}}, r"\[env\] and \[\[envs\]\] are both there"),
        ({"envs": [SUMS]}, "a mixture needs two"),
        ({"envs": [SUMS, SUMS]}, "twice has the label 'math'"),
        ({"envs": [PATHS, SUMS | {"levle": 2}]}, "did you mean 'level'"),
        ({"envs": [PATHS, SUMS | {"weight": 0}]}, "greater than 0"),
        ({"envs": "math"}, "list of tables"),
        ({"team": {"tool": "main", "planner": "main"}}, "role 'reasoner'"),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_env_fits(parse_recipe(recipe(**changes), "r"))
