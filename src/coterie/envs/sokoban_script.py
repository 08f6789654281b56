"""What becomes of a Sokoban answer, and the scripted player."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from coterie.envs.sokoban_rules import MOVES, Position
from coterie.envs.sokoban_solver import is_small, pushes_left, solution
from coterie.errors import EnvError

Mark: TypeAlias = Literal["*", "x", "!", "?", "."]
"""How an answer ended: solved, a box stuck for good, at an illegal move, not well-formed, or all moves made."""

# A multiple of 2**-40 adds and subtracts without rounding, so pushing to and fro sums to exactly 0.0.
_PHI_STEPS = 2**40


def phi(position: Position, start: Position) -> float:
    """Return the potential in [0, 1], a multiple of 2**-40: 1 - p/p0 with p the pushes left and p0 those at the start.

    0 where more pushes are left than at the start, or a box is stuck for good; 1 only where solved.
    """
    left, whole = pushes_left(position), pushes_left(start)
    if left is None or not whole:
        return float(position.solved)
    return round(max(0.0, 1.0 - left / whole) * _PHI_STEPS) / _PHI_STEPS


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of an answer: its moves, how many were made, how it ended, and the position after.

    ``moves`` is "" unless the answer is well-formed.
    """

    moves: str
    made: int
    mark: Mark
    position: Position

    def padded(self, width: int) -> str:
        """Return the moves filled with ``-`` to a fixed width."""
        return self.moves.ljust(width, "-")

    def draw(self) -> str:
        """Return the level after the answer as XSB, for people."""
        return self.position.xsb()

    def sentence(self) -> str:
        """Return what happened in English."""
        if not self.moves:
            return "no well-formed answer, so nothing moved."
        moves, made = " ".join(self.moves), self.made
        if self.mark == "*":
            return f"{moves}: solves the level with move {made}."
        on_goal, boxes = (self.position.boxes & self.position.level.goals).bit_count(), self.position.boxes.bit_count()
        end = f"{on_goal} of {boxes} boxes on goals"
        if self.mark == "x":
            end += ", but a box is stuck for good"
        if made == len(self.moves):
            return f"{moves}: all moves are legal and end with {end}."
        bad = f"move {made + 1} ({self.moves[made]}) runs into a wall or pushes a box that is blocked"
        return f"{moves}: {bad}; without it and what follows it, the moves end with {end}."


def execute(position: Position, moves: str) -> Attempt:
    """Return what happens when ``moves`` are made: they stop at the first illegal one and when the level is solved."""
    now, made = position, 0
    while made < len(moves) and not now.solved:
        following = now.after(moves[made])
        if following is None:
            break
        now, made = following, made + 1
    return Attempt(moves, made, _mark(now, moves, made), now)


def _mark(end: Position, moves: str, made: int) -> Mark:
    if end.solved:
        return "*"
    if pushes_left(end) is None:
        return "x"
    if not moves:
        return "?"
    return "." if made == len(moves) else "!"


# ---- the scripted player ------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _route(start: Position) -> Mapping[Position, str]:
    """Return, for every position on the scripted solution of a level, the moves that are left.

    Raises ``EnvError`` where there is no solution or none is found.
    """
    found = solution(start)
    if found.status == "unsolvable":
        raise EnvError(f"this level has no solution; remove it from the file:\n{start.xsb()}")
    if found.status == "unknown":
        raise EnvError(f"the scripted player gives up on this level; demonstrate easier ones:\n{start.xsb()}")
    rest, now = {start: found.moves}, start
    for made, move in enumerate(found.moves, 1):
        following = now.after(move)
        if following is None:
            raise EnvError(f"move {made} of a scripted solution is illegal, a fault of the solver:\n{start.xsb()}")
        now = following
        rest[now] = found.moves[made:]
    return rest


def plan(start: Position, now: Position) -> str | None:
    """Return the moves of a solution from ``now``, in a play that began at ``start``.

    On the way of the scripted solution it is the rest of that, so a play never searches twice. Off it, ``None`` means
    that there is no solution or none was found. Raises ``EnvError`` where none is found from ``start`` itself.
    """
    rest = _route(start).get(now)
    if rest is not None:
        return rest
    found = solution(now)
    return found.moves if found.status == "solved" else None


def best_moves(start: Position, now: Position, rng: random.Random, limit: int) -> str:
    """Return up to ``limit`` moves of a solution, or any legal moves where nothing can be saved."""
    moves = plan(start, now)
    return moves[:limit] if moves else random_moves(now, rng, limit)


def answer_moves(
    start: Position, now: Position, draft: Attempt | None, rng: random.Random, noise: float, limit: int
) -> str:
    """Return the script's answer: the draft where it is as short as any (small levels), else moves of its own.

    With noise 0 it follows a solution. With more, a good draft is used more rarely, and the moves stray.
    """
    if draft is not None and is_small(now.level) and rng.random() >= noise:
        own = plan(start, now)
        if own and draft.made == len(draft.moves) == min(limit, len(own)):
            after = solution(draft.position)
            if after.status == "solved" and len(after.moves) == len(own) - draft.made:
                return draft.moves
    return noisy_moves(start, now, rng, noise, limit)


def noisy_moves(start: Position, now: Position, rng: random.Random, noise: float, limit: int) -> str:
    """Return the moves of a player who strays and gives up early.

    With probability ``noise`` a move is any of the four instead of the best from where it is made; with probability
    ``noise`` the answer stops after a move.

    An illegal move ends the answer: it would end there when executed.
    """
    if noise == 0.0:
        return best_moves(start, now, rng, limit)
    moves = ""
    while len(moves) < limit and not now.solved:
        move = rng.choice(tuple(MOVES)) if rng.random() < noise else best_moves(start, now, rng, 1)
        moves += move
        following = now.after(move)
        if following is None or rng.random() < noise:
            break
        now = following
    return moves


def random_moves(now: Position, rng: random.Random, limit: int) -> str:
    """Return ``limit`` random legal moves (fewer if they solve the level); one illegal move where none is legal."""
    moves = ""
    while len(moves) < limit and not now.solved:
        legal = [(move, after) for move in MOVES if (after := now.after(move))]
        if not legal:
            return moves or "U"
        move, now = rng.choice(legal)
        moves += move
    return moves


def blind_moves(draft: Attempt, rng: random.Random, noise: float) -> str:
    """Return the answer of a scripted planner who does not see the map.

    With noise 0 it is the legal part of a draft that gets no box stuck, else any single move, as with noise it is
    more often.
    """
    useful = draft.made > 0 and draft.mark != "x"
    return draft.moves[: draft.made] if useful and rng.random() >= noise else rng.choice(tuple(MOVES))
