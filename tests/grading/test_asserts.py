"""Tests written as asserts: which are taken apart, which run as a whole, and that both judge as Python does."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from coterie.errors import SandboxError
from coterie.grading import grade
from coterie.grading.asserts import split
from coterie.grading.evalplus import evalplus_same
from coterie.problems import AssertTest, CodeProblem

EQUALS_ALL = "class All:\n    def __eq__(self, other): return True\n    def __lt__(self, other): return True\n"


def passes(code: str, program: str, runner: Any, starter: str = "", entry: str = "f") -> bool:
    problem = CodeProblem(id="p", statement="", tests=(AssertTest(code=code),), entry=entry, starter=starter)
    return asyncio.run(grade(problem, program, runner)).all_passed


APART = [
    ("assert f(3) == 9", "x * x", "x + x"),
    ("assert f(3) == 9, 'message'", "x * x", "x + x"),
    ("assert f(1) is True", "True", "1"),
    ("assert f(1) is None", "None", "0"),
    ("assert f(-1)", "x", "0"),
    ("assert not f(1)", "[]", "[0]"),
    ("assert abs(f(1.5) - 2.25) < 1e-6", "x * x + 1e-7", "x * x + 1e-5"),
    ("import math\nassert math.isclose(f(2), 4.0, rel_tol=0.001)", "x * x + 0.001", "x * x + 0.1"),
    ("assert set(f(2)) == set([1, 2])", "[2, 1, 1]", "[2, 1, 3]"),
    ("assert sorted(f(2)) == [1, 2]", "(2, 1)", "(2, 2)"),
    ("assert f(2) == (1, 2)", "(1, 2)", "[1, 2]"),
    ("assert f(2) == {'a': 1}", "__import__('collections').Counter('a')", "{'a': 2}"),
    ("assert f(1) == f(2) == 5", "5", "x + 4"),
    ("assert f(f(2)) == 16 and f(1) != 2", "x * x", "x + x"),
    ("assert f(5)[0] == 5", "[x]", "x"),
    ("assert f(3 * 5) == 1 + 2 * 7", "x", "x + 1"),
    ("assert 3 in f(1)", "{3}", "{4}"),
    ("def check(g):\n    assert g(3) == 9\n    assert True\n    assert g(4) == 16\ncheck(f)", "x * x", "9"),
    ("y = f(2)\nassert f(y) == 16", "x * x", "x + x"),
    ("data = [1, 2]\nassert f(data) == data", "x", "x + [3]"),
]


@pytest.mark.parametrize(("code", "right", "wrong"), APART)
def test_an_assert_with_written_arguments_is_taken_apart(code: str, right: str, wrong: str, runner: Any) -> None:
    assert split(code, "f") is not None
    assert passes(code, f"def f(x): return {right}", runner)
    assert not passes(code, f"def f(x): return {wrong}", runner)
    assert not passes(code, f"{EQUALS_ALL}def f(x): return All()", runner)
    assert len(runner.runs) == 3, "one run for each program"


def test_only_the_calls_go_inside() -> None:
    parts = split("assert f([1, 'a'], k=2) == 77\nassert 3 < abs(f(4)) < 88", "f")
    assert parts is not None
    assert parts.calls == ("f([1, 'a'], k=2)", "f(4)")
    assert parts.setup == ""


def test_a_class_of_the_program_is_made_inside_with_the_setup_that_needs_it(runner: Any) -> None:
    program = "class Node:\n    def __init__(self, v): self.v, self.left = v, None\ndef f(node): return node.left.v"
    code = "root = Node(1)\nroot.left = Node(5)\nassert f(root) == 5"
    parts = split(code, "f")
    assert parts is not None
    assert parts.setup == "root = Node(1)\nroot.left = Node(5)"
    assert passes(code, program, runner)
    assert not passes(code, program + " + 1", runner)
    assert passes("v = 5\nroot = Node(v)\nroot.left = Node(v)\nassert f(root) == 5", program, runner)


WHOLE = [
    ("for x in range(2, 8):\n    assert f(x) == x * x", "x * x", "x * x if x < 7 else 0"),
    ("import random\nfor _ in range(20):\n    x = random.randint(0, 99)\n    assert f(x) == x + 1", "x + 1", "x + 2"),
    ("xs = [i for i in range(9)]\nassert f(xs) == sum(xs)", "sum(x)", "0"),
    ("def ref(x): return x * 2\nassert f(4) == ref(4)", "x * 2", "x + 3"),
    ("out = []\nfor x in (1, 2):\n    out.append(f(x))\nassert out == [1, 4]", "x * x", "1"),
    ("try:\n    f(0)\nexcept ValueError:\n    pass\nelse:\n    assert False", "int('a')", "0"),
    ("x = [1]\nx.append(2)\nassert f(x) == [1, 2]", "x", "x[:1]"),
    ("x = 1\nx = 2\nassert f(x) == 2", "x", "1"),
    ("x = [1]\ny = x\ny.append(2)\nassert f(x) == [1, 2]", "x", "x[:1]"),
    ("import sys\nassert f(1) == sys.getsizeof((1, 2))", "(1, 2).__sizeof__() + 16", "1"),
    ("assert f(1) == re.sub('a', 'b', 'aa')", "'bb'", "'aa'"),
    ("x = 1\nwhile x < 50:\n    x = f(x)\nassert x == 64", "x * 2", "x * 3"),
    (
        "def check(candidate):\n    print('noise')\n    for i in (1, 2):\n        assert candidate(i)\ncheck(f)",
        "x",
        "x - 1",
    ),
]


@pytest.mark.parametrize(("code", "right", "wrong"), WHOLE)
def test_any_other_test_runs_as_a_whole_in_a_process_of_its_own(code: str, right: str, wrong: str, runner: Any) -> None:
    assert split(code, "f") is None
    assert passes(code, f"# the candidate\ndef f(x): return {right}", runner)
    assert not any(b"the candidate" in stdin and b"assert" in stdin for _, stdin in runner.runs)
    assert not passes(code, f"def f(x): return {wrong}", runner)
    assert not passes(code, f"{EQUALS_ALL}def f(x): return All()", runner)


def test_a_loop_of_asserts_needs_three_runs_however_many_calls_it_makes(runner: Any) -> None:
    assert passes("for x in range(300):\n    assert f(x) == x", "def f(x): return x", runner)
    assert len(runner.runs) == 3, "what it calls, the calls, the judgement"


def test_a_helper_of_the_starter_is_taken_from_there_and_not_from_the_program(runner: Any) -> None:
    starter = "def encode(x):\n    return x + 3\n\ndef f(x):\n    '''Undo encode.'''\n"
    code = "for k in range(3):\n    assert f(encode(k)) == k"
    assert passes(code, "def encode(x): return x + 3\ndef f(x): return x - 3", runner, starter)
    assert not passes(code, "def encode(x): return x\ndef f(x): return x", runner, starter)


def test_a_call_that_ends_the_program_fails_only_when_the_test_really_makes_it(runner: Any) -> None:
    code = "y = f(1)\nassert f(0 if y is None else 5) == 5"
    program = "import os\ndef f(x):\n    if x == 0: os._exit(3)\n    return x"
    assert passes(code, program, runner)
    assert not passes("y = f(1)\nassert f(y - 1) == 0", program, runner)


def test_a_test_that_asks_without_end_stops(runner: Any) -> None:
    assert not passes("x = 0\nwhile x >= 0:\n    x = f(x)", "def f(x): return x + 1", runner)


def test_a_module_that_the_sandbox_lacks_is_an_error_and_no_failed_test(runner: Any) -> None:
    with pytest.raises(SandboxError, match="no_such_module"):
        passes("import no_such_module\nfor x in [1]:\n    assert f(x)", "def f(x): return 1", runner)


@pytest.mark.parametrize("name", ["ModuleNotFoundError", "AssertionError", "UnicodeDecodeError", "Nonsense"])
def test_an_error_that_the_program_raises_fails_the_test_whatever_its_name(name: str, runner: Any) -> None:
    program = f"class Nonsense(Exception): pass\ndef f(x): raise type('{name}', (Exception,), {{}})('x')"
    assert not passes("for x in [1]:\n    assert f(x)", program, runner)


EVALPLUS = """
import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float)

def assertion(out, exp, atol):
    assert np.allclose(out, exp, rtol=1e-07, atol=atol)

def check(candidate):
    inputs = [[1.0, 2], [3, 4]]
    results = [3.0, 7]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(candidate(*inp), exp, 0)

check(f)
"""


def test_the_loop_of_evalplus_is_taken_apart(runner: Any) -> None:
    parts = split(EVALPLUS, "f")
    assert parts is not None
    assert parts.calls == ("f(1.0, 2)", "f(3, 4)")
    assert passes(EVALPLUS, "def f(a, b): return a + b", runner)
    assert passes(EVALPLUS, "def f(a, b): return a + b + (a == 1.0) * 1e-7", runner)
    assert not passes(EVALPLUS, "def f(a, b): return a + b + (a == 1.0) * 1e-5", runner)
    assert not passes(EVALPLUS, "def f(a, b): return a + b + (a == 3) * 1e-7", runner), "7 is an integer"


def test_a_test_of_evalplus_that_runs_as_a_whole_needs_no_numpy(runner: Any) -> None:
    code = EVALPLUS.replace("results = [3.0, 7]", "results = [x[0] + x[1] for x in inputs]")
    assert split(code, "f") is None
    assert passes(code, "def f(a, b): return a + b", runner)
    assert not passes(code, "def f(a, b): return a - b", runner)
    judged = [json.loads(stdin)["test"] for _, stdin in runner.runs if b'"preludes"' in stdin]
    assert judged
    assert not any("numpy" in text for text in judged)


@pytest.mark.parametrize(
    ("value", "expected", "atol", "right"),
    [
        (1.0000009, 1.0, 0, True),
        (1.000002, 1.0, 0, False),
        (1.00005, 1.0, 1e-4, True),
        ([1.0, 2.0000001], [1.0, 2.0], 0, True),
        ([1.0], [1.0, 1.0], 0, False),  # numpy would stretch it
        (1.0, [1.0, 1.0], 0, False),
        ([1, 2], (1, 2), 0, False),
        ("a", 1.0, 0, False),
        (None, 1.0, 1e-4, False),
        (float("inf"), float("inf"), 0, True),
    ],
)
def test_evalplus_compares_floats_with_its_tolerance(value: object, expected: object, atol: float, right: bool) -> None:
    assert evalplus_same(value, expected, atol) is right
