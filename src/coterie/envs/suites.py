"""Suites: the tests that a tester writes, how they are read, confirmed by reference programs and worth something."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from coterie.envs.answer_texts import block, json_of, last_block, statements
from coterie.grading import grade
from coterie.problems import CallTest, CodeProblem, CodeTest, ProgramTest
from coterie.sandbox.execution import Runner

_MAX_TEST_CHARS = 2000
_COMPACT = re.compile(r"(\d{1,3})>(-?\d{1,5})")


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one answer, and what they are worth: the shares that are confirmed, and of wrong programs caught."""

    tests: tuple[CodeTest, ...] = ()
    confirmed: float = 0.0
    caught: float = 0.0

    def draw(self) -> str:
        """Return it for people."""
        return "\n".join(shown(test) for test in self.tests) or "no test"


def read_suite(text: str, problem: CodeProblem, most: int, compact: bool) -> tuple[CodeTest, ...]:
    """Return the first tests of an answer, each once; those that repeat a public test or expect nothing are left out.

    A program is tested by a JSON block, ``[{"input": "...", "output": "..."}]``; a function by a Python block of lines
    ``assert f(args) == value`` with literals. compact: the whole text is ``input>output``, joined by ``;``.
    """
    if compact:
        parts = [_COMPACT.fullmatch(part) for part in text.split(";")]
        found: Iterable[CodeTest] = (
            [ProgramTest(stdin=f"{part[1]}\n", expected=f"{part[2]}\n") for part in parts if part] if all(parts) else []
        )
    else:
        found = _asserts(text, problem.entry) if problem.entry else _pairs(text)
    known = {replace(test, public=False) for test in problem.tests if test.public}
    return tuple(dict.fromkeys(test for test in found if test not in known))[:most]


def write_suite(tests: Sequence[ProgramTest], compact: bool) -> str:
    """Return tests of a program as a tester writes them."""
    if compact:
        return ";".join(f"{test.stdin.strip()}>{test.expected.strip()}" for test in tests)
    rows = ",\n".join(
        f'  {{"input": {shown_text(test.stdin)}, "output": {shown_text(test.expected)}}}' for test in tests
    )
    return block(f"[\n{rows}\n]", "json")


def shown(test: CodeTest) -> str:
    """Return a test as prompts show it."""
    if isinstance(test, ProgramTest):
        return f"input {shown_text(test.stdin)} -> output {shown_text(test.expected)}"
    return f"arguments {test.args} -> {test.expected}" if isinstance(test, CallTest) else test.code


async def judged(
    tests: tuple[CodeTest, ...], problem: CodeProblem, right: Sequence[str], wrong: Sequence[str], runner: Runner
) -> Suite:
    """Return a suite with its worth: a test is confirmed where all of the ``right`` programs pass it.

    A wrong program is caught where it fails a confirmed test. Where there are wrong programs and none is caught, the
    suite is trivial and nothing of it counts as confirmed.
    """
    confirmed = set(range(len(tests)))
    for program in right:
        report = await grade(replace(problem, tests=tests), program, runner)
        confirmed &= {number for number, test in enumerate(report.grades) if test.passed}
    if not confirmed:
        return Suite(tests)
    kept = replace(problem, tests=tuple(tests[number] for number in sorted(confirmed)))
    caught = [not (await grade(kept, program, runner, stop_at_failure=True)).all_passed for program in wrong]
    share = sum(caught) / len(caught) if caught else 0.0
    return Suite(tests, 0.0 if caught and not share else len(confirmed) / len(tests), share)


def _pairs(text: str) -> list[CodeTest]:
    listed = json_of(text)
    tests: list[CodeTest] = []
    for item in listed if isinstance(listed, list) else ():
        given, wanted = (item.get("input"), item.get("output")) if isinstance(item, dict) else (None, None)
        if isinstance(given, str) and isinstance(wanted, str) and wanted.strip() and _sane(given + wanted):
            tests.append(ProgramTest(stdin=_line(given), expected=_line(wanted)))
    return tests


def _asserts(text: str, entry: str) -> list[CodeTest]:
    found = [_call(item, entry) for item in statements(last_block(text, "python", "py", ""))]
    return [test for test in found if test is not None]


def _call(item: ast.stmt, entry: str) -> CodeTest | None:
    """Return the test of ``assert entry(literals) == literal``, ``None`` for any other statement."""
    match item:
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name(id=name), args=args, keywords=[]), ops=[ast.Eq()], comparators=[wanted]
            )
        ) if name == entry and args:
            texts = [ast.unparse(node) for node in (*args, wanted)]
            if all(_is_literal(part) for part in texts) and _sane("".join(texts)):
                return CallTest(args=f"[{', '.join(texts[:-1])}]", expected=texts[-1])
    return None


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return False
    return True


def _sane(text: str) -> bool:
    """Return whether a test can be shown and written to a program: no NUL, no half of a surrogate pair, not endless."""
    return len(text) <= _MAX_TEST_CHARS and not re.search("[\0\ud800-\udfff]", text)


def _line(text: str) -> str:
    return text if text.endswith("\n") else f"{text}\n"


def shown_text(text: str) -> str:
    """Return a text on one line, in quotes, as prompts show it."""
    return json.dumps(text, ensure_ascii=False)
