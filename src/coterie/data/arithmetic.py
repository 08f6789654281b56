"""Problems of arithmetic made on the spot, with exact answers: no download, no end, disjoint splits.

Level 1: one sum or difference of numbers below 50. Level 2: products, and sums of three. Level 3: brackets and
precedence. Level 4: sums of fractions. Level 5: short stories. Answers are whole numbers, or fractions in lowest terms.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from coterie.envs.splits import make_instance
from coterie.problems import MathProblem

LEVELS = (1, 2, 3, 4, 5)
QUESTION_CHARS = {1: 6, 2: 11, 3: 18, 4: 12}
"""The longest question of a level that has no stories."""
ANSWER_CHARS = 6
_NAMES = ("Ada", "Ben", "Chi", "Dara", "Eli", "Fay", "Gus", "Hana")
_THINGS = ("apples", "books", "coins", "marbles", "pens", "shells", "stamps", "tickets")


@dataclass(frozen=True, slots=True)
class Operation:
    """A sign between two expressions."""

    sign: str
    left: Expression
    right: Expression


Expression: TypeAlias = int | Fraction | Operation


@dataclass(frozen=True, slots=True)
class Made:
    """A question, its exact answer, and what is equal for all questions that count as the same."""

    question: str
    answer: Fraction
    canonical: str


def make_problem(level: int, split: str, index: int) -> MathProblem:
    """Return problem ``index`` of a split at a level; a function of the arguments alone."""
    _, made = make_instance(
        f"arithmetic/{level}", split, index, lambda rng: draw(level, rng), lambda made: made.canonical
    )
    return MathProblem(id=f"arithmetic{level}/{split}/{index}", question=made.question, answer=str(made.answer))


def draw(level: int, rng: random.Random) -> Made | None:
    """Return a random problem of a level, ``None`` where the draw is none (a negative result at level 1)."""
    if level == 5:
        return _story(rng)
    expression = _EXPRESSIONS[level](rng)
    answer = value(expression)
    if level == 1 and answer < 0:
        return None
    return Made(question=write(expression) + "=", answer=answer, canonical=_canonical(expression))


def value(expression: Expression) -> Fraction:
    """Return the exact value."""
    if not isinstance(expression, Operation):
        return Fraction(expression)
    left, right = value(expression.left), value(expression.right)
    return {"+": left + right, "-": left - right, "*": left * right}[expression.sign]


def write(expression: Expression) -> str:
    """Return an expression as one writes it, with the brackets that it needs and no others."""
    if not isinstance(expression, Operation):
        return str(expression)
    left, right = expression.left, expression.right
    tight = expression.sign == "*"
    first = f"({write(left)})" if tight and isinstance(left, Operation) and left.sign in "+-" else write(left)
    loose = isinstance(right, Operation) and (right.sign in "+-" if tight or expression.sign == "-" else False)
    return f"{first}{expression.sign}" + (f"({write(right)})" if loose else write(right))


def _canonical(expression: Expression) -> str:
    """Return a form in which the order of summands and of factors does not show."""
    if not isinstance(expression, Operation):
        return str(expression)
    parts = [_canonical(expression.left), _canonical(expression.right)]
    return f"({expression.sign.join(parts if expression.sign == '-' else sorted(parts))})"


def _level1(rng: random.Random) -> Expression:
    return Operation(rng.choice("+-"), rng.randrange(50), rng.randrange(50))


def _level2(rng: random.Random) -> Expression:
    if rng.random() < 0.5:
        return Operation("*", rng.randrange(2, 100), rng.randrange(2, 13))
    inner = Operation(rng.choice("+-"), rng.randrange(10, 1000), rng.randrange(10, 1000))
    return Operation(rng.choice("+-"), inner, rng.randrange(10, 100))


def _level3(rng: random.Random) -> Expression:
    pair = Operation(rng.choice("+-"), rng.randrange(2, 100), rng.randrange(2, 100))
    product = (
        Operation("*", pair, rng.randrange(2, 10)) if rng.random() < 0.5 else Operation("*", rng.randrange(2, 10), pair)
    )
    other = Operation("*", rng.randrange(2, 10), rng.randrange(2, 10)) if rng.random() < 0.5 else rng.randrange(1, 100)
    return Operation(rng.choice("+-"), product, other)


def _level4(rng: random.Random) -> Expression:
    fractions = [Fraction(rng.randrange(1, 10), rng.randrange(2, 13)) for _ in range(2)]
    return Operation(rng.choice("+-"), *fractions)


_EXPRESSIONS: dict[int, Callable[[random.Random], Expression]] = {1: _level1, 2: _level2, 3: _level3, 4: _level4}


# ---- stories --------------------------------------------------------------------------------------------------------


def _share(a: int, b: int, c: int) -> tuple[str, Fraction] | None:
    text = "{name} has {a} bags with {b} {things} each and gives {c} {things} away. How many {things} are left?"
    return (text, Fraction(a * b - c)) if c < a * b else None


def _price(a: int, b: int, c: int) -> tuple[str, Fraction] | None:
    text = (
        "{name} buys {a} {things} at {b} dollars each and one box for {c} dollars. How many dollars is that together?"
    )
    return text, Fraction(a * b + c)


def _speed(a: int, b: int, c: int) -> tuple[str, Fraction] | None:
    text = "{name} walks {a} km in {b} hours, always at the same speed. How many km are that in {c} hours?"
    return text, Fraction(a * c, b)


def _rest(a: int, b: int, c: int) -> tuple[str, Fraction] | None:
    text = "{name} fills as many boxes of {b} as {a} {things} allow, then finds {c} more. How many are in no box?"
    return (text, Fraction(a % b + c)) if a > b > 1 else None


def _percent(a: int, b: int, c: int) -> tuple[str, Fraction] | None:
    text = "A shop has {a} {things}. It sells {p} percent of them and gets {c} new ones. How many are there now?"
    return (text, Fraction(a * 20 * (100 - 5 * b), 100) + c) if b < 20 else None


_STORIES = (_share, _price, _speed, _rest, _percent)


def _story(rng: random.Random) -> Made | None:
    kind = rng.randrange(len(_STORIES))
    a, b, c = rng.randrange(2, 60), rng.randrange(2, 30), rng.randrange(2, 40)
    told = _STORIES[kind](a, b, c)
    if told is None:
        return None
    shown = {"a": a * 20, "p": 5 * b} if _STORIES[kind] is _percent else {"a": a}
    question = told[0].format(name=rng.choice(_NAMES), things=rng.choice(_THINGS), b=b, c=c, **shown)
    return Made(question=question, answer=told[1], canonical=f"{_STORIES[kind].__name__}:{a},{b},{c}")
