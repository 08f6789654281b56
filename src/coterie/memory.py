"""The peak memory of a run, measured before it begins: each phase at full size, in a folder thrown away after."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import RenderableType
from rich.table import Table

from coterie.display import titled
from coterie.errors import ConfigError
from coterie.estimate import readable_bytes
from coterie.lineup import Lineup
from coterie.machine import available_memory, resident_memory
from coterie.record import Recorder
from coterie.train import Listener, Run

_WARM_STEPS = 2
_STEPS = 3
"""What a step takes depends on what was drawn: the largest of one SmolLM2 step in six was a fifth above the first."""


def measure(lineup: Lineup, tell: Callable[[str], None]) -> dict[str, int]:
    """Return the peak bytes of this process up to the end of each phase that raised it; the last is the run's peak.

    Runs what a run begins with: the warm start for two steps, the first evaluations, three whole training steps and a
    checkpoint. The lineup is of no use afterwards. ``tell`` hears which phase begins. Memory of devices is not in it.
    Raises ``ConfigError`` where other processes do the work, or the system does not say what this one takes.
    """
    recipe = lineup.recipe
    if recipe.hardware.backend != "local":
        raise ConfigError(
            f'hardware.backend = "{recipe.hardware.backend}": its workers are other processes, whose memory is not '
            'measured here; measure one with --set hardware.backend="local"'
        )
    if resident_memory() is None:
        raise ConfigError("this system does not say what memory a process takes (Linux does, in /proc/self/status)")
    warm = recipe.imitate
    short = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update={"steps": min(recipe.train.steps, _STEPS)}),
            "eval": recipe.eval.model_copy(update={"every": 0, "every_tokens": 0}),
            "imitate": None if warm is None else warm.model_copy(update={"steps": min(warm.steps, _WARM_STEPS)}),
        }
    )
    silent = Listener(
        step=lambda _report: None,
        score=lambda _name, _score: None,
        imitate=lambda _policies, _step, _steps, _loss: None,
        stop=lambda: None,
    )
    with tempfile.TemporaryDirectory(prefix="coterie-memory-") as folder, Recorder(Path(folder)) as recorder:
        run = Run(replace(lineup, recipe=short), Path(folder), recorder, silent)
        tell("warm start" if warm else "learners")
        run.warm_start()
        tell(f"evaluations of {recipe.eval.final_tasks} tasks")
        run.owed = ["before", "before_greedy"]
        run.pay()
        tell("training steps")
        run.train()
    return run.peaks


def peaks_table(peaks: Mapping[str, int]) -> RenderableType:
    """Return the measured peaks as a table, with what this machine has left."""
    table = Table("up to the end of")
    table.add_column("peak of the process", justify="right")
    for phase, peak in peaks.items():
        table.add_row(phase, readable_bytes(peak))
    left = available_memory()
    free = "" if left is None else f"; {readable_bytes(left)} are free beside this process"
    return titled(f"Memory, measured: {readable_bytes(max(peaks.values()))}{free}", table)
