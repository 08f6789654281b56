"""The sandbox: slots that run model-written Python, one program at a time each, behind walls that have been tried.

``SandboxPool`` picks the strongest tier that this host allows and proves it with canaries before the first program.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Literal, Self

from coterie.errors import ConfigError, SandboxError
from coterie.sandbox import canaries, landlock, walls
from coterie.sandbox.execution import Execution, Limits
from coterie.sandbox.slot import Job, Slot
from coterie.sandbox.unsafe import UnsafeSlot
from coterie.sandbox.walls import Tier

UNSAFE = "COTERIE_UNSAFE_SANDBOX"
_TRIES = 3
_TRIVIAL = "print(2 + 2)"
_REMEDIES = (
    "To run model-written programs, one of these is needed: user namespaces for this user (sysctl "
    "kernel.unprivileged_userns_clone=1, kernel.apparmor_restrict_unprivileged_userns=0), with bubblewrap; or a kernel "
    "with Landlock (6.2 or later, `landlock` in the lsm= list) whose container allows it. Only where losing "
    f'everything on this machine is acceptable: sandbox.mode = "unsafe" and the environment variable {UNSAFE}=1'
)


class SandboxPool:
    """Runs programs, as many at a time as it has slots. Threads and event loops may share one pool.

    ``tier`` is the tier in force: ``"A"`` namespaces, ``"C"`` none of them, ``"unsafe"`` no walls at all; ``layers``
    names what a program is behind.
    """

    def __init__(
        self,
        slots: int | None = None,
        *,
        mode: Literal["auto", "unsafe"] = "auto",
        tier: Literal["A", "C"] | None = None,
        grace_s: float = 10.0,
    ) -> None:
        """Start one slot and try its walls; the others start when needed (default: one per core).

        ``tier`` allows only that tier. ``grace_s`` past a wall limit, a slot that is silent is replaced. Raises
        ``ConfigError`` where no tier holds, and for ``mode = "unsafe"`` unless the environment asks for it too.
        """
        cores = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
        self.slots = slots or len(cores)
        # With a core each, slots neither crowd on one nor wander; with fewer slots the scheduler knows better.
        self._cores = [cores[index % len(cores)] if self.slots >= len(cores) else None for index in range(self.slots)]
        self._owner, self._grace_s, self._closed = os.getpid(), grace_s, False
        self._all: list[Slot | UnsafeSlot] = []
        self.tier: Tier = "unsafe"
        self.layers: tuple[str, ...] = ()
        if mode == "unsafe":
            _check_unsafe()
            self._all = [UnsafeSlot() for _ in range(self.slots)]
        else:
            self._raise_walls(("A", "C") if tier is None else (tier,))
        self._free: queue.LifoQueue[Slot | UnsafeSlot] = queue.LifoQueue()
        for slot in reversed(self._all):
            self._free.put(slot)
        self._threads = ThreadPoolExecutor(max_workers=self.slots, thread_name_prefix="sandbox")
        atexit.register(self.close)

    @property
    def usable(self) -> bool:
        """Whether programs can be run: not closed, and started by this process, not by one that it is a fork of."""
        return not self._closed and os.getpid() == self._owner

    def _raise_walls(self, tiers: Sequence[Literal["A", "C"]]) -> None:
        """Take the first tier that starts and holds against all canaries; ``ConfigError`` where none does."""
        if sys.platform != "linux":
            raise ConfigError(f"the sandbox needs Linux, this is {sys.platform}. {_REMEDIES}")
        found = []
        if landlock.abi() < landlock.LEAST_ABI and "C" in tiers:
            tiers = [tier for tier in tiers if tier != "C"]
            found.append(f"tier C: Landlock {landlock.abi()}, needed is {landlock.LEAST_ABI} (Linux 6.2) or later")
        for tier in tiers:
            for proc in (True, False) if tier == "A" else (False,):
                slots = [self._slot(tier, index, proc) for index in range(self.slots)]
                trouble = _tried(slots[0])
                if not trouble:
                    self.tier, self._all, self.layers = tier, list(slots), _layers(tier, proc)
                    return
                slots[0].stop()
                found.append(f"tier {tier}{'' if proc or tier == 'C' else ' without /proc'}: {trouble}")
        raise ConfigError("no sandbox holds on this host. " + "; ".join(found) + f". {_REMEDIES}")

    def _slot(self, tier: Literal["A", "C"], index: int, proc: bool) -> Slot:
        core = self._cores[index]
        if tier == "A":
            return Slot(lambda: walls.tier_a(index, core, proc), grace_s=self._grace_s, shared_user=False)
        return Slot(lambda: walls.tier_c(index, core), grace_s=self._grace_s, shared_user=True)

    # ---- running -----------------------------------------------------------------------------------------------------

    def run_now(self, program: str, stdin: bytes = b"", limits: Limits | None = None, *, seed: int = 0) -> Execution:
        """Run a program to its end and return what happened; waits for a free slot. For code that is not async.

        ``seed`` is that of the program's ``random``. ``SandboxError`` when it could not be run on several slots.
        """
        if os.getpid() != self._owner:
            raise SandboxError("this sandbox was started by another process; make a pool of its own in each process")
        job = Job(program.encode("utf-8", "surrogatepass"), stdin, limits or Limits(), seed)
        for tries_left in reversed(range(_TRIES)):
            slot = self._free.get()
            try:
                if self._closed:
                    raise SandboxError("this sandbox is closed")
                return slot.execute(job)
            except SandboxError:
                if self._closed or not tries_left:
                    raise
            finally:
                self._free.put(slot)
        raise AssertionError("the last try returns or raises")

    async def run(self, program: str, stdin: bytes = b"", limits: Limits | None = None, *, seed: int = 0) -> Execution:
        """Run a program to its end and return what happened, as ``run_now``, without holding up the event loop."""
        work = functools.partial(self.run_now, program, stdin, limits, seed=seed)
        try:
            future = self._threads.submit(work)
        except RuntimeError as error:
            raise SandboxError("this sandbox is closed") from error
        return await asyncio.wrap_future(future)

    async def run_many(self, jobs: Sequence[tuple[str, bytes]], limits: Limits | None = None) -> list[Execution]:
        """Run (program, standard input) pairs and return what happened, in order."""
        return list(await asyncio.gather(*(self.run(program, stdin, limits) for program, stdin in jobs)))

    async def run_tests(
        self,
        program: str,
        inputs: Sequence[bytes],
        limits: Limits | None = None,
        *,
        passes: Callable[[int, Execution], bool] | None = None,
    ) -> list[Execution]:
        """Run one program on several inputs and return what happened, in order.

        With ``passes(index, execution)`` the list ends with the first input that does not pass; which one that is does
        not depend on the number of slots. What runs beside it is finished and left out.
        """
        done: dict[int, Execution] = {}
        numbers, first_failure = iter(range(len(inputs))), len(inputs)

        async def work() -> None:
            nonlocal first_failure
            for index in numbers:
                if index > first_failure:
                    return
                done[index] = await self.run(program, inputs[index], limits)
                if passes is not None and not passes(index, done[index]):
                    first_failure = min(first_failure, index)

        await asyncio.gather(*(work() for _ in range(min(self.slots, len(inputs)))))
        return [done[index] for index in range(min(first_failure + 1, len(inputs)))]

    # ---- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the programs that run, then end every process of this pool. Closing twice is the same as once."""
        if self._closed or os.getpid() != self._owner:
            return
        self._closed = True
        atexit.unregister(self.close)
        for slot in [self._free.get() for _ in self._all]:
            slot.stop()
            self._free.put(slot)  # whoever still waits gets it, and is told that the sandbox is closed
        self._threads.shutdown(wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tried(slot: Slot) -> str:
    """Start a slot and run the canaries; return what is wrong with it, nothing when all is well."""
    try:
        return "; ".join(canaries.escaped(lambda program, limits: slot.execute(Job(program.encode(), b"", limits, 0))))
    except SandboxError as error:
        return str(error)


def _layers(tier: Tier, proc: bool) -> tuple[str, ...]:
    """Return what a program of a tier is behind, in words."""
    spaces = ("namespaces (mount, pid, net, ipc, uts, cgroup)", "read-only root", "scratch directory in memory")
    own = ("own user id",) if os.getuid() == 0 else ()
    inner = ("no capabilities", "no_new_privs", f"Landlock {landlock.abi()}", "seccomp", "limits")
    return (*(spaces if tier == "A" else ()), *(() if proc or tier == "C" else ("no /proc",)), *own, *inner)


def _check_unsafe() -> None:
    """Raise ``ConfigError`` unless the environment asks for no walls as well."""
    if os.environ.get(UNSAFE) != "1":
        raise ConfigError(
            'sandbox.mode = "unsafe" runs model-written programs with all rights of this user. It must be asked for '
            f'twice: set the environment variable {UNSAFE}=1 as well, or use sandbox.mode = "auto"'
        )


def measure(pool: SandboxPool, seconds: float) -> tuple[float, float]:
    """Return how many trivial programs run in a second, one after the other: in a pool, and as a bare Python each."""
    bare = [sys.executable, "-I", "-c", _TRIVIAL]
    return (
        _rate(lambda: pool.run_now(_TRIVIAL), seconds),
        _rate(lambda: subprocess.run(bare, capture_output=True, check=True), seconds),
    )


def _rate(work: Callable[[], object], seconds: float) -> float:
    """Return how often a second some work is done."""
    count, began = 0, time.perf_counter()
    while (spent := time.perf_counter() - began) < seconds:
        work()
        count += 1
    return count / spent
