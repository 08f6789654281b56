"""Files that survive a crash: strict JSON, written whole or not at all, and folders that can be relied on."""

from __future__ import annotations

import fcntl
import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from coterie.errors import ConfigError
from coterie.types import Json

LOCK_NAME = ".lock"


def finite(value: Json) -> Json:
    """Return the value with NaN and infinities as ``None``: JSON has no word for them and most readers refuse them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value


def json_text(value: Json, *, indent: int | None = None) -> str:
    """Return strict JSON: NaN and infinities as null, floats in the shortest form that reads back to the same bits.

    Only ASCII is written, so a lone surrogate in a model's text cannot break the file.
    """
    return json.dumps(finite(value), indent=indent, allow_nan=False)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a file so that, after any crash, it holds either what it held before or all of ``text``."""
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def atomic_write_json(path: Path, value: Json) -> None:
    """Write indented JSON as ``atomic_write_text`` does."""
    atomic_write_text(path, json_text(value, indent=2) + "\n")


def sync_file(path: Path) -> None:
    """Return when the file's bytes are on the disk; ``OSError`` where they cannot be."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Return when the folder's names (creations, renames, removals) are on the disk."""
    sync_file(path)


def check_writable(run_dir: Path) -> None:
    """Make the run folder and prove that files can be written, synced and renamed in it; ``ConfigError`` if not."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe-{os.getpid()}"
        atomic_write_text(probe, "writable\n")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"run folder {run_dir}: cannot write in it ({error}). Expected a folder this user may write to, with "
            "space left; choose another one or free some space"
        ) from error


class RunLock:
    """Holds a run folder for one process, as a context manager; a second one is refused at once, never made to wait.

    The lock is the kernel's (``flock``): it ends with the process, however that dies. The file's text (pid and host)
    only serves the message of the refusal.
    """

    def __init__(self, run_dir: Path) -> None:
        """Name the folder; it is locked by ``__enter__``."""
        self.path = run_dir / LOCK_NAME
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take the lock; ``ConfigError`` names the holder where there is one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "a process that left no name"
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise ConfigError(f"run folder {self.path.parent}: cannot be locked ({error})") from error
            raise ConfigError(
                f"run folder {self.path.parent} is in use by {holder}: one run may write to it at a time. Wait for "
                "that run, stop it, or choose another folder"
            ) from error
        self._descriptor = descriptor
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the folder go; the file stays, since removing it would race with the next holder."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
