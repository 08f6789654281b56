"""Where Sokoban levels come from: made by reverse play, or read from a file of public levels."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from coterie.envs.sokoban_rules import FLOOR, Level, MalformedLevelError, Position, canonical, cells, parse
from coterie.envs.sokoban_solver import pushes_left, solution
from coterie.envs.splits import split_of
from coterie.errors import ConfigError

LONGEST_PER_SIZE = 4
"""A made level takes at most this many moves per row of its size."""


# ---- made levels ------------------------------------------------------------------------------------------------


def draw_level(rng: random.Random, size: int, boxes: int, walls: float) -> Position | None:
    """Return a random level of ``size`` x ``size`` cells, outer wall included; ``None`` where a draw is of no use.

    Boxes start on their goals and are pulled up to ``size`` times, so every level can be solved. Of no use are levels
    that are solved at once, by a single move, or (by the scripted solution) only in more than ``4 * size`` moves.
    """
    edge = (0, size - 1)
    inner = [cell for cell in range(size * size) if not {*divmod(cell, size)} & {*edge}]
    floor = [cell for cell in inner if rng.random() >= walls]
    if len(floor) < boxes + 2:
        return None
    wall = (1 << size * size) - 1 - sum(1 << cell for cell in floor)
    *goals, agent = rng.sample(floor, boxes + 1)
    made = _pulled(rng, Position(Level(size, size, wall, sum(1 << goal for goal in goals)), agent, 0), size)
    if made.solved:
        return None
    found = solution(made)
    return made if found.status == "solved" and 2 <= len(found.moves) <= LONGEST_PER_SIZE * size else None


def _pulled(rng: random.Random, empty: Position, most: int) -> Position:
    """Return the level after 1 to ``most`` random pulls from its solved position, the agent anywhere it can walk to."""
    level, agent, boxes = empty.level, empty.agent, empty.level.goals
    for _ in range(rng.randint(1, most)):
        blocked = level.walls | boxes
        region = level.region(agent, blocked)
        pulls = [
            (box, step)
            for box in cells(boxes)
            for step in level.steps
            if region >> box + step & 1 and not blocked >> box + 2 * step & 1
        ]
        if not pulls:
            break
        box, step = rng.choice(pulls)
        boxes ^= 1 << box | 1 << box + step
        agent = box + 2 * step
    return Position(level, rng.choice(list(cells(level.region(agent, level.walls | boxes)))), boxes)


# ---- public levels ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileLevel:
    """One level of a file: its start, the last text line before it, the line it begins in (from 1), and its split."""

    start: Position
    title: str
    line: int
    split: str


def read_levels(path: str) -> tuple[FileLevel, ...]:
    """Return the levels of an XSB file in their order; ``ConfigError`` (``file:line``) where one cannot be played.

    A level is a run of lines, the first of which starts with ``#`` (after floor). It ends at an empty line, a comment
    (``;``) or a ``Key: value`` line. Other lines between levels are titles. A file is read once, until it changes.
    """
    try:
        status = Path(path).stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ConfigError(f"env.levels = {path!r}: cannot be read: {error}") from error


@lru_cache(maxsize=16)
def _read(path: str, _modified_ns: int, _num_bytes: int) -> tuple[FileLevel, ...]:
    """Return the levels; the unused arguments make a changed file a new entry of the cache."""
    levels: list[FileLevel] = []
    rows: list[str] = []
    title = ""
    # Titles may hold any bytes; a replaced byte inside a level is refused as an unknown character.
    for line, text in enumerate([*Path(path).read_text("utf-8", "replace").splitlines(), ""], 1):
        bare = text.rstrip()
        ends = not bare or bare.startswith(";") or re.match(r"[A-Za-z]+:", bare)
        if bare.lstrip(FLOOR).startswith("#") or (rows and not ends):
            rows.append(bare)
            continue
        if rows:
            levels.append(_level(path, rows, line - len(rows), title))
            rows, title = [], ""
        title = bare.strip("; ") or title
    if not levels:
        raise ConfigError(f"env.levels = {path!r}: no level found; expected XSB text, walls drawn with #")
    return tuple(levels)


def _level(path: str, rows: list[str], line: int, title: str) -> FileLevel:
    try:
        start = parse("\n".join(rows))
        if start.solved:
            raise MalformedLevelError(0, "every box is on a goal at the start: expected a level with something to do")
        if pushes_left(start) is None:
            raise MalformedLevelError(0, "a box is stuck for good at the start: expected a level that can be solved")
    except MalformedLevelError as error:
        raise ConfigError(f"{path}:{line + error.row}: malformed level {title!r}: {error.reason}") from error
    return FileLevel(start, title, line, split_of(canonical(start)))
