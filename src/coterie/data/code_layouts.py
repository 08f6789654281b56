"""Published layouts of programming problems, by the fields they have."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.data.fields import (
    RowError,
    call_tests,
    checked_tests,
    line_pairs,
    number_of,
    optional,
    pairs_of,
    program_tests,
    text_of,
    texts_of,
    tolerance_of,
    unjson,
    unpacked,
)
from coterie.problems import AssertTest, CodeProblem, CodeTest

_PYTHON3 = (3, "3", "PYTHON3", "python3", "python")
MAX_WRONG = 8


def humaneval(fields: Mapping[str, Any], id: str) -> CodeProblem:
    """HumanEval and HumanEval+: one ``check(candidate)``; the prompt is the beginning of the program."""
    entry, prompt = text_of(fields, "entry_point"), text_of(fields, "prompt")
    tests = [AssertTest(code=f"{text_of(fields, 'test', limit=10**7)}\n\ncheck({entry})\n")]
    return CodeProblem(
        id=id,
        statement=f"Complete this Python function.\n\n{prompt.strip()}",
        tests=checked_tests(tests),
        entry=entry,
        starter=prompt,
        reference=prompt + text_of(fields, "canonical_solution"),
        tolerance=number_of(fields, "atol") or None,
    )


def mbpp(fields: Mapping[str, Any], id: str) -> CodeProblem:
    """MBPP, full and sanitized: a list of asserts. The first is public, since only it names the function."""
    code = text_of(fields, "code").replace("\r\n", "\n")
    setup = "\n".join([*texts_of(fields, "test_imports"), optional(fields, "test_setup_code")]).replace("\r\n", "\n")
    listed = [*texts_of(fields, "test_list"), *texts_of(fields, "challenge_test_list")]
    return CodeProblem(
        id=id,
        statement=text_of(fields, "text" if "text" in fields else "prompt").replace("\r\n", "\n"),
        tests=_asserts(listed, setup.strip()),
        entry=_called(code, listed),
        reference=code,
    )


def mbpp_plus(fields: Mapping[str, Any], id: str) -> CodeProblem:
    """MBPP+: the asserts of ``assertion``. Its further inputs have no outputs in the file and are not used."""
    entry, prompt = text_of(fields, "entry_point"), text_of(fields, "prompt")
    statements = _parsed(text_of(fields, "assertion", limit=10**7))
    code = text_of(fields, "canonical_solution")
    words = "\n".join(line for line in prompt.strip().strip('"').splitlines() if not line.startswith("assert "))
    asserts = [ast.unparse(item) for item in statements if isinstance(item, ast.Assert)]
    setup = "\n".join(ast.unparse(item) for item in statements if not isinstance(item, ast.Assert))
    return CodeProblem(
        id=id,
        statement=words.strip(),
        tests=_asserts(asserts, setup),
        entry=entry,
        reference=code,
        tolerance=number_of(fields, "atol") or None,
    )


def _asserts(listed: Sequence[str], setup: str) -> tuple[CodeTest, ...]:
    if not all(item.strip() for item in listed):
        raise RowError("the list of asserts holds an empty text")
    codes = [item.replace("\r\n", "\n").strip() for item in listed]
    return checked_tests(
        [AssertTest(code=f"{setup}\n{code}".lstrip(), public=number == 0) for number, code in enumerate(codes)]
    )


def _parsed(code: str) -> list[ast.stmt]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python will refuse one day; they are the data's
            return ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise RowError(f"a program or its asserts are not Python: {error}") from error


def _called(code: str, asserts: Sequence[str]) -> str:
    """Return the function of the program that the first assert calls, "" where that cannot be told."""
    defined = [item.name for item in _parsed(code) if isinstance(item, ast.FunctionDef | ast.ClassDef)]
    return next((name for name in reversed(defined) if asserts and re.search(rf"\b{name}\b", asserts[0])), "")


def apps(fields: Mapping[str, Any], id: str) -> CodeProblem:
    """APPS: ``input_output`` and ``solutions`` are JSON in strings; with ``fn_name`` a function is called."""
    packed = unjson(fields.get("input_output"), "input_output")
    if not isinstance(packed, Mapping):
        raise RowError("field 'input_output' is missing or empty, so there is no test")
    pairs, entry = pairs_of(packed, "input_output"), optional(packed, "fn_name")
    # Values of codewars stand in a list of one; those of LeetCode are as they are.
    wrapped = "leetcode" not in str(fields.get("url")) and all(
        isinstance(out, list) and len(out) == 1 for _, out in pairs
    )
    calls = [(given, out[0] if wrapped else out) for given, out in pairs]
    tests = call_tests(calls) if entry else program_tests(pairs)
    solutions = texts_of({"solutions": unjson(fields.get("solutions") or None, "solutions")}, "solutions")
    statement = text_of(fields, "question")
    return CodeProblem(
        id=id,
        statement=statement,
        tests=checked_tests(tests),
        entry=entry,
        starter=optional(fields, "starter_code"),
        reference=next((item for item in solutions if item.strip()), ""),
        tolerance=tolerance_of(statement, tests),
    )


def live_code_bench(fields: Mapping[str, Any], id: str) -> CodeProblem:
    """LiveCodeBench: public tests as JSON, private ones packed; functional ones are calls of ``metadata.func_name``."""
    metadata = unjson(fields.get("metadata") or "{}", "metadata")
    entry = optional(metadata, "func_name") if isinstance(metadata, Mapping) else ""
    tests: list[CodeTest] = []
    for name, public in (("public_test_cases", True), ("private_test_cases", False)):
        pairs = pairs_of(unpacked(fields.get(name), name), name)
        tests += call_tests(line_pairs(pairs, name), public=public) if entry else program_tests(pairs, public=public)
    statement = text_of(fields, "question_content")
    return CodeProblem(
        id=id,
        statement=statement,
        tests=checked_tests(tests),
        entry=entry,
        starter=optional(fields, "starter_code"),
        tolerance=tolerance_of(statement, tests),
    )


def sandbox_fusion(fields: Mapping[str, Any], id: str) -> CodeProblem:
    """SandboxFusion's rows of CodeContests and LiveCodeBench: ``content`` and ``test``."""
    found = unpacked(fields.get("test"), "test")
    entry = optional(found, "fn_name") if isinstance(found, Mapping) else ""
    pairs = pairs_of(found, "test")
    tests = call_tests(line_pairs(pairs, "test")) if entry else program_tests(pairs)
    statement = text_of(fields, "content")
    return CodeProblem(
        id=id,
        statement=statement,
        tests=checked_tests(tests),
        entry=entry,
        tolerance=tolerance_of(statement, tests),
    )


def problem_tests(fields: Mapping[str, Any], id: str) -> CodeProblem:
    """``problem`` and ``tests``, as rllm writes CodeContests, Codeforces and others."""
    tests = program_tests(pairs_of(unjson(fields.get("tests"), "tests"), "tests"))
    statement = text_of(fields, "problem")
    return CodeProblem(
        id=id,
        statement=statement.strip(),
        tests=checked_tests(tests),
        tolerance=tolerance_of(statement, tests),
    )


def code_contests(fields: Mapping[str, Any], id: str) -> CodeProblem:
    """deepmind/code_contests: public, private and generated tests, solutions and wrong solutions with languages."""
    tests: list[CodeTest] = []
    for name in ("public_tests", "private_tests", "generated_tests"):
        if fields.get(name) is not None:
            tests += program_tests(pairs_of(fields[name], name), public=name == "public_tests")
    statement = text_of(fields, "description")
    limit = fields.get("time_limit")
    seconds = number_of(limit, "seconds") + number_of(limit, "nanos") / 1e9 if isinstance(limit, Mapping) else 0.0
    return CodeProblem(
        id=id,
        statement=statement,
        tests=checked_tests(tests),
        reference=next(iter(_in_python(fields, "solutions")), ""),
        wrong=tuple(_in_python(fields, "incorrect_solutions")[:MAX_WRONG]),
        tolerance=tolerance_of(statement, tests),
        cpu_s=max(4.0, 2.0 * seconds),  # limits are set for C++
    )


def _in_python(fields: Mapping[str, Any], name: str) -> list[str]:
    """Return the Python 3 programs of parallel lists of languages and programs."""
    listed = fields.get(name)
    if listed is None:
        return []
    languages = listed.get("language") if isinstance(listed, Mapping) else None
    if not isinstance(languages, list) or len(languages) != len(texts_of(listed, "solution")):
        raise RowError(f"field {name!r} lacks the lists of languages and programs, or they differ in length")
    return [code for language, code in zip(languages, listed["solution"], strict=True) if language in _PYTHON3]


def codeforces(fields: Mapping[str, Any], id: str) -> CodeProblem:
    """open-r1/codeforces: statement in parts, ``examples`` (public) and ``official_tests``."""
    parts = {"": "description", "Input": "input_format", "Output": "output_format", "Note": "note"}
    texts = {head: optional(fields, name) for head, name in parts.items()}
    statement = "\n\n".join(f"{head}\n{text}".strip() for head, text in texts.items() if text)
    tests = program_tests(pairs_of(fields.get("examples") or [], "examples"), public=True)
    tests += program_tests(pairs_of(fields.get("official_tests") or [], "official_tests"))
    return CodeProblem(
        id=id,
        statement=text_of({"description": statement}, "description"),
        tests=checked_tests(tests),
        tolerance=tolerance_of(statement, tests),
        cpu_s=max(4.0, 2.0 * number_of(fields, "time_limit")),
    )
