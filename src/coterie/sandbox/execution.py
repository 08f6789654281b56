"""What is asked of a sandbox and what comes back. No behaviour: who runs programs and who grades them meet here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Verdict(StrEnum):
    """How a program ended. Right or wrong is not decided here; a sandbox that fails raises ``SandboxError`` instead."""

    OK = "ok"
    """It ended by itself with exit code 0."""
    RUNTIME_ERROR = "runtime_error"
    """It ended by itself with another exit code."""
    SIGNAL = "signal"
    """A signal ended it that no limit sent."""
    CPU_TIME = "cpu_time"
    """It used up its processor time."""
    WALL_TIME = "wall_time"
    """It was still there, waiting, at the generous wall limit."""
    OUTPUT_LIMIT = "output_limit"
    """It wrote more than it may."""
    MEMORY = "memory"
    """It asked for more memory than it may have."""
    REFUSED = "refused"
    """It ended because it tried what a program may not do; ``Execution.hint`` says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use. ``cpu_s`` decides time; ``wall_s`` (``None``: 3 x cpu + 2) only ends what sleeps."""

    cpu_s: float = 4.0
    wall_s: float | None = None
    memory_mb: int = 512
    output_bytes: int = 16 * 2**20

    @property
    def wall_limit_s(self) -> float:
        """The wall limit, in seconds."""
        return 3.0 * self.cpu_s + 2.0 if self.wall_s is None else self.wall_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One run of one program: how it ended, what it wrote, what it used (seconds)."""

    verdict: Verdict
    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    cpu_s: float
    wall_s: float
    hint: str = ""


class Runner(Protocol):
    """Something that runs programs, each in a clean world: the sandbox's pool, or a stand-in in tests."""

    async def run(self, program: str, stdin: bytes = b"", limits: Limits | None = None) -> Execution:
        """Run a Python program to its end and return what happened.

        ``SandboxError`` when it could not be run, after retries on fresh workers: that says nothing about the program.
        """
        ...
