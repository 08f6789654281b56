"""Values of published fields: what they become, and that nothing in them is ever run."""

from __future__ import annotations

import base64
import json
import os
import pickle
import zlib
from pathlib import Path

import pytest

from coterie.data.fields import (
    RowError,
    answer_of,
    call_tests,
    checked_tests,
    line_pairs,
    pairs_of,
    program_tests,
    text_of,
    tolerance_of,
    unpacked,
)
from coterie.problems import CallTest, ProgramTest


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def test_packed_tests_are_read_and_plain_json_too() -> None:
    tests = [{"input": "1\n", "output": "2\n"}]
    text = json.dumps(tests)
    assert unpacked(packed(text), "t") == unpacked(text, "t") == unpacked(packed({"input_output": text}), "t") == tests


def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    with pytest.raises(RowError, match="nothing was executed"):
        unpacked(packed(Evil()), "private_test_cases")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "value",
    [
        "!!!",
        base64.b64encode(b"no zlib").decode(),
        packed([1]),
        *(
            base64.b64encode(zlib.compress(content)).decode()
            for content in (b"no pickle", b"\x80\x63.", b"\x80\x04\x95" + b"\xff" * 8, b"X\x01\0\0\0\xff.", b"N\x85R.")
        ),
    ],
)
def test_tests_that_cannot_be_unpacked_are_a_fault_never_an_empty_list(value: str) -> None:
    with pytest.raises(RowError):
        unpacked(value, "t")
    with pytest.raises(RowError, match="cut short"):
        unpacked(base64.b64encode(zlib.compress(pickle.dumps("x" * 1000))[:-5]).decode(), "t")


def test_no_tests_and_unequal_numbers_of_inputs_and_outputs_are_faults() -> None:
    with pytest.raises(RowError, match="no test"):
        checked_tests([])
    with pytest.raises(RowError, match="2 inputs and 1 outputs"):
        pairs_of({"inputs": ["1", "2"], "outputs": ["1"]}, "tests")
    with pytest.raises(RowError, match="empty output"):
        checked_tests(program_tests([("1", ""), ("2", " \n")]))
    assert pairs_of([{"input": "1", "output": "2"}], "tests") == [("1", "2")]


def test_texts_that_are_missing_empty_huge_or_not_unicode_are_faults() -> None:
    for value, why in ((None, "null"), ("  ", "empty"), (3, "int"), ("x" * 10_000_000, "10000000"), ("\ud800", "lone")):
        with pytest.raises(RowError, match=why):
            text_of({"a": value}, "a")
    with pytest.raises(RowError, match="missing"):
        text_of({}, "a")


def test_answers_are_written_out_as_a_person_would() -> None:
    assert answer_of({"a": 33}, "a") == answer_of({"a": 33.0}, "a") == answer_of({"a": " 33 "}, "a") == "33"
    assert answer_of({"a": 0.5}, "a") == "0.5"
    for value in (float("nan"), float("inf"), True, None, ""):
        with pytest.raises(RowError):
            answer_of({"a": value}, "a")


def test_calls_are_literals_and_arguments_stand_one_a_line() -> None:
    assert line_pairs([('[1, 2]\n"x"', "true")], "t") == [([[1, 2], "x"], True)]
    assert call_tests([([[1, 2], "x"], True)]) == [CallTest(args="[[1, 2], 'x']", expected="True")]
    with pytest.raises(RowError, match="no literal"):
        call_tests([([float("inf")], 1)])


def test_the_tolerance_is_what_the_statement_says_or_follows_from_decimals() -> None:
    whole, decimal = ProgramTest(stdin="", expected="3 4"), ProgramTest(stdin="", expected="0.25")
    assert tolerance_of("the absolute or relative error must not exceed $10^{-4}$", [whole]) == 1e-4
    assert tolerance_of("an absolute error of at most 1e-9 is fine", [whole]) == 1e-9
    assert tolerance_of("Print it.", [decimal]) == 1e-6
    assert tolerance_of("Print it.", [whole]) is None
    assert tolerance_of("Print the version.", [ProgramTest(stdin="", expected="v1.2.3")]) is None
