"""Python literals as JSON and back: how values cross the wall of the sandbox. Plain data only, no code, no object.

This file runs on both sides: the trainer imports it, and its text travels into the sandbox. It needs nothing but the
standard library, and what comes out of the sandbox is rebuilt as fresh plain values, so no ``__eq__`` or ``__repr__``
of a program is ever called outside.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import cast

SAFE_INT = 2**53
MAX_HEX = 2**16
"""Hexadecimal digits of an integer: arithmetic on longer ones would take seconds."""
MAX_ALIKE = 100
"""Members of a set, or keys, with one hash: more are made to make building it slow."""


class NotLiteralError(Exception):
    """A value that is not made of None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict."""


def encode(value: object) -> object:
    """Return ``value`` as plain JSON data; sets in a fixed order, floats exact, nan and infinities kept.

    Instances of subclasses (``Counter``, named tuples, ``IntEnum``) become the plain value they hold. Anything else
    raises ``NotLiteralError``, which names the type; a value that holds itself raises ``RecursionError``.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if -SAFE_INT < whole < SAFE_INT else {"int": hex(whole)}
    if isinstance(value, float):
        return {"float": float.hex(value)}
    if isinstance(value, complex):
        return {"complex": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, str):
        return encode_text(str.__str__(value))
    if isinstance(value, bytes):
        return {"bytes": bytes.hex(value)}
    if isinstance(value, list):
        return [encode(item) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in tuple.__iter__(value)]}
    if isinstance(value, set):
        return {"set": sorted((encode(item) for item in set.__iter__(value)), key=json.dumps)}
    if isinstance(value, frozenset):
        return {"frozenset": sorted((encode(item) for item in frozenset.__iter__(value)), key=json.dumps)}
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in dict.items(value)]}
    raise NotLiteralError(f"a value of type {type(value).__name__}")


def encode_text(text: str) -> object:
    """Return a text; one with halves of surrogate pairs, which JSON would join, as its bytes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return {"text": text.encode("utf-8", "surrogatepass").hex()}
    return text


def decode(data: object) -> object:
    """Return the value that ``encode`` was given; ``NotLiteralError`` where the data is not of that form."""
    if data is None or isinstance(data, bool | int | str):
        return data
    if isinstance(data, list):
        return [decode(item) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise NotLiteralError(f"data that is no literal: {str(data)[:80]}")
    [(kind, body)] = data.items()
    try:
        return decode_tagged(str(kind), body)
    except (TypeError, ValueError, AttributeError) as error:
        raise NotLiteralError(f"data that is no {kind}: {error}") from error


def spread(items: list[object]) -> list[object]:
    """Return the items; ``NotLiteralError`` when many of them have one hash."""
    if len(items) > MAX_ALIKE and max(Counter(map(hash, items)).values()) > MAX_ALIKE:
        raise NotLiteralError("members that were chosen to have one hash")
    return items


def decode_tagged(kind: str, body: object) -> object:
    """Return the value of one tagged datum; any of the usual errors where ``body`` does not fit ``kind``."""
    if kind == "int":
        if len(cast(str, body)) > MAX_HEX:
            raise NotLiteralError(f"an integer of more than {MAX_HEX} digits")
        return int(cast(str, body), 16)
    if kind == "float":
        return float.fromhex(cast(str, body))
    if kind in ("bytes", "text"):
        raw = bytes.fromhex(cast(str, body))
        return raw if kind == "bytes" else raw.decode("utf-8", "surrogatepass")
    items = list(cast(list[object], body))
    if kind == "complex":
        real, imag = (float.fromhex(cast(str, item)) for item in items)
        return complex(real, imag)
    if kind == "tuple":
        return tuple(decode(item) for item in items)
    if kind == "set":
        return set(spread([decode(item) for item in items]))
    if kind == "frozenset":
        return frozenset(spread([decode(item) for item in items]))
    if kind == "dict":
        pairs = [(decode(key), decode(item)) for key, item in cast(list[list[object]], items)]
        spread([key for key, _ in pairs])
        return dict(pairs)
    raise NotLiteralError(f"data of an unknown kind {kind[:40]!r}")
