"""The process of one measured system: it loads, then does what it is told, a line at a time.

Lines come from the standard input until it is closed: ``run``, ``logprobs`` or ``gemm``. Answers are lines of JSON on
the original standard output; whatever libraries print goes to the standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from cells import Cell

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Order:
    """What a process is started for: the cell, and the settings that are the system's own."""

    cell: Cell
    settings: dict[str, Any]


class System(Protocol):
    """A loaded system."""

    def run(self) -> int:
        """Do the cell's work once; return the tokens generated or trained."""
        ...

    def logprobs(self) -> list[float]:
        """Return the log-probs of the first completion of the first prompt."""
        ...

    def gemm(self) -> float:
        """Return the rate of the cell's matrix products, in floating-point operations per second; 0 if not asked."""
        ...


def order() -> Order:
    """Return what the command line asks for, and send everything printed from now on elsewhere."""
    asked = json.loads(sys.argv[1])
    return Order(Cell(**asked["cell"]), asked["settings"])


def channel() -> IO[str]:
    """Return where answers go; file descriptor 1 is the standard error afterwards."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def peak_bytes(*, reset: bool = False) -> int:
    """Return the most memory this process has held since the last reset."""
    if reset:
        _CLEAR.write_text("5")
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def greet(answers: IO[str], versions: dict[str, str]) -> None:
    """Say that the system is loaded, with the memory that took."""
    say(answers, {"ready": True, "versions": versions, "loaded_bytes": peak_bytes(reset=True)})


def serve(system: System, answers: IO[str], versions: dict[str, str]) -> None:
    """Answer until there are no more lines."""
    greet(answers, versions)
    for line in sys.stdin:
        match line.strip():
            case "run":
                start = time.perf_counter()
                tokens = system.run()
                took = time.perf_counter() - start
                say(answers, {"seconds": took, "tokens": tokens, "peak_bytes": peak_bytes()})
            case "logprobs":
                say(answers, {"logprobs": system.logprobs()})
            case "gemm":
                say(answers, {"flops": system.gemm()})
            case other:
                raise ValueError(f"asked {other!r}: expected run, logprobs or gemm")


def say(answers: IO[str], answer: dict[str, Any]) -> None:
    """Answer a line."""
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
