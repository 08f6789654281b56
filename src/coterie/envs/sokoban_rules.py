"""Sokoban positions as frozen values, their moves, and the standard XSB text.

Legend: a cell is ``row * width + column``; a set of cells is an ``int`` with bit ``cell`` set (a bitboard). A closed
level never lets the agent or a box onto the rim of its rectangle, so a shift by one row or column never wraps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

FLOOR = " -_"
XSB = "#@+$*." + FLOOR
MOVES = "UDLR"


class MalformedLevelError(ValueError):
    """A text that is no playable level; ``row`` is the line of the level (from 0) where that shows."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row
        self.reason = reason


def cells(board: int) -> Iterator[int]:
    """Yield the cells of a set in rising order."""
    while board:
        lowest = board & -board
        yield lowest.bit_length() - 1
        board ^= lowest


def shifted(board: int, step: int) -> int:
    """Return the set with ``step`` added to every cell; what would leave the low end is dropped."""
    return board << step if step > 0 else board >> -step


@dataclass(frozen=True, slots=True)
class Level:
    """What never changes: the rectangle (cells), the walls and the goals."""

    width: int
    height: int
    walls: int
    goals: int

    def step(self, move: str) -> int:
        """Return what a move U, D, L or R adds to a cell."""
        return {"U": -self.width, "D": self.width, "L": -1, "R": 1}[move]

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """What the moves U, D, L and R add to a cell, in this order."""
        return (-self.width, self.width, -1, 1)

    def region(self, agent: int, blocked: int) -> int:
        """Return the set of cells that can be walked to from ``agent`` without entering ``blocked``."""
        width, free = self.width, ~blocked
        reached, front = 0, 1 << agent
        while front:
            reached |= front
            front = (front << 1 | front >> 1 | front << width | front >> width) & free & ~reached
        return reached


@dataclass(frozen=True, slots=True)
class Position:
    """One position: where the agent (a cell) and the boxes (a set) are. ``after`` gives the next, nothing changes."""

    level: Level
    agent: int
    boxes: int

    @property
    def solved(self) -> bool:
        """True where every box is on a goal."""
        return not self.boxes & ~self.level.goals

    def after(self, move: str) -> Position | None:
        """Return the position after U, D, L or R, or ``None`` where the move is illegal.

        Walking into a box pushes it. Illegal are walking into a wall and pushing a box into a wall or another box.
        """
        step = self.level.step(move)
        target = self.agent + step
        if self.level.walls >> target & 1:
            return None
        if not self.boxes >> target & 1:
            return replace(self, agent=target)
        if (self.level.walls | self.boxes) >> (target + step) & 1:
            return None
        return Position(self.level, target, self.boxes ^ (1 << target) ^ (1 << target + step))

    def reachable(self) -> int:
        """Return the set of cells the agent can walk to without a push."""
        return self.level.region(self.agent, self.level.walls | self.boxes)

    def symbol(self, cell: int) -> str:
        """Return the XSB character of a cell."""
        goal = self.level.goals >> cell & 1
        if self.level.walls >> cell & 1:
            return "#"
        if self.boxes >> cell & 1:
            return "*" if goal else "$"
        if cell == self.agent:
            return "+" if goal else "@"
        return "." if goal else " "

    def rows(self) -> list[str]:
        """Return the rows of the level as XSB, all of the level's width."""
        width = self.level.width
        return [
            "".join(self.symbol(row * width + column) for column in range(width)) for row in range(self.level.height)
        ]

    def xsb(self) -> str:
        """Return the level as XSB text, without spaces at the ends of lines; ``parse`` reads it back equal."""
        return "\n".join(row.rstrip() for row in self.rows())


@lru_cache(maxsize=1024)
def inside(level: Level, agent: int) -> int:
    """Return the set of cells within the walls around ``agent``, boxes taken as floor."""
    return level.region(agent, level.walls)


def parse(text: str) -> Position:
    """Return the position an XSB text shows; floor is space, ``-`` or ``_``, rows may differ in length.

    Raises ``MalformedLevelError`` where the level has an unknown character, not exactly one agent, not as many goals as
    boxes, an open wall, or a box off its goal that the agent can never come to.
    """
    lines = [line.rstrip(FLOOR) for line in text.split("\n")]
    width, height = max(map(len, lines)), len(lines)
    sets = dict.fromkeys("#@$.", 0)
    for row, line in enumerate(lines):
        for column, char in enumerate(line):
            if char not in XSB:
                raise MalformedLevelError(row, f"character {char!r} in column {column + 1}: expected one of {XSB!r}")
            for symbol in {"+": "@.", "*": "$."}.get(char, char if char in sets else ""):
                sets[symbol] |= 1 << row * width + column
    agents, boxes, goals = sets["@"].bit_count(), sets["$"].bit_count(), sets["."].bit_count()
    if agents != 1:
        raise MalformedLevelError(0, f"{agents} agents (@ or +): expected exactly one")
    if not boxes or boxes != goals:
        raise MalformedLevelError(0, f"{boxes} boxes ($ or *) and {goals} goals (. + or *): expected as many, >= 1")
    position = Position(Level(width, height, sets["#"], sets["."]), sets["@"].bit_length() - 1, sets["$"])
    _check_closed(position)
    return position


def _check_closed(position: Position) -> None:
    """Raise ``MalformedLevelError`` where the agent could walk out of the rectangle, or a box is out of reach."""
    level, width = position.level, position.level.width
    seen, front = set(), [position.agent]
    while front:  # cell by cell and not by bitboard: an open level is just what makes a shift wrap
        cell = front.pop()
        row, column = divmod(cell, width)
        if row in (0, level.height - 1) or column in (0, width - 1):
            raise MalformedLevelError(row, f"the wall is open at column {column + 1}: expected # all around the agent")
        seen.add(cell)
        front += [cell + s for s in level.steps if cell + s not in seen and not level.walls >> cell + s & 1]
    for box in cells(position.boxes & ~level.goals):
        if box not in seen:
            raise MalformedLevelError(box // width, f"the box in column {box % width + 1} is outside the agent's walls")


def canonical(position: Position) -> str:
    """Return one text for all forms that count as the same level, whatever is outside its walls.

    Same are the eight turns and reflections, and levels that differ only in where the agent starts.
    """
    level, area = position.level, inside(position.level, position.agent)
    bare = replace(position, agent=-1)
    rows = [
        [bare.symbol(cell) if area >> cell & 1 else "#" for cell in range(start, start + level.width)]
        for start in range(0, level.width * level.height, level.width)
    ]
    top = [i for i, row in enumerate(rows) if set(row) != {"#"}]
    left = [i for i, column in enumerate(zip(*rows, strict=True)) if set(column) != {"#"}]
    grid = ["".join(row[left[0] : left[-1] + 1]) for row in rows[top[0] : top[-1] + 1]]
    forms = []
    for _ in range(4):
        grid = ["".join(column) for column in zip(*grid[::-1], strict=True)]
        forms += ["\n".join(grid), "\n".join(row[::-1] for row in grid)]
    return min(forms)
