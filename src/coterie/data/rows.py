"""Files of problems as rows of fields, each with its place; a row that cannot be read is a named fault, never a gap.

JSON lines, one JSON list, CSV, parquet, gzip of each, a folder of such files, the folder layout of APPS, and a data set
of the Hugging Face hub. Places read ``file:LINE`` where a row is a line (CSV: its last), ``file#N`` where it is item N,
from 1.
"""

from __future__ import annotations

import csv
import fnmatch
import gzip
import importlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

from coterie.errors import ConfigError

MAX_ROW_BYTES = 64 * 2**20
FORMATS = (".jsonl", ".json", ".csv", ".parquet")
_HUB = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<pattern>[^:]+))?")
_APPS_TEXTS = {
    "question": "question.txt",
    "input_output": "input_output.json",
    "solutions": "solutions.json",
    "starter_code": "starter_code.py",
}


@dataclass(frozen=True, slots=True)
class Row:
    """The fields of one row, as read."""

    place: str
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that is not used, and why."""

    place: str
    why: str


Rows: TypeAlias = Iterator[Row | BadRow]


def find_files(source: str) -> list[Path]:
    """Return the files of a source in order of their names: a file, a folder, or ``owner/name[:pattern]`` of the hub.

    A folder in APPS's layout counts as a file. ``ConfigError`` where there is nothing to read.
    """
    path = Path(source)
    if not path.exists():
        match = _HUB.fullmatch(source)
        if match is None or source.endswith(FORMATS):
            raise ConfigError(f"no file, folder or data set {source!r} (looked in {Path.cwd()})")
        return _hub_files(source, match["repo"], match["pattern"])
    if path.is_file() or _is_apps_folder(path):
        return [path]
    return _files_below(path, source, None)


def read_rows(path: Path) -> Rows:
    """Yield the rows of one file, or of a folder in APPS's layout, in order."""
    if path.is_dir():
        yield from _apps_rows(path)
        return
    kind = _kind(path)
    try:
        if kind == ".parquet":
            yield from _parquet_rows(path)
            return
        with _open(path) as file:
            if kind == ".jsonl":
                yield from _json_lines(path, file)
            elif kind == ".json":
                yield from _json_list(path, file.read())
            else:
                yield from _csv_rows(path, file.read())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        yield BadRow(str(path), f"the gzip is damaged or cut short ({error}); what stands behind is lost")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error})") from error


def _kind(path: Path) -> str:
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind not in FORMATS:
        raise ConfigError(f"{path}: cannot tell the format from the name; expected {', '.join(FORMATS)}, or with .gz")
    return kind


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _json_lines(path: Path, file: IO[bytes]) -> Rows:
    number = 0
    while line := file.readline(MAX_ROW_BYTES):
        number += 1
        place = f"{path}:{number}"
        if len(line) == MAX_ROW_BYTES and not line.endswith(b"\n"):
            yield BadRow(
                place, f"the line is longer than {MAX_ROW_BYTES // 2**20} MiB; the rest of the file is not read"
            )
            return
        if line.strip():
            yield _parsed(place, line)


def _parsed(place: str, line: bytes) -> Row | BadRow:
    try:
        return _checked(place, json.loads(line.decode("utf-8-sig")))
    except UnicodeDecodeError as error:
        return BadRow(place, f"not UTF-8: byte {line[error.start]:#04x} at position {error.start + 1} of the line")
    except (json.JSONDecodeError, RecursionError) as error:
        return BadRow(place, f"not JSON: {error}")


def _checked(place: str, value: object) -> Row | BadRow:
    if not isinstance(value, dict):
        return BadRow(place, f"expected an object with fields, found {type(value).__name__}")
    return Row(place, value)


def _json_list(path: Path, content: bytes) -> Rows:
    """Yield the items of a list; a file that is called .json but holds JSON lines is read as such."""
    try:
        value = json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        yield BadRow(f"{path}:{content[: error.start].count(10) + 1}", f"not UTF-8: byte {content[error.start]:#04x}")
        return
    except RecursionError as error:
        yield BadRow(str(path), f"not JSON: {error}")
        return
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _json_lines(path, io.BytesIO(content))
        else:
            yield BadRow(f"{path}:{error.lineno}", f"not JSON: {error}")
        return
    for number, item in enumerate(value if isinstance(value, list) else [value], start=1):
        yield _checked(f"{path}#{number}", item)


def _csv_rows(path: Path, content: bytes) -> Rows:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        yield BadRow(f"{path}:{content[: error.start].count(10) + 1}", f"not UTF-8: byte {content[error.start]:#04x}")
        return
    csv.field_size_limit(MAX_ROW_BYTES)
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            yield BadRow(f"{path}:{reader.line_num}", f"not CSV: {error}; what stands behind is lost")
            return
        if fields is None:
            return
        place = f"{path}:{reader.line_num}"
        if None in fields or None in fields.values():
            yield BadRow(place, f"expected {len(reader.fieldnames or ())} columns, found more or fewer")
        else:
            yield Row(place, fields)


def _parquet_rows(path: Path) -> Rows:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
        arrow = importlib.import_module("pyarrow")
    except ImportError as error:
        raise ConfigError(f"{path}: parquet is read by pyarrow; pip install 'coterie[data]'") from error
    try:
        source = arrow.BufferReader(gzip.decompress(path.read_bytes())) if path.suffix == ".gz" else str(path)
        number = 0
        for batch in parquet.ParquetFile(source).iter_batches(batch_size=256):
            for fields in batch.to_pylist():
                number += 1
                yield Row(f"{path}#{number}", fields)
    except arrow.ArrowException as error:
        yield BadRow(str(path), f"not parquet, or damaged: {error}")


def _is_apps_folder(path: Path) -> bool:
    return next(path.glob("*/question.txt"), None) is not None or (path / "question.txt").is_file()


def _apps_rows(path: Path) -> Rows:
    folders = (
        [path] if (path / "question.txt").is_file() else sorted(item.parent for item in path.glob("*/question.txt"))
    )
    for folder in folders:
        fields: dict[str, Any] = {"problem_id": folder.name}
        try:
            for field, name in _APPS_TEXTS.items():
                if (folder / name).is_file():
                    fields[field] = (folder / name).read_text(encoding="utf-8")
            more = folder / "metadata.json"
            about = _checked(str(more), json.loads(more.read_text(encoding="utf-8")) if more.is_file() else {})
            yield about if isinstance(about, BadRow) else Row(str(folder), {**fields, **about.fields})
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            yield BadRow(str(folder), f"not UTF-8 or not JSON: {error}")


def _files_below(folder: Path, source: str, pattern: str | None) -> list[Path]:
    apps = {item.parent.parent for item in folder.rglob("question.txt")}
    files = [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name.removesuffix(".gz").endswith(FORMATS) and path.parent.parent not in apps
    ]
    found = sorted([*files, *apps])
    if pattern is not None:
        found = [path for path in found if fnmatch.fnmatch(str(path.relative_to(folder)), pattern)]
    if not found:
        raise ConfigError(
            f"{source}: no file of {', '.join(FORMATS)} in it" + (f" fits {pattern!r}" if pattern else "")
        )
    return found


def _hub_files(source: str, repo: str, pattern: str | None) -> list[Path]:
    """Return the files of a data set of the hub, from its cache where they are in it."""
    hub = importlib.import_module("huggingface_hub")
    wanted = [f"*{kind}{packed}" for kind in FORMATS for packed in ("", ".gz")]
    offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    try:
        folder = hub.snapshot_download(repo, repo_type="dataset", allow_patterns=wanted, local_files_only=offline)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source!r} is no file here ({Path.cwd()}), and not to be had as a data set of the Hugging Face hub: "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return _files_below(Path(folder), source, pattern)
