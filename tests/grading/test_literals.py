"""Values across the wall: plain data, exact, and nothing else."""

from __future__ import annotations

import json
import math
from collections import Counter, namedtuple
from enum import IntEnum

import pytest

from coterie.errors import ConfigError
from coterie.grading.expressions import read_literal
from coterie.grading.literals import NotLiteralError, decode, encode


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**53),
        2**53 - 1,
        [10**5000],
        0.1,
        -0.0,
        math.inf,
        1 + 2j,
        "",
        "\ud800 and \0",
        b"\xff\x00",
        [],
        [1, (2, [3.5])],
        (),
        {1, "a", (2, 3)},
        frozenset({frozenset({1})}),
        {"a": [1], (1, 2): {None: set()}},
    ],
)
def test_a_plain_value_comes_back_as_it_was_through_json(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value))))
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, float):
        assert math.copysign(1, value) == math.copysign(1, back)  # type: ignore[arg-type]


def test_nan_stays_nan_and_a_bool_in_a_list_stays_a_bool() -> None:
    back = decode(json.loads(json.dumps(encode([math.nan, True, 1]))))
    assert isinstance(back, list)
    assert math.isnan(back[0])
    assert back[1] is True
    assert back[2] is not True


def test_equal_sets_are_encoded_equally_whatever_the_order_they_were_filled_in() -> None:
    assert encode({8, 0, 16}) == encode({16, 8, 0}) == {"set": [0, 16, 8]}


class Colour(IntEnum):
    RED = 3


Pair = namedtuple("Pair", ["a", "b"])


@pytest.mark.parametrize(
    ("value", "plain"), [(Colour.RED, 3), (Pair(1, 2), (1, 2)), (Counter("aab"), {"a": 2, "b": 1})]
)
def test_an_instance_of_a_subclass_becomes_the_value_it_holds(value: object, plain: object) -> None:
    assert decode(encode(value)) == plain
    assert type(decode(encode(value))) is type(plain)


class EqualsAll(list[int]):
    def __eq__(self, other: object) -> bool:
        return True

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([99])


def test_what_a_subclass_does_when_it_is_compared_or_read_does_not_cross_the_wall() -> None:
    assert decode(encode(EqualsAll([7]))) == [7]
    assert decode(encode(EqualsAll([7]))) != [8]


@pytest.mark.parametrize("value", [object(), iter([1]), range(3), len, [object()], {"a": lambda: 1}])
def test_anything_else_is_no_literal(value: object) -> None:
    with pytest.raises(NotLiteralError, match="a value of type"):
        encode(value)


@pytest.mark.parametrize(
    "data", [{"x": 1}, {"set": [[]]}, {"int": 5}, {"tuple": 3}, {"dict": [[1]]}, {}, {"float": "x"}, {"complex": ["0"]}]
)
def test_data_of_another_form_is_refused(data: object) -> None:
    with pytest.raises(NotLiteralError):
        decode(data)


def test_values_made_to_be_slow_are_refused() -> None:
    prime = 2**61 - 1
    with pytest.raises(NotLiteralError, match="one hash"):
        decode({"set": [{"int": hex(k * prime)} for k in range(1, 200)]})
    with pytest.raises(NotLiteralError, match="one hash"):
        decode({"dict": [[{"int": hex(k * prime)}, 0] for k in range(1, 200)]})
    with pytest.raises(NotLiteralError, match="more than 65536 digits"):
        decode({"int": "0x" + "f" * 2**17})
    assert decode(encode(set(range(1000)))) == set(range(1000))


def test_literals_of_the_data_may_hold_nan_infinity_and_empty_sets() -> None:
    value = read_literal("[-inf, set(), {1: (2.5, None)}, -3, float('inf')]", "here")
    assert value == [-math.inf, set(), {1: (2.5, None)}, -3, math.inf]


@pytest.mark.parametrize("text", ["open('x')", "[1", "a", "__import__('os')", "9**9**9", "[].append"])
def test_text_that_is_no_literal_is_refused_with_its_place(text: str) -> None:
    with pytest.raises(ConfigError, match=r"problem 'p': .* is no Python literal"):
        read_literal(text, "problem 'p'")
