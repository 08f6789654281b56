"""Is the boxed answer of a text the answer of the problem. What counts as the same is in docs/grading.md."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from coterie.boxed import last_boxed
from coterie.errors import ConfigError, SandboxError
from coterie.grading.maths_same import plainly_same, same_answer
from coterie.grading.maths_text import MAX_ANSWER, MAX_NESTING, nesting

CPU_S = 5.0
"""Processor time that one comparison may take in a worker."""
START_S = 120.0
"""Wall time, beyond its processor time, after which a worker counts as broken; sympy alone takes seconds to load."""
NUM_WORKERS = max(1, min(4, (os.cpu_count() or 2) // 2))


class Reason(StrEnum):
    """Why a text is right or wrong."""

    SAME = "same"
    DIFFERENT = "different"
    NO_BOX = "no_box"
    """There is no ``\\boxed{...}``, or the last one is never closed."""
    EMPTY = "empty"
    TOO_LONG = "too_long"
    UNREADABLE = "unreadable"
    """The answer, or a part of it, is no formula that can be compared."""
    TIME_LIMIT = "time_limit"
    """Comparing it took more than its processor time."""
    MEMORY_LIMIT = "memory_limit"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a text gives the right answer, the answer it gives ("" where none), why, and a detail for people."""

    correct: bool
    reason: Reason
    answer: str = ""
    detail: str = ""


@dataclass
class Verifier:
    """Compares answers; may be used from any thread and any event loop. Workers start when first needed.

    ``counts`` holds how many verdicts had each reason. ``close`` ends the workers.
    """

    num_workers: int = NUM_WORKERS
    cpu_s: float = CPU_S
    counts: Counter[Reason] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(self.num_workers):
            self.idle.put(Worker())

    async def verify(self, gold: str, text: str, *, ordered: bool | None = None) -> Verdict:
        """Return the verdict on a text, see ``verify_now``; other tasks go on meanwhile."""
        return await asyncio.to_thread(self.verify_now, gold, text, ordered=ordered)

    def verify_now(self, gold: str, text: str, *, ordered: bool | None = None) -> Verdict:
        """Return whether the last boxed answer of a text is the gold answer.

        ``ordered`` says whether bare lists have an order, see ``maths_same.same_answer``. ``ConfigError`` for an empty
        gold answer; ``SandboxError`` when the comparison itself cannot be made, which says nothing about the text.
        """
        boxed = last_boxed(text)
        if boxed is None:
            return self.count(Verdict(False, Reason.NO_BOX))
        return self.compare_now(gold, boxed, ordered=ordered)

    def compare_now(self, gold: str, answer: str, *, ordered: bool | None = None) -> Verdict:
        """Return whether an answer, out of its box, is the gold answer; errors as ``verify_now``."""
        if not gold.strip(" $."):
            raise ConfigError(f"the gold answer {gold!r} is empty, so no answer can be compared with it")
        answer = answer.encode("utf-8", errors="replace").decode("utf-8").replace("\0", " ").strip()
        if not answer.strip(" $.{}"):
            return self.count(Verdict(False, Reason.EMPTY))
        if len(answer) > MAX_ANSWER:
            return self.count(Verdict(False, Reason.TOO_LONG, answer[:MAX_ANSWER]))
        if nesting(answer) > MAX_NESTING:
            return self.count(Verdict(False, Reason.UNREADABLE, answer, f"brackets deeper than {MAX_NESTING}"))
        plain = True if gold.strip() == answer else same_answer(gold, answer, plainly_same, ordered)
        if plain is not None:
            return self.count(Verdict(plain, Reason.SAME if plain else Reason.DIFFERENT, answer))
        request = {"gold": gold, "answer": answer, "ordered": ordered, "cpu_s": self.cpu_s}
        return self.count(verdict_of(self.ask(request), answer))

    def ask(self, request: Mapping[str, object]) -> dict[str, Any]:
        """Return what a worker says; ``SandboxError`` when two processes in a row are broken."""
        worker = self.idle.get()
        try:
            try:
                return worker.ask(request, self.cpu_s)
            except SandboxError:
                return worker.ask(request, self.cpu_s)  # which starts a fresh process
        finally:
            self.idle.put(worker)

    def count(self, verdict: Verdict) -> Verdict:
        """Return the verdict, counted."""
        with self.lock:
            self.counts[verdict.reason] += 1
        return verdict

    def close(self) -> None:
        """End the workers; a later comparison starts new ones."""
        workers = [self.idle.get() for _ in range(self.num_workers)]
        for worker in workers:
            worker.stop()
            self.idle.put(worker)


def verdict_of(reply: dict[str, Any], answer: str) -> Verdict:
    """Return the verdict that a worker's reply means."""
    if "limit" in reply:
        return Verdict(False, Reason(reply["limit"]), answer)
    if reply["same"]:
        return Verdict(True, Reason.SAME, answer)
    if reply["unreadable"]:
        return Verdict(False, Reason.UNREADABLE, answer, reply["unreadable"])
    return Verdict(False, Reason.DIFFERENT, answer)


class Worker:
    """One process of ``maths_worker``, started again after it ended. Used by one thread at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def ask(self, request: Mapping[str, object], cpu_s: float) -> dict[str, Any]:
        """Return the worker's reply, or ``{"limit": reason}`` where the request used up its time or memory.

        ``SandboxError``, and no process left, when it failed.
        """
        reply = None
        try:
            reply = self.exchange(request, cpu_s)
        finally:
            if reply is None:  # whatever came in between: an answer may still be on its way, to another question
                self.stop()
        return reply

    def exchange(self, request: Mapping[str, object], cpu_s: float) -> dict[str, Any]:
        """Hand over a request and wait for the reply; see ``ask``."""
        process = self.running()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise broken("it ended before it was asked") from None
        wall_s = 3 * cpu_s + START_S
        poll = select.poll()
        poll.register(process.stdout, select.POLLIN)
        if not poll.poll(1000.0 * wall_s):
            raise broken(f"it gave no answer within {wall_s:.0f} s of wall time")
        line = process.stdout.readline()
        if not line:
            return self.ended()
        try:
            reply = json.loads(line)
        except ValueError:
            raise broken(f"it wrote {line[:80]!r}") from None
        return dict(reply)

    def ended(self) -> dict[str, Any]:
        """Return the limit that ended the process; ``SandboxError`` when no limit did."""
        assert self.process is not None
        code = self.process.wait()
        if code in (-signal.SIGXCPU, -signal.SIGSEGV):  # too long, or nested too deep for the C stack of a parser
            return {"limit": Reason.TIME_LIMIT if code == -signal.SIGXCPU else Reason.MEMORY_LIMIT}
        raise broken(f"it ended with {code}")

    def running(self) -> subprocess.Popen[bytes]:
        """Return the process, started when there is none."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "coterie.grading.maths_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        return self.process

    def stop(self) -> None:
        """End the process, if there is one, and close its pipes."""
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.communicate()


def broken(what: str) -> SandboxError:
    """Return the error of a worker that failed."""
    return SandboxError(
        f"the process that compares mathematics failed: {what}; "
        "`python -m coterie.grading.maths_worker` shows why (are math-verify and sympy installed?)"
    )


SHARED = Verifier()
atexit.register(SHARED.close)


async def verify(gold: str, text: str, *, ordered: bool | None = None) -> Verdict:
    """Return the verdict on a text by the verifier that the process shares, see ``Verifier.verify_now``."""
    return await SHARED.verify(gold, text, ordered=ordered)


def verify_now(gold: str, text: str, *, ordered: bool | None = None) -> Verdict:
    """Return the verdict on a text by the verifier that the process shares, see ``Verifier.verify_now``."""
    return SHARED.verify_now(gold, text, ordered=ordered)
