"""Public levels and puzzles, played to the end through the whole stack, and shown as a person sees them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.config import parse_recipe
from coterie.imitate import expert_draw
from coterie.lineup import assemble, check_env_fits
from coterie.rollout import plays_of
from coterie.team import Plan
from coterie.types import Episode, Json

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
BOXOBAN = (
    "hard/000",
    "hard/001",
    "medium/train/000",
    "medium/valid/000",
    "unfiltered/train/000",
    "unfiltered/valid/000",
)
SUDOKU = {
    "sudoku_9x9/sudoku-easy50.txt": 34,
    "sudoku_9x9/sudoku-hardest-solutions.csv": 7,
    "sudoku_4x4/4x4_test_sudoku.csv": 249,
}
LONG_SUDOKU = {"sudoku_9x9/sudoku-top95.txt": 63, "sudoku_9x9/sudoku10k-first600.txt": 400}

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not DATA.is_dir(), reason=f"the public data sets are not at {DATA}"),
]


def played_by_the_script(env: dict[str, Json], start: int, count: int) -> list[Episode]:
    """Return episodes of the split "all", both roles answered by the env's faultless experts, by the real rollout."""
    raw = {
        "env": env,
        "policies": {"one": {"model": "tiny:width=16,layers=1,heads=2,positions=8192"}},
        "team": {"tool": "one", "planner": "one"},
        "train": {"steps": 1, "tasks_per_step": 1},
        "eval": {"split": "all", "tasks": 1, "final_split": "all", "final_tasks": 1},
    }
    lineup = assemble(check_env_fits(parse_recipe(raw, "test")))

    def refuse(kind: str, fields: Mapping[str, str | int]) -> None:
        raise AssertionError(f"{kind}: {fields}")

    rollout = replace(
        lineup.rollout(training=True, event=refuse, before_batch=lambda: None),
        plan=Plan(mode="tree", num_candidates=2, select="random"),
        expert=expert_draw(lineup.policies, lambda task_id, candidate: 0.0),
    )
    tasks = lineup.make_env().tasks("all", start, count)
    assert len(tasks) == count
    return rollout.run(plays_of(tasks, seed=0, purpose="imitate", step=0, episodes_per_task=1))


def sokoban(name: str, **options: Json) -> dict[str, Json]:
    return {"name": "sokoban", "levels": str(DATA / name), "max_moves": 200, **options}


def sudoku(name: str) -> dict[str, Json]:
    small = "4x4" in name
    return {"name": "sudoku", "puzzles": str(DATA / name), "size": 4 if small else 9, "drop_ambiguous": small}


def check_solved(episodes: list[Episode]) -> None:
    for episode in episodes:
        assert episode.outcome is not None
        assert episode.outcome.success, f"{episode.task.id}: {episode.played[-1].text}"
        assert not episode.outcome.truncated
        # the potential of the start is 0 and that of the end 1, and solving adds 1
        assert episode.outcome.team == 2.0
        played = [turn.reward for turn in episode.played if turn.role == "planner"]
        assert sum(reward.team or 0.0 for reward in played if reward is not None) == 2.0
        assert all(reward is not None and reward.local == 0.1 for reward in played)


# ---- played to the end --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BOXOBAN)
def test_boxoban_levels_of_every_file_are_solved_by_the_scripted_team(name: str) -> None:
    episodes = played_by_the_script(sokoban(f"boxoban/{name}.txt"), 2, 2)
    check_solved(episodes)
    assert {episode.task.data["title"] for episode in episodes} == {"2", "3"}
    assert all(episode.outcome and episode.outcome.labels == {"boxes": "4"} for episode in episodes)


def test_the_first_twenty_microban_levels_are_solved_in_short_answers_of_many_rounds() -> None:
    episodes = played_by_the_script(
        sokoban("sokoban_microban/Microban.txt", max_moves=10, max_rounds=20, style="compact"), 0, 20
    )
    check_solved(episodes)
    made = {episode.outcome.metrics["moves"] for episode in episodes if episode.outcome}
    assert min(made) == 16.0, "the shortest of them, Microban 2"
    # ten moves an answer: 16 moves are two rounds of two acts
    assert min(len(episode.played) for episode in episodes) == 4


@pytest.mark.parametrize("name", SUDOKU)
def test_every_puzzle_of_the_public_sudoku_lists_is_solved_by_the_scripted_team(name: str) -> None:
    episodes = played_by_the_script(sudoku(name), 0, SUDOKU[name])
    check_solved(episodes)
    assert all(len(episode.played) == 2 for episode in episodes), "one draft, one answer"


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG_SUDOKU)
def test_every_puzzle_of_the_long_sudoku_lists_is_solved_by_the_scripted_team(name: str) -> None:
    check_solved(played_by_the_script(sudoku(name), 0, LONG_SUDOKU[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", BOXOBAN)
def test_ten_boxoban_levels_of_every_file_are_solved_by_the_scripted_team(name: str) -> None:
    check_solved(played_by_the_script(sokoban(f"boxoban/{name}.txt"), 0, 10))


# ---- shown to people ----------------------------------------------------------------------------------------------


def shown(recipe: Path, *settings: str) -> str:
    arguments = ["play", str(recipe), "--task", "1"]
    for setting in settings:
        arguments += ["--set", setting]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(
        """
        [policies.one]
        model = "tiny:width=16,layers=1,heads=2,positions=4096"
        [team]
        tool = "one"
        planner = "one"
        [sampling]
        num_candidates = 2
        max_tokens = 8
        [train]
        steps = 1
        tasks_per_step = 1
        [env]
        max_rounds = 1
        [eval]
        split = "all"
        tasks = 1
        final_split = "all"
        final_tasks = 1
        """
    )
    return path


@pytest.mark.parametrize(
    ("name", "row", "line"),
    [
        ("boxoban/hard/000.txt", "  ##$$.#####", 14),
        ("sokoban_microban/Microban.txt", "  # $* #", 27),
    ],
)
def test_a_public_level_is_shown_with_its_rows_under_each_other_and_its_place_in_the_file(
    recipe: Path, name: str, row: str, line: int
) -> None:
    output = shown(recipe, "env.name=sokoban", f"env.levels={DATA / name}")
    lines = [text.rstrip() for text in output.splitlines()]
    assert "task sokoban:all:1 (all)" in output
    assert row in lines
    assert [text for text in lines if text.startswith("line: ")] == [f"line: {line}"]
    assert output.count("what it leads to:") == 2
    assert "<|end|><|user|>Round 1. The map:" in output, "where one message ends and the next begins"
    assert "not solved, a limit ended it: team reward 0, rounds 1, moves 0, stuck 0, boxes" in output


@pytest.mark.parametrize(
    ("name", "settings", "rows"),
    [
        ("sudoku_4x4/4x4_test_sudoku.csv", ("env.drop_ambiguous=true",), ". . 2 4\n. . 3 1\n. 1 . .\n. 4 1 3\n"),
        ("sudoku_9x9/sudoku-easy50.txt", ("env.size=9",), "2 . . . 8 . 3 . .\n. 6 . . 7 . . 8 4\n. 3 . 5 . . 2 . 9\n"),
    ],
)
def test_a_public_puzzle_is_shown_as_a_grid(recipe: Path, name: str, settings: tuple[str, ...], rows: str) -> None:
    output = shown(recipe, "env.name=sudoku", f"env.puzzles={DATA / name}", *settings)
    assert "task sudoku:all:1 (all)" in output
    assert output.count("what it leads to:\n" + rows) == 2, "nothing is placed by the words of an untrained model"
    assert "not solved, a limit ended it: team reward 0, rounds 1" in output
