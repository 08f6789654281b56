"""What this machine has left."""

from __future__ import annotations

import re
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes of main memory a process can still take, the limit of its container included.

    ``None`` where the system does not say: it says so on Linux.
    """
    if not meminfo.is_file():
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(encoding="ascii"), flags=re.MULTILINE)
    if match is None:
        return None
    free = int(match[1]) * 1024
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file():
        most = limit.read_text(encoding="ascii").strip()
        if most.isdecimal():
            free = min(free, int(most) - int(used.read_text(encoding="ascii")))
    return max(0, free)
