"""Published programming problems: their own solutions pass, and mutants of them are judged as plain Python judges."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from bare_runner import BareRunner
from coterie.grading import Report, grade
from coterie.grading.expressions import tree_of
from coterie.problems import AssertTest, CodeProblem
from coterie.sandbox.execution import Limits, Verdict
from published_problems import DATA, apps, humaneval, mbpp, mbpp_plus

pytestmark = [pytest.mark.data, pytest.mark.skipif(not DATA.exists(), reason=f"no public data sets in {DATA}")]

BROKEN = ["HumanEval/32"]
"""HumanEval+ unpacks the float that find_zero returns (``_poly(*candidate(*inp), inp)``): nothing can pass that."""


def failures(problems: Iterable[CodeProblem], runner: Any) -> tuple[int, list[str]]:
    """Return the number of problems and those whose own solution does not score 1."""

    async def run() -> tuple[int, list[str]]:
        count, failed = 0, []
        for problem in problems:
            count += 1
            report = await grade(problem, problem.reference, runner)
            if not report.all_passed:
                failed.append(problem.id)
        return count, failed

    return asyncio.run(run())


def test_a_part_of_the_published_solutions_passes_its_tests(runner: Any) -> None:
    part = [*humaneval()][::12] + [*mbpp()][::110] + [*mbpp_plus()][::60]
    assert failures(part, runner) == (25, [])


def test_a_solution_of_every_apps_problem_passes(runner: Any) -> None:
    async def any_passes(problem: CodeProblem, solutions: list[str]) -> bool:
        return any([(await grade(problem, text, runner)).all_passed for text in solutions[:3]])

    found = {problem.id: asyncio.run(any_passes(problem, solutions)) for problem, solutions in apps()}
    assert found == dict.fromkeys(found, True)
    assert len(found) == 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_published_solution_passes_its_tests(runner: Any) -> None:
    assert failures(humaneval(), runner) == (109, [])
    assert failures(mbpp(), runner) == (995, [])
    assert failures(mbpp_plus(), runner) == (256, [])
    plus = [*humaneval("humaneval_plus/HumanEvalPlus-OriginFmt.jsonl.gz")]
    assert failures(plus, runner) == (109, BROKEN)


# ---- mutants ------------------------------------------------------------------------------------------------------


class Mutate(ast.NodeTransformer):
    """Changes the n-th place where it can: an integer becomes one more, a condition never holds, ``<`` is ``>=``."""

    def __init__(self, place: int) -> None:
        self.place, self.seen = place, 0

    def here(self) -> bool:
        self.seen += 1
        return self.seen - 1 == self.place

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        if type(node.value) is int and self.here():
            return ast.Constant(value=node.value + 1)
        return node

    def visit_If(self, node: ast.If) -> ast.stmt:
        if self.here():
            node.test = ast.Constant(value=False)
            return node
        self.generic_visit(node)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if isinstance(node.ops[0], ast.Lt) and self.here():
            node.ops[0] = ast.GtE()
            return node
        self.generic_visit(node)
        return node


def mutants(problem: CodeProblem, most: int) -> Iterator[str]:
    """Yield mutants of a solution; helpers of its starter stay as they are, since tests take them from the starter."""
    for place in range(most):
        mutation = Mutate(place)
        tree = tree_of(problem.reference)
        for node in tree.body:
            if not problem.starter or (isinstance(node, ast.FunctionDef) and node.name == problem.entry):
                mutation.visit(node)
        if mutation.seen <= place:
            return
        yield ast.unparse(ast.fix_missing_locations(tree))


async def passes_in_plain_python(problem: CodeProblem, program: str) -> bool:
    tests = "\n".join(test.code for test in problem.tests if isinstance(test, AssertTest))
    execution = await BareRunner().run(f"{program}\n{tests}", b"", Limits(cpu_s=8.0))
    return execution.verdict is Verdict.OK


def judged(problems: Iterable[CodeProblem], most: int, runner: Any) -> tuple[int, int, list[str]]:
    """Return how many mutants plain Python fails, how many it passes, and those that are judged otherwise here."""

    async def run() -> tuple[int, int, list[str]]:
        counts = {True: 0, False: 0}
        other = []
        for problem in problems:
            for number, mutant in enumerate(mutants(problem, most)):
                plain = await passes_in_plain_python(problem, mutant)
                report: Report = await grade(problem, mutant, runner, stop_at_failure=True)
                counts[plain] += 1
                if report.all_passed is not plain:
                    other.append(f"{problem.id} mutant {number}: plain Python {plain}")
        return counts[False], counts[True], other

    return asyncio.run(run())


def test_mutants_of_a_part_of_the_solutions_fail_where_plain_python_fails_them(runner: Any) -> None:
    failed, passed, other = judged([*humaneval()][::27] + [*mbpp()][::250], 2, runner)
    assert other == []
    assert (failed, passed) == (10, 4)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_mutants_of_every_solution_fail_where_plain_python_fails_them(runner: Any) -> None:
    failed, passed, other = judged(humaneval(), 2, runner)
    assert other == []
    assert failed > passed
    failed, passed, other = judged([*mbpp()][::4], 1, runner)
    assert other == []
    assert failed > passed
