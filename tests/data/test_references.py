"""References run against their own tests; those that fail are named with their first failure."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from coterie.cli import app
from coterie.data.references import failing_references
from coterie.problems import CodeProblem, ProgramTest
from coterie.sandbox.shared import shared_pool


def problem(name: str, reference: str) -> CodeProblem:
    tests = (ProgramTest(stdin="1\n", expected="2\n"), ProgramTest(stdin="3\n", expected="4\n"))
    return CodeProblem(id=name, statement="Add 1.", tests=tests, reference=reference)


def test_only_references_that_fail_are_named() -> None:
    problems = [problem("good", "print(int(input())+1)"), problem("bad", "print(2)"), problem("none", "")]
    assert failing_references(problems, shared_pool()) == {
        "bad": "passes 1 of 2 tests; wrong_answer: another output than expected"
    }


def test_the_command_counts_failing_references_as_faults(tmp_path: Path) -> None:
    row = {"problem_id": 1, "question": "Add 1.", "input_output": json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})}
    rows = [
        row | {"solutions": json.dumps(["print(2)"])},
        row | {"problem_id": 2, "solutions": json.dumps(["print(3)"])},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    found = CliRunner().invoke(app, ["data", "check", str(tmp_path / "a.json"), "--references"])
    assert found.exit_code == 1
    assert "1 of 2 reference solutions pass their own tests" in found.output
    assert "a/2: passes 0 of 1 tests" in found.output
    assert "1 faults" in found.output
