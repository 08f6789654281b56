"""From what was written to what it says: the spelling of an answer made one, its lists and brackets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_ANSWER = 2000
"""Characters of an answer; a longer one is not read."""

MAX_NESTING = 40
"""Brackets within brackets; a parser of formulas takes seconds over hundreds of them."""

MAX_DEPTH = 12

SPELLINGS: Sequence[tuple[str, str]] = (
    (r"[−–]", "-"),
    (r"°", r"^\\circ "),
    (r"π", r"\\pi "),
    (r"∞", r"\\infty "),
    (r"∪", r"\\cup "),
    (r"√(\d+)", r"\\sqrt{\1}"),
    (r"≤|\\leqslant(?![a-zA-Z])|\\leq(?![a-zA-Z])", r"\\le "),
    (r"≥|\\geqslant(?![a-zA-Z])|\\geq(?![a-zA-Z])", r"\\ge "),
    (r"×", r"\\times "),
    (r"(?<!\\)\\(?:[()]|[\[\]])|\\?\$", " "),  # the marks of a formula, and dollars
    (r",\s*\\!\s*|\{,\}", ","),
    (r"(?<!\\)\\!", ""),
    (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])", " "),
    (r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])\.?", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
    (r"\\(?:mbox|mathrm|textbf|textit|mathbf|textrm|operatorname)(?=\{)", r"\\text"),
    (r"\\([lr])(?:vert|Vert)(?![a-zA-Z])", "|"),
    (r"\\lbrace(?![a-zA-Z])", r"\\{"),
    (r"\\rbrace(?![a-zA-Z])", r"\\}"),
    (r"\\in(?![a-zA-Z])", r"\\in "),
    (r"\\text\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])", ","),
    (r",(?:\s*,)+", ","),
    (r"\s+", " "),
    (r"\\frac ?(\d) ?(\d)", r"\\frac{\1}{\2}"),
    (r"\\frac ?(\d) ?\{", r"\\frac{\1}{"),
    (r"\\frac ?(\{[^{}]*\}) ?(\d)", r"\\frac\1{\2}"),
    (r"\\sqrt ?(\d)", r"\\sqrt{\1}"),
)
COMPACT: Sequence[tuple[str, str]] = (
    (r"([_^])\{(-?\w)\}", r"\1\2"),
    (r"(?<![\d.])\+(?=\d)", ""),
)
NAME = re.compile(r"(?:[A-Za-z]|\\[a-zA-Z]+)(?:_(?:\w|\{[^{}]*\}))?'?(?:\([^()]*\))?|\([A-Za-z](?:,[A-Za-z])*\)")
NUMBER_WITH_COMMAS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}")


def spelled(text: str) -> str:
    """Return an answer in one spelling: no formula marks or spacing commands, one kind of fraction, plain ``<=``."""
    for pattern, plain in SPELLINGS:
        text = re.sub(pattern, plain, text)
    return text.strip(" ,;").rstrip(" .,;")


def compact(text: str) -> str:
    """Return an answer without blanks and with one way to set braces, for comparing letter by letter."""
    text = re.sub(r"(\\[a-zA-Z]+) (?=[a-zA-Z])", r"\1\0", text).replace(" ", "").replace("\0", " ")
    for pattern, plain in COMPACT:
        text = re.sub(pattern, plain, text)
    return text


@dataclass(frozen=True, slots=True)
class Node:
    """A part of an answer. ``kind``: scalar, list, set, union, matrix, or two brackets such as ``(]``."""

    kind: str
    items: tuple[Node, ...] = ()
    text: str = ""
    name: str = field(default="", compare=False)
    """The name an answer is given to, as in ``x = 5``; it says nothing unless both sides have one."""


def readings(text: str) -> list[Node]:
    """Return what an answer may say: two things where ``12,345`` may be a number or a list, else one."""
    plain = spelled(text)
    name, rest = named(plain)
    number = [Node("scalar", text=rest.replace(",", ""), name=name)] if NUMBER_WITH_COMMAS.fullmatch(rest) else []
    return [*number, structure(plain)]


def named(text: str) -> tuple[str, str]:
    """Return the name and the value of ``x = 5``, ``f(x) = ...`` or ``x \\in ...``; the name is "" where none is."""
    parts = split_top(text, ("=",)) if "=" in text else split_top(text, ("\\in ",))
    if len(parts) >= 2 and NAME.fullmatch(parts[0].replace(" ", "")):
        return compact(parts[0]), parts[-1].strip()
    return "", text


def structure(text: str, depth: int = 0) -> Node:
    """Return the structure of a spelled answer; what is nested deeper than ``MAX_DEPTH`` stays one scalar."""
    text = text.strip()
    if depth > MAX_DEPTH:
        return Node("scalar", text=text)
    items = split_top(text, (",", ";"))
    if len(items) > 1 and all(item.strip() for item in items):
        return Node("list", tuple(part for item in items for part in plus_minus(structure(item, depth + 1))))
    name, value = named(text)
    if name:
        inner = structure(value, depth + 1)
        return Node(inner.kind, inner.items, inner.text, name)
    union = split_top(text, ("\\cup",))
    if len(union) > 1:
        return Node("union", tuple(structure(item, depth + 1) for item in union))
    matrix = MATRIX.fullmatch(text)
    if matrix:
        rows = [row for row in matrix[2].split("\\\\") if row.strip()]
        cells = [tuple(structure(cell, depth + 1) for cell in row.split("&")) for row in rows]
        return Node("matrix", tuple(Node("row", row) for row in cells))
    inner_set = re.fullmatch(r"\\\{(.*)\\\}", text)
    if inner_set and "\\{" not in inner_set[1]:
        return Node("set", as_items(structure(inner_set[1], depth + 1)))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and is_enclosed(text):
        inside = structure(text[1:-1], depth + 1)
        if inside.kind == "list":
            return Node(text[0] + text[-1], inside.items)
        if text[0] + text[-1] == "()" and inside.kind == "scalar":
            return inside
    both = plus_minus(Node("scalar", text=text))
    return both[0] if len(both) == 1 else Node("list", tuple(both))


def as_items(node: Node) -> tuple[Node, ...]:
    """Return the items of a list, or the one thing that is no list."""
    return node.items if node.kind == "list" else (node,)


def plus_minus(node: Node) -> list[Node]:
    """Return the two scalars that ``a \\pm b`` stands for, the node itself where nothing does."""
    if node.kind != "scalar" or node.text.count("\\pm") != 1 or "\\mp" in node.text:
        return [node]
    return [Node("scalar", text=re.sub(r"\\pm(?![a-zA-Z])\s*", sign, node.text), name=node.name) for sign in "+-"]


def nesting(text: str) -> int:
    """Return how many brackets are open at once, at most."""
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest


def split_top(text: str, marks: Sequence[str]) -> list[str]:
    """Return the parts of a text between marks that stand in no bracket and no environment."""
    parts, depth, last, position = [], 0, 0, 0
    while position < len(text):
        if text.startswith(("\\begin", "\\{"), position):
            depth, position = depth + 1, position + 2
        elif text.startswith(("\\end", "\\}"), position):
            depth, position = depth - 1, position + 2
        elif text[position] in "([{":
            depth, position = depth + 1, position + 1
        elif text[position] in ")]}":
            depth, position = depth - 1, position + 1
        else:
            mark = next((mark for mark in marks if depth == 0 and text.startswith(mark, position)), "")
            if mark:
                parts.append(text[last:position])
                last = position + len(mark)
            position += len(mark) or 1
    return [*parts, text[last:]]


def is_enclosed(text: str) -> bool:
    """Return whether the first bracket of a text is closed by its last character and no other."""
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if depth == 0:
            return position == len(text) - 1
    return False
