"""Plan-Path's state and moves: the board as a value, what becomes of an answer, and the scripted player."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from coterie.envs.grid import MOVES, Cell, Grid, cells_of, distances, step, straight_distance
from coterie.errors import EnvError
from coterie.types import Task

Mark: TypeAlias = Literal["*", "!", "?", "."]
"""How an answer ended: on the goal, at an illegal move, not well-formed, or all moves made."""


# ---- the state --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Board:
    """A map and where the agent stands: a value, never changed.

    ``grid`` holds ``#`` (wall), ``G`` (goal) and ``.``; ``distance`` the moves to the goal from every cell that can
    reach it, which is every cell the agent can ever stand on; ``shortest`` that of the start.
    """

    grid: Grid
    agent: Cell
    goal: Cell
    shortest: int
    distance: Mapping[Cell, int] = field(repr=False, compare=False)

    @classmethod
    def of(cls, task: Task) -> Board:
        """Return the board a task starts with; ``EnvError`` if its grid has not one start and one reachable goal."""
        rows = task.data.get("grid")
        grid = tuple(str(row) for row in rows) if isinstance(rows, Sequence) else ()
        starts, goals = cells_of(grid, "S"), cells_of(grid, "G")
        if len(starts) != 1 or len(goals) != 1 or len({len(row) for row in grid}) != 1:
            raise EnvError(f"task {task.id}: expected data['grid'], equal rows with one 'S' and one 'G', got {rows!r}")
        (start,), (goal,) = starts, goals
        distance = distances(cells_of(grid, ".SG"), goal)
        if start not in distance:
            raise EnvError(f"task {task.id}: the goal {goal} cannot be reached from the start {start}")
        return cls(tuple(row.replace("S", ".") for row in grid), start, goal, distance[start], distance)

    @property
    def solved(self) -> bool:
        """True on the goal."""
        return self.distance[self.agent] == 0

    @property
    def detour(self) -> bool:
        """True where the shortest path from here is longer than it would be without walls."""
        return self.distance[self.agent] > straight_distance(self.agent, self.goal)

    @property
    def phi(self) -> float:
        """The potential in [0, 1]: 0 at the start (or farther away), 1 on the goal."""
        # 1 - x is a multiple of 2**-53 whatever x is, so differences add up exactly and a closed walk gains 0.0 to the
        # last bit. Written as (shortest - distance) / shortest it would not.
        return max(0.0, 1.0 - self.distance[self.agent] / self.shortest)

    def after(self, move: str) -> Board | None:
        """Return the board after one move, ``None`` if it leads into a wall or off the grid."""
        cell = step(self.agent, move)
        return replace(self, agent=cell) if cell in self.distance else None

    def draw(self) -> str:
        """Return the map for people: one line per row, ``A`` where the agent stands."""
        row, column = self.agent
        line = self.grid[row]
        return "\n".join((*self.grid[:row], f"{line[:column]}A{line[column + 1 :]}", *self.grid[row + 1 :]))

    def way(self, size: int) -> str:
        """Return rows and columns to the goal as signed numbers of equal width, walls aside: ``"+3-1"``."""
        digits = len(str(size - 1))
        rows, columns = self.goal[0] - self.agent[0], self.goal[1] - self.agent[1]
        return f"{rows:+0{digits + 1}d}{columns:+0{digits + 1}d}"

    def rolled(self) -> str:
        """Return the map as the agent sees it: (n + 1) * (n + 1) characters, row by row, the agent's cell first.

        One wall row and one wall column close the grid on all four sides, because the rolled map is cyclic. So what
        is one step to the right is always character 1, wherever the agent stands.
        """
        row, column = self.agent
        closed = (*(line + "#" for line in self.grid), "#" * (len(self.grid[0]) + 1))
        return "".join(line[column:] + line[:column] for line in closed[row:] + closed[:row])


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of an answer: its moves, how many were made, how it ended, and the board after.

    ``moves`` is "" unless the answer is well-formed.
    """

    moves: str
    made: int
    mark: Mark
    board: Board

    def padded(self, width: int) -> str:
        """Return the moves filled with ``-`` to a fixed width."""
        return self.moves.ljust(width, "-")

    def draw(self) -> str:
        """Return the map after the answer, for people."""
        return self.board.draw()

    def sentence(self) -> str:
        """Return what happened in English."""
        if self.mark == "?":
            return "no well-formed answer, so nothing moved."
        moves, (row, column) = " ".join(self.moves), self.board.agent
        if self.mark == "*":
            return f"{moves}: reaches the goal with move {self.made}."
        end = f"at row {row}, column {column}, not yet on the goal."
        if self.mark == ".":
            return f"{moves}: all moves are legal and end {end}"
        bad = f"move {self.made + 1} ({self.moves[self.made]}) runs into a wall or off the grid"
        return f"{moves}: {bad}; without it and what follows it, the moves end {end}"


def execute(board: Board, moves: str) -> Attempt:
    """Return what happens when ``moves`` are made: they stop at the first illegal one and on the goal."""
    now = board
    for made, move in enumerate(moves):
        if now.solved:
            return Attempt(moves, made, "*", now)
        following = now.after(move)
        if following is None:
            return Attempt(moves, made, "!", now)
        now = following
    mark: Mark = "*" if now.solved else "."
    return Attempt(moves, len(moves), mark if moves else "?", now)


def last_answer(history: Sequence[Attempt], width: int) -> str:
    """Return what a compact prompt says of the last answer: its moves in ``width`` characters, and its mark."""
    return history[-1].padded(width) + history[-1].mark if history else "-" * (width + 1)


# ---- the scripted player ------------------------------------------------------------------------------------------


def best_moves(board: Board, rng: random.Random, limit: int) -> str:
    """Return up to ``limit`` moves along a shortest path, ties broken by ``rng``."""
    moves, now = "", board
    while len(moves) < limit and not now.solved:
        nearer = [(m, b) for m in MOVES if (b := now.after(m)) and b.distance[b.agent] < now.distance[now.agent]]
        move, now = rng.choice(nearer)
        moves += move
    return moves


def noisy_moves(board: Board, rng: random.Random, noise: float, limit: int) -> str:
    """Return the moves of a player who strays and gives up early.

    With probability ``noise`` a move is any of the four instead of the best from where it is made; with probability
    ``noise`` the answer stops after a move.

    A move into a wall ends the answer: it would end there when executed.
    """
    moves, now = "", board
    while len(moves) < limit and not now.solved:
        move = rng.choice("UDLR") if rng.random() < noise else best_moves(now, rng, 1)
        moves += move
        following = now.after(move)
        if following is None or rng.random() < noise:
            break
        now = following
    return moves


def answer_moves(board: Board, draft: Attempt | None, rng: random.Random, noise: float, limit: int) -> str:
    """Return the script's answer: the draft where it is as short as any way, else moves of its own.

    With noise 0 it walks a shortest path. With more, a good draft is used more rarely, and the moves stray.
    """
    if draft is not None and draft.mark in "*." and rng.random() >= noise:
        here, there = board.distance[board.agent], draft.board.distance[draft.board.agent]
        if here - there == min(limit, here) == draft.made:
            return draft.moves[: draft.made]
    return noisy_moves(board, rng, noise, limit)


def nearest_end(drafts: Sequence[Attempt]) -> Attempt:
    """Return the draft that ends nearest to the goal by true distance, the first of several."""
    return min(drafts, key=lambda draft: draft.board.distance[draft.board.agent])


def blind_moves(board: Board, drafts: Sequence[Attempt], rng: random.Random, noise: float) -> str:
    """Return the answer of a scripted planner who does not see the map.

    With noise 0 it is the legal part of the draft that ends nearest to the goal as the crow walks, or, where no draft
    has a legal move, one move in the goal's direction; with more, it is more often any single move.
    """
    legal = [draft for draft in drafts if draft.made]
    if rng.random() < noise:
        return rng.choice("UDLR")
    if legal:
        best = min(legal, key=lambda draft: straight_distance(draft.board.agent, board.goal))
        return best.moves[: best.made]
    here = straight_distance(board.agent, board.goal)
    return rng.choice([move for move in MOVES if straight_distance(step(board.agent, move), board.goal) < here])
