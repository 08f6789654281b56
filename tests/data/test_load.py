"""Layouts are recognised by their fields; each becomes problems; every bad row is named; the real files load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from coterie.data.load import LAYOUTS, load, load_for_play, normalised
from coterie.errors import ConfigError
from coterie.problems import AssertTest, CallTest, CodeProblem, MathProblem, ProgramTest

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
PAIR = [{"input": "1\n", "output": "2\n"}]


def one(tmp_path: Path, row: dict[str, Any], name: str = "set.json") -> Any:
    """Return the one problem of a file with one row."""
    (tmp_path / name).write_text(json.dumps([row]), encoding="utf-8")
    loaded = load(str(tmp_path / name))
    assert loaded.bad == ()
    (problem,) = loaded.problems
    return problem


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"problem": "Q", "answer": "1/2", "unique_id": "u"}, "Q", "1/2"),
        ({"ID": "2024-I-1", "Problem": "Q", "Solution": "s", "Answer": 33}, "Q", "33"),
        ({"ID": "1983-1", "Year": "1983", "Question": "Q", "Answer": "60"}, "Q", "60"),
        ({"question": "Q", "answer": "so <<1+1=2>>2\n#### 1,234,567"}, "Q", "1234567"),
        ({"question": "Q", "answer": "7"}, "Q", "7"),
        ({"problem": "Q", "solution": r"so \boxed{3} or \boxed{\frac{1}{2}}."}, "Q", r"\frac{1}{2}"),
        ({"problem": "Q", "answer": "5", "difficulty": "3/8"}, "Q", "5"),
        (
            {"question": "Q", "context": "C", "final_answer": ["$1$", "$2$"], "is_multiple_answer": True, "unit": "km"},
            "C\n\nQ\n\nGive the answer in km.",
            "$1$, $2$",
        ),
        (
            {
                "data_source": "d",
                "prompt": [
                    {
                        "role": "user",
                        "content": "Q Let's think step by step and output the final answer within \\boxed{}.",
                    }
                ],
                "reward_model": {"ground_truth": '["9"]'},
            },
            "Q",
            "9",
        ),
        (
            {
                "data_source": "math_dapo",
                "prompt": [{"role": "user", "content": "wrapped"}],
                "reward_model": {"ground_truth": "540"},
                "extra_info": {"index": 2, "raw_problem": "Q"},
            },
            "Q",
            "540",
        ),
    ],
)
def test_layouts_of_mathematics(tmp_path: Path, row: dict[str, Any], question: str, answer: str) -> None:
    problem = one(tmp_path, row)
    assert (problem.question, problem.answer) == (question, answer)
    assert isinstance(problem, MathProblem)


def test_humaneval_checks_by_its_own_function(tmp_path: Path) -> None:
    row = {"task_id": "H/0", "prompt": "def f(x):\n", "entry_point": "f", "canonical_solution": "    return x\n"}
    problem = one(tmp_path, row | {"test": "def check(candidate):\n    assert candidate(1) == 1\n"})
    assert problem.id == "set/H/0"
    assert problem.reference == "def f(x):\n    return x\n"
    assert problem.tests == (AssertTest(code="def check(candidate):\n    assert candidate(1) == 1\n\n\ncheck(f)\n"),)


def test_the_first_assert_of_mbpp_is_public_and_names_the_function(tmp_path: Path) -> None:
    row = {"text": "Double.", "code": "def g(x):\r\n  return x\r\ndef f(x):\r\n  return 2 * g(x)", "task_id": 1}
    problem = one(
        tmp_path, row | {"test_list": ["assert f(1) == 2", "assert f(2) == 4"], "test_setup_code": "import math"}
    )
    assert problem.entry == "f"
    assert [test.public for test in problem.tests] == [True, False]
    assert problem.tests[1].code == "import math\nassert f(2) == 4"
    assert "\r" not in problem.reference


def test_apps_reads_programs_and_calls_and_unwraps_the_values_of_codewars(tmp_path: Path) -> None:
    row = {"problem_id": 1, "question": "Add.", "solutions": '["print(2)"]', "url": "https://codewars.com/x"}
    program = one(tmp_path, row | {"input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})}, "a.json")
    assert program.tests == (ProgramTest(stdin="1\n", expected="2\n"),)
    assert (program.reference, program.entry) == ("print(2)", "")
    packed = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[True], [False]]}
    call = one(tmp_path, row | {"input_output": json.dumps(packed)}, "b.json")
    assert call.tests == (CallTest(args="[1]", expected="True"), CallTest(args="[2]", expected="False"))
    leetcode = row | {"url": "https://leetcode.com/x", "input_output": json.dumps(packed)}
    assert one(tmp_path, leetcode, "c.json").tests[0].expected == "[True]"


def test_live_code_bench_marks_public_tests_and_reads_calls(tmp_path: Path) -> None:
    row = {"question_id": "q", "question_content": "Add.", "starter_code": "", "metadata": "{}"}
    row |= {"public_test_cases": json.dumps(PAIR), "private_test_cases": json.dumps([{"input": "3", "output": "4"}])}
    assert [test.public for test in one(tmp_path, row, "a.json").tests] == [True, False]
    functional = {
        "public_test_cases": json.dumps([{"input": "[1]\n2", "output": "[3]"}]),
        "metadata": '{"func_name": "f"}',
    }
    problem = one(tmp_path, row | functional | {"private_test_cases": "[]"}, "b.json")
    assert problem.tests == (CallTest(args="[[1], 2]", expected="[3]", public=True),)


def test_code_contests_as_published_with_wrong_programs_and_null_parts(tmp_path: Path) -> None:
    row = {
        "name": "n",
        "description": "Add.",
        "public_tests": {"input": ["1\n"], "output": ["2\n"]},
        "private_tests": {"input": [], "output": []},
        "generated_tests": {"input": ["3\n"], "output": ["4\n"]},
        "solutions": {"language": [2, 3], "solution": ["int main", "print(2)"]},
        "incorrect_solutions": {"language": [3, 1], "solution": ["print(3)", "print 3"]},
        "time_limit": {"seconds": 3, "nanos": 500_000_000},
    }
    problem = one(tmp_path, row)
    assert [test.public for test in problem.tests] == [True, False]
    assert (problem.reference, problem.wrong, problem.cpu_s) == ("print(2)", ("print(3)",), 7.0)


def test_other_layouts_of_tests(tmp_path: Path) -> None:
    wanted = (ProgramTest(stdin="1\n", expected="2\n"),)
    assert one(tmp_path, {"problem": "Add.", "tests": PAIR}, "a.json").tests == wanted
    assert (
        one(tmp_path, {"problem": "Add.", "tests": {"inputs": ["1\n"], "outputs": ["2\n"]}}, "b.json").tests == wanted
    )
    fusion = [{"input": {"stdin": "1\n"}, "output": {"stdout": "2\n"}}]
    assert (
        one(tmp_path, {"content": "Add.", "id": 0, "labels": "{}", "test": json.dumps(fusion)}, "c.json").tests
        == wanted
    )
    forces = {"id": "1/A", "description": "Add.", "examples": PAIR, "official_tests": PAIR, "time_limit": 3.0}
    assert [test.public for test in one(tmp_path, forces, "d.json").tests] == [True, False]


def test_an_unknown_layout_says_what_was_found_and_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"foo": 1, "bar": 2}\n')
    with pytest.raises(ConfigError) as caught:
        load(str(tmp_path / "a.jsonl"))
    assert "['bar', 'foo']" in str(caught.value)
    assert all(layout.name in str(caught.value) for layout in LAYOUTS)


def test_bad_rows_are_named_with_their_line_and_training_refuses_or_skips_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    rows = ['{"problem": "1+1", "answer": "2"}', '{"problem": "2+2", "answer": ""}', "{", '{"problem": "3"}']
    path.write_text("\n".join([*rows, json.dumps({"problem": "x" * 10_000_000, "answer": "1"})]))
    loaded = load(str(path))
    assert [(row.place, row.why.split(" has ")[0]) for row in loaded.bad] == [
        (f"{path}:2", "field 'answer' is empty"),
        (f"{path}:3", "not JSON: Expecting property name enclosed in double quotes: line 2 column 1 (char 2)"),
        (f"{path}:4", "field 'answer' is missing (layout problem/answer)"),
        (f"{path}:5", "field 'problem'"),
    ]
    with pytest.raises(ConfigError, match=r"4 rows cannot be used(.|\n)*a.jsonl:2"):
        load_for_play([str(path)], "math", "refuse")
    with caplog.at_level(logging.WARNING):
        assert [problem.id for problem in load_for_play([str(path)], "math", "skip")] == ["a/1"]
    assert "4 rows are left out" in caplog.text


def test_equal_rows_are_read_once_and_an_id_of_two_problems_is_a_fault(tmp_path: Path) -> None:
    rows = [{"id": 1, "problem": "1+1", "answer": "2"}] * 3 + [{"id": 1, "problem": "2+2", "answer": "4"}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    loaded = load(str(tmp_path / "a.json"))
    assert (len(loaded.problems), loaded.repeats) == (1, 2)
    assert "id 'a/1' is also that of" in loaded.bad[0].why


def test_a_question_is_played_once_and_the_log_says_how_many_were_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"problem": "1+1", "answer": "2"}, {"problem": "1 + 1", "answer": "3"}, {"problem": "2+2", "answer": "4"}]
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(rows))
    with caplog.at_level(logging.WARNING):
        found = load_for_play([str(tmp_path / "a.json"), str(tmp_path / "b.json")], "math", "refuse")
    assert [problem.id for problem in found] == ["a/1", "a/3"]
    assert "a.json: 1 problems ask what an earlier one asks" in caplog.text
    assert "b.json: 3 problems ask what an earlier one asks" in caplog.text


def test_problems_of_the_other_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"problem": "1+1", "answer": "2"}]))
    with pytest.raises(ConfigError, match="of the other kind"):
        load_for_play([str(tmp_path / "a.json")], "code", "refuse")


def test_a_question_is_known_again_in_other_dress_but_signs_count() -> None:
    assert normalised("Find $\\dfrac{1}{2}$ .") == normalised("find $\\frac12$")
    assert normalised("3+4=?") != normalised("34=?")


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not beside the project")
@pytest.mark.parametrize(
    ("name", "problems", "repeats", "bad"),
    [
        ("aime24/aime_2024_problems.parquet", 20, 0, 0),
        ("aime24/dapo-aime-2024.parquet", 20, 620, 0),
        ("aime24/test.jsonl", 20, 0, 0),
        ("aime25", 40, 0, 0),
        ("aime_past", 923, 0, 1),
        ("apps/apps_train_sample.jsonl", 5, 0, 0),
        ("apps/train", 5, 0, 0),
        ("code_contests", 130, 0, 0),
        ("codeforces", 274, 0, 0),
        ("deepscaler/dsr_sub.parquet", 1204, 0, 1),
        ("gsm8k/test.jsonl", 879, 0, 0),
        ("humaneval", 109, 0, 0),
        ("humaneval_plus", 218, 0, 0),
        ("livecodebench", 6, 0, 0),
        ("math500", 333, 0, 0),
        ("math_train", 7436, 0, 4),
        ("mbpp", 995, 0, 0),
        ("mbpp_plus", 256, 0, 0),
        ("olympiadbench", 450, 0, 0),
    ],
)
def test_the_real_files_load_and_their_bad_rows_are_found(name: str, problems: int, repeats: int, bad: int) -> None:
    loaded = load(str(DATA / name))
    assert (len(loaded.problems), loaded.repeats, len(loaded.bad)) == (problems, repeats, bad)
    assert all(problem.tests for problem in loaded.problems if isinstance(problem, CodeProblem))


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="the public data sets are not beside the project")
def test_both_forms_of_the_same_apps_and_live_code_bench_rows_agree() -> None:
    packed, folder = load(str(DATA / "apps/apps_train_sample.jsonl")), load(str(DATA / "apps/train"))
    for one_form, other in zip(packed.problems, folder.problems, strict=True):
        assert isinstance(one_form, CodeProblem)
        assert isinstance(other, CodeProblem)
        assert (one_form.tests, one_form.entry, one_form.reference) == (other.tests, other.entry, other.reference)
    lite = load(str(DATA / "livecodebench/code_generation_lite.sample.jsonl")).problems
    assert [problem.entry for problem in lite if isinstance(problem, CodeProblem)] == ["", "countSeniors", ""]
