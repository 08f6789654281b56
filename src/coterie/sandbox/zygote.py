"""The process inside the walls: waits for jobs, forks one at a time, watches it, cleans up. Standard library only.

It is started by ``slot.Slot`` with a clean environment and is never a fork of the trainer, so nothing of the trainer is
in its memory. A job is a child of it: lowered limits, no capabilities, no_new_privs, Landlock, seccomp, then the
program as ``__main__``. When the control socket closes or the trainer is gone, the zygote dies, and the job with it.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import linecache
import math
import os
import random
import resource
import select
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass
from typing import Any, NoReturn

from coterie.sandbox import kernel, landlock, seccomp

SCRATCH = "/tmp"
SCRATCH_BYTES, SCRATCH_FILES = 16 * 2**20, 1024
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PROGRAM = "main.py"
_PRELOADED = (
    "bisect collections copy dataclasses datetime decimal enum fractions functools heapq itertools json math operator "
    "queue re statistics string textwrap tempfile time typing"
)
_STATUS_FD, _LIBRARY_FD, _CONTROL_FD, _TRAINER_FD = 3, 4, 10, 11
_OPEN_FILES, _STACK_BYTES = 64, 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Walls:
    """What every job is put behind."""

    rules: landlock.Ruleset
    filter: bytearray
    places: tuple[int, ...]
    library: bool
    scratch: str | None


@dataclass(frozen=True, slots=True)
class _Wire:
    """How the zygote hears of the trainer: jobs and end of file on the socket, its end on a pidfd of it."""

    control: socket.socket

    def poll(self) -> select.poll:
        """Return a poll that wakes up when the trainer says something or is gone."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(_TRAINER_FD, select.POLLIN)
        return poll

    def send(self, message: dict[str, Any]) -> None:
        """Tell the trainer."""
        self.control.send(json.dumps(message).encode())


def main() -> None:
    """Be the zygote that the first argument (JSON) describes, until the trainer is gone."""
    config = json.loads(sys.argv[1])
    wire = _Wire(_arrange_descriptors())
    for name in _PRELOADED.split():
        __import__(name)
    walls = _build_walls(config)
    for name in [name for name in sys.modules if name == "coterie" or name.startswith("coterie.")]:
        del sys.modules[name]
    # Frozen objects are not walked in jobs: their pages stay shared with the zygote.
    gc.collect()
    gc.freeze()
    wire.send({"ready": True})
    idle = wire.poll()
    while True:
        if _TRAINER_FD in [fd for fd, _ in idle.poll()]:
            return
        message, fds, _, _ = socket.recv_fds(wire.control, 65536, 4)
        if not message:
            return
        wire.send(_run(json.loads(message), fds, walls, wire))


def _arrange_descriptors() -> socket.socket:
    """Move what came as standard input and output, the socket and the trainer's pidfd; return the socket.

    The lowest numbers stay taken, so that nothing is ever opened on a number that a job's own descriptors will get.
    """
    os.dup2(0, _CONTROL_FD, inheritable=False)
    os.dup2(1, _TRAINER_FD, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, _STATUS_FD, _LIBRARY_FD):
        if fd != null:
            os.dup2(null, fd, inheritable=False)
    return socket.socket(fileno=_CONTROL_FD)


def _build_walls(config: dict[str, Any]) -> _Walls:
    """Do what needs privileges, give all of them up, and return what jobs are put behind."""
    uid, scratch, library = config["uid"], SCRATCH if config["scratch"] else None, config["library"]
    if config["core"] is not None:
        os.sched_setaffinity(0, {config["core"]})
    if library is not None:
        # By way of a descriptor a library is found wherever it lies, also below a folder that only root may enter.
        fd = os.open(library, os.O_PATH | os.O_DIRECTORY)
        os.dup2(fd, _LIBRARY_FD, inheritable=False)
        _move_library(library, f"/proc/self/fd/{_LIBRARY_FD}")
    if scratch is not None:
        kernel.mount_scratch(scratch, SCRATCH_BYTES, SCRATCH_FILES, os.getuid() if uid is None else uid)
    rules = landlock.ruleset(config["readable"], config["listed"], DEVICES, scratch)
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    kernel.drop_capabilities()
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    os.chdir(scratch or "/")
    code = seccomp.build()
    return _Walls(rules, code, seccomp.places_of_pid(code), library is not None, scratch)


def _move_library(old: str, new: str) -> None:
    """Have modules that are still to be imported looked for elsewhere, also those of packages already imported."""
    packages = [module.__path__ for module in list(sys.modules.values()) if "__path__" in vars(module)]
    for paths in (sys.path, *packages):
        if isinstance(paths, list):
            paths[:] = [path.replace(old, new) for path in paths]
    sys.path_importer_cache.clear()


def _run(job: dict[str, Any], fds: list[int], walls: _Walls, wire: _Wire) -> dict[str, Any]:
    """Run one job to its end and return how it ended; nothing of it is left when this returns."""
    began, zygote_pid = time.monotonic(), os.getpid()
    status_read, status_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become_job(job, fds, status_write, walls, zygote_pid)
    for fd in (status_write, *fds):
        os.close(fd)
    killed = _watch(pid, job, began, wire)
    _, status, usage = os.wait4(pid, 0)
    wall_s = time.monotonic() - began
    started = os.read(status_read, 1) == b"1"
    os.close(status_read)
    return {
        "started": started,
        "status": status,
        "killed": killed,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "wall_s": wall_s,
        "clean": walls.scratch is None or _wiped(walls.scratch),
    }


def _watch(pid: int, job: dict[str, Any], began: float, wire: _Wire) -> str:
    """Wait until a job has ended or must; return the limit it was killed at, or nothing."""
    pidfd, poll = os.pidfd_open(pid), wire.poll()
    poll.register(pidfd, select.POLLIN)
    clock, waited = (~pid << 3) | 2, 0.0  # the kernel's number for the processor time of a process
    try:
        while True:
            wall_left = job["wall_s"] + waited - (time.monotonic() - began)
            cpu_left = job["cpu_s"] - time.clock_gettime(clock)
            if cpu_left <= 0.0:
                return _kill(pid, "cpu")
            if wall_left <= 0.0:
                # Time in which the job could have run and got no core says nothing about the job.
                before, waited = waited, _waited_s(pid)
                if waited - before < 0.01:
                    return _kill(pid, "wall")
                wire.send({"waited_s": waited})
                continue
            ready = [fd for fd, _ in poll.poll(1000.0 * max(0.001, min(wall_left, cpu_left)))]
            if pidfd in ready:
                return ""
            if ready:  # the trainer sends nothing while a job runs: it is gone
                _kill(pid, "")
                os._exit(0)
    finally:
        os.close(pidfd)


def _kill(pid: int, why: str) -> str:
    os.kill(pid, signal.SIGKILL)
    return why


def _waited_s(pid: int) -> float:
    """Return how long a thread of a job was runnable without a core, the longest of all; 0 where no /proc says so."""
    longest = 0.0
    with contextlib.suppress(OSError):  # no /proc
        for thread in os.listdir(f"/proc/{pid}/task"):
            path = f"/proc/{pid}/task/{thread}/schedstat"
            # A thread may have ended since, and a kernel may not count.
            with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
                longest = max(longest, int(file.read().split()[1]) / 1e9)
    return longest


def _wiped(scratch: str) -> bool:
    """Empty the scratch directory; False where a job made something of it that cannot be removed plainly."""
    try:
        for entry in list(os.scandir(scratch)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    except (OSError, RecursionError):
        return False
    return True


# ---- the job ---------------------------------------------------------------------------------------------------------


def _become_job(job: dict[str, Any], fds: list[int], status_fd: int, walls: _Walls, zygote_pid: int) -> NoReturn:
    """Turn this fork of the zygote into the job and never come back."""
    try:
        program, stdin, stdout, stderr = fds
        source = os.pread(program, os.fstat(program).st_size, 0)
        os.setsid()
        for fd, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(fd, target)
        _set_limits(job)
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote_pid:
            os._exit(1)
        walls.rules.enforce()
        os.dup2(status_fd, _STATUS_FD, inheritable=False)
        os.closerange((_LIBRARY_FD if walls.library else _STATUS_FD) + 1, 2**20)
        seccomp.enforce(walls.filter, walls.places)
        os.write(_STATUS_FD, b"1")
        os.close(_STATUS_FD)
        _run_program(source, job["seed"])
    except OSError as error:
        os.write(2, f"{error}".encode())
    finally:
        os._exit(1)


def _set_limits(job: dict[str, Any]) -> None:
    """Lower what a process may use, past what the zygote watches for itself."""
    cpu_s = math.ceil(job["cpu_s"]) + 1
    stack = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = _STACK_BYTES if stack == resource.RLIM_INFINITY else min(_STACK_BYTES, stack)
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, job["address_bytes"]),
        (resource.RLIMIT_FSIZE, job["output_bytes"] + 1),  # the byte too many tells that there were too many
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_NPROC, job["num_threads"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 256),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_STACK, (soft, stack))


def _run_program(source: bytes, seed: int) -> None:
    """Run a program as ``python main.py`` would, and end this process with its exit code."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    random.seed(seed)
    main = types.ModuleType("__main__")
    main.__file__ = PROGRAM
    sys.modules["__main__"], sys.argv[:] = main, [PROGRAM]
    for name, fd, mode, errors in (
        ("stdin", 0, "r", "surrogateescape"),
        ("stdout", 1, "w", "surrogateescape"),
        ("stderr", 2, "w", "backslashreplace"),
    ):
        buffering = 1 if name == "stderr" else -1
        stream = open(fd, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        vars(sys)[name] = vars(sys)[f"__{name}__"] = stream
    sys.excepthook = _show
    lines = io.TextIOWrapper(io.BytesIO(source), encoding="utf-8", errors="replace").readlines()
    linecache.cache[PROGRAM] = (len(source), None, lines, PROGRAM)
    try:
        exec(compile(source, PROGRAM, "exec"), main.__dict__)
    finally:
        _leave(sys.exc_info()[1], main)


def _show(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
    """Print an exception with the program's own frames."""
    traceback.print_exception(kind, error, trace and trace.tb_next)


def _leave(error: BaseException | None, main: types.ModuleType) -> NoReturn:
    """End the process as the interpreter would, without the milliseconds of taking the interpreter down.

    Whatever fails here ends the process with 1: nothing of a job may return into the zygote's own loop.
    """
    code = 1
    try:
        if error is None:
            code = 0
        elif isinstance(error, SystemExit):
            code = _exit_code(error.code)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        del error
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        code = _flushed(code)
        main.__dict__.clear()  # files that the program left open are flushed when nothing holds them any more
        gc.collect()
    finally:
        os._exit(code)


def _exit_code(value: object) -> int:
    """Return the exit code of ``sys.exit(value)``."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    sys.stderr.write(f"{value}\n")
    return 1


def _flushed(code: int) -> int:
    """Flush standard output; the exit code is 120 where that fails, as the interpreter has it."""
    try:
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None:
                stream.flush()
    except (OSError, ValueError):
        return 120
    return code
