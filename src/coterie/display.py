"""What a person sees while a run goes on and after it: a bar on a terminal, plain lines elsewhere, and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from coterie.config import Recipe
from coterie.types import Json

if TYPE_CHECKING:  # they import torch, which takes seconds
    from coterie.evaluate import Score
    from coterie.train import StepReport

_LINE_EVERY_S = 5.0
"""Without a terminal, steps that follow each other faster than this share a line."""
_TROUBLES = {
    "episodes_failed": "episodes failed",
    "updates_empty": "policies not updated, nothing to learn from",
    "updates_skipped": "policies not updated, gradient not finite",
}
"""What must not be silent in a training step, by its key in the metrics."""


class _Bar(Progress):
    """A progress bar with a line of numbers under it."""

    note = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the bar, then the line."""
        yield self.make_tasks_table(self.tasks)
        if self.note:
            yield Text(self.note, style="dim")


class RunDisplay:
    """Shows how far a run is; its methods are those of ``train.Listener``. A context manager."""

    def __init__(
        self,
        console: Console,
        recipe: Recipe,
        *,
        resumed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Show a run of ``recipe`` on a console, which may be one that goes on; ``clock`` gives seconds."""
        self._resumed = resumed
        self._console = console
        self._recipe = recipe
        self._clock = clock
        self._stage_name = ""
        self._next = ""
        self._stage_began = 0.0
        self._stage_first = 0
        self._last_line = -math.inf
        self._bar: _Bar | None = None
        if console.is_terminal:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn())
            # Two refreshes a second: drawing must not take time from training.
            self._bar = _Bar(*columns, TimeRemainingColumn(), console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._bar is not None:
            self._bar.start()
        self.stage(self._first_stage())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the bar away; what was printed stays."""
        if self._bar is not None:
            self._bar.stop()

    def stage(self, name: str, done: int = 0, total: int | None = None) -> None:
        """Show that something else has begun; of ``total`` parts, if it can be counted."""
        if name == self._stage_name:
            return
        # A stage that is counted is first heard of when its first step is done: that is where its clock starts.
        self._stage_name, self._stage_began, self._stage_first = name, self._clock(), done + 1
        if self._bar is not None:
            self._bar.note = ""
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._bar.add_task(name, completed=done, total=total)
        else:
            self._line(name)

    # ---- what a listener is told --------------------------------------------------------------------------------

    def imitate(self, policy: str, step: int, steps: int, loss: float) -> None:
        """Show a step of the warm start."""
        self.stage(f"warm start of {policy}", step - 1, steps)
        self._advance(step, steps, f"loss {loss:.3f}")
        if step == steps:
            self._next = self._final_stage("before")

    def step(self, report: StepReport) -> None:
        """Show a training step: success of the selected paths, reward per role, speed."""
        self.stage("training", report.step, report.steps)
        done = report.step + 1
        self._advance(done, report.steps, step_line(report.metrics, report.tokens_per_s))
        every = self._recipe.eval.every
        if done == report.steps:
            self._next = self._final_stage("after")
        elif every and done % every == 0:
            self._next = f"validation on {self._recipe.eval.tasks} tasks of {self._recipe.eval.split}"

    def score(self, name: str, score: Score) -> None:
        """Print the result of an evaluation; these lines stay."""
        low, high = score.ci95
        how = "greedy" if score.temperature == 0.0 else f"temperature {score.temperature:g}"
        failed = f", {score.failed} episodes failed" if score.failed else ""
        self._line(
            f"{name.replace('_', ' ')}: {percent(score.success)} solved, 95% interval {percent(low)} to "
            f"{percent(high)} ({score.tasks} tasks of {score.split}, {how}{failed})"
        )

    def stop(self) -> None:
        """Never ask for a stop, signals do; but a batch that is about to run is the first of what comes next."""
        if self._next:
            self.stage(self._next)
            self._next = ""

    # ---- machinery below ----------------------------------------------------------------------------------------

    def _first_stage(self) -> str:
        imitate = self._recipe.imitate
        if self._resumed:
            return "going on from the last checkpoint"
        if imitate is not None:
            return f"the scripted experts play {imitate.episodes} episodes to learn from"
        return self._final_stage("before")

    def _final_stage(self, when: str) -> str:
        table = self._recipe.eval
        return f"evaluation {when} training on {table.final_tasks} tasks of {table.final_split}, sampled and greedy"

    def _advance(self, done: int, total: int, note: str) -> None:
        """Move the bar; without one, print a line every few seconds, and the last one always."""
        if self._bar is not None:
            self._bar.note = note
            for task in self._bar.task_ids:
                self._bar.update(task, completed=done, total=total)
            return
        now = self._clock()
        if done < total and now - self._last_line < _LINE_EVERY_S:
            return
        self._last_line = now
        timed = done - self._stage_first
        left = f", {minutes((now - self._stage_began) / timed * (total - done))} left" if timed > 0 else ""
        self._line(f"{self._stage_name} {done}/{total}: {note}{left}")

    def _line(self, text: str) -> None:
        """Print one line that stays; it is never wrapped, so that logs can be searched by line."""
        console = self._console if self._bar is None else self._bar.console
        console.print(Text(text), soft_wrap=True)


def step_line(metrics: Mapping[str, Json], tokens_per_s: float) -> str:
    """Return the numbers of a training step in one line."""
    parts = []
    success = metrics.get("success_selected")
    if isinstance(success, int | float):
        parts.append(f"{percent(success)} of selected paths solved")
    rewards = [
        f"{key.removeprefix('reward/')} {value:.2f}"
        for key, value in metrics.items()
        if key.startswith("reward/") and key != "reward/team" and isinstance(value, int | float)
    ]
    if rewards:
        parts.append(f"reward {', '.join(rewards)}")
    for key, meaning in _TROUBLES.items():
        if metrics.get(key):
            parts.append(f"{metrics[key]} {meaning}")
    return ", ".join([*parts, f"{tokens_per_s:.0f} tokens/s"])


def percent(value: float) -> str:
    """Return a share as a percentage with one decimal; "-" where there is none."""
    return f"{100.0 * value:.1f}%" if math.isfinite(value) else "-"


def minutes(seconds: float) -> str:
    """Return a duration as ``m:ss``, or ``h:mm:ss`` from an hour on."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    tail = f"{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
    return f"{hours}:{tail}" if hours else tail


# ---- tables -------------------------------------------------------------------------------------------------------


def titled(title: str, table: Table) -> RenderableType:
    """Return a table under a title that may be wider than the table."""
    return Group(Text(title, style="bold"), table)


def spent_table(seconds: Mapping[str, float]) -> RenderableType:
    """Return how long each part of a run took, and its share of all of them."""
    total = sum(seconds.values())
    table = Table("part")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for name, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{spent:.2f}", f"{spent / total:.1%}" if total > 0 else "")
    return titled("Where the time went", table)


def before_after(summary: Mapping[str, Json]) -> RenderableType:
    """Return the result of a run: success before and after training with 95% intervals, sampled and greedy, by label.

    ``summary`` is the content of ``summary.json``: evaluation rows under ``before``, ``after`` and their ``_greedy``.
    """
    rows = {name: row for name, row in summary.items() if isinstance(row, Mapping)}
    table = Table("tasks")
    table.add_column("number", justify="right")
    table.add_column("play")
    for column in ("before", "after"):
        table.add_column(column, justify="right")
    keys = [("all", "", "tasks"), *((label, f"by/{label}/", f"by/{label}/tasks") for label in labels_of(rows.values()))]
    for label, prefix, tasks in keys:
        for suffix, play in (("", "sampled"), ("_greedy", "greedy")):
            before, after = rows.get(f"before{suffix}", {}), rows.get(f"after{suffix}", {})
            number = str(after.get(tasks, before.get(tasks, "")))
            cells = (success_cell(before, prefix), success_cell(after, prefix))
            table.add_row(label if not suffix else "", number if not suffix else "", play, *cells)
        table.add_section()
    return titled("Solved by plain play, with 95% intervals", table)


def score_table(row: Mapping[str, Json], title: str) -> RenderableType:
    """Return one evaluation: success with its 95% interval over all tasks and by label, and pass@k."""
    table = Table("tasks")
    table.add_column("number", justify="right")
    table.add_column("solved", justify="right")
    table.add_row("all", str(row.get("tasks")), success_cell(row, ""))
    table.add_section()
    for label in labels_of([row]):
        table.add_row(label, str(row.get(f"by/{label}/tasks")), success_cell(row, f"by/{label}/"))
    table.add_section()
    for key, value in row.items():
        if key.startswith("pass@") and isinstance(value, int | float):
            table.add_row(key, "", percent(value))
    return titled(title, table)


def labels_of(rows: Iterable[Mapping[str, Json]]) -> list[str]:
    """Return the labels that evaluation rows report success by, sorted."""
    keys = {key for row in rows for key in row if key.startswith("by/") and key.endswith("/success")}
    return sorted(key.removeprefix("by/").removesuffix("/success") for key in keys)


def success_cell(row: Mapping[str, Json], prefix: str) -> str:
    """Return ``"12.3% [10.1, 14.6]"`` of an evaluation row, "-" where it has no such number."""
    success, interval = row.get(f"{prefix}success"), row.get(f"{prefix}success_ci95")
    if not isinstance(success, int | float):
        return "-"
    if isinstance(interval, Sequence) and len(interval) == 2:
        low, high = interval
        if isinstance(low, int | float) and isinstance(high, int | float):
            return f"{percent(success)} [{100.0 * low:.1f}, {100.0 * high:.1f}]"
    return percent(success)
