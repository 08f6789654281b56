"""Numbers as they are written in answers, exactly, and when two of them are the same."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

RELATIVE = Fraction(1, 10**12)
"""Two numbers this near, relative to the larger, are the same: the noise of a computed decimal, no more."""
ENOUGH_DIGITS = 6
"""Significant digits that a decimal needs to stand for a number it can only approach, such as 1/3 or pi."""
MAX_EXPONENT = 400

DECIMAL = r"[-+]?(?:\d+\.?\d*|\.\d+)"
POWER_OF_TEN = re.compile(rf"({DECIMAL})(?:e|E|(?:\\times|\\cdot|\*)10\^)\{{?([-+]?\d{{1,4}})\}}?")
FRACTION = re.compile(rf"([-+]?)(?:\\frac\{{({DECIMAL})\}}\{{({DECIMAL})\}}|({DECIMAL})/({DECIMAL}))")
MIXED = re.compile(r"([-+]?)(\d+)(?: (\d+)/(\d+)| ?\\frac\{(\d+)\}\{(\d+)\})")
UNIT_WORDS = (
    "degrees?|radians?|cm|mm|km|m|in|inch|inches|feet|ft|foot|yards?|miles?|units?|square|cubic|grams?|kg|g|"
    "seconds?|sec|s|minutes?|min|hours?|h|days?|weeks?|months?|years?|cents?|dollars?|euros?|mph|people|"
    "ways?|points?|times|liters?|litres?|pounds?|lbs?"
)
UNITS = re.compile(rf"(?<=[\d}})])\s+(?:(?:{UNIT_WORDS})\b(?:\^\{{?\d\}}?)?\s*)+$")
UNIT_TEXT = re.compile(r"(?<=[^\s])\s*\\text\{[^{}]*\}(?:\^\{?\d\}?)?$")
DEGREES = re.compile(r"\s*\^\s*(?:\\circ|\{\s*\\circ\s*\})|\s*\\degree(?![a-zA-Z])")


@dataclass(frozen=True, slots=True)
class Number:
    """An exact value. ``step`` is the worth of the last digit of a decimal with enough digits, ``None`` otherwise."""

    value: Fraction
    step: Fraction | None = None
    decimal: bool = False
    percent: bool = False


def without_units(text: str) -> str:
    """Return an answer without the degrees, unit words and ``\\text{...}`` behind its number."""
    text = DEGREES.sub("", text)
    return UNITS.sub("", UNIT_TEXT.sub("", text)).strip()


def read_number(text: str) -> Number | None:
    """Return the number a text is, ``None`` where it is anything else.

    Known: integers, decimals, powers of ten, ``a/b`` and ``\\frac`` of them, mixed numbers, a percent sign behind.
    """
    text = without_units(text)
    percent = re.fullmatch(r"(.*?)\s*\\?%", text)
    if percent:
        inner = read_number(percent[1])
        return Number(inner.value, inner.step, inner.decimal, True) if inner and not inner.percent else None
    if len(text) > 1000:
        return None
    mixed = MIXED.fullmatch(re.sub(r"\s+", " ", text))
    if mixed:
        sign, whole, *parts = mixed.groups()
        top, bottom = (int(part) for part in parts if part is not None)
        return Number((-1 if sign == "-" else 1) * (int(whole) + Fraction(top, bottom))) if bottom else None
    text = re.sub(r"\s+", "", text)
    fraction = FRACTION.fullmatch(text)
    if fraction:
        sign, *parts = fraction.groups()
        over, under = (Fraction(part) for part in parts if part is not None)
        return Number((-1 if sign == "-" else 1) * over / under) if under else None
    return read_decimal(text)


def read_decimal(text: str) -> Number | None:
    """Return the number that digits, a point and perhaps a power of ten write."""
    power = POWER_OF_TEN.fullmatch(text)
    digits, exponent = (power[1], int(power[2])) if power else (text, 0)
    if not re.fullmatch(DECIMAL, digits) or abs(exponent) > MAX_EXPONENT:
        return None
    scale = Fraction(10) ** exponent
    places = len(digits.partition(".")[2])
    significant = len(digits.lstrip("+-").replace(".", "").lstrip("0"))
    step = scale / 10**places if "." in digits and significant >= ENOUGH_DIGITS else None
    return Number(Fraction(digits) * scale, step, decimal="." in digits)


def same_number(gold: Number, answer: Number) -> bool:
    """Return whether two numbers are the same.

    Equal, or within 1e-12 of the larger; or one is a decimal of at least six significant digits and the other, a
    fraction that is no integer, rounds to it or is cut to it. A percentage is the same as its number of percent and as
    its value; two percentages are compared as such.
    """
    if gold.percent != answer.percent:
        sign, plain = (gold, answer) if gold.percent else (answer, gold)
        return any(near(sign.value / scale, plain.value) for scale in (1, 100))
    if near(gold.value, answer.value):
        return True
    for decimal, exact in ((gold, answer), (answer, gold)):
        if decimal.step is not None and not exact.decimal and exact.value.denominator != 1:
            return is_rounded(decimal, exact.value)
    return False


def is_rounded(decimal: Number, exact: Fraction) -> bool:
    """Return whether a decimal of enough digits is an exact value rounded, or cut, to them."""
    if decimal.step is None:
        return False
    error = abs(decimal.value - exact)
    return error <= decimal.step / 2 or (error < decimal.step and abs(decimal.value) < abs(exact))


def near(a: Fraction, b: Fraction) -> bool:
    """Return whether two values differ by nothing but noise; integers have none."""
    return a == b or (a.denominator * b.denominator > 1 and abs(a - b) <= RELATIVE * max(abs(a), abs(b)))
