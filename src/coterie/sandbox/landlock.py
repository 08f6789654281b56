"""Landlock: what a process may open, from now on and for good. Standard library only: the zygote imports this."""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from coterie.sandbox import kernel

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
_MAKE_CHAR, _MAKE_SOCK, _MAKE_BLOCK = 1 << 6, 1 << 9, 1 << 11
_TRUNCATE = 1 << 14
_OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE
LEAST_ABI = 3
"""Before it (Linux 6.2) a file that may not be written could still be cut to nothing."""


@dataclass(frozen=True, slots=True)
class Ruleset:
    """An open ruleset of the kernel: what is allowed below some paths, all else is refused."""

    fd: int
    handled: int

    def allow(self, path: str, access: int) -> None:
        """Allow ``access`` for a file, or for everything below a directory; a path that is not there is left out."""
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return
        try:
            if not stat.S_ISDIR(os.fstat(fd).st_mode):
                access &= _OF_FILES
            rule = struct.pack("=Qi", access & self.handled, fd)
            kernel.check(kernel.syscall(ADD_RULE, self.fd, 1, rule, 0), f"landlock_add_rule of {path}")
        finally:
            os.close(fd)

    def enforce(self) -> None:
        """Hold this process, and what it starts, to the rules; no_new_privs must be set."""
        kernel.check(kernel.syscall(RESTRICT_SELF, self.fd, 0), "landlock_restrict_self")


def abi() -> int:
    """Return the version of Landlock that the kernel offers; 0 where it has none."""
    return max(0, kernel.syscall(CREATE_RULESET, None, 0, 1))


def ruleset(readable: Iterable[str], listed: Iterable[str], devices: Iterable[str], scratch: str | None) -> Ruleset:
    """Return the rules of a job; needs Landlock of version 1 or later.

    ``readable`` may be read with all below, ``listed`` are directories whose names may be listed with those below,
    ``devices`` may be read and written, ``scratch`` is free but for devices, sockets and programs.
    """
    version = abi()
    # Every right that a version knows is handled, so what no rule allows is refused.
    handled = (1 << (13 + (version >= 2) + (version >= 3) + (version >= 5))) - 1
    attributes = struct.pack("=QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    rules = Ruleset(kernel.check(kernel.syscall(CREATE_RULESET, buffer, size, 0), "landlock_create_ruleset"), handled)
    for path in readable:
        rules.allow(path, READ_FILE | READ_DIR)
    for path in listed:
        rules.allow(path, READ_DIR)
    for path in devices:
        rules.allow(path, READ_FILE | WRITE_FILE | _TRUNCATE)
    if scratch is not None:
        rules.allow(scratch, handled & ~(EXECUTE | _MAKE_CHAR | _MAKE_SOCK | _MAKE_BLOCK))
    return rules
