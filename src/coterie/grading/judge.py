"""Tests that cannot be taken apart: the test runs in the sandbox too, but never in the process of the candidate.

In lock-step: the judge runs the test with a stand-in for the program that knows the answers given so far. Where it has
none, it says which calls it needs; the candidate is asked, and the judge runs again from the start, until no answer is
missing. The judge sees plain values, never an object or a line of the candidate, and the candidate sees calls, never
the test. The same call has the same answer each time it is made, so a program is judged as a function of its arguments.
"""

from __future__ import annotations

import ast
import json

from coterie.errors import ConfigError, SandboxError
from coterie.grading.asserts import BUILTINS, imported_names, names_in, parse
from coterie.grading.exchange import Answer, Call, ask
from coterie.grading.expressions import tree_of
from coterie.grading.inside import CODEC, EVALPLUS, JUDGE
from coterie.grading.report import PASSED, Grade, Mark, bad_end
from coterie.sandbox.execution import Limits, Runner

MAX_ROUNDS = 100
"""Runs of the judge for one test. A loop of asserts needs two; tests whose calls depend on answers need more."""

JUDGE_LIMITS = Limits(cpu_s=20.0)

MODULES = frozenset(
    {"bisect", "cmath", "collections", "copy", "datetime", "functools", "heapq", "itertools", "math", "operator"}
    | {"random", "re", "string", "sys"}
)
"""Modules that tests of the published sets use without an import, since the program they came with imports them."""


async def judge(code: str, entry: str, starter: str, program: str, runner: Runner, limits: Limits) -> Grade:
    """Return the grade of a program on a test that runs as a whole.

    ``starter`` is run before the test when it is Python: helpers it defines are taken from there, not from the program.
    ``ConfigError`` for a test that calls nothing of the program, ``SandboxError`` when the sandbox lacks a module that
    the test imports.
    """
    job = make_job(code, entry, starter)
    answers: dict[str, object] = {}
    for _ in range(MAX_ROUNDS):
        stdin = json.dumps({**job, "answers": answers}).encode()
        execution = await runner.run(JUDGE, stdin, JUDGE_LIMITS)
        end = bad_end(execution)
        if end is not None:
            return Grade(Mark.WRONG, f"the test ended on the program's answers ({end.reason})")
        kind, *rest = json.loads(execution.stdout)
        if kind == "missing":
            raise SandboxError(f"the test {code[:60]!r} cannot be run: {rest[0]} in the sandbox; make the module known")
        if kind == "failed":
            return Grade(Mark.WRONG, str(rest[0]))
        if kind == "passed":
            if not answers:
                raise ConfigError(f"the test {code[:80]!r} calls nothing of the program, so any program passes it")
            return PASSED
        calls: list[Call] = rest[0]
        for number, (call, reply) in enumerate(zip(calls, await ask(program, calls, runner, limits), strict=True)):
            if isinstance(reply, Grade):
                if number == 0:
                    return reply
                break  # the test may not make this call at all once it has the answers before it
            answers[json.dumps(call, sort_keys=True)] = answer_data(reply)
    return Grade(Mark.NOT_RUN, f"the test still asked for calls after {MAX_ROUNDS} rounds")


def answer_data(answer: Answer) -> list[object]:
    """Return an answer as the judge reads it."""
    return [answer.kind, *answer.rest]


def make_job(code: str, entry: str, starter: str) -> dict[str, object]:
    """Return what the judge is told about a test: its text, made to go on where an answer is missing, and its names."""
    tree = parse(code)
    preludes = [starter] if is_python(starter) else []
    if any(isinstance(node, ast.FunctionDef) and node.name == "assertion" for node in tree.body):
        preludes.append(EVALPLUS)
        tree.body = [node for node in tree.body if not is_evalplus(node)]
    defined = bound_names(tree).union(*(bound_names(tree_of(text)) for text in preludes))
    free = set(names_in(tree, ast.Load)) - BUILTINS - defined
    return {
        "codec": CODEC,
        "preludes": preludes,
        "modules": sorted(free & MODULES),
        "stubs": sorted((free - MODULES) | ({entry} if entry else set())),
        "test": ast.unparse(ast.fix_missing_locations(Patient().visit(tree))),
    }


def is_python(text: str) -> bool:
    """Return whether a text is a module of Python that has something in it."""
    try:
        return bool(tree_of(text).body)
    except (SyntaxError, ValueError):
        return False


def bound_names(tree: ast.Module) -> set[str]:
    """Return every name that a module binds anywhere: variables, parameters, functions, classes, imports."""
    names = set(names_in(tree, ast.Store))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= set(imported_names(node))
    return names


def is_evalplus(node: ast.stmt) -> bool:
    """Return whether a statement belongs to the comparison that EvalPlus writes into its tests, which ours replaces."""
    return (isinstance(node, ast.FunctionDef) and node.name in ("assertion", "is_floats")) or (
        isinstance(node, ast.Import) and ast.unparse(node) == "import numpy as np"
    )


class Patient(ast.NodeTransformer):
    """Makes a test go on after a statement that needs an answer, so that one run finds many calls to make.

    Such a run decides nothing: its grade is not looked at while an answer is missing.
    """

    def visit_Assert(self, node: ast.Assert) -> ast.stmt:
        """Return the assert, left out when it needs an answer."""
        return patient(node)

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        """Return the statement, left out when it needs an answer."""
        return node if isinstance(node.value, ast.Constant) else patient(node)

    def visit_Assign(self, node: ast.Assign) -> ast.stmt:
        """Return the assignment; its name stands for what is missing when it needs an answer."""
        if len(node.targets) != 1 or not isinstance(node.targets[0], ast.Name):
            return node
        return patient(node, ast.Assign(targets=node.targets, value=ast.parse("Missing()", mode="eval").body))


def patient(node: ast.stmt, instead: ast.stmt | None = None) -> ast.stmt:
    """Return a statement that is left out, or replaced, when it needs an answer."""
    body = [instead or ast.Pass()]
    handler = ast.ExceptHandler(type=ast.Name(id="NeedsAnswer", ctx=ast.Load()), name=None, body=body)
    return ast.Try(body=[node], handlers=[handler], orelse=[], finalbody=[])
