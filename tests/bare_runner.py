"""A stand-in for the sandbox, for tests of what is around it: ``python -I`` with two limits and no walls at all."""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from coterie.sandbox.execution import Execution, Limits, Verdict


class BareRunner:
    """Runs programs of the tests, one process each."""

    async def run(self, program: str, stdin: bytes = b"", limits: Limits | None = None) -> Execution:
        return await asyncio.to_thread(run_now, program, stdin, limits or Limits())


def run_now(program: str, stdin: bytes, limits: Limits) -> Execution:
    cpu_s = max(1, round(limits.cpu_s))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))

    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    with subprocess.Popen(
        [sys.executable, "-I", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=limit,
    ) as process:
        late, given = False, stdin or None
        while True:
            try:
                stdout, stderr = process.communicate(given, timeout=limits.wall_limit_s)
                break
            except subprocess.TimeoutExpired:  # only what sleeps is late: one that waits for a core is not
                given = None
                if not late and Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S":
                    late = True
                    process.kill()
    code = process.returncode
    verdict = Verdict.OK if code == 0 else Verdict.RUNTIME_ERROR if code > 0 else Verdict.SIGNAL
    if late:
        verdict = Verdict.WALL_TIME
    elif code == -signal.SIGXCPU:
        verdict = Verdict.CPU_TIME
    return Execution(
        verdict=verdict,
        exit_code=code if code >= 0 else None,
        signal=-code if code < 0 else None,
        stdout=stdout,
        stderr=stderr,
        cpu_s=resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before,
        wall_s=time.monotonic() - began,
    )
