"""Which code made a result: the package's version and, in a git checkout of it, the commit."""

from __future__ import annotations

import importlib.metadata
import subprocess
from functools import lru_cache
from pathlib import Path

from coterie.types import Json

_GIT_S = 10.0


@lru_cache(maxsize=1)
def code_version() -> dict[str, Json]:
    """Return ``version``, ``commit`` and ``changed``: whether tracked files differ from that commit.

    Commit and ``changed`` are ``None`` where this package is not part of a git checkout, or there is no git.
    """
    version: Json = importlib.metadata.version("coterie")
    here = Path(__file__).resolve()
    # A virtual environment may lie inside the checkout of something else: this very file must be a tracked one.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return {"version": version, "commit": None, "changed": None}
    status = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return {
        "version": version,
        "commit": _git(here.parent, "rev-parse", "HEAD"),
        "changed": None if status is None else bool(status),
    }


def _git(folder: Path, *words: str) -> str | None:
    """Return what git says, ``None`` where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=_GIT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
