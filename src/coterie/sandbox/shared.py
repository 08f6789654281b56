"""The one sandbox of this process: settings first, started when a program is first run, closed at exit."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal

from coterie.sandbox.pool import SandboxPool


@dataclass(frozen=True, slots=True)
class SandboxSettings:
    """How the sandbox of this process is started: ``slots`` (``None``: one per core) and ``mode``."""

    slots: int | None = None
    mode: Literal["auto", "unsafe"] = "auto"


_lock = threading.Lock()
_settings = SandboxSettings()
_pool: SandboxPool | None = None


def configure(settings: SandboxSettings) -> None:
    """Set how the sandbox is started from now on; one that runs with other settings is closed."""
    global _settings, _pool
    with _lock:
        if settings != _settings and _pool is not None:
            _pool.close()
            _pool = None
        _settings = settings


def shared_pool() -> SandboxPool:
    """Return the sandbox of this process, started by the first call; ``ConfigError`` where none holds on this host."""
    global _pool
    with _lock:
        if _pool is None or not _pool.usable:
            _pool = SandboxPool(_settings.slots, mode=_settings.mode)
        return _pool


def started_tier() -> str | None:
    """Return the tier of the sandbox if it was started, else ``None``: what a run's summary says of it."""
    return None if _pool is None else _pool.tier
