"""A run folder from its start to its end: refuse what cannot work, lock, train, stop at a signal, resume, summarise."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from coterie.checkpoint import CheckpointStore, truncate_journals
from coterie.cluster.entry import placed
from coterie.config import Recipe, dump_recipe, flat, read_recipe
from coterie.dry_play import check_prompts
from coterie.durable import LOCK_NAME, RunLock, atomic_write_json, check_writable
from coterie.errors import CheckpointError, ConfigError
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.plots import draw_curves
from coterie.provenance import code_version
from coterie.record import EVAL, EVENTS, SOLVED, Recorder, read_rows
from coterie.sandbox.shared import started_tier
from coterie.shipped import RECIPE_JSON
from coterie.trackers import RUN_ID, check_trackers, open_trackers
from coterie.train import Listener, Run
from coterie.trained import Which, find_checkpoint, load_weights
from coterie.types import Json

RECIPE = RECIPE_JSON
SUMMARY = "summary.json"
# Keys that do not change what is learned from a given state on (so do all of eval); a resumed run may change them when
# told to.
_COMPATIBLE = (
    "description",
    "trackers",
    "train.steps",
    "train.max_generated_tokens",
    "train.save_every",
    "train.keep",
    "train.retries",
    "train.max_failed_fraction",
    "train.max_skipped_updates",
    "train.episode_deadline_s",
    "sandbox.slots",
)

_BEFORE_SAVING = {RECIPE, LOCK_NAME, EVENTS, EVAL, SOLVED, RUN_ID, "checkpoints", "tensorboard", "wandb"}
"""What a run folder holds, at most, before the first checkpoint is saved."""


class StopRequestedError(BaseException):
    """SIGINT or SIGTERM arrived; not an ``Exception``, so nothing but the run itself catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


@dataclass(slots=True)
class StopSignal:
    """Remembers the first SIGINT or SIGTERM until the run asks; the second ends the process at once."""

    number: int | None = None

    def check(self) -> None:
        """Raise ``StopRequestedError`` once a signal has come."""
        if self.number is not None:
            raise StopRequestedError(self.number)

    def arrive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle a signal."""
        if self.number is not None:
            os._exit(128 + number)
        self.number = number


@contextmanager
def stop_signals() -> Iterator[StopSignal]:
    """Catch SIGINT and SIGTERM inside the block, and restore what was there before."""
    stop = StopSignal()
    before = {number: signal.signal(number, stop.arrive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def start(recipe: Recipe, run_dir: Path, listener: Listener) -> Mapping[str, Json]:
    """Train a recipe from the beginning in a new folder, or one whose run saved nothing; return its summary."""
    refuse_begun(run_dir)
    recipe = check_env_fits(recipe)
    check_trackers(recipe.trackers)
    if not recipe.trained_policies:
        raise ConfigError(
            f'no policy would be trained: {sorted(recipe.policies)} are all frozen; set train = "full" for one, or '
            "play them as they are with coterie eval"
        )
    lineup = assemble(recipe)
    check_prompts(lineup, "train", recipe.eval.final_split, *([recipe.eval.split] if recipe.eval.validates else []))
    check_writable(run_dir)
    with RunLock(run_dir):
        atomic_write_json(run_dir / RECIPE, dump_recipe(recipe))
        return _train(lineup, run_dir, listener)


def refuse_begun(run_dir: Path) -> None:
    """Raise ``ConfigError`` unless the folder is absent or empty, or its run ended before it had saved anything.

    A warm start that fails or is stopped leaves such a folder: nothing in it is worth going on from.
    """
    names = {path.name for path in run_dir.iterdir()} if run_dir.is_dir() else set()
    saved = [path for path in (run_dir / "checkpoints").glob("*") if not path.name.startswith(".tmp-")]
    if saved or not names <= _BEFORE_SAVING or not names & {RECIPE, LOCK_NAME}:
        refuse_used(run_dir)


def refuse_used(run_dir: Path) -> None:
    """Raise ``ConfigError`` unless the folder is absent or empty."""
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file; give a folder that is new or empty with --out")
    if run_dir.is_dir() and any(run_dir.iterdir()):
        raise ConfigError(
            f"{run_dir} is not empty; nothing was changed. Give another --out, or go on with its run: train --resume"
        )


def resume(run_dir: Path, recipe: Recipe | None, listener: Listener, accept_changes: bool) -> Mapping[str, Json]:
    """Go on with a run from its newest whole checkpoint; return its summary.

    ``recipe``, if given, is compared with the run's own: incompatible changes are refused, compatible ones need
    ``accept_changes``.
    """
    if not (run_dir / RECIPE).is_file():
        raise ConfigError(f"{run_dir} holds no run ({RECIPE} is missing); leave --resume out to start one")
    own = read_recipe(run_dir / RECIPE)
    if recipe is not None:
        recipe = check_env_fits(recipe)
        check_changes(dump_recipe(own), dump_recipe(recipe), accept_changes, changed_schedules(own, recipe))
    lineup = assemble(check_env_fits(recipe or own))
    with RunLock(run_dir):
        atomic_write_json(run_dir / RECIPE, dump_recipe(lineup.recipe))
        return _train(lineup, run_dir, listener)


def is_finished(run_dir: Path, recipe: Recipe | None) -> bool:
    """Return whether a run has made all of its steps, or used up its tokens, and written its summary.

    False where ``recipe`` is given and differs from the run's own: there is something to go on with, or to refuse.
    """
    own = read_recipe(run_dir / RECIPE)
    if recipe is not None and dump_recipe(check_env_fits(recipe)) != dump_recipe(own):
        return False
    path = run_dir / SUMMARY
    if not path.is_file():
        return False
    summary = json.loads(path.read_text(encoding="utf-8"))
    return own.is_over(int(summary["steps"]), int(summary["tokens_generated"]))


def open_run(
    run_dir: Path,
    which: Which = "last",
    settings: Sequence[str] = (),
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> Lineup:
    """Return the lineup of a run with the weights and versions of its last or best whole checkpoint, to play with.

    The folder is only read, so a run that is going on is not disturbed. ``settings`` override keys of the recipe, as
    ``--set`` does; ``change`` then may add policies to it. Raises ``CheckpointError`` where no usable checkpoint is
    there, or its weights are of other shapes.
    """
    if not (run_dir / RECIPE).is_file():
        raise ConfigError(f"{run_dir} holds no run: {RECIPE} is missing; give the folder that training wrote")
    trained = read_recipe(run_dir / RECIPE).trained_policies
    checkpoint = find_checkpoint(run_dir, which)
    lineup = assemble(change(check_env_fits(read_recipe(run_dir / RECIPE, settings))))
    lineup.load_warmed(checkpoint.path)
    for name in trained:
        if name in lineup.policies:
            load_weights(lineup.policies[name], checkpoint.path / name)
    return lineup


def changed_schedules(old: Recipe, new: Recipe) -> tuple[str, ...]:
    """Return a remark for each policy whose learning rate, from the next step on, depends on how many steps there are.

    Linear and cosine schedules end with the policy's last update, or with the last token that may be generated: when
    that moves, every rate on the way there does.
    """
    budgets = old.train.max_generated_tokens, new.train.max_generated_tokens
    remarks = []
    for name in new.trained_policies:
        schedule = new.policies[name].optimizer.schedule
        if name not in old.policies or schedule == "constant":
            continue
        before, after = old.num_updates(name), new.num_updates(name)
        if before != after:
            remarks.append(
                f"policies.{name}: the {schedule} schedule ends after {before} -> {after} updates; the learning rate "
                "of every later step is another than it would have been"
            )
        elif budgets[0] != budgets[1]:
            remarks.append(
                f"policies.{name}: the {schedule} schedule ends with train.max_generated_tokens, "
                f"{budgets[0] or 'none'} -> {budgets[1] or 'none'}; the learning rate of every later step is another "
                "than it would have been"
            )
    return tuple(remarks)


def check_changes(old: Mapping[str, Any], new: Mapping[str, Any], accept: bool, remarks: Sequence[str] = ()) -> None:
    """Raise ``ConfigError`` showing the difference of two resolved recipes, unless it is compatible and accepted.

    ``remarks`` say what the difference brings with it; they are shown below it.
    """
    before, after = flat(old), flat(new)
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    if not changed:
        return
    lines = "\n".join(f"  {key}: {before.get(key, '(absent)')!r} -> {after.get(key, '(absent)')!r}" for key in changed)
    lines += "".join(f"\n  {remark}" for remark in remarks)
    refused = [key for key in changed if key not in _COMPATIBLE and not key.startswith(("eval.", "hardware."))]
    if refused:
        raise ConfigError(
            f"the recipe differs from the run's in keys that cannot change while it runs ({', '.join(refused)}):"
            f"\n{lines}\nStart a new run for it, or resume without these changes"
        )
    if not accept:
        raise ConfigError(
            f"the recipe differs from the run's:\n{lines}\nAdd --accept-changes to go on with the new values"
        )


def _train(assembled: Lineup, run_dir: Path, listener: Listener) -> Mapping[str, Json]:
    """Train in a locked folder, from its newest checkpoint if it has one."""
    began = time.monotonic()
    code_version()  # noted now: a long run's checkout may be at another commit by its end
    with (
        Recorder(run_dir) as recorder,
        placed(assembled, lambda kind, fields: recorder.event(kind, **fields), run_dir) as lineup,
        stop_signals() as stop,  # last, because Ray sets a handler of its own
    ):

        def check_stop() -> None:
            stop.check()
            listener.stop()

        run = Run(lineup, run_dir, recorder, replace(listener, stop=check_stop))
        checkpoint = CheckpointStore(run_dir, keep=lineup.recipe.train.keep).latest(recorder.event)
        if checkpoint is None:
            if read_rows(run_dir / "metrics.jsonl"):
                raise CheckpointError(f"{run_dir} has metrics but no checkpoint; start over in another folder")
            for journal in recorder.journals:
                journal.unlink(missing_ok=True)
        else:
            truncate_journals(run_dir, checkpoint)
            run.restore(checkpoint)
            recorder.event("resumed", step=run.next_step, checkpoint=checkpoint.path.name)
        for tracker in open_trackers(
            lineup.recipe.trackers, run_dir, dump_recipe(lineup.recipe), recorder.failure, run.next_step
        ):
            recorder.add_tracker(tracker)
        try:
            if checkpoint is None:
                run.warm_start()
                run.owed = ["before", "before_greedy"]
                run.pay()
                run.save()
            run.train()
            run.owed = ["after", "after_greedy"]
            run.pay()
        except StopRequestedError:
            if run.learners:
                run.save()
            recorder.event("stopped", step=run.next_step)
            raise
        summary = summarise(run, time.monotonic() - began)
        atomic_write_json(run_dir / SUMMARY, summary)
        draw_curves(run_dir)
    return summary


def summarise(run: Run, total_s: float) -> dict[str, Json]:
    """Return the content of ``summary.json``, read from the journals."""
    rows = read_rows(run.recorder.run_dir / "eval.jsonl")
    by_name: dict[str, Json] = {}
    for row in rows:
        name = row.get("name")
        if name in ("before", "before_greedy", "after", "after_greedy"):
            by_name[str(name)] = row
    tier = started_tier()
    return {
        "description": run.recipe.description,
        "seed": run.recipe.seed,
        "code": code_version(),
        "steps": run.next_step,
        "minutes": round(run.spent_s / 60.0, 2),
        "minutes_with_warm_start_and_evaluation": round(total_s / 60.0, 2),
        "tokens_generated": run.tokens_generated,
        "imitation_loss": dict(run.imitation),
        "best_validation": run.best,
        **({} if tier is None else {"sandbox": tier}),
        "peak_memory_mb": _mb(max(run.peaks.values())) if run.peaks else None,
        "peak_memory_mb_by_phase": {phase: _mb(count) for phase, count in run.peaks.items()},
        **by_name,
    }


def _mb(count: int) -> float:
    return round(count / 2**20, 1)
