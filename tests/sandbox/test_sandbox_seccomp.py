"""The filter of system calls, run by a small machine for its instructions: both architectures, every number."""

from __future__ import annotations

import errno
import struct

import pytest

from coterie.sandbox import seccomp

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
PID = 4321
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def decide(machine: str, number: int, *args: int, architecture: int | None = None) -> int:
    """Return what the filter says to a call with some arguments."""
    code = seccomp.build(machine)
    for place in seccomp.places_of_pid(code):
        struct.pack_into("=I", code, place, PID)
    words = [*args, *[0] * (6 - len(args))]
    data = struct.pack("=IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *words)
    value, at = 0, 0
    while True:
        operation, yes, no, constant = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            (value,) = struct.unpack_from("=I", data, constant)
        elif operation == 0x54:
            value &= constant
        elif operation == 0x05:
            at += constant
        elif operation == 0x15:
            at += yes if value == constant else no
        elif operation == 0x35:
            at += yes if value >= constant else no
        else:
            assert operation == 0x06
            return int(constant)


@pytest.mark.parametrize(
    ("machine", "name", "number", "right"),
    [
        ("x86_64", "read", 0, ALLOW),
        ("x86_64", "execve", 59, EPERM),
        ("x86_64", "fork", 57, EPERM),
        ("x86_64", "socket", 41, EPERM),
        ("x86_64", "ptrace", 101, EPERM),
        ("x86_64", "sendmsg", 46, EPERM),
        ("x86_64", "sendfile", 40, EPERM),
        ("x86_64", "mincore", 27, EPERM),
        ("x86_64", "clone3", 435, ENOSYS),
        ("x86_64", "io_uring_setup", 425, ENOSYS),
        ("x86_64", "one that is not invented yet", 1000, ENOSYS),
        ("x86_64", "read of x32", 0x40000000, KILL),
        ("aarch64", "read", 63, ALLOW),
        ("aarch64", "openat", 56, ALLOW),
        ("aarch64", "exit_group", 94, ALLOW),
        ("aarch64", "execve", 221, EPERM),
        ("aarch64", "socket", 198, EPERM),
        ("aarch64", "ptrace", 117, EPERM),
        ("aarch64", "io_setup", 0, EPERM),
        ("aarch64", "clone3", 435, ENOSYS),
    ],
)
def test_calls_are_allowed_refused_or_unknown(machine: str, name: str, number: int, right: int) -> None:
    assert decide(machine, number) == right, name


@pytest.mark.parametrize(
    ("machine", "clone", "kill", "tgkill", "prlimit", "prctl", "ioctl", "fcntl", "socketpair", "sendto"),
    [("x86_64", 56, 62, 234, 302, 157, 16, 72, 53, 44), ("aarch64", 220, 129, 131, 261, 167, 29, 25, 199, 206)],
)
def test_some_calls_depend_on_their_arguments(
    machine: str, clone: int, kill: int, tgkill: int, prlimit: int, prctl: int, ioctl: int, fcntl: int, socketpair: int,
    sendto: int,
) -> None:  # fmt: skip
    thread = 0x3D0F00  # the flags of pthread_create
    cases = [
        (clone, (thread,), ALLOW),
        (clone, (17,), EPERM),  # SIGCHLD: a fork
        (clone, (0x4000 | 0x100 | 17,), EPERM),  # a vfork
        (clone, (thread | 0x10000000,), EPERM),  # with a user namespace
        (kill, (PID, 9), ALLOW),
        (kill, (PID + 1, 9), EPERM),
        (kill, (0, 9), EPERM),
        (kill, (2**64 - 1, 9), EPERM),
        (tgkill, (PID, 5, 6), ALLOW),
        (tgkill, (1, 1, 6), EPERM),
        (prlimit, (0,), ALLOW),
        (prlimit, (PID,), ALLOW),
        (prlimit, (1,), EPERM),
        (prctl, (15,), ALLOW),  # the name of a thread
        (prctl, (1,), EPERM),  # the signal at the parent's death
        (prctl, (4,), EPERM),
        (ioctl, (0, 0x5401), ALLOW),
        (ioctl, (0, 0x5412), EPERM),  # TIOCSTI
        (fcntl, (0, 3), ALLOW),
        (fcntl, (0, 8), EPERM),  # F_SETOWN
        (socketpair, (1, 1), ALLOW),
        (socketpair, (1, 1 | 0o2004000), ALLOW),  # close on exec, not blocking
        (socketpair, (1, 2), EPERM),
        (socketpair, (16, 1), EPERM),
        (sendto, (5, 1, 1, 0, 0, 0), ALLOW),
        (sendto, (5, 1, 1, 0x4000, 0, 0), ALLOW),
        (sendto, (5, 1, 1, 1, 0, 0), EPERM),  # MSG_OOB
        (sendto, (5, 1, 1, 0, 0x7F00, 9), EPERM),
        (sendto, (5, 1, 1, 0, 0x7F00000000, 9), EPERM),  # an address whose low half is 0
    ]
    assert [(call, args, decide(machine, call, *args)) for call, args, _ in cases] == cases


def test_calls_in_the_manner_of_another_architecture_kill() -> None:
    assert decide("x86_64", 0, architecture=0x40000003) == KILL
    assert decide("aarch64", 63, architecture=0x40000028) == KILL


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_tree_says_of_every_number_what_the_tables_say(machine: str) -> None:
    allowed = set(seccomp._numbers(seccomp._ALLOWED, machine).values())
    unknown = set(seccomp._numbers(seccomp._UNKNOWN, machine).values())
    judged = set(seccomp._numbers(seccomp._BY_ARGUMENT, machine).values())
    assert not allowed & unknown | allowed & judged | unknown & judged
    for number in sorted(set(range(480)) - judged):
        right = ALLOW if number in allowed else ENOSYS if number in unknown or number > 462 else EPERM
        assert decide(machine, number) == right, number


def test_an_architecture_without_a_table_is_refused() -> None:
    with pytest.raises(OSError, match=r"no table of system calls for 'riscv64'; known are \['aarch64', 'x86_64'\]"):
        seccomp.build("riscv64")
