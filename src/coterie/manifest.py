"""A checkpoint folder that can be trusted: its manifest has size and SHA-256 of every file, and its own checksum."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.durable import atomic_write_text, finite, json_text, sync_file, sync_folder
from coterie.errors import CheckpointError
from coterie.types import Json

SCHEMA_VERSION = 1
MANIFEST = "MANIFEST.json"
_STEP = re.compile(r"step_(\d+)")


class NewerSchemaError(CheckpointError):
    """The checkpoint is whole, but written by a later version of Coterie than this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A verified checkpoint: its folder, its step, what the writer noted, and the journals' lengths in bytes.

    ``journals`` maps paths relative to the run folder to the length they had when the checkpoint was written.
    """

    path: Path
    step: int
    meta: Mapping[str, Json]
    journals: Mapping[str, int]


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint of a folder after verifying every byte of it.

    Raises ``NewerSchemaError`` for a later format, ``CheckpointError`` for anything missing, cut or changed.
    """
    manifest = _read_manifest(path)
    for name, entry in manifest.files.items():
        if file_size(path / name) != entry["size"]:
            raise CheckpointError(f"{path / name}: {file_size(path / name)} bytes, manifest says {entry['size']}")
        if _sha256(path / name) != entry["sha256"]:
            raise CheckpointError(f"{path / name}: content differs from the SHA-256 in the manifest")
    return manifest.checkpoint


@dataclass(frozen=True, slots=True)
class _Manifest:
    """A manifest that agrees with itself; the files it lists are not looked at yet."""

    checkpoint: Checkpoint
    files: Mapping[str, Mapping[str, Json]]


def seal(folder: Path, step: int, meta: Mapping[str, Json], journals: Mapping[str, Path]) -> None:
    """Sync all files of the folder, write the manifest over them, and sync the folders."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    for path in [*(folder / name for name in names), *journals.values()]:
        if path.exists():
            sync_file(path)
    body: dict[str, Json] = {
        "schema": SCHEMA_VERSION,
        "step": step,
        "meta": finite(meta),
        "files": {name: {"size": file_size(folder / name), "sha256": _sha256(folder / name)} for name in names},
        "journals": {name: file_size(path) if path.exists() else 0 for name, path in journals.items()},
    }
    for path in folder.rglob("*"):
        if path.is_dir():
            sync_folder(path)
    # summed as it will be read: JSON turns number keys into text, which sorts differently
    checksum = _checksum(json.loads(json_text(body)))
    atomic_write_text(folder / MANIFEST, json_text({**body, "checksum": checksum}, indent=1) + "\n")


def _read_manifest(path: Path) -> _Manifest:
    """Return the manifest of a folder, checked against its own checksum and the folder's name."""
    where = path / MANIFEST
    try:
        body = json.loads(where.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{where}: cannot be read ({error})") from error
    if not isinstance(body, dict) or not isinstance(body.get("schema"), int):
        raise CheckpointError(f"{where}: not a manifest with a schema number")
    if body["schema"] > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{where}: written in checkpoint schema {body['schema']}, this version reads up to {SCHEMA_VERSION}. "
            "Continue the run with the version of Coterie that wrote it, or a later one"
        )
    checksum = body.pop("checksum", None)
    if checksum != _checksum(body):
        raise CheckpointError(f"{where}: content differs from its own checksum")
    if (named := _STEP.fullmatch(path.name)) and int(named[1]) != body["step"]:
        raise CheckpointError(f"{where}: holds step {body['step']}, the folder is named {path.name}")
    checkpoint = Checkpoint(path=path, step=body["step"], meta=body["meta"], journals=body["journals"])
    return _Manifest(checkpoint, body["files"])


def looks_whole(path: Path) -> bool:
    """Return whether manifest and file sizes agree: the quick check, which does not read the files."""
    try:
        return all(file_size(path / name) == entry["size"] for name, entry in _read_manifest(path).files.items())
    except CheckpointError:
        return False


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is not JSON")


def _checksum(body: Mapping[str, Json]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def file_size(path: Path) -> int:
    """Return the bytes of a file that a manifest lists; ``CheckpointError`` where it is not there."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path}: listed in the manifest, but {error.strerror}") from error
