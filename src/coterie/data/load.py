"""Problems from files: layouts are recognised by their fields, every row is checked, every fault has its place."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from coterie.data import code_layouts as code
from coterie.data import math_layouts as maths
from coterie.data.fields import RowError
from coterie.data.rows import BadRow, Row, find_files, read_rows
from coterie.errors import ConfigError
from coterie.keyed import stable_hash
from coterie.problems import CodeProblem, MathProblem

_LOG = logging.getLogger(__name__)
_LOOK = 20
_SHOWN = 5
_SIGNS = frozenset("+-*/^<>=")
Problem: TypeAlias = MathProblem | CodeProblem
Kind: TypeAlias = Literal["math", "code"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A published layout: the fields that tell it, the field of its ids ("": none), and how a row is read."""

    name: str
    needs: tuple[str, ...]
    id_field: str
    convert: Callable[[Mapping[str, Any], str], Problem]


LAYOUTS: tuple[Layout, ...] = (
    Layout("HumanEval", ("prompt", "entry_point", "canonical_solution", "test"), "task_id", code.humaneval),
    Layout("MBPP+", ("prompt", "entry_point", "canonical_solution", "assertion"), "task_id", code.mbpp_plus),
    Layout("MBPP", ("text", "code", "test_list"), "task_id", code.mbpp),
    Layout("MBPP sanitized", ("prompt", "code", "test_list"), "task_id", code.mbpp),
    Layout("APPS", ("question", "input_output"), "problem_id", code.apps),
    Layout(
        "LiveCodeBench",
        ("question_content", "public_test_cases", "private_test_cases"),
        "question_id",
        code.live_code_bench,
    ),
    Layout("CodeContests", ("description", "public_tests", "private_tests"), "name", code.code_contests),
    Layout("Codeforces", ("description", "official_tests", "examples"), "id", code.codeforces),
    Layout("SandboxFusion", ("content", "test", "labels"), "id", code.sandbox_fusion),
    Layout("rllm code", ("problem", "tests"), "", code.problem_tests),
    Layout("verl math", ("data_source", "prompt", "reward_model"), "", maths.verl),
    Layout("AIME past", ("ID", "Year", "Question", "Answer"), "ID", maths.aime_table),
    Layout("AIME 2024", ("ID", "Problem", "Answer"), "ID", maths.aime24),
    Layout("OlympiadBench", ("question", "final_answer"), "id", maths.olympiad),
    Layout("MATH-500", ("problem", "answer", "unique_id"), "unique_id", maths.problem_answer),
    Layout("problem/answer", ("problem", "answer"), "id", maths.problem_answer),
    Layout("MATH", ("problem", "solution"), "", maths.math_solutions),
    Layout("question/answer", ("question", "answer"), "id", maths.question_answer),
)
"""Most telling first: the first layout whose fields a row has is its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a source holds: problems in file order with their places, the rows that are none, and what repeats."""

    problems: tuple[Problem, ...]
    places: Mapping[str, str]
    bad: tuple[BadRow, ...]
    repeats: int
    """Rows that repeat an earlier row of the same file whole; they are read once."""
    layouts: Mapping[str, str]
    """File -> the name of its layout."""


def load(source: str) -> Loaded:
    """Return the problems of a file, a folder or ``owner/name[:pattern]`` of the Hugging Face hub.

    ``ConfigError`` where nothing can be read or a layout is not known; single rows that are wrong are in ``bad``.
    An id is the file's name and the row's own id, or its number.
    """
    files = find_files(source)
    return _load(tuple((str(path), *_stamp(path)) for path in files))


def _stamp(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=32)
def _load(files: tuple[tuple[str, int, int], ...]) -> Loaded:
    """Read files once a process; every episode has an env of its own, which asks again."""
    problems: dict[str, Problem] = {}
    places: dict[str, str] = {}
    bad: list[BadRow] = []
    layouts: dict[str, str] = {}
    repeats = 0
    for name, _, _ in files:
        path = Path(name)
        rows = read_rows(path)
        head = list(islice(rows, _LOOK))
        layout = recognise(name, [row.fields for row in head if isinstance(row, Row)])
        layouts[name] = "nothing readable" if layout is None else layout.name
        for row, made in _converted(path, layout, chain(head, rows)):
            if isinstance(made, BadRow):
                bad.append(made)
            elif made.id not in problems:
                problems[made.id], places[made.id] = made, row.place
            elif problems[made.id] == made:
                repeats += 1
            else:
                bad.append(BadRow(row.place, f"id {made.id!r} is also that of {places[made.id]}, another problem"))
    return Loaded(problems=tuple(problems.values()), places=places, bad=tuple(bad), repeats=repeats, layouts=layouts)


def recognise(name: str, rows: Sequence[Mapping[str, Any]]) -> Layout | None:
    """Return the layout that most of some rows have, ``None`` without rows; ``ConfigError`` says what is known."""
    found = Counter(
        next((number for number, layout in enumerate(LAYOUTS) if set(layout.needs) <= set(row)), None) for row in rows
    )
    if not found:
        return None
    best = max((number for number in found if number is not None), key=lambda number: found[number], default=None)
    if best is None:
        known = "; ".join(f"{layout.name} ({', '.join(layout.needs)})" for layout in LAYOUTS)
        fields = sorted(map(str, rows[0]))
        raise ConfigError(f"{name}: no known layout has the fields {fields}. Known layouts and their fields: {known}")
    return LAYOUTS[best]


def _converted(
    path: Path, layout: Layout | None, rows: Iterator[Row | BadRow]
) -> Iterator[tuple[Row | BadRow, Problem | BadRow]]:
    """Yield each row with its problem, or with what is wrong with it."""
    stem = path.name.removesuffix(".gz").rpartition(".")[0] or path.name
    for number, row in enumerate(rows, start=1):
        if isinstance(row, BadRow):
            yield row, row
            continue
        assert layout is not None  # there is a row, so there is a layout
        missing = [field for field in layout.needs if field not in row.fields]
        if missing:
            yield row, BadRow(row.place, f"field {missing[0]!r} is missing (layout {layout.name})")
            continue
        own = row.fields.get(layout.id_field) if layout.id_field else None
        extra = row.fields.get("extra_info")
        if own is None and isinstance(extra, Mapping):
            own = extra.get("index", extra.get("id"))
        try:
            yield row, layout.convert(row.fields, f"{stem}/{number if own is None else own}")
        except RowError as error:
            yield row, BadRow(row.place, str(error))


# ---- for training ----------------------------------------------------------------------------------------------------


def load_for_play(sources: Sequence[str], kind: Kind, bad_rows: Literal["refuse", "skip"]) -> tuple[Problem, ...]:
    """Return the problems of all sources, each question once, as it stands first; the log counts what is left out.

    Left out are questions that are asked again and, with ``bad_rows = "skip"``, bad rows, which are refused otherwise.
    ``ConfigError`` where a source holds problems of the other kind, or none.
    """
    wanted = MathProblem if kind == "math" else CodeProblem
    found: dict[int, Problem] = {}
    for source in sources:
        loaded = load(source)
        if loaded.bad:
            lines = "".join(f"\n  {row.place}: {row.why}" for row in loaded.bad[:_SHOWN])
            more = f"\n  and {len(loaded.bad) - _SHOWN} more" if len(loaded.bad) > _SHOWN else ""
            if bad_rows == "refuse":
                raise ConfigError(
                    f"{source}: {len(loaded.bad)} rows cannot be used:{lines}{more}\nMend them, or leave them out with "
                    'env.bad_rows = "skip"'
                )
            _LOG.warning("%s: %d rows are left out:%s%s", source, len(loaded.bad), lines, more)
        others = [problem.id for problem in loaded.problems if not isinstance(problem, wanted)]
        if others or not loaded.problems:
            what = f"{others[0]!r} is of the other kind" if others else "there is none"
            raise ConfigError(f"{source}: expected problems for env {kind!r}, but {what}")
        before = len(found)
        for problem in loaded.problems:
            found.setdefault(question_hash(problem), problem)
        again = len(loaded.problems) - (len(found) - before)
        if again:
            _LOG.warning("%s: %d problems ask what an earlier one asks and are left out", source, again)
    return tuple(found.values())


def question_of(problem: Problem) -> str:
    """Return the text that asks."""
    return problem.question if isinstance(problem, MathProblem) else problem.statement


def question_hash(problem: Problem) -> int:
    """Return a number that is equal for questions that differ in spacing, case and punctuation only."""
    return stable_hash(normalised(question_of(problem)))


def normalised(text: str) -> str:
    """Return letters, digits and signs of arithmetic, lower case: how two copies of a question are known as one."""
    plain = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").replace("\\left", "").replace("\\right", "")
    return "".join(char for char in plain.casefold() if char.isalnum() or char in _SIGNS)
