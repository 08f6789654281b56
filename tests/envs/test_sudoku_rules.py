"""Grids, the solver, making and canonical forms; numbers by hand or by brute force over all 288 full grids."""

from __future__ import annotations

import itertools
import random

import pytest

from coterie.envs.sudoku_rules import (
    BLANK,
    all_grids_4x4,
    broken_units,
    canonical,
    changed_clues,
    conflicts,
    make_puzzle,
    only_solution,
    rows_of,
    solutions,
    unit_name,
    units,
)

TWO_SOLUTIONS = "1.....12.1..4321"
ONE_SOLUTION = "1..43..2..43..2."
SOLVED = "1234341221434321"
HARD_9X9 = "85...24..72......9..4.........1.7..23.5...9...4...........8..7..17..........36.4."


def by_brute_force(clues: str) -> list[str]:
    given = [(cell, clue) for cell, clue in enumerate(clues) if clue != BLANK]
    return [grid for grid in all_grids_4x4() if all(grid[cell] == clue for cell, clue in given)]


def naive_puzzle(blanks: int, rng: random.Random) -> str | None:
    solution = rng.choice(all_grids_4x4())
    order = list(range(16))
    rng.shuffle(order)
    clues = list(solution)
    for cell in order:
        if clues.count(BLANK) < blanks:
            clues[cell] = BLANK
            if len(by_brute_force("".join(clues))) > 1:
                clues[cell] = solution[cell]
    return "".join(clues) if clues.count(BLANK) == blanks else None


def rearranged(grid: str, rng: random.Random) -> str:
    """Return another form of a grid, by relabelling, shuffled bands, stacks and lines, and transposition."""
    size = len(rows_of(grid))
    box = {4: 2, 9: 3}[size]

    def order() -> list[int]:
        bands = [rng.sample(range(start, start + box), box) for start in range(0, size, box)]
        rng.shuffle(bands)
        return [line for band in bands for line in band]

    names = dict(zip("123456789"[:size], rng.sample("123456789"[:size], size), strict=True))
    rows, cols = order(), order()
    lines = [[rows_of(grid)[row][col] for col in cols] for row in rows]
    if rng.random() < 0.5:
        lines = [list(line) for line in zip(*lines, strict=True)]
    return "".join(names.get(cell, cell) for line in lines for cell in line)


def test_the_puzzle_with_two_solutions_has_exactly_these_two() -> None:
    """ENV-01."""
    assert sorted(solutions(TWO_SOLUTIONS)) == ["1234341221434321", "1243341221344321"]
    assert only_solution(TWO_SOLUTIONS) is None


def test_the_unique_puzzle_has_exactly_this_solution() -> None:
    """ENV-01."""
    assert list(solutions(ONE_SOLUTION)) == [SOLVED]
    assert only_solution(ONE_SOLUTION) == SOLVED


def test_there_are_288_full_4x4_grids_and_each_keeps_the_rules() -> None:
    """ENV-01."""
    grids = set(all_grids_4x4())
    assert len(grids) == 288
    assert all(broken_units(grid) == [] for grid in grids)


def test_made_puzzles_of_1000_seeds_have_one_solution_and_exactly_8_blanks_by_brute_force() -> None:
    """ENV-01, and reference.md section 4 fault 12 (324 of 400 puzzles had no solution)."""
    for seed in range(1000):
        puzzle = make_puzzle(4, 8, random.Random(seed))
        assert puzzle is not None
        assert by_brute_force(puzzle.clues) == [puzzle.solution]
        assert puzzle.clues.count(BLANK) == 8


@pytest.mark.parametrize("blanks", [2, 5, 8, 11, 12])
def test_taking_clues_away_in_chunks_gives_the_puzzle_of_the_one_by_one_order(blanks: int) -> None:
    made = [make_puzzle(4, blanks, random.Random(seed)) for seed in range(60)]
    naive = [naive_puzzle(blanks, random.Random(seed)) for seed in range(60)]
    assert [None if puzzle is None else puzzle.clues for puzzle in made] == naive


@pytest.mark.parametrize("blanks", [2, 40, 50])
def test_made_9x9_puzzles_have_one_solution_and_the_blanks_asked_for(blanks: int) -> None:
    for seed in range(3):
        puzzle = make_puzzle(9, blanks, random.Random(seed))
        assert puzzle is not None
        assert puzzle.clues.count(BLANK) == blanks
        assert only_solution(puzzle.clues) == puzzle.solution
        assert conflicts(puzzle.clues, puzzle.solution) == (False,) * 81


def test_the_solver_agrees_with_brute_force_on_random_clues_with_none_one_and_many_solutions() -> None:
    rng = random.Random(0)
    counts = set()
    for _ in range(400):
        clues = "".join(rng.choice("1234") if rng.random() < 0.3 else BLANK for _ in range(16))
        found = sorted(solutions(clues))
        assert found == sorted(by_brute_force(clues))
        counts.add(min(len(found), 2))
    assert counts == {0, 1, 2}


def test_a_hard_9x9_puzzle_is_solved_and_contradictory_ones_have_no_solution() -> None:
    solved = only_solution(HARD_9X9)
    assert solved is not None
    assert rows_of(solved)[0] == "859612437"
    assert list(solutions("55" + BLANK * 79)) == []
    # No digit repeats, but the last cell of row 1 could only be 9, which its column already holds.
    assert list(solutions("12345678" + BLANK + BLANK * 8 + "9" + BLANK * 63)) == []


def test_units_are_rows_then_columns_then_boxes_with_their_names() -> None:
    assert units(4)[0] == (0, 1, 2, 3)
    assert units(4)[5] == (1, 5, 9, 13)
    assert units(4)[10] == (8, 9, 12, 13)
    assert [unit_name(4, index) for index in (0, 5, 10)] == ["row 1", "column 2", "box 3"]
    assert len(units(9)) == 27
    assert units(9)[26] == (60, 61, 62, 69, 70, 71, 78, 79, 80)


def test_conflicts_mark_every_cell_of_a_repeated_digit_and_nothing_else() -> None:
    grid = "1324341221434321"  # 2 and 3 of row 1 exchanged: columns 2 and 3 and the two upper boxes break
    assert broken_units(grid) == [5, 6, 8, 9]
    marked = [cell for cell, mark in enumerate(conflicts(ONE_SOLUTION, grid)) if mark]
    assert marked == [1, 2, 4, 7, 13, 14]


def test_a_changed_clue_is_a_conflict_even_where_no_digit_repeats() -> None:
    other = "2143432112343412"  # a full valid grid, of another puzzle
    assert broken_units(other) == []
    assert changed_clues(ONE_SOLUTION, other) == [0, 3, 4, 7, 10, 11, 14]
    assert sum(conflicts(ONE_SOLUTION, other)) == 7


def test_blanks_are_never_in_conflict_with_each_other() -> None:
    assert conflicts(BLANK * 16, BLANK * 16) == (False,) * 16


def test_all_forms_of_a_4x4_puzzle_have_one_canonical_form_and_it_is_one_of_them() -> None:
    rng = random.Random(1)
    for seed in range(20):
        puzzle = make_puzzle(4, 8, random.Random(seed))
        assert puzzle is not None
        forms = {canonical(rearranged(puzzle.clues, rng)) for _ in range(20)}
        assert forms == {canonical(puzzle.clues)}
        assert canonical(canonical(puzzle.clues)) == canonical(puzzle.clues)


def test_the_288_grids_are_two_up_to_symmetry() -> None:
    """Known: 4x4 Sudoku has exactly 2 essentially different grids."""
    assert len({canonical(grid) for grid in all_grids_4x4()}) == 2


def test_all_forms_of_a_9x9_puzzle_share_a_fingerprint_and_different_puzzles_do_not() -> None:
    rng = random.Random(2)
    prints = []
    for seed in range(6):
        puzzle = make_puzzle(9, 45, random.Random(seed))
        assert puzzle is not None
        forms = {canonical(rearranged(puzzle.clues, rng)) for _ in range(8)}
        assert len(forms) == 1
        prints += forms
    assert len(set(prints)) == 6
    moved_clue = HARD_9X9[:8] + "7." + HARD_9X9[10:]
    assert canonical(moved_clue) != canonical(HARD_9X9)


def test_the_fingerprint_sees_which_digits_are_equal_not_only_where_clues_are() -> None:
    first = "12" + BLANK * 78 + "1"
    second = "12" + BLANK * 78 + "3"
    assert canonical(first) != canonical(second)
    assert canonical(first) == canonical("21" + BLANK * 78 + "2")


def test_solutions_are_lazy_so_that_an_empty_grid_costs_nothing() -> None:
    assert len(list(itertools.islice(solutions(BLANK * 81), 2))) == 2
