"""Are two answers the same: their structures part by part, and their scalars by a way that the caller chooses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from coterie.grading.maths_numbers import read_number, same_number, without_units
from coterie.grading.maths_text import Node, compact, readings

SameScalar: TypeAlias = Callable[[str, str], bool | None]
"""Whether two scalars are the same; ``None``: this way cannot tell."""

IN_BASE = re.compile(r"[0-9A-F]+_(?:\w|\{\w+\})")
WORDS = re.compile(r"(?:\\text\{([^{}]*)\}|\(?([A-Z])\)?|([A-Za-z]{3,}(?: [A-Za-z]+)*))")


def same_answer(gold: str, answer: str, scalar: SameScalar, ordered: bool | None = None) -> bool | None:
    """Return whether two answers are the same; ``None`` where ``scalar`` could not tell and it mattered.

    ``ordered`` says whether a bare list, ``3, 2, 4``, has an order. ``None``: it has none when the gold list holds
    other things than plain numbers or is in ascending order, as lists of solutions are written; any other order of
    plain numbers is taken as meant.
    """
    results = [same(a, b, scalar, ordered) for a in readings(gold) for b in readings(answer)]
    return True if True in results else None if None in results else False


def same(gold: Node, answer: Node, scalar: SameScalar, ordered: bool | None = None) -> bool | None:
    """Return whether two structures are the same, see ``same_answer``."""
    if gold.name and answer.name and gold.name != answer.name:
        return False
    if gold.kind == "scalar" and answer.kind == "scalar":
        return scalar(gold.text, answer.text)
    loose = is_loose(gold, ordered)
    kinds = {"list", "set"} if loose and gold.kind in ("list", "set") else {gold.kind}
    if gold.kind == "scalar" or answer.kind not in kinds or len(gold.items) != len(answer.items):
        return False
    if loose:
        return same_in_any_order(gold.items, answer.items, scalar)
    return all_same([same(a, b, scalar, ordered) for a, b in zip(gold.items, answer.items, strict=True)])


def all_same(results: Sequence[bool | None]) -> bool | None:
    """Return ``False`` where one is, else ``None`` where one is, else ``True``."""
    return False if False in results else None if None in results else True


def is_loose(gold: Node, ordered: bool | None) -> bool:
    """Return whether the order of the items says nothing."""
    if gold.kind != "list" or ordered is not None:
        return gold.kind in ("set", "union") or (gold.kind == "list" and ordered is False)
    numbers = [read_number(item.text) if item.kind == "scalar" else None for item in gold.items]
    values = [number.value for number in numbers if number is not None]
    return len(values) < len(numbers) or values == sorted(values)


def same_in_any_order(gold: Sequence[Node], answer: Sequence[Node], scalar: SameScalar) -> bool | None:
    """Return whether each gold item has an answer of its own."""
    left = list(answer)
    unknown = False
    for item in gold:
        results = [same(item, other, scalar) for other in left]
        if True in results:
            left.pop(results.index(True))
        elif None in results:
            unknown = True
        else:
            return False
    return None if unknown else True


def plainly_same(gold: str, answer: str) -> bool | None:
    """Return whether two scalars are the same as far as their letters or exact numbers tell, else ``None``.

    Words are compared without case, ``\\text`` and brackets around one letter. A number with a base, ``52_8``, is the
    same as itself only.
    """
    a, b = compact(without_units(gold)), compact(without_units(answer))
    if not b:
        return False
    if a == b:
        return True
    if IN_BASE.fullmatch(a) or IN_BASE.fullmatch(b):
        return False
    wanted, got = WORDS.fullmatch(gold.strip()), WORDS.fullmatch(answer.strip())
    if wanted and got:
        one, other = ("".join(found.groups("")).strip(" ()").casefold() for found in (wanted, got))
        return one == other
    wanted_number, got_number = read_number(gold), read_number(answer)
    if wanted_number is not None and got_number is not None:
        return same_number(wanted_number, got_number)
    return None
