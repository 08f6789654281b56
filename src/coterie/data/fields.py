"""Values of published fields, checked: texts, JSON in strings, packed tests. What is wrong is a ``RowError``."""

from __future__ import annotations

import ast
import base64
import io
import json
import math
import pickle
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from coterie.problems import CallTest, CodeTest, ProgramTest

MAX_TEXT_CHARS = 200_000
MAX_ANSWER_CHARS = 10_000
MAX_UNPACKED_BYTES = 512 * 2**20
DEFAULT_TOLERANCE = 1e-6
_BAD_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    MemoryError,
)
"""What an unpickler raises for bytes that are no pickle; a text that is no base64 is a ``ValueError`` too."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_DECIMAL = re.compile(r"(?<![\w.])[-+]?\d*\.\d+(?![\w.])")
_ERROR_WORDS = re.compile(
    r"(absolute|relative)\s+(or|and)?\s*(absolute|relative)?\s*(error|difference|precision)", re.I
)
_POWER = re.compile(r"10\s*\^?\s*\{?\s*[-−–]\s*(\d{1,2})\s*\}?|1e-(\d{1,2})", re.I)


class RowError(ValueError):
    """Why a row cannot be a problem; the loader makes a named fault of it."""


def text_of(fields: Mapping[str, Any], name: str, *, limit: int = MAX_TEXT_CHARS) -> str:
    """Return a field that must be text, not empty, printable as UTF-8 and of a sane length."""
    value = fields.get(name)
    if value is None:
        raise RowError(f"field {name!r} is missing or null")
    if not isinstance(value, str):
        raise RowError(f"field {name!r} is {type(value).__name__}, expected text")
    if not value.strip():
        raise RowError(f"field {name!r} is empty")
    if len(value) > limit:
        raise RowError(f"field {name!r} has {len(value)} characters, the limit is {limit}")
    if _SURROGATE.search(value) or "\0" in value:
        raise RowError(f"field {name!r} holds a lone surrogate or a NUL, which no tokenizer can read")
    return value


def optional(fields: Mapping[str, Any], name: str) -> str:
    """Return a text field, "" where it is missing, null or empty."""
    value = fields.get(name)
    return "" if value is None or (isinstance(value, str) and not value.strip()) else text_of(fields, name)


def texts_of(fields: Mapping[str, Any], name: str) -> list[str]:
    """Return a field that is a list of texts, an empty one where it is missing or null."""
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RowError(f"field {name!r} is {str(value)[:80]!r}, expected a list of texts")
    return value


def number_of(fields: Mapping[str, Any], name: str) -> float:
    """Return a field that is a number, 0 where it is missing or null."""
    value = fields.get(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError(f"field {name!r} is {str(value)[:80]!r}, expected a number")
    return float(value)


def answer_of(fields: Mapping[str, Any], name: str) -> str:
    """Return a final answer as text; numbers are written out, whole ones without a decimal point."""
    value = fields.get(name)
    if isinstance(value, bool):
        raise RowError(f"field {name!r} is {value}, expected an answer")
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RowError(f"field {name!r} is {value}, which is no number, so there is no answer")
        return repr(value)
    return text_of(fields, name, limit=MAX_ANSWER_CHARS).strip()


def unjson(value: object, name: str) -> Any:
    """Return a value that may be packed as a JSON string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RowError(f"field {name!r} is not JSON: {error}") from error


class _TextOnly(pickle.Unpickler):
    """Reads pickles of texts, lists and mappings. Whatever names a class or function is refused, so nothing can run."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse."""
        raise RowError(f"the packed tests name {module}.{name}; only plain texts are read, so nothing was executed")

    def persistent_load(self, pid: object) -> NoReturn:
        """Refuse."""
        raise RowError(f"the packed tests refer to an object outside of them ({pid!r})")


def unpacked(value: object, name: str) -> Any:
    """Return tests as LiveCodeBench packs them: JSON, or base64 of zlib of a pickle of JSON as text."""
    if not isinstance(value, str):
        return value
    if value.lstrip()[:1] in ("[", "{"):
        return unjson(value, name)
    try:
        packed = base64.b64decode(value, validate=True)
        unzip = zlib.decompressobj()
        content = unzip.decompress(packed, MAX_UNPACKED_BYTES)
        if unzip.unconsumed_tail or not unzip.eof:
            raise RowError(f"field {name!r} is cut short, or larger than {MAX_UNPACKED_BYTES // 2**20} MiB unpacked")
        found = _TextOnly(io.BytesIO(content)).load()
    except RowError:
        raise
    except (zlib.error, *_BAD_PICKLE) as error:
        raise RowError(f"field {name!r} cannot be unpacked: {type(error).__name__}: {error}") from error
    if isinstance(found, dict) and set(found) == {"input_output"}:
        found = found["input_output"]
    if not isinstance(found, str):
        raise RowError(f"field {name!r} unpacks to {type(found).__name__}, expected text")
    return unjson(found, name)


# ---- tests ----------------------------------------------------------------------------------------------------------


def pairs_of(tests: object, name: str) -> list[tuple[Any, Any]]:
    """Return (input, output) pairs of ``{inputs: [], outputs: []}`` or ``[{input:, output:}]``; equal in number."""
    if isinstance(tests, Mapping):
        inputs = tests.get("inputs", tests.get("input"))
        outputs = tests.get("outputs", tests.get("output"))
        if not isinstance(inputs, Sequence) or not isinstance(outputs, Sequence):
            raise RowError(f"field {name!r} lacks the lists of inputs and outputs; it has {sorted(map(str, tests))}")
        if len(inputs) != len(outputs):
            raise RowError(f"field {name!r} has {len(inputs)} inputs and {len(outputs)} outputs")
        return list(zip(inputs, outputs, strict=True))
    if isinstance(tests, Sequence) and not isinstance(tests, str):
        for item in tests:
            if not isinstance(item, Mapping) or "input" not in item or "output" not in item:
                raise RowError(f"field {name!r}: expected items with 'input' and 'output', found {str(item)[:80]!r}")
        return [(item["input"], item["output"]) for item in tests]
    raise RowError(f"field {name!r} is {type(tests).__name__}, expected tests")


def program_tests(pairs: Sequence[tuple[Any, Any]], *, public: bool = False) -> list[CodeTest]:
    """Return tests of a program that reads and prints; an input or output given as lines is joined."""
    return [ProgramTest(stdin=_lines(given), expected=_lines(wanted), public=public) for given, wanted in pairs]


def _lines(value: object) -> str:
    if isinstance(value, Mapping):
        value = value.get("stdin", value.get("stdout"))
    if isinstance(value, list):
        return "\n".join(map(str, value))
    if not isinstance(value, str):
        raise RowError(f"a test has {type(value).__name__} as input or output, expected text: {str(value)[:80]!r}")
    return value


def call_tests(pairs: Sequence[tuple[Any, Any]], *, public: bool = False) -> list[CodeTest]:
    """Return tests of a function from (list of arguments, value) pairs of JSON values."""
    tests: list[CodeTest] = []
    for args, wanted in pairs:
        if not isinstance(args, list):
            raise RowError(f"the arguments of a call must be a list, found {str(args)[:80]!r}")
        tests.append(CallTest(args=literal(args), expected=literal(wanted), public=public))
    return tests


def literal(value: object) -> str:
    """Return a value as a Python literal that reads back equal."""
    text = repr(value)
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise RowError(f"a test holds a value that is no literal: {text[:80]!r}") from error
    return text


def line_pairs(pairs: Sequence[tuple[Any, Any]], name: str) -> list[tuple[Any, Any]]:
    """Return LiveCodeBench's calls: one argument a line, as JSON; the value as JSON."""
    return [
        ([unjson(line, name) for line in str(given).split("\n") if line.strip()], unjson(str(wanted), name))
        for given, wanted in pairs
    ]


def checked_tests(tests: Sequence[CodeTest]) -> tuple[CodeTest, ...]:
    """Return the tests; there must be some, and not all may expect an empty output."""
    if not tests:
        raise RowError("there is no test, so every program would pass")
    if all(isinstance(test, ProgramTest) and not test.expected.strip() for test in tests):
        raise RowError("every test expects an empty output, so a program that prints nothing would pass")
    return tuple(tests)


def tolerance_of(statement: str, tests: Sequence[CodeTest]) -> float | None:
    """Return the error a number may have: as the statement says, else 1e-6 where an expected answer has decimals."""
    words = _ERROR_WORDS.search(statement)
    if words is not None:
        power = _POWER.search(statement, words.start(), words.end() + 120)
        if power is not None:
            return float(f"1e-{power[1] or power[2]}")
        return DEFAULT_TOLERANCE
    expected = [test.expected for test in tests if isinstance(test, ProgramTest | CallTest)]
    return DEFAULT_TOLERANCE if any(_DECIMAL.search(text) for text in expected) else None
