"""The runner that the tests of graders use: the sandbox, or where a host allows none, plain Python."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from bare_runner import BareRunner
from coterie.errors import ConfigError
from coterie.sandbox.execution import Execution, Limits, Runner
from coterie.sandbox.pool import SandboxPool


@dataclass
class Watched:
    """A runner that remembers (program, stdin) of every run, so a test can see what went inside."""

    runner: Runner
    runs: list[tuple[str, bytes]] = field(default_factory=list)

    async def run(self, program: str, stdin: bytes = b"", limits: Limits | None = None) -> Execution:
        self.runs.append((program, stdin))
        return await self.runner.run(program, stdin, limits)


@pytest.fixture(scope="session")
def programs() -> Iterator[Runner]:
    try:
        pool = SandboxPool()
    except ConfigError:
        yield BareRunner()
        return
    with pool:
        yield pool


@pytest.fixture
def runner(programs: Runner) -> Watched:
    return Watched(programs)
