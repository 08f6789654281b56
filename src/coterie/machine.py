"""What this machine has, what this process takes of its memory, and how it gives back what it does not use."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_STATUS = Path("/proc/self/status")
_CPUINFO = Path("/proc/cpuinfo")
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""What /proc/cpuinfo calls instructions that multiply bfloat16, on x86 and on ARM."""
_KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}
"""Of oneDNN, and of PyTorch before it; 1024 each by default. A pass over a micro-batch needs some twenty."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # as malloc.h numbers them
_KEPT = 2**30
"""Bytes. Smaller allocations come from the heap, and so much may be free at its top."""


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Return the bytes of main memory a process can still take, the limit of its container included.

    ``None`` where the system does not say: it says so on Linux.
    """
    free = _entry(meminfo, "MemAvailable")
    if free is None:
        return None
    limit, used = cgroup / "memory.max", cgroup / "memory.current"
    if limit.is_file() and used.is_file():
        most = limit.read_text(encoding="ascii").strip()
        if most.isdecimal():
            free = min(free, int(most) - int(used.read_text(encoding="ascii")))
    return max(0, free)


def resident_memory(status: Path = _STATUS) -> int | None:
    """Return the bytes of main memory that this process takes now; ``None`` where the system does not say."""
    return _entry(status, "VmRSS")


def peak_memory(status: Path = _STATUS) -> int | None:
    """Return the most bytes of main memory that this process has taken so far; ``None`` where it is not said."""
    return _entry(status, "VmHWM")


def multiplies_bfloat16(cpuinfo: Path = _CPUINFO) -> bool:
    """Return whether the processor has instructions for products of bfloat16, as far as the system says.

    Without them a product takes as long as fifty in float32, a large one as a hundred and more.
    """
    if not cpuinfo.is_file():
        return False
    text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    flags = re.findall(r"^(?:flags|Features)\s*:(.*)$", text, flags=re.MULTILINE)
    return any(_BFLOAT16 & set(line.split()) for line in flags)


def folder_of(package: str) -> Path | None:
    """Return the folder of an installed package; ``None`` where there is none.

    A folder of that name which is no package does not count: Python would import it, empty, from wherever it stands.
    """
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def keep_freed_memory() -> None:
    """Let the process keep what it frees for the tensors to come, where the C library can be told to (glibc).

    Otherwise every tensor above 32 MB, and the top of the heap, comes from the system anew: pages that it zeroes first
    were a sixth of an update of SmolLM2. ``release_memory`` gives it back between phases.
    """
    set_option = _of_libc("mallopt")
    if set_option is not None:
        for option in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            set_option(option, _KEPT)


def release_memory() -> None:
    """Give freed memory back to the system, where the C library can be told to (glibc).

    Freed tensors leave holes in its heap that it keeps, and that the next phase, with tensors of other sizes, does not
    fit into.
    """
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def _of_libc(name: str) -> Callable[..., int] | None:
    """Return a function of the C library; ``None`` on another system, or where the library has none of this name."""
    if sys.platform != "linux":
        return None
    try:
        function: Callable[..., int] = ctypes.CDLL(None)[name]
    except AttributeError:  # another C library than glibc
        return None
    return function


def limit_kernel_caches() -> None:
    """Let torch, when it is loaded, keep fewer kernels, unless the environment already says how many.

    On a CPU a matrix product in bfloat16 makes a kernel for every shape, about half a megabyte each. Rows of every step
    have other lengths, so that kept ones are of no use later, and a run would grow until a thousand are kept twice.
    """
    for name, count in _KERNEL_CACHES.items():
        os.environ.setdefault(name, count)


def _entry(path: Path, name: str) -> int | None:
    """Return an entry of a file of /proc, in bytes."""
    if not path.is_file():
        return None
    match = re.search(rf"^{name}:\s+(\d+) kB$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return None if match is None else int(match[1]) * 1024
