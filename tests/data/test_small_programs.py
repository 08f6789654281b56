"""Made programming problems: references pass, wrong programs fail, splits are disjoint. Programs really run."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coterie.data.small_programs import LEVELS, NUM_PUBLIC, Steps, make_program_problem
from coterie.envs.splits import SPLITS
from coterie.problems import CodeProblem, ProgramTest


def outputs(program: str, problem: CodeProblem) -> list[bool]:
    """Return per test whether the program prints what is expected; one process runs it for all tests."""
    stdins = [test.stdin for test in problem.tests if isinstance(test, ProgramTest)]
    driver = "import io, sys\nfor text in {!r}:\n    sys.stdin = io.StringIO(text)\n    exec({!r}, {{}})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-c", driver.format(stdins, program)], capture_output=True, text=True, check=True
    )
    wanted = [test.expected.strip() for test in problem.tests if isinstance(test, ProgramTest)]
    return [found == expected for found, expected in zip(done.stdout.splitlines(), wanted, strict=True)]


@pytest.mark.parametrize("level", LEVELS)
def test_references_pass_and_every_wrong_program_fails_a_hidden_test(level: int) -> None:
    for index in range(3):
        problem = make_program_problem(level, "train", index)
        assert all(outputs(problem.reference, problem)), problem
        assert len(problem.wrong) >= 3
        for wrong in problem.wrong:
            assert not all(outputs(wrong, problem)[NUM_PUBLIC:]), wrong


@pytest.mark.parametrize("level", LEVELS)
def test_no_program_is_in_two_splits(level: int) -> None:
    made = {split: {make_program_problem(level, split, index).reference for index in range(40)} for split in SPLITS}
    assert not made["train"] & made["test"]
    assert not made["train"] & made["validation"]
    assert not made["validation"] & made["test"]


def test_a_problem_is_made_from_its_steps() -> None:
    steps = Steps((("mul", 3), ("add", 4)), "")
    assert steps.program() == "print((int(input())*3)+4)"
    assert (steps.output([5]), steps.statement(short=True)) == (19, "*3+4")
    assert steps.statement(short=False) == (
        "Read one whole number. To it, do this: multiply by 3, then add 4. Print the result."
    )
    kept = Steps((("gt", 4), ("mul", 2)), "sum")
    assert kept.output([1, 5, 6]) == 22
    assert kept.program().splitlines()[1:] == [
        "xs = [x for x in xs if x > 4]",
        "xs = [x * 2 for x in xs]",
        "print(sum(xs))",
    ]
    assert Steps((("gt", 4),), "max").output([1]) == 0
    assert make_program_problem(2, "test", 5) == make_program_problem(2, "test", 5)
