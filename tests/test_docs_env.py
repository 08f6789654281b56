"""The environment of docs/write-an-env.md as written there: it keeps the contract, and a tiny model trains on it."""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.config import Recipe, override, parse_recipe
from coterie.env import Env, env_class
from coterie.record import read_rows
from coterie.runs import start
from coterie.testing import assert_env, play_once
from coterie.train import Listener

PAGE = (Path(__file__).parent.parent / "docs" / "write-an-env.md").read_text(encoding="utf-8")
SMALL = (
    'policies.main.model="tiny:width=32,layers=1,heads=2,positions=96"',
    "sampling.num_candidates=4",
    "train.steps=2",
    "train.tasks_per_step=2",
    "imitate.steps=2",
    "imitate.episodes=4",
    "imitate.batch_acts=8",
    "eval.tasks=2",
    "eval.final_tasks=2",
)


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(found) == 1, f"expected one block of {language} on the page, found {len(found)}"
    return str(found[0])


@pytest.fixture
def halves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Env]]:
    (tmp_path / "halves.py").write_text(block("python"), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    yield env_class("halves:Halves")
    del sys.modules["halves"]


def recipe() -> Recipe:
    return parse_recipe(override(tomllib.loads(block("toml")), SMALL), "docs/write-an-env.md")


def test_the_env_of_the_page_is_short_and_keeps_the_contract(halves: type[Env]) -> None:
    assert block("python").count("\n") <= 60
    assert_env(halves, {"length": 3})


def test_two_seats_see_one_half_each_and_the_editor_decides(halves: type[Env]) -> None:
    task = halves().tasks("train", 0, 1)[0]
    row = str(task.data["row"])
    asked: list[tuple[str, str]] = []

    def answer(role: str, prompt: str) -> str:
        asked.append((role, prompt))
        return {"drafter": max(prompt), "critic": ">", "editor": max(row)}[role]

    episode = play_once(halves, answer, task=task)
    left, right = max(row[:4]), max(row[4:])
    assert asked == [
        ("drafter", row[:4]),
        ("drafter", row[4:]),
        ("critic", left + right),
        ("editor", f"{left}>{right}"),
    ]
    assert [turn.seat for turn in episode.played] == [0, 1, 0, 0]
    assert episode.outcome is not None
    assert episode.outcome.success


def test_the_recipe_of_the_page_trains_all_three_roles(halves: type[Env], tmp_path: Path) -> None:
    silent = Listener(
        step=lambda report: None, score=lambda name, score: None, imitate=lambda *told: None, stop=lambda: None
    )
    summary = start(recipe(), tmp_path / "run", silent)
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert summary["steps"] == 2
    assert [row["episodes_failed"] for row in rows] == [0, 0]
    # 2 tasks x (2 drafter seats + critic + editor) x 4 candidates
    assert [row["turns"] for row in rows] == [32, 32]
    assert {"reward/drafter", "reward/critic", "reward/editor"} <= set(rows[0])
