"""A Sudoku under way, what becomes of an answer, and the scripted player."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from coterie.envs import sudoku_rules as rules
from coterie.errors import EnvError
from coterie.types import Task

# A multiple of 2**-40 adds and subtracts without rounding, so placing and undoing sums to exactly 0.0.
_PHI_STEPS = 2**40


# ---- the state --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Board:
    """A puzzle and the grid placed last (``None`` before the first): a value, never changed."""

    clues: str
    solution: str
    grid: str | None = None

    @classmethod
    def of(cls, task: Task) -> Board:
        """Return the board a task starts with; ``EnvError`` unless its solution fills the blanks of its clues."""
        clues, solution = task.data.get("clues"), task.data.get("solution")
        if not (isinstance(clues, str) and isinstance(solution, str)) or len(clues) != len(solution):
            raise EnvError(
                f"task {task.id}: expected data['clues'] and data['solution'] of one length, got {task.data!r}"
            )
        if rules.BLANK not in clues or rules.BLANK in solution or any(rules.conflicts(clues, solution)):
            raise EnvError(f"task {task.id}: the solution {solution!r} does not solve the clues {clues!r}")
        return cls(clues, solution)

    @property
    def size(self) -> int:
        """The n of the n x n grid."""
        return rules.size_of(self.clues)

    @property
    def marks(self) -> tuple[bool, ...]:
        """Per cell: does it break a rule? Says nothing of the solution."""
        return rules.conflicts(self.clues, self.clues if self.grid is None else self.grid)

    @property
    def solved(self) -> bool:
        """True where the grid is full, keeps the clues and breaks no rule."""
        return self.grid is not None and not any(self.marks)

    @property
    def phi(self) -> float:
        """The potential in [0, 1], a multiple of 2**-40: the share of blanks that are right; 0 if a clue is changed."""
        if self.grid is None or rules.changed_clues(self.clues, self.grid):
            return 0.0
        blanks = [cell for cell, clue in enumerate(self.clues) if clue == rules.BLANK]
        right = sum(self.grid[cell] == self.solution[cell] for cell in blanks)
        return round(right / len(blanks) * _PHI_STEPS) / _PHI_STEPS

    def after(self, answer: str) -> Board:
        """Return the board with a full grid placed; unchanged by "" (not well-formed) and once it is solved."""
        return replace(self, grid=answer) if answer and not self.solved else self

    def report(self) -> str:
        """Return in English which rules the grid breaks, never which cells are right."""
        grid = self.clues if self.grid is None else self.grid
        broken = [rules.unit_name(self.size, index) for index in rules.broken_units(grid)]
        changed = [
            f"row {cell // self.size + 1}, column {cell % self.size + 1} (the clue is {self.clues[cell]})"
            for cell in rules.changed_clues(self.clues, grid)
        ]
        lines = [f"A digit stands twice in: {', '.join(broken)}."] if broken else []
        lines += [f"Clues were changed at: {'; '.join(changed)}."] if changed else []
        return " ".join(lines) or "It breaks no rule and keeps the clues."


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of an answer: its grid ("" unless well-formed) and the board with it placed."""

    grid: str
    board: Board

    def draw(self) -> str:
        """Return the grid that was placed last (the clues before the first), for people."""
        cells, size = self.board.grid or self.board.clues, self.board.size
        return "\n".join(" ".join(cells[start : start + size]) for start in range(0, len(cells), size))


# ---- the scripted player ----------------------------------------------------------------------------------------


def slipped_grid(board: Board, rng: random.Random, noise: float) -> str:
    """Return the solution with every blank wrong with one probability, so that all are right with 1 - ``noise``."""
    per_blank = 1.0 - (1.0 - noise) ** (1.0 / board.clues.count(rules.BLANK))
    digits = "123456789"[: board.size]
    cells = []
    for clue, right in zip(board.clues, board.solution, strict=True):
        slips = clue == rules.BLANK and rng.random() < per_blank
        cells.append(rng.choice(digits.replace(right, "")) if slips else right)
    return "".join(cells)


def mended_grid(board: Board, draft: Attempt, rng: random.Random) -> str:
    """Return the answer of a scripted planner who does not see the puzzle: the draft, cells in conflict drawn anew."""
    digits = "123456789"[: board.size]
    if not draft.grid:
        return "".join(rng.choice(digits) for _ in board.clues)
    marks = rules.conflicts(board.clues, draft.grid)
    return "".join(rng.choice(digits) if mark else digit for digit, mark in zip(draft.grid, marks, strict=True))
