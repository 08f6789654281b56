"""Sudoku grids without any play: units, conflicts, a complete solver, puzzle making, canonical forms.

A grid is a string of n*n characters, row by row: digits ``1`` to ``n`` and ``.`` for a blank (n = 4 or 9).
Digit sets are bit masks: bit 0 is digit 1.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from coterie.keyed import stable_hash

BLANK = "."
Unit = tuple[int, ...]
_REFINEMENTS = 3


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Clues with exactly one solution."""

    clues: str
    solution: str


def size_of(grid: str) -> int:
    """Return n of an n x n grid."""
    return math.isqrt(len(grid))


def rows_of(grid: str) -> list[str]:
    """Return the n rows of a grid, top to bottom."""
    size = size_of(grid)
    return [grid[start : start + size] for start in range(0, size * size, size)]


@lru_cache(maxsize=4)
def units(size: int) -> tuple[Unit, ...]:
    """Return the cells of all rows, then all columns, then all boxes (left to right, top to bottom)."""
    box, span = math.isqrt(size), range(size)
    rows = [tuple(row * size + col for col in span) for row in span]
    cols = [tuple(row * size + col for row in span) for col in span]
    boxes = [
        tuple((top * box + row) * size + left * box + col for row in range(box) for col in range(box))
        for top in range(box)
        for left in range(box)
    ]
    return (*rows, *cols, *boxes)


def unit_name(size: int, index: int) -> str:
    """Return ``"row 1"``, ``"column 1"`` or ``"box 1"`` for an index into ``units(size)``."""
    return f"{('row', 'column', 'box')[index // size]} {index % size + 1}"


def broken_units(grid: str) -> list[int]:
    """Return the indices of the units in which some digit stands twice."""
    broken = []
    for index, unit in enumerate(units(size_of(grid))):
        digits = [grid[cell] for cell in unit if grid[cell] != BLANK]
        if len(set(digits)) != len(digits):
            broken.append(index)
    return broken


def changed_clues(clues: str, grid: str) -> list[int]:
    """Return the cells whose clue the grid does not keep."""
    return [cell for cell, clue in enumerate(clues) if clue not in (BLANK, grid[cell])]


def conflicts(clues: str, grid: str) -> tuple[bool, ...]:
    """Return per cell whether it breaks a rule: its digit stands twice in a unit, or it changes a clue.

    Says nothing about the solution. A full grid without a conflict solves the puzzle.
    """
    marked = set(changed_clues(clues, grid))
    for index in broken_units(grid):
        unit = units(size_of(grid))[index]
        digits = [grid[cell] for cell in unit]
        marked.update(cell for cell in unit if grid[cell] != BLANK and digits.count(grid[cell]) > 1)
    return tuple(cell in marked for cell in range(len(grid)))


# ---- solving ----------------------------------------------------------------------------------------------------


def _narrow(masks: list[int], all_units: tuple[Unit, ...], full: int) -> bool:
    """Narrow the digits each cell may hold, in place, until nothing follows; return False on a contradiction.

    Per unit: a digit that is settled in one cell leaves the others, and a digit with one place left goes there.
    """
    changed = True
    while changed:
        changed = False
        for unit in all_units:
            settled = once = twice = 0
            for cell in unit:
                mask = masks[cell]
                twice |= once & mask
                once |= mask
                if mask & (mask - 1) == 0:
                    if settled & mask:
                        return False
                    settled |= mask
            if once != full:
                return False
            only_place = once & ~twice
            for cell in unit:
                mask = masks[cell]
                if mask & (mask - 1):
                    forced = mask & only_place
                    if forced & (forced - 1):
                        return False
                    kept = forced or mask & ~settled
                    if kept != mask:
                        masks[cell] = kept
                        changed = True
    return True


def _search(masks: list[int], all_units: tuple[Unit, ...], full: int, rng: random.Random | None) -> Iterator[str]:
    if not _narrow(masks, all_units, full):
        return
    unsettled = [cell for cell, mask in enumerate(masks) if mask & (mask - 1)]
    if not unsettled:
        yield "".join(str(mask.bit_length()) for mask in masks)
        return
    cell = min(unsettled, key=lambda cell: masks[cell].bit_count())
    bits = [1 << digit for digit in range(full.bit_length()) if masks[cell] >> digit & 1]
    if rng is not None:
        rng.shuffle(bits)
    for bit in bits:
        branch = masks.copy()
        branch[cell] = bit
        yield from _search(branch, all_units, full, rng)


def solutions(clues: str, rng: random.Random | None = None) -> Iterator[str]:
    """Yield every solution of a grid, lazily; with ``rng`` digits are tried in random order."""
    size = size_of(clues)
    full = (1 << size) - 1
    masks = [full if clue == BLANK else 1 << (int(clue) - 1) for clue in clues]
    return _search(masks, units(size), full, rng)


def only_solution(clues: str) -> str | None:
    """Return the solution if there is exactly one, else ``None``."""
    found = list(itertools.islice(solutions(clues), 2))
    return found[0] if len(found) == 1 else None


@lru_cache(maxsize=1)
def all_grids_4x4() -> tuple[str, ...]:
    """Return all 288 full 4x4 grids."""
    return tuple(solutions(BLANK * 16))


# ---- making -----------------------------------------------------------------------------------------------------


def make_puzzle(size: int, blanks: int, rng: random.Random) -> Puzzle | None:
    """Return a puzzle with exactly ``blanks`` blanks and one solution, or ``None`` where this draw gets stuck.

    Clues of a random full grid are taken away in random order wherever that keeps the solution unique. 4x4 grids are
    uniform over all 288; 9x9 grids come from a randomised search, which is not uniform.
    """
    solution = rng.choice(all_grids_4x4()) if size == 4 else next(solutions(BLANK * 81, rng))
    order = list(range(size * size))
    rng.shuffle(order)
    clues, missing = list(solution), blanks
    chunks = [order]
    # Uniqueness is monotone: if a whole chunk can go, so can each of its cells one by one. Trying chunks and halving
    # those that fail gives the grid of the one-by-one order with a fraction of the searches.
    while chunks and missing:
        chunk = chunks.pop()
        trial = chunk[:missing]
        kept = clues.copy()
        for cell in trial:
            clues[cell] = BLANK
        if only_solution("".join(clues)) is not None:
            missing -= len(trial)
            if len(chunk) > len(trial):
                chunks.append(chunk[len(trial) :])
            continue
        clues = kept
        if len(chunk) > 1:
            middle = (len(trial) + 1) // 2
            chunks += [part for part in (chunk[middle:], chunk[:middle]) if part]
    return None if missing else Puzzle("".join(clues), solution)


# ---- canonical form ---------------------------------------------------------------------------------------------


def _line_orders(box: int) -> list[tuple[int, ...]]:
    """Return the orders of rows that keep bands together: bands in any order, rows of a band in any order."""
    inner = list(itertools.permutations(range(box)))
    return [
        tuple(band * box + line for band, lines in zip(bands, choice, strict=True) for line in lines)
        for bands in itertools.permutations(range(box))
        for choice in itertools.product(inner, repeat=box)
    ]


@lru_cache(maxsize=1)
def _arrangements_4x4() -> tuple[Unit, ...]:
    """Return the 128 rearrangements of the 16 cells: 8 row orders x 8 column orders x transposition."""
    straight = [
        tuple(4 * row + col for row in rows for col in cols) for rows in _line_orders(2) for cols in _line_orders(2)
    ]
    return (*straight, *(tuple(cell % 4 * 4 + cell // 4 for cell in cells) for cells in straight))


def _relabelled(grid: Sequence[str]) -> str:
    """Return the grid with digits renamed 1, 2, ... in the order in which they first appear."""
    names = {BLANK: BLANK}
    return "".join([names.setdefault(cell, str(len(names))) for cell in grid])


def _fingerprint(clues: str) -> str:
    """Return a number that relabelling, allowed rearrangements and transposition cannot change.

    Every cell gets a colour; each round it takes in the colours of its row, column, box and digit, and its row and
    column those of their band and stack. Rows and columns enter as an unordered pair, so transposing changes nothing.
    """
    size = size_of(clues)
    box = math.isqrt(size)
    digits = [tuple(cell for cell, clue in enumerate(clues) if clue == digit) for digit in sorted(set(clues) - {BLANK})]
    colour = [int(clue != BLANK) for clue in clues]

    def mixed(cells: Sequence[int], colours: Sequence[int]) -> int:
        return stable_hash(*sorted(colours[cell] for cell in cells))

    for _ in range(_REFINEMENTS):
        unit_colour = [mixed(unit, colour) for unit in units(size)]
        lines, boxes = unit_colour[: 2 * size], unit_colour[2 * size :]
        bands = [mixed(range(start, start + box), lines) for start in range(0, 2 * size, box)]
        lines = [stable_hash(line, bands[index // box]) for index, line in enumerate(lines)]
        digit_of = {cell: mixed(cells, colour) for cells in digits for cell in cells}
        colour = [
            stable_hash(
                colour[cell],
                *sorted((lines[cell // size], lines[size + cell % size])),
                boxes[cell // size // box * box + cell % size // box],
                digit_of.get(cell, 0),
            )
            for cell in range(size * size)
        ]
    return str(mixed(range(size * size), colour))


def canonical(clues: str) -> str:
    """Return a string that is equal for all forms of one puzzle, so that they fall into one split.

    Forms: digits renamed; rows permuted inside bands, columns inside stacks, bands, stacks; transposed. 4x4: the least
    of all 128 rearrangements, so it is equal *only* for forms of one puzzle. 9x9 has 3,359,232 of them: there it is an
    invariant fingerprint, which keeps the splits disjoint; that two different puzzles share one is harmless.
    """
    if len(clues) == 16:
        return min(_relabelled([clues[cell] for cell in cells]) for cells in _arrangements_4x4())
    return _fingerprint(clues)
