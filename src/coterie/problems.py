"""Problems of mathematics and of programming: frozen records that loaders make, environments ask and graders check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class MathProblem:
    """A question with one final answer, given as the data set writes it (LaTeX or plain)."""

    id: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramTest:
    """A program that reads ``stdin`` must write ``expected``; ``exact``: byte by byte, else line by line in words."""

    stdin: str
    expected: str
    public: bool = False
    exact: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTest:
    """``entry(*args)`` must give ``expected``; both are written as Python literals (text, read outside the sandbox)."""

    args: str
    expected: str
    public: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AssertTest:
    """Python statements that must pass after the program, as in HumanEval (``check(entry)``) and MBPP (``assert``)."""

    code: str
    public: bool = False


CodeTest: TypeAlias = ProgramTest | CallTest | AssertTest


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProblem:
    """A programming problem with its tests. Hidden tests, ``reference`` and ``wrong`` never reach a prompt.

    ``entry`` is the function to write ("" : a program that reads and prints), ``starter`` the code the answer begins
    with or continues. ``tolerance`` is the largest error of a number in an answer (``None``: text must be equal).
    ``wrong`` holds programs that are known to be wrong; ``cpu_s`` is the limit of one test in seconds.
    """

    id: str
    statement: str
    tests: tuple[CodeTest, ...]
    entry: str = ""
    starter: str = ""
    reference: str = ""
    wrong: tuple[str, ...] = ()
    tolerance: float | None = None
    cpu_s: float = 4.0
