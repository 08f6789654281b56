"""Is this what was expected? Text a program wrote, values a function returned; always outside the sandbox."""

from __future__ import annotations

import math
from decimal import Decimal, InvalidOperation

ROUNDING = 1e-9
"""Relative error of a float in an answer where a problem states none: noise of the last digits, no more."""


def same_output(expected: str, written: bytes, *, tolerance: float | None = None, exact: bool = False) -> bool:
    """Return whether a program wrote what was expected.

    ``exact``: every byte counts. Else lines are compared in order, each as its words, so blanks within a line, at its
    ends, ``\\r`` and empty lines at the end of the output do not matter; the cut into lines does. With a ``tolerance``,
    two words are also the same when both are numbers and ``same_number`` holds. Bytes that are no UTF-8 never match.
    """
    if exact:
        return written == expected.encode("utf-8")
    try:
        text = written.decode("utf-8")
    except UnicodeDecodeError:
        return False
    wanted, got = words_of_lines(expected), words_of_lines(text)
    return len(wanted) == len(got) and all(
        len(a) == len(b) and all(same_word(x, y, tolerance) for x, y in zip(a, b, strict=True))
        for a, b in zip(wanted, got, strict=True)
    )


def words_of_lines(text: str) -> list[list[str]]:
    """Return the words of each line, without the empty lines at the end."""
    lines = [line.split() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def same_word(expected: str, written: str, tolerance: float | None) -> bool:
    """Return whether two words are equal, or numbers within the tolerance."""
    if expected == written:
        return True
    if tolerance is None or not written.isascii() or "_" in written:
        return False
    try:
        wanted, got = Decimal(expected), Decimal(written)
    except InvalidOperation:
        return False
    if not (wanted.is_finite() and got.is_finite()):
        return False  # infinities that are equal are equal words; nan is the same as nothing
    if expected.lstrip("+-").isdigit():
        return wanted == got  # a count is never nearly right
    return near(float(wanted), float(got), tolerance)


def same_value(expected: object, value: object, tolerance: float | None = None) -> bool:
    """Return whether a returned value is the expected one.

    Types count: a bool is no number, text is no list, a set is no list. An expected list may also be answered by a
    tuple, at any depth, because the published sets write their answers as JSON, which has no tuples; an expected tuple
    wants a tuple. Integers are equal or not; where a float is expected or given, ``tolerance`` (``None``: 1e-9 of the
    value) applies to the larger of 1 and the value. nan equals nan only.
    """
    if isinstance(expected, bool) or isinstance(value, bool):
        return isinstance(expected, bool) and isinstance(value, bool) and expected == value
    if isinstance(expected, int | float) and isinstance(value, int | float):
        return near(expected, value, tolerance)
    if isinstance(expected, complex) and isinstance(value, int | float | complex):
        other = complex(value)
        return near(expected.real, other.real, tolerance) and near(expected.imag, other.imag, tolerance)
    if isinstance(expected, list | tuple):
        kinds = (list, tuple) if isinstance(expected, list) else (tuple,)
        return (
            isinstance(value, kinds)
            and len(expected) == len(value)
            and all(same_value(a, b, tolerance) for a, b in zip(expected, value, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(value, dict)
            and expected.keys() == value.keys()
            and all(same_value(item, value[key], tolerance) for key, item in expected.items())
        )
    if isinstance(expected, set | frozenset):
        return isinstance(value, set | frozenset) and expected == value
    return type(expected) is type(value) and expected == value


def near(expected: float, value: float, tolerance: float | None) -> bool:
    """Return whether two numbers are the same: integers exactly, floats within the tolerance, nan with nan."""
    if expected == value:
        return True
    if isinstance(expected, int) and isinstance(value, int):
        return False
    try:
        a, b = float(expected), float(value)
    except OverflowError:
        return False  # an integer that no float comes near
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    if tolerance is None:
        return math.isclose(a, b, rel_tol=ROUNDING, abs_tol=1e-12)
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) <= tolerance * max(1.0, abs(a))
