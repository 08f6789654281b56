"""Moves, XSB text and what counts as the same level."""

from __future__ import annotations

import pytest

from coterie.envs.sokoban_rules import MalformedLevelError, Position, canonical, cells, parse

CORRIDOR = "#####\n#@$.#\n#####"


def after(position: Position, moves: str) -> Position | None:
    now: Position | None = position
    for move in moves:
        now = now.after(move) if now else None
    return now


def test_a_step_moves_the_agent_and_leaves_the_position_as_it_was() -> None:
    start = parse("#####\n#@ .#\n# $ #\n#####")
    moved = start.after("R")
    assert moved is not None
    assert moved.xsb() == "#####\n# @.#\n# $ #\n#####"
    assert start.xsb() == "#####\n#@ .#\n# $ #\n#####"


def test_walking_into_a_box_pushes_it_and_on_the_goal_it_is_a_star() -> None:
    pushed = parse(CORRIDOR).after("R")
    assert pushed is not None
    assert pushed.xsb() == "#####\n# @*#\n#####"
    assert pushed.solved
    assert not parse(CORRIDOR).solved


@pytest.mark.parametrize("move", ["U", "L", "D"])
def test_walking_into_a_wall_is_illegal(move: str) -> None:
    assert parse(CORRIDOR).after(move) is None


def test_pushing_into_a_wall_or_another_box_is_illegal() -> None:
    assert parse("#####\n#@$##\n#  .#\n#####").after("R") is None
    assert parse("######\n#@$$ #\n# .. #\n######").after("R") is None


def test_a_box_is_never_pulled() -> None:
    level = parse("######\n# @$.#\n######")
    assert after(level, "L") == parse("######\n#@ $.#\n######")


def test_all_seven_symbols_are_read_and_written_back() -> None:
    text = "#######\n# @$.*#\n#######"
    assert parse(text).xsb() == text
    on_goal = "#####\n#+$ #\n#####"
    assert parse(on_goal).xsb() == on_goal
    assert parse(on_goal).after("R") == parse("#####\n#.@$#\n#####")


def test_floor_is_also_dash_or_underscore_and_trailing_floor_does_not_count() -> None:
    assert parse("######---\n#@-$.#\n#__ _#_ \n######") == parse("######\n#@ $.#\n#    #\n######")


def test_ragged_rows_and_an_indented_outline_are_read() -> None:
    text = "  ####\n###  ###\n#@ $ . #\n########"
    level = parse(text)
    assert (level.level.width, level.level.height) == (8, 4)
    assert level.xsb() == text
    assert list(cells(level.boxes)) == [2 * 8 + 3]


@pytest.mark.parametrize(
    ("text", "row", "word"),
    [
        ("#####\n#@x.#\n#####", 1, "'x'"),
        ("#####\n# $.#\n#####", 0, "0 agents"),
        ("######\n#@@$.#\n######", 0, "2 agents"),
        ("#####\n#@  #\n#####", 0, "0 boxes"),
        ("######\n#@$$.#\n######", 0, "2 boxes"),
        ("#####\n#@$. \n#####", 1, "open at column 5"),
        ("#####\n#@$.#\n# ###", 2, "open at column 2"),
        ("########\n#@ .#$ #\n########", 1, "column 6"),
        ("", 0, "0 agents"),
    ],
)
def test_a_malformed_level_is_refused_with_its_row_and_what_is_wrong(text: str, row: int, word: str) -> None:
    with pytest.raises(MalformedLevelError, match=word) as caught:
        parse(text)
    assert caught.value.row == row


def test_a_box_on_a_goal_outside_the_walls_is_decoration() -> None:
    assert not parse("#########\n#@$.#   #\n##### * #\n    #####").solved


def test_turned_mirrored_and_otherwise_started_levels_are_the_same() -> None:
    rows = ["######", "#@ $.#", "#    #", "######"]
    turned = ["".join(column) for column in zip(*rows[::-1], strict=True)]
    mirrored = [row[::-1] for row in rows]
    started = ["######", "#  $.#", "#   @#", "######"]
    forms = {canonical(parse("\n".join(form))) for form in (rows, turned, mirrored, started)}
    assert len(forms) == 1
    assert canonical(parse("######\n#@$ .#\n#    #\n######")) not in forms


def test_what_is_outside_the_walls_does_not_make_another_level() -> None:
    bare = parse("#####\n#@$.#\n#####")
    wrapped = parse("  #######\n  ##@$.###\n  #######\n        #")
    assert canonical(wrapped) == canonical(bare)
