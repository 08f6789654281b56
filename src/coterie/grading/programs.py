"""Grading a program: its tests run in the sandbox, and what came out is compared here."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from coterie.errors import ConfigError
from coterie.grading.asserts import Split, holds, split
from coterie.grading.compare import same_output, same_value
from coterie.grading.exchange import ask, named_call
from coterie.grading.expressions import read_literal
from coterie.grading.judge import judge
from coterie.grading.report import PASSED, Grade, Mark, Report, bad_end
from coterie.problems import AssertTest, CallTest, CodeProblem, CodeTest, ProgramTest
from coterie.sandbox.execution import Limits, Runner

MAX_TIMEOUTS = 3
"""Tests that may run out of time before the later ones of the problem are no longer run: they count as not passed."""


async def grade(problem: CodeProblem, program: str, runner: Runner, *, stop_at_failure: bool = False) -> Report:
    """Return the grade of each test of a problem for a program.

    Tests run one after the other, each under the problem's CPU limit; calls share a process. After ``MAX_TIMEOUTS``
    tests that ran out of time, or after the first test that is not passed with ``stop_at_failure``, the others are not
    run and count as not passed. Expected values, asserts and references never enter the sandbox beside the program.

    ``SandboxError`` passes through: nothing is graded when the sandbox failed. ``ConfigError`` for a problem without
    tests, or with one that cannot be read.
    """
    if not problem.tests:
        raise ConfigError(f"problem {problem.id!r} has no tests, so any program would pass it; expected one at least")
    if not is_text(program):
        return Report((Grade(Mark.RUNTIME_ERROR, "the program is no valid Unicode text"),) * len(problem.tests))
    grades: list[Grade] = []
    for kind, group in groupby(problem.tests, type):
        tests = list(group)
        for batch in [tests] if kind is CallTest else [[test] for test in tests]:
            reason = why_stop(grades, stop_at_failure)
            if reason:
                grades += [Grade(Mark.NOT_RUN, reason)] * len(batch)
            else:
                grades += await grade_batch(problem, batch, program, runner)
    return Report(tuple(grades))


def is_text(program: str) -> bool:
    """Return whether a program can be written as UTF-8, which half of a surrogate pair cannot."""
    try:
        program.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def why_stop(grades: Sequence[Grade], stop_at_failure: bool) -> str:
    """Return why no further test is run, "" when it is."""
    if stop_at_failure and not all(grade.passed for grade in grades):
        return "not run: an earlier test was not passed"
    if sum(grade.mark is Mark.TIME_LIMIT for grade in grades) >= MAX_TIMEOUTS:
        return f"not run: {MAX_TIMEOUTS} earlier tests ran out of time"
    return ""


async def grade_batch(problem: CodeProblem, tests: Sequence[CodeTest], program: str, runner: Runner) -> list[Grade]:
    """Return the grades of tests that run together: any number of calls, or one test of another kind."""
    calls = [test for test in tests if isinstance(test, CallTest)]
    if calls:
        return await grade_calls(problem, calls, program, runner)
    [test] = tests
    if isinstance(test, ProgramTest):
        return [await grade_program(problem, test, program, runner)]
    assert isinstance(test, AssertTest)
    limits = Limits(cpu_s=problem.cpu_s)
    parts = split(test.code, problem.entry)
    if parts is None:
        return [await judge(test.code, problem.entry, problem.starter, program, runner, limits)]
    return [await grade_parts(parts, program, runner, limits)]


async def grade_program(problem: CodeProblem, test: ProgramTest, program: str, runner: Runner) -> Grade:
    """Return the grade of a program that reads and writes."""
    execution = await runner.run(program, test.stdin.encode("utf-8"), Limits(cpu_s=problem.cpu_s))
    end = bad_end(execution)
    if end is not None:
        return end
    same = same_output(test.expected, execution.stdout, tolerance=problem.tolerance, exact=test.exact)
    return PASSED if same else Grade(Mark.WRONG, "another output than expected")


async def grade_calls(problem: CodeProblem, tests: Sequence[CallTest], program: str, runner: Runner) -> list[Grade]:
    """Return the grades of a program whose function is called."""
    where = f"problem {problem.id!r}"
    if not problem.entry:
        raise ConfigError(f"{where} has tests that call a function and names none; set entry to its name")
    calls = []
    for test in tests:
        args = read_literal(test.args, where)
        if not isinstance(args, list | tuple):
            raise ConfigError(f"{where}: the arguments {test.args[:80]!r} are no list or tuple; expected one item each")
        calls.append(named_call(problem.entry, args))
    expected = [read_literal(test.expected, where) for test in tests]
    grades = []
    for wanted, reply in zip(expected, await ask(program, calls, runner, Limits(cpu_s=problem.cpu_s)), strict=True):
        trouble = reply if isinstance(reply, Grade) else reply.trouble
        if trouble is None and not isinstance(reply, Grade):
            same = same_value(wanted, reply.value, problem.tolerance)
            trouble = PASSED if same else Grade(Mark.WRONG, "another value than expected")
        grades.append(trouble or PASSED)
    return grades


async def grade_parts(parts: Split, program: str, runner: Runner, limits: Limits) -> Grade:
    """Return the grade of a program on a test taken apart: passed when every check holds."""
    calls = [{"expression": call} for call in parts.calls]
    replies = await ask(program, calls, runner, limits, parts.setup)
    for indices, check in parts.checks:
        answers: dict[str, object] = {}
        for index in indices:
            reply = replies[index]
            trouble = reply if isinstance(reply, Grade) else reply.trouble
            if trouble is not None:
                return trouble
            if not isinstance(reply, Grade):
                answers[f"_{index}"] = reply.value
        result = holds(check, answers)
        if not result.passed:
            return result
    return PASSED
