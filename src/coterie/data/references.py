"""Reference solutions against the tests of their own problems: what a data set promises, run in the sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from coterie.grading import grade
from coterie.problems import CodeProblem
from coterie.sandbox.execution import Runner


def failing_references(problems: Sequence[CodeProblem], runner: Runner, at_once: int = 4) -> dict[str, str]:
    """Return id -> why for the problems whose reference does not pass all of their tests; others are left out.

    ``SandboxError`` where programs could not be run, ``ConfigError`` where a problem's tests cannot be read.
    """
    limit = asyncio.Semaphore(at_once)

    async def why(problem: CodeProblem) -> str:
        async with limit:
            report = await grade(problem, problem.reference, runner)
        first = next((one for one in report.grades if not one.passed), None)
        if first is None:
            return ""
        return f"passes {report.num_passed} of {len(report.grades)} tests; {first.mark.value}: {first.reason}"

    async def all_of_them() -> list[str]:
        return await asyncio.gather(*(why(problem) for problem in chosen))

    chosen = [problem for problem in problems if problem.reference]
    return {problem.id: text for problem, text in zip(chosen, asyncio.run(all_of_them()), strict=True) if text}
