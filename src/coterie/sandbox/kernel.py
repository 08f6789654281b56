"""Calls of the Linux kernel that the standard library lacks. Standard library only: the zygote imports this."""

from __future__ import annotations

import ctypes
import os
import struct

_libc = ctypes.CDLL(None, use_errno=True)
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_MS_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 38, 47


def check(result: int, what: str) -> int:
    """Return the result of a call; ``OSError`` with the name of the call where it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *args: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make a system call by number and return its result, -1 on failure (``ctypes.get_errno`` says why)."""
    words = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return int(_libc.syscall(ctypes.c_long(number), *words))


def prctl(option: int, *args: int) -> None:
    """Set an attribute of this process; ``OSError`` where the kernel refuses."""
    words = [ctypes.c_ulong(arg) for arg in (*args, 0, 0, 0, 0)[:4]]
    check(_libc.prctl(option, *words), f"prctl({option})")


def mount_scratch(path: str, size: int, files: int, uid: int) -> None:
    """Mount an empty directory in memory of at most ``size`` bytes and ``files`` files, owned by a user."""
    options = f"size={size},nr_inodes={files},mode=0700,uid={uid}"
    done = _libc.mount(b"scratch", path.encode(), b"tmpfs", ctypes.c_ulong(_MS_NOSUID_NODEV_NOEXEC), options.encode())
    check(done, f"mount of {path}")


def drop_capabilities() -> None:
    """Give up every capability, for good together with no_new_privs; ``OSError`` where any is left."""
    prctl(PR_CAP_AMBIENT, 4)  # PR_CAP_AMBIENT_CLEAR_ALL
    for capability in range(_LAST_CAPABILITY + 1):
        # Refused without CAP_SETPCAP or past the last capability: what is not held cannot be dropped, and is no harm.
        _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    check(_libc.capset(header, bytes(24)), "capset")
    left = ctypes.create_string_buffer(24)
    check(_libc.capget(header, left), "capget")
    if left.raw != bytes(24):
        raise OSError(f"capabilities are left after all were dropped: {left.raw.hex()}")
