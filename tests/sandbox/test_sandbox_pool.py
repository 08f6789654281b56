"""The pool: what one program leaves to the next, what a broken sandbox comes to, who may use it, what is refused."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.errors import ConfigError, SandboxError
from coterie.sandbox import canaries, landlock, shared, walls
from coterie.sandbox.execution import Execution, Limits, Verdict
from coterie.sandbox.pool import UNSAFE, SandboxPool
from coterie.sandbox.slot import Job, Slot, judge
from coterie.sandbox.walls import Command

ROOT = Path(__file__).parent.parent.parent
QUICK = Limits(cpu_s=2.0, wall_s=10.0, memory_mb=256)


def started(slots: int) -> Iterator[SandboxPool]:
    """Yield a pool with walls, closed afterwards; skip where this host allows none."""
    try:
        pool = SandboxPool(slots, grace_s=1.0)
    except ConfigError as error:
        pytest.skip(f"this host allows no sandbox: {error}")
    with pool:
        yield pool


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    yield from started(2)


@pytest.fixture(scope="module")
def single() -> Iterator[SandboxPool]:
    yield from started(1)


def zygote(pool: SandboxPool) -> int:
    """Return the process id of a pool's only zygote, started if need be."""
    assert pool.run_now("print(1)").stdout == b"1\n"
    (slot,) = pool._all
    assert slot.pid is not None
    return slot.pid


def descendants(pid: int) -> set[int]:
    """Return the processes below one, as /proc tells."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                parents[int(name)] = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def gone(pids: set[int], within_s: float = 20.0) -> bool:
    """Return whether processes are gone, or dead and only not collected yet, before a bound that catches hangs."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        alive = set()
        for pid in pids:
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except (FileNotFoundError, ProcessLookupError):
                continue
            alive |= {pid} - ({pid} if state == "Z" else set())
        if not alive:
            return True
        time.sleep(0.01)
    return False


# ---- one program and the next ----------------------------------------------------------------------------------------


def test_a_program_finds_nothing_of_the_one_before_it(single: SandboxPool) -> None:
    poison = (
        "import builtins, sys, math, random\nbuiltins.len = lambda x: 7\nmath.pi = 3\n"
        "sys.modules['json'] = None\nrandom.seed(5)"
    )
    assert single.run_now(poison).verdict == Verdict.OK
    look = "import json, math, random\nprint(len(''), math.pi > 3, random.random())"
    assert single.run_now(look).stdout == b"0 True 0.8444218515250481\n"  # random.seed(0)


@pytest.mark.parametrize(
    "mess",
    [
        "open('/tmp/a', 'w').write('x')",
        "import os\nos.makedirs('/tmp/a/b/c'); open('/tmp/a/b/c/d', 'w').close(); os.symlink('/', '/tmp/a/l')",
        "import os\nos.umask(0o777); os.mkdir('/tmp/closed')",
        "import os\nfor _ in range(900):\n    os.mkdir('d' * 200); os.chdir('d' * 200)",
    ],
)
def test_files_are_gone_after_the_program_that_wrote_them(mess: str, single: SandboxPool) -> None:
    if single.tier != "A":
        pytest.skip("programs have no place to write to")
    assert single.run_now(mess).verdict == Verdict.OK
    assert single.run_now("import os; print(os.listdir('/tmp'))").stdout == b"[]\n"


def test_the_same_program_draws_the_same_numbers_and_orders_of_sets(pool: SandboxPool) -> None:
    program = "import random; print(random.random(), list({'a', 'b', 'c', 'd'}), hash('x'))"
    first, again, other = (pool.run_now(program, seed=seed).stdout for seed in (1, 1, 2))
    assert first == again != other
    assert first.startswith(b"0.13436424411240122 ")  # random.seed(1)


def test_a_secret_of_the_trainer_is_seen_by_no_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COTERIE_TOKEN", "hunter2")
    (tmp_path / "expected.txt").write_text("hunter2")
    tmp_path.chmod(0o755)
    program = (
        "import os\nplaces = ['/proc/self/environ', '/proc/1/environ', f'/proc/{os.getppid()}/environ', "
        f"{str(tmp_path / 'expected.txt')!r}, '../../expected.txt', os.path.expanduser('~/.ssh/id_rsa')]\n"
        "print(os.environ)\nfor place in places:\n    try: print(open(place).read())\n    except OSError: pass"
    )
    with SandboxPool(1) as pool:
        execution = pool.run_now(program)
    assert execution.verdict == Verdict.OK
    assert b"hunter2" not in execution.stdout + execution.stderr


def test_a_server_on_this_host_is_not_reached(pool: SandboxPool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        execution = pool.run_now(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2); print('in')")
    assert (execution.verdict, execution.stdout) == (Verdict.REFUSED, b"")
    assert "network" in execution.hint


# ---- several at once -------------------------------------------------------------------------------------------------


def test_threads_and_event_loops_share_a_pool(pool: SandboxPool) -> None:
    results: dict[int, list[bytes]] = {}

    async def several(number: int) -> list[Execution]:
        return await pool.run_many([(f"print({number}, input())", f"{i}".encode()) for i in range(4)], QUICK)

    def work(number: int) -> None:
        results[number] = [execution.stdout for execution in asyncio.run(several(number))]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [f"{n} {i}\n".encode() for i in range(4)] for n in range(3)}


def test_tests_end_with_the_first_that_fails_whatever_the_number_of_slots(pool: SandboxPool) -> None:
    # Tests 2 and 3 fail, and 3 is done long before 2.
    program = "import time\nn = int(input())\nif n == 2: time.sleep(0.3)\nprint(n if n < 2 else 'wrong')"
    inputs = [str(n).encode() for n in range(6)]
    passes = lambda index, execution: execution.stdout == f"{index}\n".encode()  # noqa: E731
    done = asyncio.run(pool.run_tests(program, inputs, QUICK, passes=passes))
    assert [execution.stdout for execution in done] == [b"0\n", b"1\n", b"wrong\n"]
    assert len(asyncio.run(pool.run_tests(program, inputs, QUICK))) == 6


def test_a_program_that_nobody_waits_for_any_more_gives_its_slot_back(single: SandboxPool) -> None:
    async def give_up() -> None:
        task = asyncio.create_task(single.run("import time; time.sleep(0.3)", limits=QUICK))
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert single.run_now("print(1)").stdout == b"1\n"


def test_nothing_is_left_open_or_unburied(single: SandboxPool) -> None:
    daemon = "import os, time\ntry:\n    if os.fork() == 0: os.setsid(); time.sleep(60)\nexcept OSError: pass"
    single.run_now(daemon)
    gc.collect()
    before, processes = set(os.listdir("/proc/self/fd")), descendants(os.getpid())
    for _ in range(20):
        assert single.run_now(daemon).verdict == Verdict.OK
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert descendants(os.getpid()) == processes


# ---- a sandbox that breaks -------------------------------------------------------------------------------------------


def test_a_zygote_that_was_killed_is_replaced(single: SandboxPool) -> None:
    first = zygote(single)
    os.kill(first, signal.SIGKILL)
    assert single.run_now("print(1)").stdout == b"1\n"
    assert zygote(single) != first


def test_a_zygote_that_is_frozen_is_given_up_after_the_grace_and_replaced(single: SandboxPool) -> None:
    first = zygote(single)
    os.kill(first, signal.SIGSTOP)
    execution = single.run_now("print(1)", limits=Limits(cpu_s=1.0, wall_s=0.2))
    assert (execution.verdict, execution.stdout) == (Verdict.OK, b"1\n")
    assert zygote(single) != first
    assert gone({first})


def test_a_job_dies_with_its_zygote(single: SandboxPool) -> None:
    thread = threading.Thread(target=lambda: single.run_now("import time; time.sleep(1.5)", limits=QUICK))
    first = zygote(single)
    thread.start()
    deadline = time.monotonic() + 20.0
    while not (jobs := descendants(first)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert jobs
    os.kill(first, signal.SIGKILL)
    assert gone(jobs)
    thread.join()


def test_a_sandbox_that_does_not_start_is_an_error_and_never_a_verdict() -> None:
    slot = Slot(lambda: Command(("sh", "-c", "echo no room >&2; exit 1"), outer=False), grace_s=1.0, shared_user=False)
    with pytest.raises(SandboxError, match=r"did not start: .* \(no room\)"):
        slot.execute(Job(b"", b"", Limits(), 0))
    slot = Slot(lambda: Command(("/no/such/bwrap",), outer=True), grace_s=1.0, shared_user=False)
    with pytest.raises(SandboxError, match="cannot start /no/such/bwrap"):
        slot.execute(Job(b"", b"", Limits(), 0))


def test_what_fails_on_every_slot_is_raised_after_three_tries(
    single: SandboxPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (slot,) = single._all
    slot.stop()
    starts = []

    def command() -> Command:
        starts.append(1)
        return Command(("false",), outer=False)

    assert isinstance(slot, Slot)
    monkeypatch.setattr(slot, "_command", command)
    with pytest.raises(SandboxError, match="did not start"):
        single.run_now("print(1)")
    assert len(starts) == 3


TRAINER = """
import os, sys, threading, time
from coterie.sandbox.execution import Limits
from coterie.sandbox.pool import SandboxPool
pool = SandboxPool(2, tier=sys.argv[1])
for _ in range(2):
    threading.Thread(target=pool.run_now, args=("import time; time.sleep(600)",), daemon=True).start()
while not all(slot.pid for slot in pool._all):
    time.sleep(0.01)
if os.fork() == 0:
    time.sleep(20)  # a child that holds the trainer's end of every socket open
    os._exit(0)
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("tier", ["A", "C"])
def test_nothing_outlives_a_trainer_that_is_killed(tier: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    trainer = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", TRAINER, tier], stdout=subprocess.PIPE, env=environment, text=True
    )
    assert trainer.stdout is not None
    if not trainer.stdout.readline():
        trainer.wait()
        pytest.skip(f"this host does not allow tier {tier}")
    # Two zygotes with a job each, and, in tier A, bubblewrap's monitor of each.
    expected = 1 + 2 * (3 if tier == "A" else 2)
    deadline = time.monotonic() + 20.0
    while len(below := descendants(trainer.pid)) < expected and time.monotonic() < deadline:
        time.sleep(0.01)
    (child,) = [pid for pid in below if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(f"{tier}\0".encode())]
    trainer.kill()
    trainer.wait()
    try:
        assert gone(below - {child})
    finally:
        os.kill(child, signal.SIGKILL)
        trainer.stdout.close()


# ---- who may, and what is refused ------------------------------------------------------------------------------------


def test_a_closed_pool_and_one_of_another_process_run_nothing() -> None:
    others = descendants(os.getpid())
    pool = SandboxPool(1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            pool.run_now("print(1)")
        except SandboxError as error:
            code = 0 if "another process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    processes = descendants(os.getpid()) - others
    assert processes
    pool.close()
    pool.close()
    assert gone(processes)
    with pytest.raises(SandboxError, match="closed"):
        pool.run_now("print(1)")
    with pytest.raises(SandboxError, match="closed"):
        asyncio.run(pool.run("print(1)"))


def test_without_namespaces_landlock_and_seccomp_do_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise SandboxError("no bubblewrap")

    monkeypatch.setattr(walls, "find_bwrap", none)
    if landlock.abi() < landlock.LEAST_ABI:
        pytest.skip("this kernel has no Landlock")
    with SandboxPool(1) as pool:
        assert pool.tier == "C"
        assert pool.run_now("print(1)").stdout == b"1\n"


def test_a_host_without_any_walls_is_refused_with_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise SandboxError("no bubblewrap here")

    monkeypatch.setattr(walls, "find_bwrap", none)
    monkeypatch.setattr(landlock, "abi", lambda: 2)
    with pytest.raises(ConfigError) as caught:
        SandboxPool(1)
    for words in ("no bubblewrap here", "Landlock 2, needed is 3", "user namespaces", UNSAFE):
        assert words in str(caught.value)


def test_a_canary_that_gets_out_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    leak = canaries.Canary("print a word", "print('OUT')")
    monkeypatch.setattr(canaries, "canaries", lambda *_: (leak,))
    before = descendants(os.getpid())
    with pytest.raises(ConfigError, match=r"tier A: print a word: ok.*tier C: print a word: ok"):
        SandboxPool(1)
    assert gone(descendants(os.getpid()) - before)


def test_every_canary_is_caught_where_there_are_no_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canaries can fail: without walls most of them get through."""
    monkeypatch.setenv(UNSAFE, "1")
    monkeypatch.setenv("COTERIE_PLANTED", "1")
    with SandboxPool(1, mode="unsafe") as pool:
        escaped = {
            text.partition(":")[0] for text in canaries.escaped(lambda p, limits: pool.run_now(p, limits=limits))
        }
    assert escaped >= {
        "read /etc/passwd",
        "read a file of the trainer",
        "environment",
        "unix socket",
        "fork",
        "start a shell",
        "signal the trainer",
        "signal the parent",
        "write outside",
    }


def test_no_walls_are_asked_for_twice_and_stamped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(UNSAFE, raising=False)
    with pytest.raises(ConfigError, match=f"twice: set the environment variable {UNSAFE}=1"):
        SandboxPool(1, mode="unsafe")
    monkeypatch.setenv(UNSAFE, "1")
    with SandboxPool(1, mode="unsafe") as pool:
        assert pool.tier == "unsafe"
        assert pool.run_now("print(input())", b"x\n").stdout == b"x\n"
        assert pool.run_now("1 / 0").verdict == Verdict.RUNTIME_ERROR
        assert pool.run_now("import time; time.sleep(60)", limits=Limits(wall_s=0.3)).verdict == Verdict.WALL_TIME
        long = pool.run_now("print('x' * 100)", limits=Limits(output_bytes=10))
        assert (long.verdict, long.stdout) == (Verdict.OUTPUT_LIMIT, b"x" * 10)


def test_other_systems_than_linux_are_told_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux, this is darwin.*unsafe"):
        SandboxPool(1)


def test_a_process_has_one_shared_pool_which_follows_its_settings() -> None:
    shared.configure(shared.SandboxSettings(slots=2))  # closes what ran with other settings
    shared.configure(shared.SandboxSettings())
    assert shared.started_tier() is None
    shared.configure(shared.SandboxSettings(slots=1))
    try:
        pool = shared.shared_pool()
        assert shared.shared_pool() is pool
        assert (pool.slots, shared.started_tier()) == (1, pool.tier)
        shared.configure(shared.SandboxSettings(slots=1))
        assert shared.shared_pool() is pool
    finally:
        shared.configure(shared.SandboxSettings())
    assert not pool.usable
    assert shared.started_tier() is None


# ---- verdicts --------------------------------------------------------------------------------------------------------

LIMITS = Limits(cpu_s=1.0, output_bytes=4)


@pytest.mark.parametrize(
    ("answer", "stdout", "stderr", "verdict"),
    [
        ({}, b"ok", b"", Verdict.OK),
        ({"cpu_s": 1.0}, b"ok", b"", Verdict.CPU_TIME),  # as much as allowed is used up, however it ended
        ({"cpu_s": 0.999}, b"ok", b"", Verdict.OK),
        ({"status": 9, "killed": "wall"}, b"", b"", Verdict.WALL_TIME),
        ({"status": 9, "killed": "cpu"}, b"", b"", Verdict.CPU_TIME),
        ({"status": 9}, b"", b"", Verdict.SIGNAL),
        ({"status": 31}, b"", b"", Verdict.REFUSED),
        ({}, b"1234", b"", Verdict.OK),
        ({}, b"12345", b"", Verdict.OUTPUT_LIMIT),
        ({"status": 3 << 8}, b"", b"", Verdict.RUNTIME_ERROR),
        ({"status": 1 << 8}, b"", b"a\nMemoryError", Verdict.MEMORY),
        ({"status": 1 << 8}, b"", b"MemoryError\nx", Verdict.RUNTIME_ERROR),
    ],
)
def test_verdicts_follow_from_how_a_program_ended(
    answer: dict[str, object], stdout: bytes, stderr: bytes, verdict: Verdict
) -> None:
    told = {"status": 0, "killed": "", "cpu_s": 0.1, "wall_s": 0.2, **answer}
    limits = LIMITS if not stderr else Limits(cpu_s=1.0)
    assert judge(told, limits, stdout, stderr).verdict == verdict
