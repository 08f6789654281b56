"""The runner that the tests of graders use: every one of them takes it from here, so another sandbox can stand in."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from bare_runner import BareRunner
from coterie.sandbox.execution import Execution, Limits, Runner


@dataclass
class Watched:
    """A runner that remembers (program, stdin) of every run, so a test can see what went inside."""

    runner: Runner
    runs: list[tuple[str, bytes]] = field(default_factory=list)

    async def run(self, program: str, stdin: bytes = b"", limits: Limits | None = None) -> Execution:
        self.runs.append((program, stdin))
        return await self.runner.run(program, stdin, limits)


@pytest.fixture
def runner() -> Watched:
    return Watched(BareRunner())
