"""Calls of a candidate's functions in the sandbox: what to call goes in, plain values come out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, cast

from coterie.grading.inside import CODEC, DRIVER, LEETCODE_NAMES
from coterie.grading.literals import NotLiteralError, decode, encode
from coterie.grading.report import Grade, Mark, bad_end
from coterie.sandbox.execution import Execution, Limits, Runner

MAX_DEATHS = 3
"""Calls that may end the process of a program before the calls after them are no longer made."""

Call: TypeAlias = Mapping[str, object]
"""``{"expression": source}``, worked out among the program's names, or ``{"name", "args", "kwargs"}``, encoded."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call gave: ``kind`` is ``value`` (encoded), ``raised`` (type, message) or ``unreadable`` (what)."""

    kind: str
    rest: tuple[object, ...]

    @property
    def value(self) -> object:
        """Return a fresh copy of the value returned."""
        return decode(self.rest[0])

    @property
    def trouble(self) -> Grade | None:
        """Return the grade of a call that returned no plain value, else ``None``."""
        if self.kind == "value":
            return None
        if self.kind == "raised":
            return Grade(Mark.RUNTIME_ERROR, ": ".join(str(part) for part in self.rest if part))
        return Grade(Mark.WRONG, f"returned {self.rest[0]}, which is no plain value")


def named_call(name: str, args: Sequence[object]) -> Call:
    """Return the call ``name(*args)``; in ``class Solution`` where the program has no such function."""
    return {"name": name, "args": encode(tuple(args)), "kwargs": encode({})}


async def ask(
    program: str, calls: Sequence[Call], runner: Runner, limits: Limits, setup: str = ""
) -> list[Answer | Grade]:
    """Return for each call its answer, or the grade of the program that ended in it.

    All calls are made in one process, in order, each with fresh arguments. Where the process ends early, the rest is
    made in a new one, so only a call that ends a fresh process is charged with it: ``limits`` are those of one call.
    After ``MAX_DEATHS`` such calls the rest is not run. A program that does not even load fails every call at once.
    """
    texts = [LEETCODE_NAMES] if "class Solution" in program else []
    job = {"codec": CODEC, "texts": [*texts, program, *([setup] if setup else [])]}
    done: list[Answer | Grade] = []
    deaths = 0
    while len(done) < len(calls):
        rest = calls[len(done) :]
        if deaths == MAX_DEATHS:
            return done + [Grade(Mark.NOT_RUN, f"not run: {deaths} calls before it ended the program")] * len(rest)
        stdin = json.dumps({**job, "calls": rest}).encode()
        execution = await runner.run(DRIVER, stdin, limits)
        ready, answers = read_answers(execution, len(rest))
        end = bad_end(execution)
        if not ready:
            return done + [end or Grade(Mark.WRONG, "ended while it was loaded, without an answer")] * len(rest)
        if len(answers) == len(rest) and end is not None:
            answers.pop()  # it ended badly after its last answer: that call is made again, alone
        done += answers
        if not answers:
            done.append(end or Grade(Mark.WRONG, "ended without an answer"))
            deaths += 1
    return done


def read_answers(execution: Execution, most: int) -> tuple[bool, list[Answer]]:
    """Return whether the program was loaded, and its answers up to the first line that is none.

    A program may write lines here itself; it gains nothing, since what it writes is compared like any answer.
    """
    lines = execution.stdout.split(b"\n")
    if lines[0] != b'["ready"]':
        return False, []
    answers: list[Answer] = []
    for line in lines[1 : 1 + most]:
        answer = read_answer(line)
        if answer is None:
            break
        answers.append(answer)
    return True, answers


def read_answer(line: bytes) -> Answer | None:
    """Return the answer that a line holds, ``None`` where it holds none."""
    try:
        data = json.loads(line)
        kind, *rest = cast(list[object], data) if isinstance(data, list) and data else [None]
        if kind == "value" and len(rest) == 1:
            decode(rest[0])
        elif not (
            (kind, len(rest)) in (("raised", 2), ("unreadable", 1)) and all(isinstance(part, str) for part in rest)
        ):
            return None
    except (ValueError, NotLiteralError, RecursionError):
        return None
    return Answer(str(kind), tuple(rest))
