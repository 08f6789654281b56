"""Texts of answers: the program or the JSON in the last code block, what a program printed, how texts are shown."""

from __future__ import annotations

import ast
import json
import re
import warnings

_BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[ \t]*\n(.*?)^[ \t]*```", flags=re.MULTILINE | re.DOTALL)
MAX_PROGRAM_CHARS = 50_000


def last_block(text: str, *languages: str) -> str:
    """Return the last fenced block in one of the languages ("" : none named), "" where there is none."""
    found = [body for language, body in _BLOCK.findall(text) if language.lower() in languages]
    return found[-1] if found else ""


def program_of(text: str) -> str:
    """Return the program of the last Python block, "" where there is none or it cannot be a program."""
    program = last_block(text, "python", "py", "python3", "")
    return program if parses(program) else ""


def parses(program: str) -> bool:
    """Return whether a text is a program of Python, not empty and of a sane length."""
    if not program.strip() or len(program) > MAX_PROGRAM_CHARS:
        return False
    return bool(statements(program))


def statements(program: str) -> list[ast.stmt]:
    """Return the statements of a text, none where it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(program).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def json_of(text: str) -> object:
    """Return the value of the last JSON block, ``None`` where there is none or it is not JSON."""
    try:
        return json.loads(last_block(text, "json", ""))
    except (ValueError, RecursionError):
        return None


def printed(stdout: bytes) -> str:
    """Return what a program printed, without blanks around it."""
    return stdout.decode("utf-8", errors="replace").strip()


def last_line(text: str) -> str:
    """Return the last line of a text, "" where there is none."""
    lines = text.splitlines()
    return lines[-1].strip() if lines else ""


def cut(text: str, most: int) -> str:
    """Return at most so many characters of a text; what is cut says how long it was."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


def block(program: str, language: str = "python") -> str:
    """Return a text as a fenced block."""
    return f"```{language}\n{program.strip()}\n```"
