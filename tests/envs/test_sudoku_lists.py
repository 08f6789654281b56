"""Public lists of puzzles: formats, refusals with file and line, splits, and the real lists where they are present."""

from __future__ import annotations

import itertools
import logging
import pathlib
import random

import pytest

from coterie.env import make_env
from coterie.envs.sudoku import Board, Sudoku
from coterie.envs.sudoku_lists import read_puzzles
from coterie.envs.sudoku_rules import BLANK, Puzzle, canonical, make_puzzle
from coterie.errors import ConfigError

CLUES = "1..43..2..43..2."
SOLVED = "1234341221434321"
TWO_SOLUTIONS = "10000012010" + "04321"
DATA = pathlib.Path(__file__).resolve().parents[3] / "shared" / "data"
LISTS_9X9 = ("easy50", "hardest", "top95", "sudoku10k")

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason=f"no public data sets at {DATA}")


def written(tmp_path: pathlib.Path, text: str) -> pathlib.Path:
    path = tmp_path / "list.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        "1..43..2..43..2.\n",
        "1004300200430020",
        "\ufeff# a comment\n\n1004300200430020\n",
        "Puzzle,Solution\n1004300200430020,1234341221434321\n",
        "quizzes,solutions\r\n1004300200430020, 1234341221434321\r\n",
        "1..43..2..43..2.,1234341221434321,easy\n",
    ],
)
def test_every_published_format_reads_as_the_same_puzzle(tmp_path: pathlib.Path, text: str) -> None:
    assert read_puzzles(written(tmp_path, text), 4, False) == (Puzzle(CLUES, SOLVED),)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("1004", "16 characters"),
        ("1004300200430025", "digits 1 to 4"),
        ("1x04300200430020", "digits 1 to 4"),
        ("." * 81, "env.size"),
        ("1104300200430020", "row 1"),
        ("1004100200430020", "column 1"),
        ("1004010200430020", "box 1"),
        ("123....4........", "no solution"),
        (SOLVED, "no blank"),
        (TWO_SOLUTIONS, "more than one solution"),
        ("1004300200430020,1234341221434312", "the only solution is '1234341221434321'"),
        ("Puzzle,Solution", "16 characters"),
    ],
)
def test_a_line_that_is_no_puzzle_is_refused_with_file_and_line(tmp_path: pathlib.Path, line: str, word: str) -> None:
    path = written(tmp_path, f"Puzzle,Solution\n1004300200430020,{SOLVED}\n{line}\n")
    with pytest.raises(ConfigError, match=word) as caught:
        make_env("sudoku", {"puzzles": str(path)})
    assert f"{path}:3: " in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n\n", "Puzzle,Solution\n", "# nothing\n"])
def test_a_list_without_a_puzzle_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    with pytest.raises(ConfigError, match="no usable puzzle"):
        read_puzzles(written(tmp_path, text), 4, False)


def test_a_file_that_is_no_text_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "list.bin"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"list\.bin"):
        read_puzzles(path, 4, False)


def test_ambiguous_puzzles_can_be_left_out_on_request_and_are_counted(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ENV-01: a puzzle with several solutions is never graded against one of them."""
    path = written(tmp_path, f"{TWO_SOLUTIONS}\n{CLUES}\n{TWO_SOLUTIONS}\n")
    with caplog.at_level(logging.INFO):
        assert read_puzzles(path, 4, True) == (Puzzle(CLUES, SOLVED),)
    assert "2 puzzles with several solutions left out, 1 kept" in caplog.text
    with pytest.raises(ConfigError, match="2 had several solutions"):
        read_puzzles(written(tmp_path, f"{TWO_SOLUTIONS}\n{TWO_SOLUTIONS}\n"), 4, True)


def list_of(tmp_path: pathlib.Path, count: int) -> tuple[Sudoku, list[str]]:
    made = [make_puzzle(4, 8, random.Random(seed)) for seed in range(count)]
    clues = [puzzle.clues for puzzle in made if puzzle is not None]
    env = make_env("sudoku", {"puzzles": str(written(tmp_path, "\n".join(clues))), "style": "compact"})
    assert isinstance(env, Sudoku)
    return env, clues


def test_the_splits_of_a_list_partition_it_and_all_keeps_its_order(tmp_path: pathlib.Path) -> None:
    env, clues = list_of(tmp_path, 120)
    sizes = {split: env.num_tasks(split) or 0 for split in ("train", "validation", "test")}
    assert env.num_tasks("all") == 120 == sum(sizes.values())
    assert [task.data["clues"] for task in env.tasks("all", 0, 120)] == clues
    parts = {split: [str(task.data["clues"]) for task in env.tasks(split, 0, size)] for split, size in sizes.items()}
    assert sorted(itertools.chain(*parts.values())) == sorted(clues)
    forms = {split: {canonical(clue) for clue in part} for split, part in parts.items()}
    assert min(sizes.values()) > 0
    assert forms["train"].isdisjoint(forms["validation"] | forms["test"])
    assert forms["validation"].isdisjoint(forms["test"])


def test_made_and_listed_puzzles_fall_into_the_same_splits(tmp_path: pathlib.Path) -> None:
    made = make_env("sudoku", {}).tasks("test", 0, 10)
    path = written(tmp_path, "\n".join(str(task.data["clues"]) for task in made))
    listed = make_env("sudoku", {"puzzles": str(path)})
    assert (listed.num_tasks("test"), listed.num_tasks("train")) == (10, 0)


def test_a_list_has_no_tasks_beyond_its_end_and_no_unknown_splits(tmp_path: pathlib.Path) -> None:
    env, _ = list_of(tmp_path, 5)
    assert [task.id for task in env.tasks("all", 3, 9)] == ["sudoku:all:3", "sudoku:all:4"]
    assert env.tasks("all", 5, 2) == []
    with pytest.raises(ConfigError, match="no split 'dev'"):
        env.tasks("dev", 0, 1)


def test_a_changed_list_is_read_again(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, CLUES)
    assert make_env("sudoku", {"puzzles": str(path)}).num_tasks("all") == 1
    path = written(tmp_path, f"{CLUES}\n{CLUES}\n")
    assert make_env("sudoku", {"puzzles": str(path)}).num_tasks("all") == 2


@needs_data
@pytest.mark.data
@pytest.mark.parametrize("name", LISTS_9X9)
def test_every_public_9x9_puzzle_is_solved_by_the_scripted_player(name: str) -> None:
    (path,) = DATA.glob(f"sudoku_9x9/*{name}*.csv")
    env = make_env("sudoku", {"puzzles": str(path), "size": 9, "style": "compact"})
    assert isinstance(env, Sudoku)
    tasks = env.tasks("all", 0, env.num_tasks("all") or 0)
    assert len(tasks) == path.read_text().count("\n") - 1
    for task in tasks:
        board = Board.of(task)
        answer = env._expert(board, None)(random.Random(0), 0.0)
        assert env._score(board)(answer).result.board.solved


@needs_data
@pytest.mark.data
@pytest.mark.parametrize("name", ["easy50", "hardest"])
def test_the_published_text_lists_hold_the_puzzles_of_the_derived_ones(name: str) -> None:
    (plain,) = DATA.glob(f"sudoku_9x9/*{name}*.txt")
    (derived,) = DATA.glob(f"sudoku_9x9/*{name}*.csv")
    assert read_puzzles(plain, 9, False) == read_puzzles(derived, 9, False)


@needs_data
@pytest.mark.data
def test_the_public_4x4_list_is_ambiguous_in_part_and_its_unique_puzzles_are_solved() -> None:
    """ENV-01: about a quarter of that list has several solutions; it is refused unless they are dropped."""
    (path,) = DATA.glob("sudoku_4x4/*.csv")
    with pytest.raises(ConfigError, match="more than one solution"):
        make_env("sudoku", {"puzzles": str(path)})
    env = make_env("sudoku", {"puzzles": str(path), "drop_ambiguous": True, "style": "compact"})
    assert isinstance(env, Sudoku)
    tasks = env.tasks("all", 0, env.num_tasks("all") or 0)
    assert len(tasks) == 249
    assert {str(task.data["clues"]).count(BLANK) for task in tasks} == {8}
    for task in tasks:
        board = Board.of(task)
        assert env._score(board)(env._expert(board, None)(random.Random(0), 0.0)).result.board.solved
