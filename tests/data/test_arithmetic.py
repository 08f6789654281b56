"""Made problems of arithmetic: exact answers, no instance in two splits, short enough at level 1."""

from __future__ import annotations

import ast
import operator
import random
from fractions import Fraction

import pytest

from coterie.data.arithmetic import ANSWER_CHARS, LEVELS, QUESTION_CHARS, Operation, draw, make_problem, value, write
from coterie.envs.splits import SPLITS

SIGNS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def worked_out(node: ast.expr) -> Fraction:
    """Return the value of parsed arithmetic, by Python's own reading of precedence."""
    if isinstance(node, ast.Constant):
        assert isinstance(node.value, int)
        return Fraction(node.value)
    assert isinstance(node, ast.BinOp)
    found = SIGNS[type(node.op)](worked_out(node.left), worked_out(node.right))
    assert isinstance(found, Fraction)
    return found


@pytest.mark.parametrize("level", [1, 2, 3, 4])
def test_the_answer_is_what_python_makes_of_the_question(level: int) -> None:
    for index in range(200):
        problem = make_problem(level, "train", index)
        text = problem.question.removesuffix("=")
        assert worked_out(ast.parse(text, mode="eval").body) == Fraction(problem.answer), problem
        assert len(problem.question) <= QUESTION_CHARS[level]
        assert len(problem.answer) <= ANSWER_CHARS


@pytest.mark.parametrize("level", LEVELS)
def test_no_question_is_in_two_splits(level: int) -> None:
    asked = {split: {draw_key(level, split, index) for index in range(60)} for split in SPLITS}
    assert not asked["train"] & asked["test"]
    assert not asked["train"] & asked["validation"]
    assert not asked["validation"] & asked["test"]
    assert len(asked["train"]) > 50


def draw_key(level: int, split: str, index: int) -> str:
    """Return a question without what may be swapped: 3+4 and 4+3 are the same."""
    question = make_problem(level, split, index).question.removesuffix("=")
    return "+".join(sorted(question.split("+"))) if level == 1 else question


def test_problems_are_the_same_again_and_level_1_is_never_negative() -> None:
    assert make_problem(1, "train", 7) == make_problem(1, "train", 7)
    assert all(Fraction(make_problem(1, "test", index).answer) >= 0 for index in range(100))


def test_expressions_are_written_with_the_brackets_they_need() -> None:
    inner = Operation("-", 3, 4)
    assert write(Operation("-", 2, inner)) == "2-(3-4)"
    assert write(Operation("-", inner, 2)) == "3-4-2"
    assert write(Operation("*", inner, 2)) == "(3-4)*2"
    assert write(Operation("+", Operation("*", 2, 3), inner)) == "2*3+3-4"
    assert value(Operation("-", 2, inner)) == 3


def test_a_story_has_the_answer_its_numbers_give() -> None:
    seen = set()
    for seed in range(200):
        made = draw(5, random.Random(seed))
        if made is None:
            continue
        kind, _, numbers = made.canonical.partition(":")
        a, b, c = map(int, numbers.split(","))
        wanted = {
            "_share": Fraction(a * b - c),
            "_price": Fraction(a * b + c),
            "_speed": Fraction(a * c, b),
            "_rest": Fraction(a % b + c),
            "_percent": Fraction(20 * a) * (1 - Fraction(5 * b, 100)) + c,
        }
        assert made.answer == wanted[kind], made
        seen.add(kind)
    assert len(seen) == 5
