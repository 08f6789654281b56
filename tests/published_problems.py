"""Small readers of published problem sets, for tests of the graders only."""

from __future__ import annotations

import ast
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coterie.grading.expressions import tree_of
from coterie.problems import AssertTest, CallTest, CodeProblem, CodeTest, ProgramTest

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def rows(name: str) -> list[dict[str, Any]]:
    path = DATA / name
    text = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode()
    return list(json.loads(text) if text.startswith("[") else map(json.loads, text.splitlines()))


def humaneval(name: str = "humaneval/HumanEval.jsonl.gz") -> Iterator[CodeProblem]:
    for row in rows(name):
        test = AssertTest(code=f"{row['test']}\ncheck({row['entry_point']})")
        reference = row["prompt"] + row["canonical_solution"]
        yield problem(row["task_id"], [test], reference, row["entry_point"], row["prompt"])


def mbpp() -> Iterator[CodeProblem]:
    for row in rows("mbpp/mbpp.jsonl.gz"):
        tests = [f"{row['test_setup_code']}\n{test}" for test in row["test_list"] + row["challenge_test_list"]]
        yield asserting(f"mbpp/{row['task_id']}", tests, row["code"])
    for row in rows("mbpp/sanitized-mbpp.json"):
        tests = ["\n".join([*row["test_imports"], test]) for test in row["test_list"]]
        yield asserting(f"sanitized/{row['task_id']}", tests, row["code"])


def mbpp_plus() -> Iterator[CodeProblem]:
    for row in rows("mbpp_plus/MbppPlus.jsonl.gz"):
        yield asserting(row["task_id"], [row["assertion"]], row["canonical_solution"])


def apps() -> Iterator[tuple[CodeProblem, list[str]]]:
    for row in rows("apps/apps_train_sample.jsonl"):
        data = json.loads(row["input_output"])
        entry = data.get("fn_name", "")
        tests: list[CodeTest] = []
        for given, wanted in zip(data["inputs"], data["outputs"], strict=True):
            answer = wanted[0] if isinstance(wanted, list) else wanted
            tests.append(
                CallTest(args=repr(given), expected=repr(answer))
                if entry
                else ProgramTest(stdin=given, expected=wanted)
            )
        yield problem(f"apps/{row['problem_id']}", tests, "", entry), json.loads(row["solutions"])


def asserting(name: str, tests: list[str], reference: str) -> CodeProblem:
    """Return a problem whose function is the one that its own solution defines and its tests call."""
    reference = reference.replace("\r\n", "\n")
    defined = {node.name for node in tree_of(reference).body if isinstance(node, ast.FunctionDef)}
    called = [
        node.func.id
        for node in ast.walk(tree_of("\n".join(tests)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    entry = next((called_name for called_name in called if called_name in defined), "")
    return problem(name, [AssertTest(code=test) for test in tests], reference, entry)


def problem(name: str, tests: list[Any], reference: str, entry: str = "", starter: str = "") -> CodeProblem:
    return CodeProblem(
        id=name, statement="", tests=tuple(tests), reference=reference, entry=entry, starter=starter, cpu_s=8.0
    )


# ---- answers of mathematics ---------------------------------------------------------------------------------------


def answers() -> dict[str, list[str]]:
    return {
        "aime24": [row["answer"] for row in rows("aime24/test.jsonl")],
        "aime25": [row["answer"] for row in rows("aime25/test.jsonl")],
        "math500": [row["answer"] for row in rows("math500/test.jsonl")],
        "olympiadbench": [row["final_answer"][0] for row in rows("olympiadbench/test.jsonl")],
        "gsm8k": [row["answer"].split("####")[1].strip() for row in rows("gsm8k/test.jsonl")],
    }
