"""The size and manners of the code, as tests: what design.md sections 3 and 7 promise."""

from __future__ import annotations

import ast
import pathlib
import re

SRC = pathlib.Path(__file__).parent.parent / "src" / "coterie"
FILES = sorted(SRC.rglob("*.py"))
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60


def nodes(path: pathlib.Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def test_no_file_is_longer_than_the_limit() -> None:
    sizes = {str(path): path.read_text(encoding="utf-8").count("\n") for path in FILES}
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}
    assert FILES, f"no source found under {SRC}"


def test_no_function_is_longer_than_the_limit() -> None:
    long = [
        f"{path.name}:{node.lineno} {node.name}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert long == []


def test_every_function_is_fully_annotated() -> None:
    bare = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                args = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                missing = [arg.arg for arg in args if arg.annotation is None and arg.arg not in ("self", "cls")]
                if missing or node.returns is None:
                    bare.append(f"{path.name}:{node.lineno} {node.name} {missing}")
    assert bare == []


def test_the_only_broad_handler_is_guarded() -> None:
    broad = []
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler):
                names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"Exception"}
                if names & {"Exception", "BaseException"}:
                    broad.append(path.name)
    assert broad == ["errors.py"]


def test_nothing_is_probed_with_getattr_or_hasattr_and_only_the_command_line_prints() -> None:
    calls = [
        f"{path.name}:{node.lineno} {node.func.id}"
        for path in FILES
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in ("getattr", "hasattr", "print", "eval", "exec")
    ]
    # The process that runs programs has to run them.
    assert [call for call in calls if not re.fullmatch(r"zygote\.py:\d+ exec", call)] == []
    assert len(calls) <= 1


def test_no_module_is_a_drawer_for_everything() -> None:
    drawers = {"utils", "common", "helpers", "base", "core", "manager"}
    assert [str(path) for path in FILES if path.stem in drawers] == []


def test_the_core_knows_no_role_and_no_environment() -> None:
    words = ("planner", "plan_path", "sokoban", "sudoku", "tester", "coder", "reasoner")
    found = []
    for name in ("team.py", "rollout.py", "credit.py", "batch.py", "learner.py", "train.py", "loss.py"):
        path = SRC / name
        if path.exists():
            text = path.read_text(encoding="utf-8").lower()
            found += [f"{name}: {word}" for word in words if word in text]
    assert found == []
