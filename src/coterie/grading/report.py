"""What grading a program gives: one grade a test, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from coterie.sandbox.execution import Execution, Verdict


class Mark(StrEnum):
    """How one test ended. Everything but ``PASSED`` is the program's doing; what is not raises ``SandboxError``."""

    PASSED = "passed"
    WRONG = "wrong_answer"
    """It ended well with another answer, or with none."""
    RUNTIME_ERROR = "runtime_error"
    """It raised, ended with an exit code that is not 0, or a signal ended it."""
    TIME_LIMIT = "time_limit"
    MEMORY_LIMIT = "memory_limit"
    OUTPUT_LIMIT = "output_limit"
    REFUSED = "refused"
    """It tried what a program may not do in the sandbox."""
    NOT_RUN = "not_run"
    """Earlier tests failed in a way that makes running this one not worth its time; counts as not passed."""


MARKS = {
    Verdict.RUNTIME_ERROR: Mark.RUNTIME_ERROR,
    Verdict.SIGNAL: Mark.RUNTIME_ERROR,
    Verdict.CPU_TIME: Mark.TIME_LIMIT,
    Verdict.WALL_TIME: Mark.TIME_LIMIT,
    Verdict.OUTPUT_LIMIT: Mark.OUTPUT_LIMIT,
    Verdict.MEMORY: Mark.MEMORY_LIMIT,
    Verdict.REFUSED: Mark.REFUSED,
}


@dataclass(frozen=True, slots=True)
class Grade:
    """The mark of one test and, where it is not ``PASSED``, a reason for people (never the expected value)."""

    mark: Mark
    reason: str = ""

    @property
    def passed(self) -> bool:
        """Return whether the test was passed."""
        return self.mark is Mark.PASSED


PASSED = Grade(Mark.PASSED)


@dataclass(frozen=True, slots=True)
class Report:
    """The grades of a program on the tests of a problem, in their order; there is at least one."""

    grades: tuple[Grade, ...]

    @property
    def num_passed(self) -> int:
        """Return how many tests were passed."""
        return sum(grade.passed for grade in self.grades)

    @property
    def share(self) -> float:
        """Return the share of tests passed, in [0, 1]."""
        return self.num_passed / len(self.grades)

    @property
    def all_passed(self) -> bool:
        """Return whether every test was passed."""
        return self.num_passed == len(self.grades)


def bad_end(execution: Execution) -> Grade | None:
    """Return the grade of a program that did not end by itself with exit code 0, ``None`` for one that did."""
    if execution.verdict is Verdict.OK:
        return None
    lines = execution.stderr.decode("utf-8", errors="replace").strip().splitlines()
    detail = execution.hint or (lines[-1][:200] if lines else "")
    return Grade(
        MARKS[execution.verdict], f"{execution.verdict.value}: {detail}" if detail else execution.verdict.value
    )
