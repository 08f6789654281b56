"""Grid facts, against grids small enough to work out by hand."""

from __future__ import annotations

import random

from coterie.envs.grid import MOVES, canonical, cells_of, distances, step, straight_distance, symmetries


def test_moves_are_up_down_left_right_from_the_top_left() -> None:
    assert [step((2, 3), move) for move in "UDLR"] == [(1, 3), (3, 3), (2, 2), (2, 4)]
    assert list(MOVES) == ["U", "D", "L", "R"]


def test_cells_are_found_by_character() -> None:
    assert cells_of(("a.b", ".a."), "ab") == {(0, 0), (0, 2), (1, 1)}


def test_distances_go_around_a_wall() -> None:
    # .#.
    # .#.
    # ...   from the top right the top left is 2 + 2 + 2 = 6 moves away, not 2
    found = distances(cells_of((".#.", ".#.", "..."), "."), (0, 2))
    assert found == {(0, 2): 0, (1, 2): 1, (2, 2): 2, (2, 1): 3, (2, 0): 4, (1, 0): 5, (0, 0): 6}


def test_the_straight_distance_knows_no_walls() -> None:
    assert [straight_distance((0, 2), cell) for cell in ((0, 0), (2, 2), (3, 4), (0, 2))] == [2, 2, 5, 0]


def test_what_cannot_be_reached_has_no_distance() -> None:
    assert distances(cells_of((".#.", "##."), "."), (0, 0)) == {(0, 0): 0}


def test_a_distance_is_the_same_both_ways() -> None:
    rng = random.Random(1)
    for _ in range(20):
        free = cells_of(["".join(rng.choice("..#") for _ in range(6)) for _ in range(6)], ".")
        tables = {cell: distances(free, cell) for cell in free}
        assert all(tables[b].get(a) == tables[a].get(b) for a in free for b in free)


def test_a_grid_without_symmetry_has_eight_different_forms() -> None:
    forms = symmetries(("12", "34"))
    assert sorted(forms) == sorted(
        [("12", "34"), ("21", "43"), ("31", "42"), ("13", "24"), ("43", "21"), ("34", "12"), ("24", "13"), ("42", "31")]
    )


def test_a_grid_that_is_not_square_turns_too() -> None:
    assert set(symmetries(("abc",))) == {("abc",), ("cba",), ("a", "b", "c"), ("c", "b", "a")}


def test_the_canonical_form_is_one_for_all_symmetries_and_differs_between_grids() -> None:
    rng = random.Random(2)
    grids = [tuple("".join(rng.choice("ab") for _ in range(4)) for _ in range(4)) for _ in range(50)]
    for grid in grids:
        assert {canonical(form) for form in symmetries(grid)} == {canonical(grid)}
        assert canonical(grid) in {"\n".join(form) for form in symmetries(grid)}
    for a in grids:
        for b in grids:
            assert (canonical(a) == canonical(b)) == (b in symmetries(a))
