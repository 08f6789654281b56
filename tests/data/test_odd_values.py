"""Fields of the wrong type: whatever stands in a row, it becomes a problem or a named fault, never another error."""

from __future__ import annotations

import json
from typing import Any

import pytest

from coterie.data.fields import RowError
from coterie.data.load import LAYOUTS, Layout, Problem

PAIR = json.dumps([{"input": "1", "output": "2"}])
LISTS = {"input": ["1"], "output": ["2"]}
PROGRAMS = {"language": [3], "solution": ["print(2)"]}
CODE = "def f(x):\n    return x"
ROWS: dict[str, dict[str, Any]] = {
    "HumanEval": {"prompt": "def f(x):", "entry_point": "f", "canonical_solution": " return x", "test": "x", "atol": 0},
    "MBPP+": {"prompt": "Do.", "entry_point": "f", "canonical_solution": CODE, "assertion": "assert f(1)", "atol": 0},
    "MBPP": {
        "text": "Do.",
        "code": CODE,
        "test_list": ["assert f(1)"],
        "challenge_test_list": [],
        "test_setup_code": "",
    },
    "MBPP sanitized": {"prompt": "Do.", "code": CODE, "test_list": ["assert f(1)"], "test_imports": []},
    "APPS": {
        "question": "Do.",
        "input_output": '{"inputs": ["1"], "outputs": ["2"]}',
        "solutions": '["x"]',
        "starter_code": "",
        "url": "",
    },
    "LiveCodeBench": {
        "question_content": "Do.",
        "public_test_cases": PAIR,
        "private_test_cases": PAIR,
        "metadata": "{}",
        "starter_code": "",
    },
    "CodeContests": {
        "description": "Do.",
        "public_tests": LISTS,
        "private_tests": LISTS,
        "generated_tests": LISTS,
        "solutions": PROGRAMS,
        "incorrect_solutions": PROGRAMS,
        "time_limit": {"seconds": 1, "nanos": 0},
    },
    "Codeforces": {"description": "Do.", "official_tests": [], "examples": json.loads(PAIR), "time_limit": 1.0},
    "SandboxFusion": {"content": "Do.", "test": PAIR, "labels": {}},
    "rllm code": {"problem": "Do.", "tests": PAIR},
    "verl math": {
        "data_source": "d",
        "prompt": [{"content": "Q"}],
        "reward_model": {"ground_truth": "1"},
        "ability": "math",
        "extra_info": {"index": 1, "raw_problem": ""},
    },
    "AIME past": {"ID": "1", "Year": 1, "Question": "Q", "Answer": "1"},
    "AIME 2024": {"ID": "1", "Problem": "Q", "Answer": 1},
    "OlympiadBench": {"question": "Q", "final_answer": ["1"], "context": None, "unit": None},
    "MATH-500": {"problem": "Q", "answer": "1", "unique_id": "u"},
    "problem/answer": {"problem": "Q", "answer": "1"},
    "MATH": {"problem": "Q", "solution": "\\boxed{1}"},
    "question/answer": {"question": "Q", "answer": "1"},
}
ODD: tuple[Any, ...] = (
    *(None, True, 0, 1.5, float("nan"), float("inf"), "", "x", "null", "[1]", '{"a": 1}', "[null]"),
    *([], [1], [None], ["x"], [[1]], {}, {"a": 1}, {"ground_truth": '["a" 1"]'}, {"seconds": "x"}, {"index": [1]}),
    *({"inputs": "1", "outputs": "1"}, {"inputs": {"a": 1}, "outputs": [1]}, {"language": 3}, '{"func_name": [1]}'),
    *({"language": 1, "solution": ["x"]}, '{"fn_name": 1, "inputs": [[1]], "outputs": [1]}'),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_row_with_one_odd_value_is_a_problem_or_a_named_fault(layout: Layout) -> None:
    row, faults = ROWS[layout.name], 0
    assert isinstance(layout.convert(row, "id"), Problem)
    for field in row:
        for value in ODD:
            try:
                assert isinstance(layout.convert({**row, field: value}, "id"), Problem)
            except RowError:
                faults += 1
    assert faults >= 2 * len(ODD) // 3, "most odd values of what asks and what answers cannot be used"
