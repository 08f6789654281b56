"""Plan-Path's board, executed answers and scripted player, on maps small enough to walk by hand."""

from __future__ import annotations

import random

import pytest

from coterie.envs.grid import MOVES
from coterie.envs.maze import (
    Attempt,
    Board,
    answer_moves,
    best_moves,
    execute,
    noisy_moves,
)
from coterie.errors import EnvError
from coterie.types import Json, Task

CORRIDOR = ["S...G"]
BEND = [
    "S#G",
    ".#.",
    "...",
]  # shortest 6 (DDRRUU), straight 2


def board(rows: Json) -> Board:
    return Board.of(Task(id="t", split="train", seed=0, data={"grid": rows}))


def test_a_board_knows_the_true_distance_not_the_straight_one() -> None:
    assert (board(BEND).shortest, board(BEND).detour) == (6, True)
    assert (board(CORRIDOR).shortest, board(CORRIDOR).detour) == (4, False)


@pytest.mark.parametrize(
    "rows", [["..."], ["S.."], ["SSG"], ["SGG"], ["S#G"], ["S.", "G"], [], None, 3], ids=lambda rows: str(rows)
)
def test_a_task_that_is_no_map_is_an_error_that_names_it(rows: Json) -> None:
    with pytest.raises(EnvError, match="task t: "):
        board(rows)


def test_the_potential_is_the_share_of_the_way_made_and_never_negative() -> None:
    start = board(["..S..G"])  # 3 moves
    assert start.phi == 0.0
    assert execute(start, "R").board.phi == pytest.approx(1 / 3, abs=1e-12)
    assert execute(start, "RRR").board.phi == 1.0
    assert execute(start, "LL").board.phi == 0.0


@pytest.mark.parametrize("length", [3, 6, 7, 11, 13])
def test_the_gains_of_a_closed_walk_sum_to_exactly_zero(length: int) -> None:
    # Fractions like 1/7 are not floats: their differences, added up around a loop in uneven steps, need not cancel.
    start = board(["S" + "." * (length - 1) + "G"] + ["." * (length + 1)] * 3)
    for seed in range(100):
        rng, now, total = random.Random(seed), start, 0.0
        for _ in range(20):
            after = execute(now, noisy_moves(now, rng, 1.0, rng.randint(1, 4))).board
            total, now = total + (after.phi - now.phi), after
        total += start.phi - now.phi
        assert total == 0.0


def test_moves_stop_at_the_first_illegal_one() -> None:
    attempt = execute(board(BEND), "DRDD")  # D is legal, R is a wall; the legal D after it must not be made
    assert (attempt.made, attempt.mark, attempt.board.agent) == (1, "!", (1, 0))
    assert execute(board(CORRIDOR), "L").mark == "!"
    assert execute(board(CORRIDOR), "D").mark == "!"


def test_moves_after_the_goal_are_ignored_even_illegal_ones() -> None:
    attempt = execute(board(["S..G."]), "RRRRRRRRRR")  # ENV-07: ten actions, the third solves
    assert (attempt.made, attempt.mark, attempt.board.agent) == (3, "*", (0, 3))
    assert attempt.board.solved


def test_no_move_is_not_well_formed_and_changes_nothing() -> None:
    start = board(CORRIDOR)
    assert execute(start, "") == Attempt("", 0, "?", start)


def test_executing_changes_no_board() -> None:
    start = board(CORRIDOR)
    execute(start, "RR")
    assert start == board(CORRIDOR)


def test_the_drawing_shows_the_current_position() -> None:
    assert board(BEND).draw() == "A#G\n.#.\n..."
    assert execute(board(BEND), "DDR").board.draw() == ".#G\n.#.\n.A."


def test_the_rolled_map_starts_at_the_agent_and_is_closed_by_walls() -> None:
    # closed, from (0, 0):  .#G#  and from (2, 1) after DDR:  ..#.
    #                       .#.#                              ####
    #                       ...#                              #G#.
    #                       ####                              #.#.
    assert board(BEND).rolled() == ".#G#" + ".#.#" + "...#" + "####"
    assert execute(board(BEND), "DDR").board.rolled() == "..#." + "####" + "#G#." + "#.#."


def test_in_the_rolled_map_each_neighbour_has_one_fixed_place() -> None:
    rng = random.Random(3)
    side = 7  # 6 + 1
    places = {"U": side * (side - 1), "D": side, "L": side - 1, "R": 1}
    for _ in range(30):
        rows = [["#" if rng.random() < 0.2 else "." for _ in range(6)] for _ in range(6)]
        rows[0][0:2], rows[0][2] = "S.", "G"
        now = board(["".join(row) for row in rows])
        now = execute(now, "D" if now.after("D") else "R").board
        free = {move for move, place in places.items() if now.rolled()[place] != "#"}
        assert free == {move for move in MOVES if now.after(move)}


def test_what_happened_is_said_in_words() -> None:
    start = board(BEND)
    assert execute(start, "DR").sentence() == (
        "D R: move 2 (R) runs into a wall or off the grid; without it and what follows it, the moves end at row 1, "
        "column 0, not yet on the goal."
    )
    assert (
        execute(start, "DD").sentence() == "D D: all moves are legal and end at row 2, column 0, not yet on the goal."
    )
    assert execute(start, "DDRRUUU").sentence() == "D D R R U U U: reaches the goal with move 6."
    assert execute(start, "").sentence() == "no well-formed answer, so nothing moved."


def test_the_best_moves_walk_a_shortest_path() -> None:
    assert best_moves(board(BEND), random.Random(0), 4) == "DDRR"
    assert best_moves(board(BEND), random.Random(0), 99) == "DDRRUU"
    open_map = board(["S.", ".G"])
    assert {best_moves(open_map, random.Random(seed), 9) for seed in range(20)} == {"DR", "RD"}


def test_a_draft_as_good_as_any_is_taken_over_and_a_worse_one_is_not() -> None:
    start = board(["S..", "...", "..G"])
    rng = random.Random(0)
    assert answer_moves(start, execute(start, "DRDRU"), rng, 0.0, 5) == "DRDR"
    assert answer_moves(start, execute(start, "RD"), rng, 0.0, 2) == "RD"
    for bad in ("RL", "R", "RRRR", "U", ""):
        answer = answer_moves(start, execute(start, bad), rng, 0.0, 4)
        assert execute(start, answer).mark == "*", bad


def test_noise_gives_up_early_and_strays_and_goes_on_from_where_it_strayed() -> None:
    start = board(BEND)
    assert noisy_moves(start, random.Random(0), 0.0, 9) == "DDRRUU"
    answers = [noisy_moves(start, random.Random(seed), 0.5, 4) for seed in range(1000)]
    assert all(1 <= len(answer) <= 4 and set(answer) <= set("UDLR") for answer in answers)
    assert "DUDD" in answers  # strayed back up, and on from there
    assert all(execute(start, answer).made >= len(answer) - 1 for answer in answers)  # nothing after a wall
    # From the start only D is legal, and the best: D with 0.5 + 0.5 / 4 = 0.625; half of them stop after it.
    assert abs(sum(answer[0] == "D" for answer in answers) / 1000 - 0.625) < 0.05
    assert abs(sum(answer == "D" for answer in answers) / 1000 - 0.625 / 2) < 0.05


def test_the_way_to_the_goal_is_signed_and_of_one_width() -> None:
    start = board(["S..", "...", "..G"])
    assert start.way(3) == "+2+2"
    assert start.way(30) == "+02+02"
    assert execute(start, "DDRR").board.way(3) == "+0+0"
    assert board(["..G", "...", "S.."]).way(3) == "-2+2"
