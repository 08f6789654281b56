"""Checkpoints: what a kill, a flipped bit, a full disk and a second process may do to them, which is nothing."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from coterie.checkpoint import CheckpointStore, truncate_journals
from coterie.durable import sync_file
from coterie.errors import CheckpointError, ConfigError
from coterie.faults import VARIABLE
from coterie.manifest import MANIFEST, SCHEMA_VERSION, NewerSchemaError, read_checkpoint
from coterie.types import Json

NUM_STEPS = 6
RUN = """
import json, sys
from pathlib import Path
from coterie.checkpoint import CheckpointStore, truncate_journals
from coterie.durable import RunLock

run_dir = Path(sys.argv[1])
journal = run_dir / "metrics.jsonl"
with RunLock(run_dir):
    store = CheckpointStore(run_dir, keep=2)
    found = store.latest()
    state = 1
    if found is not None:
        truncate_journals(run_dir, found)
        state = json.loads((found.path / "state.json").read_text())
    elif journal.exists():
        journal.unlink()
    print("ready", flush=True)
    for step in range(found.step + 1 if found else 1, int(sys.argv[2]) + 1):
        state = state * 6364136223846793005 % 2**61
        with journal.open("a") as file:
            file.write(json.dumps({"step": step, "state": state}) + "\\n")
        def write(folder):
            (folder / "state.json").write_text(json.dumps(state))
            (folder / "policies" / "a").mkdir(parents=True)
            (folder / "policies" / "a" / "weights.bin").write_bytes(bytes(step % 256 for _ in range(20_000)))
        store.save(step, write, [journal], {"step": step})
"""


def run(run_dir: Path, num_steps: int = NUM_STEPS, fault: str = "") -> int:
    environment = {**os.environ, VARIABLE: fault}
    return subprocess.run([sys.executable, "-c", RUN, str(run_dir), str(num_steps)], env=environment, check=False,
                          stdout=subprocess.DEVNULL, timeout=60).returncode  # fmt: skip


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "state.json").write_text(text)
        (folder / "policies").mkdir()
        (folder / "policies" / "weights.bin").write_bytes(text.encode() * 100)

    return write


def stored(tmp_path: Path, steps: tuple[int, ...], keep: int = 5) -> CheckpointStore:
    store = CheckpointStore(tmp_path, keep)
    for step in steps:
        store.save(step, writer(f"state of {step}"))
    return store


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.folder.iterdir())


class Events:
    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, Json]]] = []

    def __call__(self, kind: str, /, **fields: Json) -> None:
        self.seen.append((kind, fields))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("reference")
    assert run(folder) == 0
    return (folder / "metrics.jsonl").read_bytes()


# ---- what a checkpoint is -------------------------------------------------------------------------------------------


def test_a_checkpoint_gives_back_its_files_its_meta_and_its_journal_lengths(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    store = CheckpointStore(tmp_path)
    journals = [tmp_path / "metrics.jsonl", tmp_path / "eval.jsonl"]
    path = store.save(7, writer("seven"), journals, {"recipe": {"lr": 1e-05}, "cursor": 56})
    found = store.latest()
    assert found is not None
    assert path == found.path == tmp_path / "checkpoints" / "step_00000007"
    assert (found.step, found.meta) == (7, {"recipe": {"lr": 1e-05}, "cursor": 56})
    assert found.journals == {"metrics.jsonl": 12, "eval.jsonl": 0}
    assert (found.path / "policies" / "weights.bin").read_bytes() == b"seven" * 100
    manifest = json.loads((found.path / MANIFEST).read_text())
    assert manifest["schema"] == SCHEMA_VERSION
    assert set(manifest["files"]) == {"state.json", "policies/weights.bin"}
    assert manifest["files"]["policies/weights.bin"]["size"] == 500


def test_meta_that_json_changes_still_verifies(tmp_path: Path) -> None:
    """Number keys become text, tuples lists, NaN null: the checksum is of what is read."""
    odd: dict[str, Json] = {"seen": {10: 1, 9: 2}, "pair": (1, 2), "loss": float("nan")}  # type: ignore[dict-item]
    store = CheckpointStore(tmp_path)
    store.save(1, writer("one"), meta=odd)
    found = store.latest()
    assert found is not None
    assert found.meta == {"seen": {"10": 1, "9": 2}, "pair": [1, 2], "loss": None}


def test_no_checkpoint_at_all_is_none_and_not_an_error(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path).latest() is None
    assert CheckpointStore(tmp_path).best() is None
    with pytest.raises(ConfigError, match="at least 1"):
        CheckpointStore(tmp_path, keep=0)


def test_step_10_comes_after_step_9_and_after_a_shorter_name_for_8(tmp_path: Path) -> None:
    """CKPT-06: numbers, not names, are compared."""
    store = stored(tmp_path, (8, 9, 10))
    (store.folder / "step_00000008").rename(store.folder / "step_8")
    found = store.latest()
    assert found is not None
    assert found.step == 10
    store.save(11, writer("x"))
    CheckpointStore(tmp_path, keep=2).save(12, writer("x"))
    assert names(store) == ["step_00000011", "step_00000012"]


def test_only_the_newest_are_kept_and_the_best_is_never_pruned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for step in range(1, 6):
        store.save(step, writer(f"state of {step}"))
        if step in (1, 2):
            store.save_best(step, writer(f"best at {step}"), {"success": step / 4})
    assert names(store) == ["best", "step_00000004", "step_00000005"]
    best = store.best()
    assert best is not None
    assert (best.step, best.meta) == (2, {"success": 0.5})
    assert (best.path / "state.json").read_text() == "best at 2"


def test_saving_a_step_again_keeps_the_whole_one_and_replaces_a_damaged_one(tmp_path: Path) -> None:
    store = stored(tmp_path, (3,))
    store.save(3, writer("another"))
    assert (store.folder / "step_00000003" / "state.json").read_text() == "state of 3"
    (store.folder / "step_00000003" / "state.json").write_text("damaged")
    store.save(3, writer("another"))
    assert (store.folder / "step_00000003" / "state.json").read_text() == "another"
    assert names(store) == [".bad-step_00000003-0", "step_00000003"]


def test_an_error_in_write_leaves_nothing_behind(tmp_path: Path) -> None:
    store = stored(tmp_path, (1,))

    def broken(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        store.save(2, broken)
    assert names(store) == ["step_00000001"]


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip_a_bit(folder: Path) -> None:
    path = folder / "policies" / "weights.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_a_bit_of_meta(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))


def point_outside(folder: Path) -> None:
    other = folder.parent / "step_00000001"
    (folder / MANIFEST).write_bytes((other / MANIFEST).read_bytes())


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip_a_bit,
    "cut file": lambda folder: os.truncate(folder / "policies" / "weights.bin", 10),
    "missing file": lambda folder: (folder / "state.json").unlink(),
    "empty file": lambda folder: (folder / "state.json").write_text(""),
    "empty manifest": lambda folder: (folder / MANIFEST).write_text(""),
    "cut manifest": lambda folder: os.truncate(folder / MANIFEST, 40),
    "missing manifest": lambda folder: (folder / MANIFEST).unlink(),
    "manifest that is a list": lambda folder: (folder / MANIFEST).write_text("[]"),
    "changed manifest": flip_a_bit_of_meta,
    "manifest of another step": point_outside,
    "binary manifest": lambda folder: (folder / MANIFEST).write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_told_once_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    """Reliability row 6."""
    store = stored(tmp_path, (1, 2))
    DAMAGES[damage](store.folder / "step_00000002")
    events = Events()
    found = store.latest(events)
    assert found is not None
    assert found.step == 1
    assert [(kind, fields["name"]) for kind, fields in events.seen] == [("checkpoint_quarantined", "step_00000002")]
    assert names(store) == [".bad-step_00000002-0", "step_00000001"]
    store.latest(events)
    assert len(events.seen) == 1


def test_every_flipped_byte_of_the_manifest_is_noticed(tmp_path: Path) -> None:
    store = stored(tmp_path, (1,))
    path = store.folder / "step_00000001" / MANIFEST
    whole = path.read_bytes()
    for position in range(len(whole.rstrip())):
        data = bytearray(whole)
        data[position] ^= 4
        if bytes(data).split() == whole.split():
            continue  # one blank for another
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            read_checkpoint(path.parent)
    path.write_bytes(whole)
    assert read_checkpoint(path.parent).step == 1


def test_an_empty_step_99_is_passed_over(tmp_path: Path) -> None:
    """CKPT-06."""
    store = stored(tmp_path, (9, 10))
    (store.folder / "step_99").mkdir()
    events = Events()
    found = store.latest(events)
    assert found is not None
    assert found.step == 10
    assert [fields["name"] for _, fields in events.seen] == ["step_99"]


def test_stray_names_are_ignored_and_left_alone(tmp_path: Path) -> None:
    """Reliability row 8."""
    store = stored(tmp_path, (1,))
    strays = ["step_30.tmp", "step_x", "step_", "notes", ".tmp-notes"]
    for stray in strays:
        (store.folder / stray).mkdir()
    (store.folder / "step_00000050").write_text("a file")
    events = Events()
    found = store.latest(events)
    assert found is not None
    assert (found.step, events.seen) == (1, [])
    assert set(names(store)) == {*strays, "step_00000050", "step_00000001"}


def test_when_all_are_damaged_the_run_stops_with_instructions_and_does_so_again(tmp_path: Path) -> None:
    """Reliability row 7: the second start must not take the quarantined folder for a fresh one."""
    store = stored(tmp_path, (1, 2))
    for step in (1, 2):
        flip_a_bit(store.folder / f"step_0000000{step}")
    for _ in range(2):
        with pytest.raises(CheckpointError, match="another run folder"):
            store.latest()


def test_a_damaged_best_is_quarantined_and_never_mistaken_for_a_damaged_run(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save_best(1, writer("best"))
    flip_a_bit(store.folder / "best")
    events = Events()
    assert store.best(events) is None
    assert len(events.seen) == 1
    assert store.latest() is None


def test_damaged_checkpoints_do_not_push_good_ones_out(tmp_path: Path) -> None:
    store = stored(tmp_path, (1, 2, 3), keep=2)
    os.truncate(store.folder / "step_00000003" / "state.json", 1)
    store.save(4, writer("four"))
    assert names(store) == ["step_00000002", "step_00000003", "step_00000004"]


def test_a_checkpoint_of_a_later_schema_is_refused_by_name_and_left_alone(tmp_path: Path) -> None:
    """Reliability row 34."""
    store = stored(tmp_path, (1, 2))
    path = store.folder / "step_00000002" / MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema": SCHEMA_VERSION + 1}))
    with pytest.raises(NewerSchemaError, match=f"schema {SCHEMA_VERSION + 1}, this version reads up to"):
        store.latest()
    assert names(store) == ["step_00000001", "step_00000002"]


# ---- kills ----------------------------------------------------------------------------------------------------------

POINTS = ("ckpt-tmp", "ckpt-before-rename", "ckpt-after-rename", "ckpt-before-prune")


@pytest.mark.parametrize("fault", [*(f"{point}:4" for point in POINTS), "ckpt-tmp:1", "ckpt-prune:2"])
def test_a_run_killed_while_it_saves_goes_on_to_the_same_journal(tmp_path: Path, fault: str, reference: bytes) -> None:
    """CKPT-06 and reliability rows 1, 4, 5: kill -9 at every point of a save, then resume."""
    assert run(tmp_path, fault=fault) == -signal.SIGKILL
    store = CheckpointStore(tmp_path)
    whole = [path for path in store.folder.iterdir() if path.name.startswith("step_") and read_checkpoint(path)]
    assert len(whole) >= (0 if fault == "ckpt-tmp:1" else 1)
    assert run(tmp_path) == 0
    assert (tmp_path / "metrics.jsonl").read_bytes() == reference
    assert names(store) == ["step_00000005", "step_00000006"]


def test_a_run_killed_at_five_random_times_goes_on_to_the_same_journal(tmp_path: Path) -> None:
    """CKPT-06: the resumed run repeats no step and leaves none out."""
    delays = random.Random(6)
    num_steps = 400
    for _ in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", RUN, str(tmp_path), str(num_steps)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(delays.uniform(0.0, 0.12))
            child.kill()
    found = CheckpointStore(tmp_path).latest()
    reached = found.step if found else 0
    assert reached < num_steps, "the run ended before it could be killed: make it longer"
    assert run(tmp_path, reached + 2) == 0
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    state, expected = 1, []
    for step in range(1, reached + 3):
        state = state * 6364136223846793005 % 2**61
        expected.append({"step": step, "state": state})
    assert rows == expected


def test_leftovers_of_dead_processes_are_removed_and_those_of_living_ones_are_not(tmp_path: Path) -> None:
    store = stored(tmp_path, (1,))
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    for name in (f".tmp-step_00000002-{child.pid}", f".old-step_00000000-{child.pid}", f".tmp-best-{os.getpid()}"):
        (store.folder / name).mkdir()
    living = f".tmp-step_00000002-{os.getppid()}"
    (store.folder / living).mkdir()
    store.latest()
    assert names(store) == [living, "step_00000001"]


def test_a_best_checkpoint_caught_between_two_renames_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save_best(1, writer("first"))
    monkeypatch.setenv(VARIABLE, "best-between-renames:2:exc")
    with pytest.raises(RuntimeError, match="injected"):
        store.save_best(2, writer("second"))
    assert not (store.folder / "best").exists()
    best = store.best()
    assert best is not None
    assert best.step == 1
    assert names(store) == ["best"]


# ---- disk full ------------------------------------------------------------------------------------------------------


def full_disk(folder: Path) -> None:
    (folder / "half.bin").write_bytes(b"x" * 1234)
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_last_good_checkpoint_and_says_how_much_was_written(tmp_path: Path) -> None:
    """Reliability row 9."""
    store = stored(tmp_path, (1, 2), keep=2)
    with pytest.raises(
        CheckpointError, match=r"step 3 .*No space left.* 1,234 bytes were written.* step_00000002"
    ) as told:
        store.save(3, full_disk)
    assert str(store.folder) in str(told.value)
    assert names(store) == ["step_00000002"], (
        "one older checkpoint makes room for the second attempt, the last one stays"
    )
    found = store.latest()
    assert found is not None
    assert found.step == 2


def test_with_one_checkpoint_to_keep_a_full_disk_does_not_remove_it(tmp_path: Path) -> None:
    store = stored(tmp_path, (1,), keep=1)
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(2, full_disk)
    assert names(store) == ["step_00000001"]


def test_a_save_that_fits_after_pruning_succeeds(tmp_path: Path) -> None:
    store = stored(tmp_path, (1, 2), keep=2)

    def fits_later(folder: Path) -> None:
        if (store.folder / "step_00000001").exists():
            full_disk(folder)
        writer("three")(folder)

    store.save(3, fits_later)
    assert names(store) == ["step_00000002", "step_00000003"]
    assert not (store.folder / "step_00000003" / "half.bin").exists()


def test_other_refusals_of_the_disk_are_not_retried(tmp_path: Path) -> None:
    """Reliability row 10: an I/O error is no reason to delete older checkpoints."""
    store = stored(tmp_path, (1, 2))
    calls = []

    def broken_disk(folder: Path) -> None:
        calls.append(folder)
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CheckpointError, match="Input/output error"):
        store.save(3, broken_disk)
    assert len(calls) == 1
    assert names(store) == ["step_00000001", "step_00000002"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_disk_that_is_really_full_stops_the_save_and_space_given_back_lets_it_go_on(small_disk: Path) -> None:
    store = CheckpointStore(small_disk, keep=1)
    store.save(1, lambda folder: sync_written(folder / "a.bin", 100_000))
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(2, lambda folder: sync_written(folder / "a.bin", 200_000))
    assert names(store) == ["step_00000001"]
    store.save(2, lambda folder: sync_written(folder / "a.bin", 100_000))
    assert names(store) == ["step_00000002"]


def sync_written(path: Path, num_bytes: int) -> None:
    path.write_bytes(b"x" * num_bytes)
    sync_file(path)


# ---- journals -------------------------------------------------------------------------------------------------------


def journalled(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "metrics.jsonl").write_text("one\n")
    store = CheckpointStore(tmp_path)
    store.save(1, writer("1"), [tmp_path / "metrics.jsonl", tmp_path / "eval.jsonl"])
    return store


def test_journals_are_cut_back_to_the_checkpoint_also_one_that_did_not_exist_then(tmp_path: Path) -> None:
    """OBS-06: after a resumption each step is written once."""
    found = journalled(tmp_path).latest()
    (tmp_path / "metrics.jsonl").write_text("one\ntwo\nthr")
    (tmp_path / "eval.jsonl").write_text("later\n")
    (tmp_path / "events.jsonl").write_text("stays\n")
    assert found is not None
    truncate_journals(tmp_path, found)
    texts = [(tmp_path / name).read_text() for name in ("metrics.jsonl", "eval.jsonl", "events.jsonl")]
    assert texts == ["one\n", "", "stays\n"]


@pytest.mark.parametrize("present", [True, False])
def test_a_journal_shorter_than_recorded_refuses_and_nothing_is_cut(tmp_path: Path, present: bool) -> None:
    found = journalled(tmp_path).latest()
    assert found is not None
    (tmp_path / "eval.jsonl").write_text("later\n")
    if present:
        (tmp_path / "metrics.jsonl").write_text("on")
    else:
        (tmp_path / "metrics.jsonl").unlink()
    with pytest.raises(CheckpointError, match=rf"has {2 if present else 0} bytes, but had 4"):
        truncate_journals(tmp_path, found)
    assert (tmp_path / "eval.jsonl").read_text() == "later\n"


def test_a_manifest_cannot_have_files_outside_the_run_folder_cut(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    outside = tmp_path / "other.txt"
    outside.write_text("precious")
    store = CheckpointStore(run_dir)
    found = store.latest() or read_checkpoint(store.save(1, writer("1")))
    crafted = type(found)(path=found.path, step=1, meta={}, journals={"../other.txt": 0})
    with pytest.raises(CheckpointError, match="outside the run folder"):
        truncate_journals(run_dir, crafted)
    assert outside.read_text() == "precious"
