"""Long runs: nothing grows over thousands of programs, and verdicts do not depend on what else the machine does."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie.sandbox.execution import Limits, Verdict
from coterie.sandbox.pool import SandboxPool, measure
from coterie.sandbox.slot import Slot

pytestmark = pytest.mark.slow
PROGRAMS = (
    ("print(sum(i for i in range(int(input()))))", b"1000", Limits(), Verdict.OK),
    ("n = 0\nwhile n < 3 * 10**5: n += 1\nprint(n)", b"", Limits(cpu_s=2.0), Verdict.OK),  # about 0.02 s
    ("while True: pass", b"", Limits(cpu_s=0.05), Verdict.CPU_TIME),
    ("import time; time.sleep(60)", b"", Limits(cpu_s=2.0, wall_s=0.1), Verdict.WALL_TIME),
    ("1 / 0", b"", Limits(), Verdict.RUNTIME_ERROR),
    ("x = bytearray(10**10)", b"", Limits(), Verdict.MEMORY),
    ("print('x' * 10**5)", b"", Limits(output_bytes=10**4), Verdict.OUTPUT_LIMIT),
    ("import subprocess; subprocess.run(['true'])", b"", Limits(), Verdict.REFUSED),
)


def resident_kb(pid: int) -> int:
    (line,) = [row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if row.startswith("VmRSS")]
    return int(line.split()[1])


def state(pool: SandboxPool) -> tuple[list[int], int, int, int]:
    """Return resident memory (kB) of trainer and zygotes, open descriptors, processes of the host, files of /tmp."""
    pids = [slot.pid for slot in pool._all if isinstance(slot, Slot) and slot.pid]
    memory = [resident_kb(pid) for pid in [os.getpid(), *pids]]
    processes = [name for name in os.listdir("/proc") if name.isdigit()]
    fds = [len(os.listdir(f"/proc/{pid}/fd")) for pid in [os.getpid(), *pids]]
    return memory, sum(fds), len(processes), len([name for name in os.listdir("/tmp") if "coterie" in name])


@pytest.mark.timeout(1500)
def test_nothing_grows_over_ten_thousand_programs() -> None:
    program = "import tempfile\nwith open('x', 'w') as f: f.write('x' * 1000)\nprint(input())"
    with SandboxPool(1) as pool:
        for _ in range(200):
            pool.run_now(program, b"1")
        before = state(pool)
        wrong = sum(pool.run_now(program, b"1").stdout != b"1\n" for _ in range(10_000)) if pool.tier == "A" else 0
        after = state(pool)
    sys.stderr.write(f"{before} -> {after}\n")
    assert wrong == 0
    assert after[1] == before[1]
    assert after[3] == before[3]
    assert abs(after[2] - before[2]) <= 20, "other programs of the host come and go"
    assert all(late <= early + 1024 for early, late in zip(before[0], after[0], strict=True)), "at most 1 MB"


@pytest.mark.timeout(1500)
def test_verdicts_are_the_same_beside_busy_loops() -> None:
    jobs = [PROGRAMS[index % len(PROGRAMS)] for index in range(2000)]

    async def all_of(pool: SandboxPool) -> list[Verdict]:
        runs = [pool.run(program, stdin, limits) for program, stdin, limits, _ in jobs]
        return [execution.verdict for execution in await asyncio.gather(*runs)]

    with SandboxPool(2) as pool:
        began = time.monotonic()
        alone = asyncio.run(all_of(pool))
        middle = time.monotonic()
        loops = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(6)]
        try:
            beside = asyncio.run(all_of(pool))
        finally:
            for loop in loops:
                loop.kill()
                loop.wait()
    sys.stderr.write(f"alone {middle - began:.0f} s, beside six loops {time.monotonic() - middle:.0f} s\n")
    assert alone == [verdict for *_, verdict in jobs]
    assert beside == alone


def test_a_slot_is_at_least_twice_as_fast_as_a_process_for_each_program() -> None:
    with SandboxPool(1) as pool:
        rate, bare = measure(pool, 5.0)
    sys.stderr.write(f"{rate:.0f} programs a second, {rate / bare:.1f} times a bare python -I -c\n")
    assert rate >= 2.0 * bare
