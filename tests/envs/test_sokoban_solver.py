"""Distances and solutions against plain breadth-first search, and how many public levels are solved."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path

import pytest

from coterie.envs.sokoban_levels import draw_level, read_levels
from coterie.envs.sokoban_rules import MOVES, Position, cells, parse
from coterie.envs.sokoban_script import phi
from coterie.envs.sokoban_solver import (
    assignment_distance,
    frozen_boxes,
    is_stuck,
    live_cells,
    pushes_left,
    search,
    solution,
)

DATA = Path(__file__).parents[3] / "shared" / "data"


def played(start: Position, moves: str) -> Position:
    now = start
    for move in moves:
        following = now.after(move)
        assert following is not None, f"illegal {move} in {moves}"
        now = following
    return now


def naive(start: Position, count: str) -> int | None:
    """Fewest moves or pushes by search over single moves (a walk costs 0 when pushes are counted)."""
    best = {start: 0}
    queue = deque([start])
    while queue:
        now = queue.popleft()
        if now.solved:
            return best[now]
        for move in MOVES:
            following = now.after(move)
            if following is None:
                continue
            cost = best[now] + (count == "moves" or following.boxes != now.boxes)
            if cost < best.get(following, 1 << 30):
                best[following] = cost
                (queue.append if cost > best[now] else queue.appendleft)(following)
    return None


def levels(count: int, size: int, boxes: int) -> list[Position]:
    rng = random.Random(f"{size}/{boxes}")
    drawn = (draw_level(rng, size, boxes, 0.15) for _ in range(10 * count))
    return [level for level in drawn if level is not None][:count]


@pytest.mark.parametrize(("size", "boxes", "count"), [(6, 1, 40), (6, 2, 15), (7, 2, 4)])
def test_solutions_are_as_short_as_breadth_first_search_finds(size: int, boxes: int, count: int) -> None:
    for start in levels(count, size, boxes):
        found = solution(start)
        assert played(start, found.moves).solved
        assert len(found.moves) == naive(start, "moves")
        assert pushes_left(start) == naive(start, "pushes")


def test_verdicts_along_random_play_equal_breadth_first_search() -> None:
    rng = random.Random(5)
    stuck = 0
    for start in levels(12, 6, 2):
        now = start
        for _ in range(15):
            legal = [after for move in MOVES if (after := now.after(move))]
            now = rng.choice([after for after in legal if after.boxes != now.boxes] or legal)
        exact = naive(now, "pushes")
        assert pushes_left(now) == exact
        assert solution(now).status == ("solved" if exact is not None else "unsolvable")
        if is_stuck(now.level, now.boxes):
            stuck += 1
            assert exact is None
        bound = assignment_distance(now.level, now.boxes)
        assert exact is None or (bound is not None and bound <= exact)
    assert stuck >= 3


def test_fewest_moves_and_fewest_pushes_of_a_level_worked_out_by_hand() -> None:
    # The box is two pushes left of the goal; the agent starts on the far side and walks U L L L D, then pushes R R.
    start = parse("######\n#    #\n# $@.#\n#    #\n######")
    assert pushes_left(start) == 2
    assert len(solution(start).moves) == 4 + 2
    assert played(start, "ULLDRR").solved


def test_lost_cells_of_an_open_room_are_its_walls_without_a_goal() -> None:
    # 3 x 3 room, goal in the middle of the top row: a box can be pushed along that row and up the middle column.
    start = parse("#####\n# . #\n# $ #\n# @ #\n#####")
    assert list(cells(live_cells(start.level))) == [7, 12]


def test_two_boxes_side_by_side_along_a_wall_are_frozen() -> None:
    apart = parse("#######\n#.$ $.#\n#@    #\n#     #\n#######")
    assert not frozen_boxes(apart.level, apart.boxes)
    pair = parse("######\n#.$$.#\n#@   #\n#    #\n######")
    assert frozen_boxes(pair.level, pair.boxes) == pair.boxes
    assert is_stuck(pair.level, pair.boxes)
    assert pushes_left(pair) is None


def test_a_frozen_box_on_its_goal_is_no_deadlock() -> None:
    start = parse("######\n#*   #\n#  $.#\n# @  #\n######")
    assert frozen_boxes(start.level, start.boxes) == 1 << 7
    assert not is_stuck(start.level, start.boxes)
    assert pushes_left(start) == 1


def test_the_assignment_distance_matches_each_box_to_a_goal_of_its_own() -> None:
    # Both boxes are nearest to the left goal (0 and 1 pushes); one has to go to the right goal: 1 + 2 or 2 + 1.
    start = parse("#########\n#       #\n# $.$  .#\n#   @   #\n#########")
    assert assignment_distance(start.level, start.boxes) == 1 + 3


def test_phi_is_one_minus_the_share_of_pushes_left_and_zero_when_stuck() -> None:
    start = parse("#######\n#     #\n# $  .#\n#@    #\n#######")
    assert phi(start, start) == 0.0
    one = played(start, "UR")
    assert phi(one, start) == pytest.approx(1 / 3, abs=1e-12)
    assert phi(played(start, "URR"), start) == pytest.approx(2 / 3, abs=1e-12)
    assert phi(played(start, "URRR"), start) == 1.0
    assert phi(played(start, "UR" + "DRU"), start) == 0.0, "the box is in the top row, which has no goal"
    away = played(start, "URURRDL")
    assert pushes_left(away) == 3
    assert phi(away, start) == 0.0


def test_a_search_that_runs_out_says_unknown_and_never_unsolvable() -> None:
    start = parse("########\n#      #\n# $$   #\n# ..  @#\n#      #\n########")
    assert search(start, "pushes", 1, 1).status == "unknown"
    assert search(start, "pushes", 1, 1000).status == "solved"


@pytest.mark.data
@pytest.mark.parametrize(
    "name",
    [
        "boxoban/hard/001.txt",
        "boxoban/unfiltered/valid/000.txt",
        "sokoban_microban/Microban.txt",
        "sokoban_microban/Microban_II.txt",
    ],
)
def test_public_levels_are_solved_by_the_scripted_player(name: str) -> None:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path} is absent: the public levels are not beside the project")
    for each in read_levels(str(path))[:4]:
        found = solution(each.start)
        assert found.status == "solved", f"{name}:{each.line}"
        assert played(each.start, found.moves).solved
