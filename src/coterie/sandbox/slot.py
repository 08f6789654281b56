"""The trainer's end of one zygote: start it, hand it a job, wait for the answer, kill it when none comes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

from coterie.errors import SandboxError
from coterie.sandbox.execution import Execution, Limits, Verdict
from coterie.sandbox.walls import ENVIRONMENT, Command

NUM_THREADS = 64
_START_S = 30.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Job:
    """One program with its input, limits and seed of ``random``."""

    program: bytes
    stdin: bytes
    limits: Limits
    seed: int


@dataclass(slots=True)
class _Zygote:
    """A started zygote: its process (or bubblewrap's), itself, the socket, where its own errors go."""

    process: subprocess.Popen[bytes]
    pid: int
    control: socket.socket
    errors: IO[bytes]
    base_bytes: int


class Slot:
    """One place where programs run, one after the other. For one thread at a time; the pool sees to that."""

    def __init__(self, command: Callable[[], Command], *, grace_s: float, shared_user: bool) -> None:
        """Start with ``command`` when first needed; ``grace_s`` past its wall limit, a silent zygote is given up.

        ``shared_user`` says that other processes of the same user count into the limit of threads.
        """
        self._command = command
        self._grace_s = grace_s
        self._shared_user = shared_user
        self._zygote: _Zygote | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the zygote, ``None`` while there is none."""
        return self._zygote.pid if self._zygote else None

    def execute(self, job: Job) -> Execution:
        """Run a job and return what happened; ``SandboxError``, and no zygote left, when that cannot be told."""
        execution = None
        try:
            execution = self._execute(job, self._zygote or self.start())
        except (OSError, ValueError) as error:
            raise SandboxError(f"the sandbox lost a job: {error}{self._trouble()}") from error
        finally:
            if execution is None:  # whatever came in between: an answer may still be on its way
                self.stop()
        return execution

    def start(self) -> _Zygote:
        """Start the zygote and wait until it is ready; ``SandboxError`` with its own words where it is not."""
        command = self._command()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = tempfile.TemporaryFile()  # noqa: SIM115
        info_read, info_write = os.pipe()
        trainer = os.pidfd_open(os.getpid())
        # The socket and the trainer's pidfd travel as standard input and output: no number has to be agreed on.
        inform = ["--info-fd", str(info_write)] if command.outer else []
        words = [*command.words[:1], *inform, *command.words[1:]]
        try:
            process = subprocess.Popen(
                words,
                stdin=theirs.fileno(),
                stdout=trainer,
                stderr=errors,
                env=ENVIRONMENT,
                cwd="/",
                pass_fds=(info_write,) if command.outer else (),
            )
        except OSError as error:
            ours.close()
            errors.close()
            os.close(info_read)
            raise SandboxError(f"cannot start {words[0]}: {error}") from error
        finally:
            theirs.close()
            os.close(trainer)
            os.close(info_write)
        with open(info_read, "rb", buffering=0) as info:
            pid = _inner_pid(info) if command.outer else process.pid
        zygote = self._zygote = _Zygote(process, pid, ours, errors, 0)
        try:
            self._receive(zygote, _START_S)
            with open(f"/proc/{pid}/statm", encoding="ascii") as file:
                zygote.base_bytes = int(file.read().split()[0]) * _PAGE
        except (OSError, ValueError) as error:
            trouble = self._trouble()
            self.stop()
            raise SandboxError(f"the sandbox did not start: {error}{trouble}") from error
        return zygote

    def stop(self) -> None:
        """Kill the zygote and everything in it, and wait until it is gone."""
        zygote, self._zygote = self._zygote, None
        if zygote is None:
            return
        with contextlib.suppress(ProcessLookupError):
            if zygote.pid:
                os.kill(zygote.pid, signal.SIGKILL)
        zygote.control.close()
        if not zygote.pid:
            zygote.process.kill()
        zygote.process.wait()  # bubblewrap ends with the zygote, and is the one to reap it
        zygote.errors.close()

    def _execute(self, job: Job, zygote: _Zygote) -> Execution:
        """Hand over a job and make an ``Execution`` of the answer."""
        limits = job.limits
        wall_s = limits.wall_limit_s
        request = {
            "cpu_s": limits.cpu_s,
            "wall_s": wall_s,
            "address_bytes": zygote.base_bytes + limits.memory_mb * 2**20,
            "output_bytes": limits.output_bytes,
            "num_threads": NUM_THREADS + (_threads_of_all() if self._shared_user else 0),
            "seed": job.seed,
        }
        with contextlib.ExitStack() as stack:
            fds = [_memory_file(stack, "program", job.program), _memory_file(stack, "stdin", job.stdin)]
            fds += [_memory_file(stack, name, None) for name in ("stdout", "stderr")]
            socket.send_fds(zygote.control, [json.dumps(request).encode()], fds)
            answer = self._receive(zygote, wall_s + self._grace_s)
            while "waited_s" in answer:
                answer = self._receive(zygote, wall_s + self._grace_s)
            stdout, stderr = (_content(fd, limits.output_bytes + 1) for fd in fds[2:])
        if not answer["started"]:
            raise OSError(f"a job was not started: {stderr.decode(errors='replace')}")
        if not answer["clean"]:
            self.stop()  # the scratch directory cannot be emptied: the next job gets another one
        return judge(answer, limits, stdout, stderr)

    def _receive(self, zygote: _Zygote, timeout_s: float) -> dict[str, Any]:
        """Return the next message of the zygote; ``OSError`` when it is gone or silent for too long."""
        poll = select.poll()
        poll.register(zygote.control, select.POLLIN)
        if not poll.poll(1000.0 * timeout_s):
            raise TimeoutError(f"no answer within {timeout_s:.1f} s")
        message = zygote.control.recv(65536)
        if not message:
            raise ConnectionResetError("its process has ended")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _trouble(self) -> str:
        """Return the last that the zygote, or bubblewrap, wrote of its own."""
        if self._zygote is None:
            return ""
        size = os.fstat(self._zygote.errors.fileno()).st_size
        text = os.pread(self._zygote.errors.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip()
        return f" ({text})" if text else ""


def _inner_pid(info: IO[bytes]) -> int:
    """Return the process id that bubblewrap tells of, 0 where it ends before it has started anything."""
    text, poll = b"", select.poll()
    poll.register(info, select.POLLIN)
    while b"}" not in text and poll.poll(1000.0 * _START_S):
        chunk = info.read(4096)
        if not chunk:
            return 0
        text += chunk
    return int(json.loads(text)["child-pid"]) if b"}" in text else 0


def _memory_file(stack: contextlib.ExitStack, name: str, content: bytes | None) -> int:
    """Return a file in memory, sealed against every change if it has content; closed with the stack."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | (0 if content is None else os.MFD_ALLOW_SEALING))
    stack.callback(os.close, fd)
    if content is not None:
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def _content(fd: int, most: int) -> bytes:
    """Return what a job wrote to a file in memory, at most ``most`` bytes."""
    chunks, at = [], 0
    while at < most and (chunk := os.pread(fd, most - at, at)):
        chunks.append(chunk)
        at += len(chunk)
    return b"".join(chunks)


def _threads_of_all() -> int:
    """Return how many threads there are on this host: the limit counts all that belong to one user."""
    with open("/proc/loadavg", encoding="ascii") as file:
        return int(file.read().split()[3].split("/")[1])


def judge(answer: Mapping[str, Any], limits: Limits, stdout: bytes, stderr: bytes) -> Execution:
    """Return the execution that an answer of the zygote tells of."""
    status = int(answer["status"])
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    verdict, hint = _verdict(answer, number, limits, stdout, stderr)
    return Execution(
        verdict=verdict,
        exit_code=os.WEXITSTATUS(status) if number is None else None,
        signal=number,
        stdout=stdout[: limits.output_bytes],
        stderr=stderr[: limits.output_bytes],
        cpu_s=float(answer["cpu_s"]),
        wall_s=float(answer["wall_s"]),
        hint=hint,
    )


def _verdict(
    answer: Mapping[str, Any], number: int | None, limits: Limits, stdout: bytes, stderr: bytes
) -> tuple[Verdict, str]:
    """Return how a program ended. Limits come first: a program that reached one did not end by itself."""
    if answer["cpu_s"] >= limits.cpu_s or answer["killed"] == "cpu" or number == signal.SIGXCPU:
        return Verdict.CPU_TIME, ""
    if answer["killed"] == "wall":
        return Verdict.WALL_TIME, ""
    if number == signal.SIGXFSZ or max(len(stdout), len(stderr)) > limits.output_bytes:
        return Verdict.OUTPUT_LIMIT, ""
    if number == signal.SIGSYS:
        return Verdict.REFUSED, "a system call of another architecture"
    if number is not None:
        return Verdict.SIGNAL, ""
    if answer["status"] == 0:
        return Verdict.OK, ""
    last = stderr.rstrip().rpartition(b"\n")[2].decode(errors="replace")
    if last.partition(":")[0].endswith("MemoryError") or last.startswith("OSError: [Errno 12] "):
        return Verdict.MEMORY, ""
    if last.startswith(("PermissionError: [Errno 1] ", "PermissionError: [Errno 13] ")):
        return Verdict.REFUSED, f"{last}: programs may not start others, use the network or open files outside"
    return Verdict.RUNTIME_ERROR, ""
