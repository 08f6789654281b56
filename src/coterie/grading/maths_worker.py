"""The process in which sympy compares answers: one request a line in, one result a line out.

Run as ``python -m coterie.grading.maths_worker``. It may hang or grow over what a model wrote, so the kernel ends it at
the request's processor time, and the other side starts a new one; memory past the process' limit it does not get.
"""

from __future__ import annotations

import json
import resource
import sys
from fractions import Fraction
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy
from math_verify import verify

from coterie.errors import guarded
from coterie.grading.maths_numbers import RELATIVE, is_rounded, near, read_number, without_units
from coterie.grading.maths_same import plainly_same, same_answer
from coterie.types import Failure

MEMORY_BYTES = 2 * 2**30
DIGITS = 40
NOTHING = sympy.Float("1e-60")
MAX_EXACT = sympy.Float("1e3000")
POINTS = ("1.75", "2.625", "3.3125", "5.1875")
MIN_POINTS = 3


class UnreadableError(Exception):
    """A scalar that is no formula."""


def read(text: str) -> Any:
    """Return a formula as sympy reads it; ``UnreadableError``, or what the parser raises, where it cannot."""
    text = without_units(text)
    expression = latex2sympy(text, normalization_config=None)
    if expression is None:
        raise UnreadableError(f"{text[:60]!r} is no formula")
    if isinstance(expression, sympy.Expr):  # the letter i is the imaginary unit, and letters have no assumptions
        meanings = {s: sympy.I if str(s) == "i" else sympy.Symbol(str(s)) for s in expression.free_symbols}
        expression = expression.subs(meanings)
    return expression


def same_formula(gold: str, answer: str) -> bool:
    """Return whether two scalars are the same formula.

    Numbers by value, at 40 digits; formulas with letters by their values at several points, which differ for different
    formulas; relations and what else there is as math-verify compares them (gold first).
    """
    plain = plainly_same(gold, answer)
    if plain is not None:
        return plain
    a, b = read(gold), read(answer)
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return bool(verify([a], [b], timeout_seconds=None))
    letters = sorted(a.free_symbols | b.free_symbols, key=str)
    if not letters:
        return same_values(a, b) or is_decimal_of(gold, b) or is_decimal_of(answer, a)
    if a.free_symbols != b.free_symbols:
        return False
    agreed = 0
    for shift in range(len(POINTS)):
        point = {s: sympy.Rational(POINTS[(k + shift) % len(POINTS)]) + k // len(POINTS) for k, s in enumerate(letters)}
        at_a, at_b = a.subs(point), b.subs(point)
        if not (at_a.is_finite is False or at_b.is_finite is False):
            if not same_values(at_a, at_b):
                return False
            agreed += 1
    return agreed >= MIN_POINTS


def same_values(a: Any, b: Any) -> bool:
    """Return whether two expressions without letters have the same value, to 1e-12 of the larger."""
    x, y = sympy.N(a, DIGITS), sympy.N(b, DIGITS)
    if not (x.is_number and y.is_number and x.is_finite and y.is_finite):
        return bool(x == y)
    if a.is_rational and b.is_rational and all(v == 0 or 1 / MAX_EXACT < abs(v) < MAX_EXACT for v in (x, y)):
        p, q = a.doit(), b.doit()
        if isinstance(p, sympy.Rational) and isinstance(q, sympy.Rational):
            return near(Fraction(int(p.p), int(p.q)), Fraction(int(q.p), int(q.q)))
    largest = max(abs(x), abs(y))
    return bool(largest < NOTHING or abs(x - y) <= float(RELATIVE) * largest)


def is_decimal_of(text: str, exact: Any) -> bool:
    """Return whether a text is a decimal of enough digits that stands for a value no decimal reaches."""
    number = read_number(text)
    if number is None or exact.is_rational or not exact.is_real:
        return False
    return is_rounded(number, Fraction(str(sympy.N(exact, DIGITS))))


def answer_request(request: dict[str, Any]) -> dict[str, object]:
    """Return the result of a request: ``same``, and ``unreadable`` with the reason where a part is no formula.

    Only ``limit`` where memory ran out and no reading of the answer was the same.
    """
    failures: list[Failure] = []

    def scalar(gold: str, answer: str) -> bool:
        with guarded("sympy", failures.append):  # over what a model wrote: there is no list of what it may raise
            return same_formula(gold, answer)
        return False

    same = same_answer(request["gold"], request["answer"], scalar, request["ordered"])
    if same or not failures:
        return {"same": bool(same), "unreadable": ""}
    if any(failure.kind == MemoryError.__name__ for failure in failures):
        return {"limit": "memory_limit"}
    return {"same": False, "unreadable": f"{failures[0].kind}: {failures[0].message[:100]}"}


def main() -> None:
    """Answer requests until the input ends; a parser that does not work here ends the process at its start."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    if not same_formula(r"x + \frac{1}{2}", "0.5 + x"):
        raise RuntimeError("sympy does not read x + 1/2 and 0.5 + x as the same")
    for line in sys.stdin:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + request["cpu_s"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        sys.stdout.write(json.dumps(answer_request(request)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
