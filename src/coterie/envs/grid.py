"""Facts about character grids that several envs share: cells, moves, distances, symmetries.

A grid is a tuple of equally long strings, one per row. A cell is ``(row, column)`` from the top left, both from 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Sequence
from typing import TypeAlias

Cell: TypeAlias = tuple[int, int]
Grid: TypeAlias = tuple[str, ...]

MOVES: dict[str, Cell] = {"U": (-1, 0), "D": (1, 0), "L": (0, -1), "R": (0, 1)}
"""What a move letter adds to (row, column): up, down, left, right."""


def step(cell: Cell, move: str) -> Cell:
    """Return the neighbour of ``cell`` in the direction of ``move``, a letter of ``MOVES``; it may be off the grid."""
    rows, columns = MOVES[move]
    return cell[0] + rows, cell[1] + columns


def straight_distance(a: Cell, b: Cell) -> int:
    """Return the fewest moves between two cells if there were no walls (Manhattan distance)."""
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def cells_of(grid: Sequence[str], chars: str) -> frozenset[Cell]:
    """Return the cells that hold one of ``chars``."""
    return frozenset((r, c) for r, row in enumerate(grid) for c, char in enumerate(row) if char in chars)


def distances(free: Container[Cell], start: Cell) -> dict[Cell, int]:
    """Return the fewest moves between ``start`` and every cell it is connected to over ``free`` cells, itself at 0.

    Breadth-first; ``start`` need not be free. Moves can be undone, so this is the distance *to* ``start`` as well.
    """
    found = {start: 0}
    queue = deque([start])
    while queue:
        cell = queue.popleft()
        for move in MOVES:
            near = step(cell, move)
            if near in free and near not in found:
                found[near] = found[cell] + 1
                queue.append(near)
    return found


def symmetries(grid: Sequence[str]) -> list[Grid]:
    """Return the 8 rotations and reflections of a grid (with repeats where the grid is symmetric itself)."""
    forms: list[Grid] = []
    turned = tuple(grid)
    for _ in range(4):
        forms += [turned, tuple(row[::-1] for row in turned)]
        turned = tuple("".join(column) for column in zip(*reversed(turned), strict=True))
    return forms


def canonical(grid: Sequence[str]) -> str:
    """Return one text for all 8 symmetries of a grid: the smallest of them, rows joined by newlines."""
    return min("\n".join(form) for form in symmetries(grid))
