"""The curves of a run as one picture, drawn from its journals alone.

Read are: ``success_selected`` and ``reward/NAME`` of metrics.jsonl, ``success``, ``temperature`` and ``success_ci95`` =
[low, high] of eval.jsonl, ``time_s`` of timings.jsonl. The x axis counts steps done: training step 0 is drawn at 1, and
an evaluation before training at 0.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from coterie.record import EVAL, METRICS, TIMINGS, read_rows
from coterie.types import Json

CURVES = "curves.png"
_REWARD = "reward/"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe-Ito: told apart by everyone
_SELECTED, _GREEDY, _FIRST_ROLE = 0, 1, 3
"""Colours by number; sampled plain play has those after greedy."""
_MANY_POINTS = 40


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a plot: (step, value) points in order, and for each point an interval where there is one.

    ``colour`` is a number, taken around the list of colours.
    """

    label: str
    points: tuple[tuple[int, float], ...]
    colour: int
    intervals: tuple[tuple[float, float], ...] = ()


def draw_curves(run_dir: Path) -> Path:
    """Draw success and reward per role over steps and over minutes into ``run_dir/curves.png``; return its path.

    Works at any moment of a run, with no row at all too.
    """
    metrics, evals = read_rows(run_dir / METRICS), read_rows(run_dir / EVAL)
    clock = [(int(step), float(time_s)) for step, time_s in _points(read_rows(run_dir / TIMINGS), "time_s", done=1)]
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharey="row", sharex="col")
    for column in (0, 1):
        minutes = clock if column else None
        _draw(axes[0][column], success_curves(metrics, evals), minutes)
        _draw(axes[1][column], reward_curves(metrics), minutes)
    axes[0][0].set_ylabel("success")
    axes[0][0].set_ylim(-0.03, 1.03)
    axes[1][0].set_ylabel("mean reward")
    axes[1][0].set_xlabel("training steps done")
    axes[1][0].xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes[1][1].set_xlabel("minutes")
    figure.suptitle(run_dir.resolve().name, fontsize=12)
    return write_figure(figure, run_dir)


def write_figure(figure: Figure, folder: Path) -> Path:
    """Write ``curves.png`` into a folder, whole or not at all; return its path."""
    path = folder / CURVES
    temporary = path.with_name(f".tmp-{CURVES}")
    figure.savefig(temporary, dpi=130, format="png")
    temporary.replace(path)
    return path


def success_curves(metrics: Sequence[Mapping[str, Json]], evals: Sequence[Mapping[str, Json]]) -> list[Curve]:
    """Return the selected success of training, and that of plain play: one line per temperature, greedy after sampled.

    Such a line joins what was played before, while and after training, whatever the split.
    """
    curves = [Curve("training (selected path)", _points(metrics, "success_selected", done=1), _SELECTED)]
    scored = [row for row in evals if _number(row.get("success")) is not None]
    temperatures = dict.fromkeys(_number(row.get("temperature")) for row in scored)
    sampled = _GREEDY
    for temperature in sorted(temperatures, key=lambda value: (value == 0.0, value or 0.0)):
        rows = [row for row in scored if _number(row.get("temperature")) == temperature]
        intervals = [interval for row in rows if (interval := _interval(row.get("success_ci95"))) is not None]
        whole = tuple(intervals) if len(intervals) == len(rows) else ()
        if temperature == 0.0:
            label, colour = "plain play, greedy", _GREEDY
        else:
            sampled += 1
            label = "plain play" if temperature is None else f"plain play, temperature {temperature:g}"
            colour = sampled
        curves.append(Curve(label, _points(rows, "success"), colour, whole))
    return [curve for curve in curves if curve.points]


def reward_curves(metrics: Sequence[Mapping[str, Json]]) -> list[Curve]:
    """Return one curve per role and one for the team, in the order they appear."""
    keys = dict.fromkeys(key for row in metrics for key in row if key.startswith(_REWARD))
    found = [(key.removeprefix(_REWARD), _points(metrics, key, done=1)) for key in keys]
    drawn = [(label, points) for label, points in found if points]
    return [Curve(label, points, _FIRST_ROLE + index) for index, (label, points) in enumerate(drawn)]


def _draw(axes: Axes, curves: Sequence[Curve], clock: Sequence[tuple[int, float]] | None) -> None:
    for curve in curves:
        colour = COLOURS[curve.colour % len(COLOURS)]
        xs = [float(step) if clock is None else minutes_at(clock, step) for step, _ in curve.points]
        ys = [value for _, value in curve.points]
        marker = "o" if len(ys) <= _MANY_POINTS else None
        axes.plot(xs, ys, color=colour, label=curve.label, marker=marker, markersize=3.5, linewidth=1.6)
        if curve.intervals:
            axes.fill_between(
                xs, [low for low, _ in curve.intervals], [high for _, high in curve.intervals], color=colour, alpha=0.15
            )
    if curves:
        axes.legend(frameon=False, fontsize=9)
    else:
        axes.text(0.5, 0.5, "no rows yet", transform=axes.transAxes, ha="center", va="center", color="#777777")
    axes.grid(visible=True, color="#DDDDDD", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _points(rows: Sequence[Mapping[str, Json]], key: str, done: int = 0) -> tuple[tuple[int, float], ...]:
    """Return (step + ``done``, value) of the rows that have a number under the key."""
    found = ((row.get("step"), _number(row.get(key))) for row in rows)
    return tuple((step + done, value) for step, value in found if isinstance(step, int) and value is not None)


def _number(value: Json) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _interval(value: Json) -> tuple[float, float] | None:
    """Return a pair of numbers, or ``None`` for anything else."""
    pair = [_number(item) for item in value] if isinstance(value, list) else []
    return (pair[0], pair[1]) if len(pair) == 2 and pair[0] is not None and pair[1] is not None else None


def minutes_at(clock: Sequence[tuple[int, float]], step: int) -> float:
    """Return when so many steps were done: the last time noted by then, 0 where there is none (before training)."""
    index = bisect_right([noted for noted, _ in clock], step)
    return clock[index - 1][1] / 60 if index else 0.0
