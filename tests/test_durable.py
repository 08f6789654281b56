"""Files that survive a crash, and the lock of a run folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from coterie.durable import RunLock, atomic_write_json, atomic_write_text, check_writable, json_text
from coterie.errors import ConfigError

HOLD = """
import sys
from pathlib import Path
from coterie.durable import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_floats_read_back_to_the_same_bits_and_what_json_lacks_becomes_null() -> None:
    values = [0.1, 1e-300, 2.0**-1074, 1 / 3, -0.0]
    back = json.loads(json_text(values))
    assert [value.hex() for value in back] == [value.hex() for value in values]
    odd = json_text({"a": float("nan"), "b": [float("inf"), 1], "c": {"d": (-float("inf"),)}})
    assert odd == '{"a": null, "b": [null, 1], "c": {"d": [null]}}'


def test_a_lone_surrogate_can_be_written(tmp_path: Path) -> None:
    atomic_write_json(tmp_path / "a.json", {"text": "\ud800"})
    assert json.loads((tmp_path / "a.json").read_text()) == {"text": "\ud800"}


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    atomic_write_text(path, "old")

    def refuse(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output"):
        atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reliability row 10."""
    check_writable(tmp_path / "new" / "run")
    assert list((tmp_path / "new" / "run").iterdir()) == []
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot write in it"):
        check_writable(tmp_path / "file" / "run")

    def refuse(descriptor: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(ConfigError, match="Read-only file system"):
        check_writable(tmp_path / "new" / "run")


def test_a_second_process_is_refused_and_told_who_holds_the_folder(tmp_path: Path) -> None:
    """Reliability row 11; a holder that is killed lets the folder go."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match=rf"in use by pid {child.pid} on "), RunLock(tmp_path):
            pass
        child.kill()
    with RunLock(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"pid {os.getpid()} on ")


def test_the_lock_also_excludes_a_second_holder_in_the_same_process_and_ends_with_its_block(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(ConfigError, match=f"pid {os.getpid()}"), RunLock(tmp_path):
            pass
        with pytest.raises(ConfigError, match="in use"), RunLock(tmp_path):
            pass
    with RunLock(tmp_path) as lock:
        assert lock.path == tmp_path / ".lock"
