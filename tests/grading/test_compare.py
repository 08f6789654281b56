"""Text and values compared: blanks, numbers, types."""

from __future__ import annotations

import math

import pytest

from coterie.grading.compare import same_output, same_value


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("a b", True),
        ("a b \n", True),
        ("a b\r\n", True),
        ("a b\n\n", True),
        ("a  b\n", True),  # blanks within a line are one rule everywhere: words count
        ("ab\n", False),
        ("a\nb\n", False),  # the cut into lines counts
        ("\na b\n", False),
        ("a b c\n", False),
        ("", False),
        ("A b\n", False),
    ],
)
def test_output_is_compared_line_by_line_in_words(written: str, right: bool) -> None:
    assert same_output("a b\n", written.encode()) is right
    assert same_output("a b  \r\n\n", written.encode()) is right, "blanks at the end of what is expected change nothing"


def test_exact_output_is_compared_byte_by_byte() -> None:
    assert same_output(" x\n", b" x\n", exact=True)
    assert not same_output(" x\n", b" x", exact=True)
    assert not same_output(" x\n", b"x\n", exact=True)


@pytest.mark.parametrize(
    ("expected", "written"),
    [
        ("YES\nNO\nYES\n", "NO\nYES\nYES\n"),
        ("Eve Eve Eve", "Eve Eve"),
        ("1 2 2", "1 2"),
        ("1 2 2", "2 1 2"),
        ("5\n", "5\n99\n"),
        ("5\n6\n", "5\n"),
    ],
)
def test_order_and_number_of_words_count(expected: str, written: str) -> None:
    assert not same_output(expected, written.encode(), tolerance=1e-6)


@pytest.mark.parametrize(
    ("expected", "written", "right"),
    [
        ("0.333333333333", "0.333333", True),  # 3.3e-7 away
        ("0.333333333333", "0.33333", False),  # 3.3e-6 away
        ("0.333333333333", "3.33333333333e-1", True),
        ("2000000.0", "2000001.0", True),  # above 1 the tolerance is relative: 5e-7
        ("2000000.0", "2000003.0", False),
        ("1000000", "1000001", False),  # an integer is never nearly right
        ("7", "7.0", True),
        ("7", "7.0000001", False),
        ("7.0", "nan", False),
        ("nan", "7.0", False),
        ("inf", "inf", True),
        ("inf", "1e400", False),
        ("1.0", "1e999999999", False),
        ("1000.0", "1_000.0", False),
        ("x 1.0", "y 1.0", False),
    ],
)
def test_with_a_tolerance_numbers_are_compared_as_numbers(expected: str, written: str, right: bool) -> None:
    assert same_output(expected, written.encode(), tolerance=1e-6) is right


def test_without_a_tolerance_numbers_are_text() -> None:
    assert not same_output("7", b"7.0")
    assert not same_output("0.5", b"0.50")


def test_bytes_that_are_no_text_never_match() -> None:
    assert not same_output("\ufffd", b"\xff")


@pytest.mark.parametrize(
    ("expected", "value", "right"),
    [
        ([1, 2], [1, 2], True),
        ([1, 2], (1, 2), True),  # JSON has no tuples
        ([[1], [2]], ((1,), [2]), True),
        ((1, 2), [1, 2], False),
        ([1, 2], {1, 2}, False),
        ([1, 2], [1, 2, 3], False),
        ([1, 2], "[1, 2]", False),
        ([1, 2], [2, 1], False),
        ({1, 2}, {2, 1}, True),
        ({1, 2}, [1, 2], False),
        (True, True, True),
        (True, 1, False),
        (1, True, False),
        (1, 1.0, True),
        (10**400, 1.0, False),
        (1.0, 10**400, False),
        ("1", 1, False),
        (None, None, True),
        (None, False, False),
        ([0.3, 1.0], [0.1 + 0.2, 1.0], True),
        (0.3, 0.3001, False),
        (10**20, 10**20 + 1, False),
        (math.nan, math.nan, True),
        (math.nan, 0.0, False),
        (math.inf, -math.inf, False),
        ({"a": [1]}, {"a": (1,)}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (1 + 2j, 1 + 2j, True),
        (1 + 2j, 1 - 2j, False),
        (b"x", "x", False),
    ],
)
def test_values_are_compared_with_their_types(expected: object, value: object, right: bool) -> None:
    assert same_value(expected, value) is right


def test_the_tolerance_of_a_problem_holds_for_the_floats_of_its_values() -> None:
    assert same_value([1.0], [1.0000009], 1e-6)
    assert not same_value([1.0], [1.000002], 1e-6)
    assert not same_value([1000000], [1000001], 1e-3)
