"""Programs and functions graded: cheats fail, right programs pass, and nothing that is secret goes inside."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from coterie.errors import ConfigError, SandboxError
from coterie.grading import Mark, Report, grade
from coterie.problems import AssertTest, CallTest, CodeProblem, CodeTest, ProgramTest
from coterie.sandbox.execution import Execution, Limits

SECRET = "7405926"
ECHO = ProgramTest(stdin="3 4\n5 6\n", expected="7\n11\n")
SUMS = (
    CallTest(args="[3, 4]", expected="7"),
    CallTest(args="[5, 6]", expected="11"),
    CallTest(args="[-1, 1]", expected="0"),
)


def problem(*tests: CodeTest, entry: str = "f", **more: Any) -> CodeProblem:
    return CodeProblem(id="p", statement="", tests=tests, entry=entry, **more)


def graded(tests: Sequence[CodeTest], program: str, runner: Any, entry: str = "f", **more: Any) -> Report:
    return asyncio.run(grade(problem(*tests, entry=entry, **more), program, runner))


def marks(report: Report) -> list[str]:
    return [grade.mark.value for grade in report.grades]


# ---- programs that read and write ---------------------------------------------------------------------------------


MAIN_GUARD = """
def main():
    for _ in 1, 2:
        print(sum(map(int, input().split())))
if __name__ == '__main__':
    main()
"""
BIG_STACK = """
import sys, threading
def go():
    for line in sys.stdin:
        print(sum(map(int, line.split())))
sys.setrecursionlimit(10**6)
threading.stack_size(2**26)
thread = threading.Thread(target=go)
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    "program",
    [
        "for line in __import__('sys').stdin:\n    print(sum(map(int, line.split())))",
        "for line in open(0).read().splitlines():\n    print(sum(map(int, line.split())))",
        "import os\nos.getcwd()\nfor _ in range(2):\n    print(sum(map(int, input().split())))",
        "r = __import__('sys').stdin.buffer.readline\nfor _ in 1, 2: print(sum(map(int, r().split())))",
        MAIN_GUARD,
        BIG_STACK,
    ],
)
def test_a_right_program_passes_however_it_reads(program: str, runner: Any) -> None:
    assert marks(graded([ECHO], program, runner, entry="")) == ["passed"]


@pytest.mark.parametrize(
    ("program", "mark"),
    [
        ("print(7)\nprint(11)\nimport sys\nsys.exit(1)", "runtime_error"),
        ("print(7)\nprint(11)\nraise ValueError('late')", "runtime_error"),
        ("print(7)", "wrong_answer"),
        ("", "wrong_answer"),
        ("print(", "runtime_error"),
        ("import os\nos.kill(os.getpid(), 11)", "runtime_error"),
        ("print('7\\n11')\nimport time\ntime.sleep(600)", "time_limit"),
        ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", "time_limit"),
        ("\ud800", "runtime_error"),
    ],
)
def test_how_a_program_failed_is_told_apart(program: str, mark: str, runner: Any) -> None:
    assert marks(graded([ECHO], program, runner, entry="", cpu_s=0.5)) == [mark]


FINDS_SECRETS = """
import gc, sys
def seen():
    frame = sys._getframe()
    while frame:
        yield from frame.f_locals.values()
        yield from frame.f_globals.values()
        frame = frame.f_back
    yield from gc.get_objects()
    for module in list(sys.modules.values()):
        yield from vars(module).values()
found = {word for thing in seen() for word in str(thing)[:100000].split() if word.startswith('740')}
"""


def test_a_program_that_walks_frames_and_memory_finds_no_expected_output(runner: Any) -> None:
    test = ProgramTest(stdin="1", expected=SECRET)
    assert marks(graded([test], FINDS_SECRETS + "print(*found)", runner, entry="")) == ["wrong_answer"]


def test_after_three_tests_out_of_time_the_others_are_not_run(runner: Any) -> None:
    tests = [ProgramTest(stdin=str(k), expected="") for k in range(6)]
    report = graded(tests, "import time\nif int(input()) != 1: time.sleep(600)", runner, entry="", cpu_s=0.1)
    assert marks(report) == ["time_limit", "passed", "time_limit", "time_limit", "not_run", "not_run"]
    assert len(runner.runs) == 4


def test_a_problem_without_tests_is_refused_and_never_passed(runner: Any) -> None:
    with pytest.raises(ConfigError, match="has no tests"):
        graded([], "pass", runner)


class Broken:
    async def run(self, program: str, stdin: bytes = b"", limits: Limits | None = None) -> Execution:
        raise SandboxError("the slot died twice")


@pytest.mark.parametrize("test", [ECHO, SUMS[0], AssertTest(code="assert f(1) == 1")])
def test_a_sandbox_that_fails_is_an_error_and_no_failed_test(test: CodeTest) -> None:
    with pytest.raises(SandboxError, match="died twice"):
        graded([test], "pass", Broken())


def test_the_report_counts_what_passed(runner: Any) -> None:
    report = graded(SUMS, "def f(a, b):\n    return a + b if a > 0 else 9", runner)
    assert marks(report) == ["passed", "passed", "wrong_answer"]
    assert (report.num_passed, report.share, report.all_passed) == (2, 2 / 3, False)
    assert len(runner.runs) == 1, "calls share a process"


def test_with_stop_at_failure_the_later_tests_are_not_run(runner: Any) -> None:
    tests = (ProgramTest(stdin="", expected="1"), ProgramTest(stdin="", expected="2"))
    report = asyncio.run(grade(problem(*tests, entry=""), "print(2)", runner, stop_at_failure=True))
    assert marks(report) == ["wrong_answer", "not_run"]
    assert len(runner.runs) == 1


# ---- functions that are called ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "def f(a, b): return a + b",
        "f = lambda a, b: a + b",
        "class Solution:\n    def f(self, a: int, b: int) -> Optional[int]:\n        return a + b",
        "print('noise')\ndef f(a, b):\n    print('[\"value\", 1]')\n    return a + b",
        "import os\ndef f(a, b):\n    os.write(1, b'noise')\n    return a + b",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: 'int'\ndef f(a, b): return P(a).a + b",
        "def f(a, b): return a + b\nif __name__ == '__main__':\n    print(f(int(input()), 1))",
    ],
)
def test_a_right_function_passes_whatever_it_prints_and_wherever_it_stands(program: str, runner: Any) -> None:
    assert marks(graded(SUMS, program, runner)) == ["passed"] * 3


CLASS_OF_ALL = "class All:\n    def __eq__(self, other): return True\n    __hash__ = None\n"
PATCHES_MODULES = """
import sys
for module in list(sys.modules.values()):
    module.same_value = module.decode = module.grade = lambda *a: True
def f(a, b): return 99
"""
WRITES_EVERYWHERE = """
import os
for fd in range(3, 30):
    try:
        os.write(fd, b'["passed"]\\n' * 9)
    except OSError:
        pass
def f(a, b): return 99
"""
NEVER_ENDS = """
def f(a, b):
    while True:
        try:
            while True: pass
        except BaseException:
            pass
"""


@pytest.mark.parametrize(
    ("program", "mark"),
    [
        (CLASS_OF_ALL + "def f(a, b): return All()", "wrong_answer"),
        ("class All(int):\n    def __eq__(self, other): return True\ndef f(a, b): return All(99)", "wrong_answer"),
        (FINDS_SECRETS + "def f(a, b): return int([*found, 0][0])", "wrong_answer"),
        (PATCHES_MODULES, "wrong_answer"),
        ("import json\njson.dumps = lambda *a, **k: '[\"value\", true]'\ndef f(a, b): return 99", "wrong_answer"),
        (WRITES_EVERYWHERE, "wrong_answer"),
        ("def f(a, b): return str(a + b)", "wrong_answer"),
        ("def f(a, b): return (x for x in [a + b])", "wrong_answer"),
        ("def f(a, b): yield a + b", "wrong_answer"),
        ("def f(a, b): return [f]", "wrong_answer"),
        ("def f(a, b):\n    x = []\n    x.append(x)\n    return x", "runtime_error"),
        ("def f(a, b): raise KeyError(a)", "runtime_error"),
        ("def g(a, b): return a + b", "runtime_error"),
        ("def f(a, b): exit(0)", "runtime_error"),
        ("import sys\nsys.exit(0)", "wrong_answer"),
        ("import os\ndef f(a, b): os._exit(0)", "wrong_answer"),
        (NEVER_ENDS, "time_limit"),
        ("import atexit, os\natexit.register(lambda: os._exit(3))\ndef f(a, b): return a + b", "runtime_error"),
    ],
)
def test_a_wrong_function_fails_whatever_it_does_to_the_process_it_runs_in(
    program: str, mark: str, runner: Any
) -> None:
    tests = [CallTest(args="[3, 4]", expected=SECRET), CallTest(args="[1, 1]", expected="2")]
    report = graded(tests[:1] if "a + b" not in program else tests[1:], program, runner, cpu_s=1.0)
    assert marks(report) == [mark]


def test_forged_lines_on_the_channel_pass_only_with_the_right_value(runner: Any) -> None:
    forge = (
        "import os\ndef f(a, b):\n    for fd in range(3, 30):\n        try: os.write(fd, b'[\"value\", 7]\\n' * 3)\n"
        "        except OSError: pass\n    os._exit(0)"
    )
    report = graded(SUMS, forge, runner)
    assert marks(report) == ["passed", "wrong_answer", "wrong_answer"], "7 is the first answer and no other"


def test_each_call_has_fresh_arguments(runner: Any) -> None:
    tests = [CallTest(args="[[3, 1, 2]]", expected="[1, 2, 3]"), CallTest(args="[[3, 1, 2]]", expected="[1, 2, 3]")]
    program = "def f(x):\n    x.sort()\n    y = list(x)\n    x.clear()\n    return y"
    assert marks(graded(tests, program, runner)) == ["passed", "passed"]


def test_a_call_that_ends_the_process_fails_alone(runner: Any) -> None:
    program = "import os\ndef f(a, b):\n    if a == 5: os._exit(4)\n    return a + b"
    assert marks(graded(SUMS, program, runner)) == ["passed", "runtime_error", "passed"]


def test_the_limit_is_that_of_one_call_although_calls_share_a_process(runner: Any) -> None:
    tests = [CallTest(args=f"[{k}]", expected=str(k)) for k in range(4)]
    busy = "def f(k):\n    end = t() + 0.6\n    while t() < end: pass\n    return k\nfrom time import process_time as t"
    assert marks(graded(tests, busy, runner, cpu_s=1.0)) == ["passed"] * 4
    assert len(runner.runs) > 1, "0.6 s four times do not fit into one process of 1 s"


def test_after_three_calls_that_end_the_process_the_others_are_not_made(runner: Any) -> None:
    tests = [CallTest(args=f"[{k}]", expected=str(k)) for k in range(5)]
    report = graded(tests, "import os\ndef f(k): os._exit(4)", runner)
    assert marks(report) == ["runtime_error"] * 3 + ["not_run"] * 2


def test_a_program_that_does_not_load_fails_every_call_in_one_run(runner: Any) -> None:
    report = graded(SUMS, "def f(a, b): return a +", runner)
    assert marks(report) == ["runtime_error"] * 3
    assert "SyntaxError" in report.grades[0].reason
    assert len(runner.runs) == 1


def test_the_names_that_leetcode_gives_are_there_for_a_class_and_not_for_a_function(runner: Any) -> None:
    tests = [CallTest(args="['aab']", expected="2")]
    inside = "    def f(self, s: str) -> int:\n        return max(Counter(s).values()) if pow(2, 3, 5) == 3 else 0"
    assert marks(graded(tests, "class Solution:\n" + inside, runner)) == ["passed"]
    assert marks(graded(tests, "def f(s): return max(Counter(s).values())", runner)) == ["runtime_error"]


def test_values_of_every_kind_come_back_and_are_compared(runner: Any) -> None:
    values = ["{1, (2, 3)}", "(1, 'a')", "nan", "-inf", "None", "{'k': [1.5, set()]}", str(10**30), "'\\ud83d\\ude00'"]
    tests = [CallTest(args=f"({value},)", expected=value) for value in values]
    assert marks(graded(tests, "def f(x): return x", runner)) == ["passed"] * len(values)


@pytest.mark.parametrize(
    ("test", "message"),
    [
        (CallTest(args="[1", expected="1"), "is no Python literal"),
        (CallTest(args="5", expected="1"), "are no list or tuple"),
        (AssertTest(code="assert f(1 =="), "is no Python"),
        (AssertTest(code="assert 1 == 1"), "calls nothing of the program"),
    ],
)
def test_a_test_that_cannot_be_read_is_an_error_and_no_failed_test(test: CodeTest, message: str, runner: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        graded([test], "def f(x): return x", runner)


def test_calls_without_the_name_of_the_function_are_refused(runner: Any) -> None:
    with pytest.raises(ConfigError, match="set entry to its name"):
        graded(SUMS, "def f(a, b): return a + b", runner, entry="")


@pytest.mark.parametrize(
    "test",
    [
        ProgramTest(stdin="1", expected=SECRET),
        CallTest(args="[1]", expected=SECRET),
        AssertTest(code=f"assert f(1) == {SECRET}"),
        AssertTest(code=f"x = [{SECRET}]\nfor y in x:\n    assert f(1) == y"),
    ],
)
def test_no_expected_value_goes_inside_beside_the_program(test: CodeTest, runner: Any) -> None:
    program = "def f(x): return 'the candidate'"
    report = graded([test], program, runner, reference=f"def f(x): return {SECRET}", wrong=(f"# {SECRET}",))
    assert report.num_passed == 0
    beside = [(text, stdin) for text, stdin in runner.runs if b"the candidate'" in stdin or "candidate'" in text]
    assert beside, "the program was run"
    assert not any(SECRET in text or SECRET.encode() in stdin for text, stdin in beside)


def test_marks_have_different_names_for_wrong_late_and_broken() -> None:
    assert len({Mark.WRONG, Mark.TIME_LIMIT, Mark.RUNTIME_ERROR, Mark.MEMORY_LIMIT, Mark.NOT_RUN}) == 5
