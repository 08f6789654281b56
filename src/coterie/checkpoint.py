"""Checkpoints: written whole or not at all, verified before use, cut journals back to where they were written.

A checkpoint is a folder ``checkpoints/step_00000010`` of safetensors and JSON files (no pickle) with a manifest that
holds the size and SHA-256 of every file, the byte length of the run's journals, and a checksum of itself::

    .tmp-step_00000010-PID/ --write--> fsync files --> MANIFEST.json --> fsync folder
        --rename--> step_00000010/ --> fsync parent --> prune (rename, then delete)

A crash at any of these points leaves the older checkpoints as they were.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from coterie.durable import sync_folder
from coterie.errors import CheckpointError, ConfigError
from coterie.faults import fault_point
from coterie.manifest import MANIFEST, NewerSchemaError, file_size, looks_whole, read_checkpoint, seal
from coterie.manifest import Checkpoint as Checkpoint
from coterie.types import Json

BEST = "best"
_STEP = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.(tmp|old)-(.+)-(\d+)")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


class OnEvent(Protocol):
    """Where something worth recording is told; ``Recorder.event`` is one."""

    def __call__(self, kind: str, /, **fields: Json) -> None:
        """Record one event."""
        ...


def truncate_journals(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Cut every journal back to its length at the checkpoint, so that the steps to be repeated are written once.

    Nothing is cut when a journal is shorter than recorded (``CheckpointError``): it is not this run's, or lost rows.
    """
    sizes = {}
    for name, length in checkpoint.journals.items():
        path = run_dir / name
        if not path.resolve().is_relative_to(run_dir.resolve()):
            raise CheckpointError(
                f"{checkpoint.path / MANIFEST}: journal {name!r} lies outside the run folder {run_dir}"
            )
        sizes[path] = file_size(path) if path.exists() else 0
        if sizes[path] < length:
            raise CheckpointError(
                f"{path} has {sizes[path]} bytes, but had {length} when checkpoint {checkpoint.path.name} was written: "
                "rows were lost or the file is of another run. Put the file back, or start in another run folder"
            )
    for path, size in sizes.items():
        length = checkpoint.journals[str(path.relative_to(run_dir))]
        if size > length:
            with path.open("r+b") as file:
                file.truncate(length)
                file.flush()
                os.fsync(file.fileno())


class CheckpointStore:
    """The checkpoints of one run folder, used by the one process that holds its ``RunLock``."""

    def __init__(self, run_dir: Path, keep: int = 2) -> None:
        """Keep the newest ``keep`` checkpoints (and the best one) under ``run_dir/checkpoints``."""
        if keep < 1:
            raise ConfigError(f"checkpoints to keep: {keep}, expected at least 1 (2 survives a damaged newest one)")
        self.run_dir = run_dir
        self.folder = run_dir / "checkpoints"
        self.keep = keep

    def save(
        self,
        step: int,
        write: Callable[[Path], None],
        journals: Sequence[Path] = (),
        meta: Mapping[str, Json] | None = None,
    ) -> Path:
        """Return the folder of a complete checkpoint of ``step``; afterwards older ones beyond ``keep`` are gone.

        ``write(folder)`` puts safetensors and JSON files into an empty folder; on a full disk it is called a second
        time after pruning. A whole checkpoint of the same step is left as it is. Raises ``CheckpointError`` where the
        disk refuses; the older checkpoints are untouched then.
        """
        target = self.folder / f"step_{step:08d}"
        if target.exists():
            try:
                return read_checkpoint(target).path
            except CheckpointError as error:
                self._quarantine(target, error, None)
        try:
            temporary = self._build(target.name, step, write, journals, meta or {})
        except CheckpointError as error:
            cause = error.__cause__
            if not (isinstance(cause, OSError) and cause.errno in _FULL and self._prune(max(1, self.keep - 1))):
                raise
            _log.warning("%s; trying once more after removing older checkpoints", error)
            temporary = self._build(target.name, step, write, journals, meta or {})
        fault_point("ckpt-before-rename", step)
        temporary.rename(target)
        sync_folder(self.folder)
        fault_point("ckpt-after-rename", step)
        fault_point("ckpt-before-prune", step)
        self._prune(self.keep)
        return target

    def save_best(self, step: int, write: Callable[[Path], None], meta: Mapping[str, Json] | None = None) -> Path:
        """Return the folder ``checkpoints/best``, now holding what ``write`` wrote; pruning never touches it."""
        target = self.folder / BEST
        temporary = self._build(BEST, step, write, (), meta or {})
        aside = self.folder / f".old-{BEST}-{os.getpid()}"
        if target.exists():
            shutil.rmtree(aside, ignore_errors=True)
            target.rename(aside)
            fault_point("best-between-renames", step)
        temporary.rename(target)
        sync_folder(self.folder)
        shutil.rmtree(aside, ignore_errors=True)
        return target

    def latest(self, on_event: OnEvent | None = None) -> Checkpoint | None:
        """Return the newest checkpoint that verifies, or ``None`` where none was ever written.

        Damaged ones are renamed to ``.bad-...`` and told once, as the event ``checkpoint_quarantined``. Raises
        ``CheckpointError`` when there were checkpoints and none is usable: a run never starts over by itself.
        """
        self._clean()
        for path in reversed(self._steps()):
            try:
                return read_checkpoint(path)
            except NewerSchemaError:
                raise
            except CheckpointError as error:
                self._quarantine(path, error, on_event)
        bad = sorted(path.name for path in self.folder.glob(".bad-step_*"))
        if bad:
            raise CheckpointError(
                f"{self.folder}: no usable checkpoint, only damaged ones: {bad}. Restore one from a copy (rename it "
                "back to step_N), or start over in another run folder"
            )
        return None

    def best(self, on_event: OnEvent | None = None) -> Checkpoint | None:
        """Return the best checkpoint, or ``None`` where there is none; a damaged one is quarantined and told."""
        self._clean()
        path = self.folder / BEST
        if not path.is_dir():
            return None
        try:
            return read_checkpoint(path)
        except NewerSchemaError:
            raise
        except CheckpointError as error:
            self._quarantine(path, error, on_event)
            return None

    # ---- machinery below ----------------------------------------------------------------------------------------

    def _build(
        self, name: str, step: int, write: Callable[[Path], None], journals: Sequence[Path], meta: Mapping[str, Json]
    ) -> Path:
        """Return a temporary folder that is complete and on the disk; whatever goes wrong, it is removed again."""
        temporary = self.folder / f".tmp-{name}-{os.getpid()}"
        done = False
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            write(temporary)
            fault_point("ckpt-tmp", step)
            seal(temporary, step, meta, {str(path.relative_to(self.run_dir)): path for path in journals})
            done = True
        except OSError as error:
            raise CheckpointError(self._refusal(temporary, step, error)) from error
        finally:
            if not done:
                shutil.rmtree(temporary, ignore_errors=True)
        return temporary

    def _refusal(self, temporary: Path, step: int, error: OSError) -> str:
        """Return what to say when the disk refused a checkpoint."""
        steps = self._steps()
        last = (
            f"the last one, {steps[-1].name}, is kept and takes {_num_bytes(steps[-1]):,} bytes"
            if steps
            else "there is none yet"
        )
        free = shutil.disk_usage(self.folder if self.folder.exists() else self.run_dir).free
        return (
            f"checkpoint of step {step} could not be written to {self.folder}: {error}. {_num_bytes(temporary):,} "
            f"bytes were written, {free:,} more were free; {last}. Free some space and start the run again: it resumes"
        )

    def _steps(self) -> list[Path]:
        """Return the step folders in the order of their numbers: step_10 after step_9."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_step_of)

    def _prune(self, keep: int) -> int:
        """Remove all but the newest ``keep`` checkpoints that look whole, and return how many went.

        Damaged ones do not count as kept, so that one flipped manifest cannot push out the last good checkpoint.
        """
        whole = [path for path in self._steps() if looks_whole(path)]
        for path in whole[:-keep]:
            aside = self.folder / f".old-{path.name}-{os.getpid()}"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            fault_point("ckpt-prune", _step_of(path))
            shutil.rmtree(aside, ignore_errors=True)
        return len(whole[:-keep])

    def _clean(self) -> None:
        """Remove what crashed processes left behind; a best checkpoint caught between two renames is put back."""
        for path in sorted(self.folder.iterdir()) if self.folder.is_dir() else []:
            match = _LEFTOVER.fullmatch(path.name)
            if match is None or (int(match[3]) != os.getpid() and _alive(int(match[3]))):
                continue
            if match[1] == "old" and match[2] == BEST and not (self.folder / BEST).exists():
                path.rename(self.folder / BEST)
            else:
                shutil.rmtree(path, ignore_errors=True)

    def _quarantine(self, path: Path, error: CheckpointError, on_event: OnEvent | None) -> None:
        """Rename a damaged checkpoint out of the way and say so."""
        number = 0
        while (aside := self.folder / f".bad-{path.name}-{number}").exists():
            number += 1
        path.rename(aside)
        _log.warning("checkpoint %s is damaged (%s); renamed to %s and not used", path.name, error, aside.name)
        if on_event is not None:
            on_event("checkpoint_quarantined", name=path.name, renamed_to=aside.name, reason=str(error))


def _num_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step_"))


def _alive(pid: int) -> bool:
    """Return whether a process of this machine has this id."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
