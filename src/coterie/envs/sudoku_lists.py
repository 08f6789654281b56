"""Public lists of Sudoku puzzles: read, checked and split once.

One puzzle a line: n*n characters row by row, ``.`` or ``0`` for a blank; in a CSV file the solution may follow
(``puzzle,solution``), and the first line may name the columns. Empty lines and lines starting with ``#`` are skipped.
"""

from __future__ import annotations

import itertools
import logging
import pathlib
from collections.abc import Sequence
from functools import lru_cache

from coterie.envs.splits import split_list, split_of
from coterie.envs.sudoku_rules import BLANK, Puzzle, broken_units, canonical, solutions, unit_name
from coterie.errors import ConfigError

_LOG = logging.getLogger(__name__)


def _checked(where: str, fields: Sequence[str], size: int) -> Puzzle | None:
    """Return the puzzle of one line, or ``None`` if it has several solutions; ``ConfigError`` if it is none."""
    clues = fields[0].replace("0", BLANK)
    allowed = {BLANK, *"123456789"[:size]}
    if len(clues) != size * size or not set(clues) <= allowed:
        raise ConfigError(
            f"{where}: {fields[0]!r} is no {size}x{size} puzzle: expected {size * size} characters, digits 1 to {size} "
            "and '.' or '0' for a blank; is env.size right?"
        )
    if BLANK not in clues:
        raise ConfigError(f"{where}: the grid has no blank, so there is nothing to solve; remove the line")
    broken = broken_units(clues)
    if broken:
        raise ConfigError(f"{where}: the clues repeat a digit in {unit_name(size, broken[0])}; mend or remove the line")
    found = list(itertools.islice(solutions(clues), 2))
    if not found:
        raise ConfigError(f"{where}: the puzzle has no solution; mend or remove the line")
    if len(found) > 1:
        return None
    if len(fields) > 1 and fields[1] != found[0]:
        raise ConfigError(f"{where}: the solution given is {fields[1]!r}, the only solution is {found[0]!r}")
    return Puzzle(clues, found[0])


def read_puzzles(path: pathlib.Path, size: int, drop_ambiguous: bool) -> tuple[Puzzle, ...]:
    """Return the puzzles of a list, in file order, each with its only solution.

    ``ConfigError`` names file and line of what is malformed, contradictory or contradicts the solution given. So does a
    puzzle with several solutions, unless ``drop_ambiguous`` leaves it out (and logs how many).
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"env.puzzles = {str(path)!r} cannot be read: {error}") from error
    puzzles, dropped = [], 0
    for number, line in enumerate(lines, start=1):
        fields = [field.strip() for field in line.split(",")]
        is_header = number == 1 and len(fields) > 1 and fields[0].isalpha()
        if not line.strip() or line.startswith("#") or is_header:
            continue
        puzzle = _checked(f"{path}:{number}", fields, size)
        if puzzle is not None:
            puzzles.append(puzzle)
        elif drop_ambiguous:
            dropped += 1
        else:
            raise ConfigError(
                f"{path}:{number}: the puzzle has more than one solution; expected exactly one. Remove the line, or "
                "set env.drop_ambiguous = true to leave such puzzles out"
            )
    if not puzzles:
        raise ConfigError(f"env.puzzles = {str(path)!r} holds no usable puzzle ({dropped} had several solutions)")
    if dropped:
        _LOG.info("%s: %d puzzles with several solutions left out, %d kept", path, dropped, len(puzzles))
    return tuple(puzzles)


@lru_cache(maxsize=8)
def _read_splits(
    path: pathlib.Path,
    size: int,
    drop_ambiguous: bool,
    stamp: tuple[int, int],  # noqa: ARG001
) -> dict[str, tuple[Puzzle, ...]]:
    puzzles = read_puzzles(path, size, drop_ambiguous)
    return {**split_list(puzzles, lambda puzzle: split_of(canonical(puzzle.clues))), "all": puzzles}


def listed_splits(path: pathlib.Path, size: int, drop_ambiguous: bool) -> dict[str, tuple[Puzzle, ...]]:
    """Return the puzzles of a list by split. A list is read and solved once, because every episode makes an env."""
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"env.puzzles = {str(path)!r} cannot be read: {error}") from error
    return _read_splits(path, size, drop_ambiguous, (status.st_mtime_ns, status.st_size))
