"""Plan-Path where each of two holds what the other lacks: the tool the walls, the planner the way to the goal.

What the tool says is worth nothing by itself, so nothing scores it; what becomes of it can (``lookahead``).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from coterie.envs.grid import MOVES, step, straight_distance
from coterie.envs.maze import Attempt, Board, last_answer

WIDTH = 4
"""Characters of a compact message: a letter for every direction, in any order."""
_LONGEST = 200
"""Characters of a message in English that reach the planner."""


def without_goal(board: Board) -> Board:
    """Return the board as a tool knows it that does not know the goal: for showing only, it cannot be played."""
    return replace(board, grid=tuple(row.replace("G", ".") for row in board.grid))


def message_of(text: str, compact: bool) -> str:
    """Return what reaches the planner of a tool's answer.

    compact: 1 to 4 different letters of UDLR, filled with ``-``; anything else is ``????``. plain: the first 200
    characters, in one line.
    """
    if not compact:
        return " ".join(text.split())[:_LONGEST]
    letters = text if 1 <= len(text) <= WIDTH and set(text) <= set("UDLR") and len(set(text)) == len(text) else ""
    return letters.ljust(WIDTH, "-") if letters else "?" * WIDTH


def scripted_message(board: Board, rng: random.Random, noise: float, compact: bool) -> str:
    """Return what a scripted tool says: the directions that are open here, each wrongly with probability noise / 2."""
    said = [move for move in MOVES if (board.after(move) is not None) != (rng.random() < noise / 2)]
    rng.shuffle(said)
    letters = "".join(said) or rng.choice("UDLR")
    return letters if compact else f"Free next to you: {' '.join(letters)}"


def scripted_step(board: Board, messages: Sequence[str], rng: random.Random, noise: float) -> str:
    """Return the move of a scripted planner: of those that a message names one that leads nearer to the goal.

    As the crow flies; if none does, any of them, and without a letter any at all. With ``noise`` any at all.
    """
    named = [move for move in MOVES if any(move in message.rpartition(":")[2] for message in messages)]
    if rng.random() < noise or not named:
        return rng.choice("UDLR")
    here = straight_distance(board.agent, board.goal)
    nearer = [move for move in named if straight_distance(step(board.agent, move), board.goal) < here]
    return rng.choice(nearer or named)


def compact_tool(board: Board, history: Sequence[Attempt], width: int) -> str:
    """Return the tool's compact prompt: the map without the goal, the last answer, its mark."""
    return without_goal(board).rolled() + last_answer(history, width)


def compact_planner(board: Board, messages: Sequence[str], history: Sequence[Attempt], width: int, size: int) -> str:
    """Return the planner's compact prompt: the way to the goal, the messages, the last answer, its mark."""
    return board.way(size) + "".join(messages) + last_answer(history, width)


def situation(board: Board, messages: Sequence[str] | None, history: Sequence[Attempt]) -> str:
    """Return the part of a plain prompt that changes: the tool's where ``messages`` is ``None``, else the planner's."""
    lines = [f"Round {len(history) + 1}."]
    if messages is None:
        lines += ["The map:", without_goal(board).draw(), "The planner is at row {}, column {}.".format(*board.agent)]
    else:
        lines.append(
            "You are at row {}, column {}. The goal is at row {}, column {}.".format(*board.agent, *board.goal)
        )
    if history:
        lines.append(f"Executed last round: {history[-1].sentence()}")
    lines += [f"The tool says: {message}" for message in messages or ()]
    return "\n".join(lines)
