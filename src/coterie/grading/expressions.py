"""A few kinds of Python expressions, worked out on plain values: what is left of an assert when its calls are answered.

Nothing here can run code of a program: the values are plain data and the functions are the ones named below.
"""

from __future__ import annotations

import ast
import math
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.errors import ConfigError


class NotWorkedOutError(Exception):
    """The expression has a part that is not known here; says nothing about any program."""


MAX_POWER = 64

COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, box: item in box,
    ast.NotIn: lambda item, box: item not in box,
}
ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: Mapping[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "all": all,
    "any": any,
    "dict": dict,
    "float": float,
    "frozenset": frozenset,
    "int": int,
    "len": len,
    "list": list,
    "max": max,
    "min": min,
    "round": round,
    "set": set,
    "sorted": sorted,
    "str": str,
    "sum": sum,
    "tuple": tuple,
    "math.fabs": math.fabs,
    "math.isclose": math.isclose,
    "math.isnan": math.isnan,
}
CONSTANTS: Mapping[str, float] = {"nan": math.nan, "inf": math.inf, "math.pi": math.pi, "math.inf": math.inf}
NUMBERS = (int, float, complex)


def tree_of(text: str) -> ast.Module:
    """Return the tree of a program or a test, without the warnings that Python has about its style.

    ``SyntaxError``, ``ValueError``, ``RecursionError`` or ``MemoryError`` where it is no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ast.parse(text)


def is_known(node: ast.expr, holes: Sequence[str] = ()) -> bool:
    """Return whether ``work_out`` knows every part of an expression, given names that will have values."""
    try:
        check_known(node, set(holes))
    except NotWorkedOutError:
        return False
    return True


def check_known(node: ast.expr, holes: set[str]) -> None:
    """Raise ``NotWorkedOutError`` for the first part of an expression that ``work_out`` does not know."""
    if isinstance(node, ast.Call):
        if ast.unparse(node.func) not in FUNCTIONS or any(word.arg in (None, "key") for word in node.keywords):
            raise NotWorkedOutError(ast.unparse(node))
        parts: list[ast.expr] = [*node.args, *(word.value for word in node.keywords)]
    elif isinstance(node, ast.Name | ast.Attribute):
        if ast.unparse(node) not in CONSTANTS and ast.unparse(node) not in holes:
            raise NotWorkedOutError(ast.unparse(node))
        parts = []
    elif (
        isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.Set | ast.Subscript | ast.BoolOp)
        or (isinstance(node, ast.Dict) and None not in node.keys)
        or (isinstance(node, ast.UnaryOp) and type(node.op) in UNARY)
        or (isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC)
        or isinstance(node, ast.Compare)
    ):
        parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]
    else:
        raise NotWorkedOutError(ast.unparse(node))
    for part in parts:
        check_known(part, holes)


def work_out(node: ast.expr, values: Mapping[str, object]) -> Any:
    """Return the value of an expression; ``values`` has those of its names.

    ``NotWorkedOutError`` for a part that is not known here; otherwise the errors that Python would raise.
    """
    match node:
        case ast.Constant():
            return node.value
        case ast.Name() | ast.Attribute():
            name = ast.unparse(node)
            if name in values:
                return values[name]
            if name in CONSTANTS:
                return CONSTANTS[name]
        case ast.List() | ast.Tuple() | ast.Set():
            items = [work_out(item, values) for item in node.elts]
            return items if isinstance(node, ast.List) else tuple(items) if isinstance(node, ast.Tuple) else set(items)
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {work_out(key, values): work_out(item, values) for key, item in pairs if key is not None}
        case ast.UnaryOp() if type(node.op) in UNARY:
            return UNARY[type(node.op)](work_out(node.operand, values))
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            return arithmetic(node.op, work_out(node.left, values), work_out(node.right, values))
        case ast.BoolOp():
            return boolean(node, values)
        case ast.Compare():
            return comparison(node, values)
        case ast.Subscript():
            return work_out(node.value, values)[work_out(node.slice, values)]
        case ast.Call() if ast.unparse(node.func) in FUNCTIONS:
            arguments = [work_out(argument, values) for argument in node.args]
            words = {word.arg: work_out(word.value, values) for word in node.keywords if word.arg is not None}
            return FUNCTIONS[ast.unparse(node.func)](*arguments, **words)
    raise NotWorkedOutError(ast.unparse(node))


def arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    """Return ``left op right`` for numbers, and for sums also for text and lists, whose sizes only add up."""
    numbers = isinstance(left, NUMBERS) and isinstance(right, NUMBERS)
    if not numbers and not (isinstance(op, ast.Add) and isinstance(left, list | tuple | str)):
        raise TypeError(f"arithmetic on {type(left).__name__} and {type(right).__name__}")
    if isinstance(op, ast.Pow) and isinstance(right, int) and not abs(right) <= MAX_POWER:
        raise OverflowError(f"a power above {MAX_POWER}")
    return ARITHMETIC[type(op)](left, right)


def boolean(node: ast.BoolOp, values: Mapping[str, object]) -> Any:
    """Return the value of ``and`` or ``or``, reading no further than Python does."""
    value: Any = None
    for part in node.values:
        value = work_out(part, values)
        if bool(value) is isinstance(node.op, ast.Or):
            break
    return value


def comparison(node: ast.Compare, values: Mapping[str, object]) -> bool:
    """Return whether a chain of comparisons holds."""
    left = work_out(node.left, values)
    for op, part in zip(node.ops, node.comparators, strict=True):
        right = work_out(part, values)
        if not COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True


def read_literal(text: str, where: str) -> object:
    """Return the value that a literal of the data describes; ``nan``, ``inf`` and ``set()`` may stand in it.

    ``ConfigError`` names ``where`` when the text is no such literal.
    """
    try:
        match tree_of(text.strip()).body:
            case [ast.Expr(value=value)]:
                return work_out(value, {})
        raise SyntaxError("not one expression")
    except (
        SyntaxError,
        ValueError,
        TypeError,
        NotWorkedOutError,
        RecursionError,
        MemoryError,
        ArithmeticError,
    ) as error:
        raise ConfigError(
            f"{where}: {text[:80]!r} is no Python literal ({error}); expected one such as [1, 'a', (2.5, None)]"
        ) from error
