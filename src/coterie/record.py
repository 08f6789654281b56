"""What a run leaves behind: one JSON object per line, append-only, and the same numbers to the trackers.

::

    metrics.jsonl    one row per training step; nothing that depends on the clock, so two runs can be compared by bytes
    timings.jsonl    one row per training step: everything that does depend on the clock
    eval.jsonl       one row per evaluation
    episodes/        step-N.jsonl: every episode of step N with every turn
    solved/          NAME.jsonl: how often each task of an evaluation before or after training was solved
    events.jsonl     retries, restarts, quarantines, failures, in the order they happened; never cut

JSON has no NaN or infinity: they are written as null, and the row's ``nonfinite`` says which they were.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from coterie.durable import atomic_write_text, json_text
from coterie.errors import TrainError, guarded
from coterie.trackers import Tracker
from coterie.types import Credit, Episode, Failure, Json, Reward, Turn

METRICS, TIMINGS, EVAL, EVENTS = "metrics.jsonl", "timings.jsonl", "eval.jsonl", "events.jsonl"
SOLVED = "solved"
_MAX_TRACKER_FAILURES = 3
_log = logging.getLogger(__name__)


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are there: [0.5, None, 0.7] gives 0.6, nothing at all gives ``None``."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None


def count(values: Iterable[float | None]) -> int:
    """Return how many values are there, which is what ``mean`` divides by."""
    return sum(value is not None for value in values)


def read_rows(path: Path) -> list[dict[str, Json]]:
    """Return the rows of a journal; none where it does not exist. A torn last line (no newline) is left out."""
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise TrainError(f"{path}:{number}: not a JSON row ({error}); was the file edited or damaged?") from error
    return rows


class Recorder:
    """Writes the journals of a run and feeds its trackers; a context manager.

    Files are opened at the first row, so a recorder may be made before the journals are cut back to a checkpoint.
    """

    def __init__(self, run_dir: Path, trackers: Sequence[Tracker] = ()) -> None:
        """Record into a folder that exists; its rows go to the trackers too."""
        self.run_dir = run_dir
        self.counts: Counter[str] = Counter()
        self._trackers = list(trackers)
        self._failures: Counter[str] = Counter()
        self._files: dict[str, IO[bytes]] = {}
        self._last_step: dict[str, int] = {}

    @property
    def journals(self) -> tuple[Path, ...]:
        """The files whose lengths belong into a checkpoint."""
        return tuple(self.run_dir / name for name in (METRICS, TIMINGS, EVAL))

    def add_tracker(self, tracker: Tracker) -> None:
        """Send later rows to this tracker too."""
        self._trackers.append(tracker)

    def metrics(self, step: int, numbers: Mapping[str, Json]) -> None:
        """Append the row of a training step; a step that is there already is a ``TrainError``."""
        self._row(METRICS, step, numbers, once=True)
        self._track(step, numbers, "")

    def timings(self, step: int, numbers: Mapping[str, Json]) -> None:
        """Append the clock's row of a training step: ``time_s`` (since the run began), ``rollout_s``, ..."""
        self._row(TIMINGS, step, numbers, once=True)
        self._track(step, numbers, "time/")

    def evals(self, step: int, numbers: Mapping[str, Json]) -> None:
        """Append the row of an evaluation after ``step`` steps; ``name`` tells several of one step apart."""
        self._row(EVAL, step, numbers, once=False)
        name = numbers.get("name")
        self._track(step, numbers, f"eval/{name}/" if isinstance(name, str) else "eval/")

    def event(self, kind: str, /, **fields: Json) -> None:
        """Append an event with the time of day, and count its kind. A disk that refuses it is logged, not raised."""
        self.counts[kind] += 1
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        try:
            self._append(EVENTS, {"event": kind, "time": now, **fields})
        except OSError as error:
            _log.warning("event %s %s could not be written: %s", kind, fields, error)

    def failure(self, failure: Failure) -> None:
        """Record a ``Failure`` as an event: the ``record`` that ``guarded`` wants."""
        _log.warning("%s: %s: %s", failure.where, failure.kind, failure.message)
        fields: dict[str, Json] = {"where": failure.where, "error": failure.kind, "message": failure.message}
        self.event("failure", **fields, traceback=failure.traceback)

    def episodes(self, step: int, episodes: Sequence[Episode], credits: Sequence[Credit] = ()) -> None:
        """Write ``episodes/step-N.jsonl``, one episode per line, whole or not at all; a repeated step replaces it.

        A disk that refuses is an event, not the end of the run: nothing is trained from these files.
        """
        by_turn = {credit.turn.id(): credit for credit in credits}
        text = "".join(json_text(episode_row(episode, by_turn)) + "\n" for episode in episodes)
        path = self.run_dir / "episodes" / f"step-{step}.jsonl"
        try:
            path.parent.mkdir(exist_ok=True)
            atomic_write_text(path, text)
        except OSError as error:
            self.event("episodes_not_written", step=step, message=str(error))

    def solved(self, name: str, counts: Mapping[str, tuple[int, int]]) -> None:
        """Write ``solved/NAME.jsonl``, one task of an evaluation per line; a repeated evaluation replaces it."""
        rows: list[dict[str, Json]] = [
            {"task": task, "solved": solved, "plays": plays} for task, (solved, plays) in counts.items()
        ]
        path = self.run_dir / SOLVED / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        atomic_write_text(path, "".join(json_text(row) + "\n" for row in rows))

    def elapsed_s(self) -> float:
        """Return ``time_s`` of the last timings row (0.0 without one): where a resumed run's clock goes on."""
        rows = read_rows(self.run_dir / TIMINGS)
        time_s = rows[-1].get("time_s") if rows else None
        return float(time_s) if isinstance(time_s, int | float) else 0.0

    def sync(self) -> None:
        """Return when all rows are on the disk."""
        for file in self._files.values():
            os.fsync(file.fileno())

    def close(self) -> None:
        """Close the files and the trackers."""
        for tracker in self._trackers:
            with guarded(f"tracker {tracker.name}: close", self.failure):
                tracker.close()
        self._trackers.clear()
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- machinery below ----------------------------------------------------------------------------------------

    def _row(self, name: str, step: int, numbers: Mapping[str, Json], *, once: bool) -> None:
        """Append a step's row; the journals are the run's record, so a disk that refuses one ends the run."""
        path = self.run_dir / name
        if name not in self._last_step:
            rows = read_rows(path)
            last = rows[-1].get("step") if rows else None
            self._last_step[name] = last if isinstance(last, int) else -1
        if step < self._last_step[name] or (once and step == self._last_step[name]):
            raise TrainError(
                f"{path} already goes to step {self._last_step[name]}, a row of step {step} would be a second one: cut "
                "it back to the checkpoint the run goes on from, or use another run folder"
            )
        row: dict[str, Json] = {"step": step, **numbers}
        odd = {key: str(value) for key, value in flat_numbers(numbers).items() if not math.isfinite(value)}
        if odd:
            row["nonfinite"] = odd
        try:
            self._append(name, row)
        except OSError as error:
            raise TrainError(
                f"{path}: the row of step {step} cannot be written ({error}). Free some space and start the run again: "
                "it goes on from its last checkpoint"
            ) from error
        self._last_step[name] = step

    def _append(self, name: str, row: Mapping[str, Json]) -> None:
        """Append one line and hand it to the operating system."""
        if name not in self._files:
            path = self.run_dir / name
            _cut_torn_line(path)
            self._files[name] = path.open("ab", buffering=0)
        # one write per row, straight to the file: a crash leaves at most one torn line, and nothing in a buffer
        file, data = self._files[name], json_text(row).encode() + b"\n"
        end = file.seek(0, os.SEEK_END)
        written = file.write(data)
        if written != len(data):
            file.truncate(end)
            raise OSError(f"{written} of {len(data)} bytes of a row were written: is the disk full?")

    def _track(self, step: int, numbers: Mapping[str, Json], prefix: str) -> None:
        """Send numbers to every tracker; one that fails three times in a row is dropped."""
        named = {prefix + key: value for key, value in flat_numbers(numbers).items()}
        for tracker in tuple(self._trackers):
            before = self.counts["failure"]
            with guarded(f"tracker {tracker.name}: log", self.failure):
                tracker.log(step, named)
            self._failures[tracker.name] = self._failures[tracker.name] + 1 if self.counts["failure"] > before else 0
            if self._failures[tracker.name] >= _MAX_TRACKER_FAILURES:
                self._trackers.remove(tracker)
                self.event("tracker_dropped", tracker=tracker.name, step=step, failures=_MAX_TRACKER_FAILURES)


def flat_numbers(values: Mapping[str, Json], prefix: str = "") -> dict[str, float]:
    """Return the numbers among the values, nested ones under ``outer/inner``; text, truths, lists and None are not."""
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flat_numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            flat[prefix + key] = float(value)
    return flat


def episode_row(episode: Episode, credits: Mapping[str, Credit]) -> dict[str, Json]:
    """Return an episode as JSON: its key, how it ended, and every turn with its credit (``credits`` by turn id)."""
    outcome, failure = episode.outcome, episode.failure
    return {
        "episode": episode.key.text(),
        "task": episode.task.id,
        "split": episode.task.split,
        "attempts": episode.attempts,
        **({"lookahead_tokens": episode.lookahead_tokens} if episode.lookahead_tokens else {}),
        "success": outcome.success if outcome else None,
        "team": outcome.team if outcome else None,
        "local": dict(outcome.local) if outcome else None,
        "truncated": outcome.truncated if outcome else None,
        "metrics": dict(outcome.metrics) if outcome else None,
        "labels": dict(outcome.labels) if outcome else None,
        "failure": {"where": failure.where, "error": failure.kind, "message": failure.message} if failure else None,
        "turns": [_turn_row(turn, credits.get(turn.id())) for turn in episode.turns],
    }


def _turn_row(turn: Turn, credit: Credit | None) -> dict[str, Json]:
    reward = turn.reward or Reward(None, None)
    return {
        "act": turn.act,
        "candidate": turn.candidate,
        "role": turn.role,
        "seat": turn.seat,
        "round": turn.round,
        "policy": turn.policy,
        "version": turn.version,
        "peers": turn.peers,
        "played": turn.played,
        "trainable": turn.trainable,
        "team": reward.team,
        "local": reward.local,
        "value": credit.value if credit else None,
        "advantage": credit.advantage if credit else None,
        "num_prompt_tokens": len(turn.prompt_ids),
        "num_completion_tokens": len(turn.completion_ids),
        "stop_reason": turn.stop_reason.value,
        "temperature": turn.temperature,
        "error": turn.error,
        "text": turn.text,
    }


def _cut_torn_line(path: Path) -> None:
    """Remove what follows the last newline: the row a crash interrupted would make the next one unreadable."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n") and data:
            os.truncate(path, data.rfind(b"\n") + 1)
