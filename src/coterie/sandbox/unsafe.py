"""Programs without any walls, for those who ask for it twice: a plain process per program, with limits of use only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from coterie.sandbox.execution import Execution, Limits
from coterie.sandbox.slot import Job, judge

_BOOT = """
import random, resource, runpy, sys
for name, value in (("CPU", {cpu_s} + 1), ("AS", {memory}), ("FSIZE", {output} + 1), ("CORE", 0)):
    try: resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
    except (OSError, ValueError): pass
random.seed({seed})
sys.argv = ["main.py"]
runpy.run_path("main.py", run_name="__main__")
"""
_BASE_BYTES = 256 * 2**20


class UnsafeSlot:
    """Runs a job as this user, on this host, with this network."""

    pid: int | None = None

    def execute(self, job: Job) -> Execution:
        """Run a job and return what happened."""
        limits = job.limits
        boot = _BOOT.format(
            cpu_s=int(-(-limits.cpu_s // 1)),
            memory=_BASE_BYTES + limits.memory_mb * 2**20,
            output=limits.output_bytes,
            seed=job.seed,
        )
        with tempfile.TemporaryDirectory(prefix="coterie-unsafe-") as name:
            folder = Path(name)
            (folder / "main.py").write_bytes(job.program)
            (folder / "stdin").write_bytes(job.stdin)
            with (
                (folder / "stdin").open("rb") as stdin,
                (folder / "stdout").open("wb") as stdout,
                (folder / "stderr").open("wb") as stderr,
            ):
                began = time.monotonic()
                process = subprocess.Popen(
                    [sys.executable, "-I", "-X", "utf8", "-c", boot],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    cwd=folder,
                    start_new_session=True,
                )
                answer = _wait(process, limits, began)
            most = limits.output_bytes + 1
            texts = [(folder / name).read_bytes()[:most] for name in ("stdout", "stderr")]
        return judge(answer, limits, *texts)

    def stop(self) -> None:
        """Do nothing: a slot without walls keeps no process between jobs."""


def _wait(process: subprocess.Popen[bytes], limits: Limits, began: float) -> dict[str, int | float | str]:
    """Wait for a process, kill its group at the wall limit, and return what a zygote would have answered."""
    killed, pid, status = "", 0, 0
    while not pid:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not pid:
            if not killed and time.monotonic() - began > limits.wall_limit_s:
                killed = "wall"
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(0.002)
    process.returncode = os.waitstatus_to_exitcode(status)
    return {
        "status": status,
        "killed": killed,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": time.monotonic() - began,
    }
