"""Levels made by reverse play and levels read from files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from coterie.env import make_env
from coterie.envs.sokoban_levels import draw_level, read_levels
from coterie.envs.sokoban_rules import cells, parse
from coterie.envs.sokoban_solver import live_cells, solution
from coterie.errors import ConfigError

DATA = Path(__file__).parents[3] / "shared" / "data"

BOXOBAN_STYLE = "; 0\n#####\n#@$.#\n#####\n\n; 1\n######\n#@ $.#\n######\n"
OTHER_STYLE = """\
Some set
; by somebody

; first

  #####
  #@$.#
  #####

Second, with dashes
#######
#@-$-.#
#######
Title: Second
Author: somebody
"""


def write(folder: Path, text: str) -> str:
    path = folder / "levels.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_thousand_seeds_at_the_smallest_size_give_levels_that_can_be_played() -> None:
    """ENV-05: no error, solvable in 2 to 4 * size moves, none solved at the start, no box on a lost cell."""
    made = 0
    for seed in range(1000):
        level = draw_level(random.Random(seed), 5, 1, 0.1)
        if level is None:
            continue
        made += 1
        assert not level.solved
        assert not level.boxes & ~live_cells(level.level)
        assert 2 <= len(solution(level).moves) <= 20
        assert parse(level.xsb()) == level
    assert made >= 500, "more than half of the draws are thrown away"


@pytest.mark.parametrize(("size", "boxes"), [(5, 2), (6, 4), (12, 2), (10, 5)])
def test_levels_of_every_kind_have_as_many_boxes_as_asked_for(size: int, boxes: int) -> None:
    for task in make_env("sokoban", {"size": size, "boxes": boxes}).tasks("train", 0, 3):
        level = parse(str(task.data["xsb"]))
        assert level.boxes.bit_count() == boxes
        assert (level.level.width, level.level.height) == (size, size)


def test_one_box_at_six_by_six_takes_between_five_and_six_moves_on_average() -> None:
    lengths = [int(str(task.data["shortest"])) for task in make_env("sokoban", {}).tasks("train", 0, 300)]
    assert 5.0 < sum(lengths) / len(lengths) < 6.2
    assert min(lengths) == 2
    assert max(lengths) <= 24


def test_levels_are_read_with_title_and_line_from_both_layouts_of_file(tmp_path: Path) -> None:
    first, second = read_levels(write(tmp_path, BOXOBAN_STYLE))
    assert (first.title, first.line, second.title, second.line) == ("0", 2, "1", 7)
    assert second.start.xsb() == "######\n#@ $.#\n######"
    first, second = read_levels(write(tmp_path, OTHER_STYLE))
    assert (first.title, first.line) == ("first", 6)
    assert (second.title, second.line) == ("Second, with dashes", 11)
    assert second.start.xsb() == "#######\n#@ $ .#\n#######"


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    assert len(read_levels(write(tmp_path, BOXOBAN_STYLE))) == 2
    assert len(read_levels(write(tmp_path, BOXOBAN_STYLE + BOXOBAN_STYLE))) == 4


@pytest.mark.parametrize(
    ("text", "where", "word"),
    [
        ("; 0\n#####\n#@$.#\n#####\n\n; 1\n#####\n#@x.#\n#####\n", ":8:", "'x'"),
        ("#####\n@ $.#\n#####\n", ":2:", "open"),
        ("; a\n#####\n#@$.#\n####\n; b\n#####\n#@$ #\n#####\n", ":6:", "0 goals"),
        ("#####\n#@*##\n#####\n", ":1:", "with something to do"),
        ("######\n#@  .#\n#   $#\n# .  #\n#$   #\n######\n", ":1:", "stuck for good"),
    ],
)
def test_a_malformed_level_stops_the_run_before_it_starts(tmp_path: Path, text: str, where: str, word: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=word) as caught:
        make_env("sokoban", {"levels": path})
    assert path + where in str(caught.value)


def test_a_file_that_is_missing_or_holds_no_level_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        make_env("sokoban", {"levels": str(tmp_path / "absent.txt")})
    with pytest.raises(ConfigError, match="no level found"):
        make_env("sokoban", {"levels": write(tmp_path, "; only words\n\nhello\n")})


def test_the_splits_of_a_file_are_disjoint_and_the_split_all_is_every_level_in_order(tmp_path: Path) -> None:
    rows = [f"; {n}\n{'#' * (n + 5)}\n#@{' ' * n}$.#\n{'#' * (n + 5)}\n" for n in range(40)]
    env = make_env("sokoban", {"levels": write(tmp_path, "\n".join(rows))})
    counts = {split: env.num_tasks(split) for split in ("train", "validation", "test", "all")}
    assert counts["all"] == 40
    assert sum(count or 0 for split, count in counts.items() if split != "all") == 40
    assert [task.data["title"] for task in env.tasks("all", 0, 40)] == [str(n) for n in range(40)]
    train = {task.data["title"] for task in env.tasks("train", 0, 40)}
    held_out = {task.data["title"] for split in ("validation", "test") for task in env.tasks(split, 0, 40)}
    assert train
    assert held_out
    assert not train & held_out
    assert env.tasks("all", 38, 10) == env.tasks("all", 38, 2)
    with pytest.raises(ConfigError, match="'al'"):
        env.tasks("al", 0, 1)


def test_a_turned_copy_of_a_level_is_in_the_same_split(tmp_path: Path) -> None:
    upright = "\n".join(["###", *(f"#{char}#" for char in "@ $ ."), "###"])
    levels = read_levels(write(tmp_path, f"#######\n#@ $ .#\n#######\n\n{upright}\n\n#######\n#. $ @#\n#######\n"))
    assert len({each.split for each in levels}) == 1


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "count", "line"),
    [("boxoban/hard/000.txt", 1000, 2), ("sokoban_microban/Microban.txt", 103, 17)],
)
def test_a_public_file_is_read_as_a_whole(name: str, count: int, line: int) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent: the public levels are not beside the project")
    levels = read_levels(str(path))
    assert len(levels) == count
    assert levels[0].line == line
    text = path.read_text(encoding="utf-8").split("\n")
    for each in (levels[0], levels[-1]):
        rows = each.start.xsb().split("\n")
        assert [row.rstrip() for row in text[each.line - 1 : each.line - 1 + len(rows)]] == rows
        assert list(cells(each.start.boxes))
