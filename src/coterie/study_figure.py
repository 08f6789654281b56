"""The figure of a study: success of plain play against generated tokens and against minutes, a line per variant."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from coterie.plots import COLOURS, minutes_at, write_figure
from coterie.record import EVAL, METRICS, TIMINGS, read_rows
from coterie.types import Json

Point = tuple[float, float, float, float, float]
"""Tokens, minutes, success, and the 95% interval of that over tasks, low and high."""
_GRID = 60


def draw_study(folder: Path, runs: Mapping[str, Sequence[Path]], title: str) -> Path:
    """Draw ``curves.png`` of a study's finished runs, by variant; return its path.

    A line is the mean over seeds. Its band spans the seeds; where there is one seed, it is the 95% interval over tasks.
    """
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2, sharey=True)
    for number, (name, folders) in enumerate(runs.items()):
        curves = [points for path in folders if (points := curve_of(path))]
        for column in (0, 1):
            _draw(axes[column], name, curves, column, number)
    axes[0].set_ylabel("success, plain play")
    axes[0].set_ylim(-0.03, 1.03)
    axes[0].set_xlabel("generated tokens of training")
    axes[1].set_xlabel("minutes of training")
    for each in axes:
        each.grid(visible=True, color="#DDDDDD", linewidth=0.6)
        each.spines[["top", "right"]].set_visible(False)
    if runs:
        axes[1].legend(frameon=False, fontsize=8)
    figure.suptitle(f"{title}. Bands: range over seeds (one seed: 95% over tasks)", fontsize=11)
    return write_figure(figure, folder)


def curve_of(run_dir: Path) -> list[Point]:
    """Return what a run's sampled evaluations found, in order: before, the validations, after."""
    tokens = [0.0, *accumulate(_number(row.get("tokens_generated")) for row in read_rows(run_dir / METRICS))]
    clock = [(int(_number(row.get("step"))) + 1, _number(row.get("time_s"))) for row in read_rows(run_dir / TIMINGS)]
    points = []
    for row in read_rows(run_dir / EVAL):
        interval, step = row.get("success_ci95"), int(_number(row.get("step")))
        if str(row.get("name")).endswith("_greedy") or not isinstance(interval, list):
            continue
        low, high = (_number(end) for end in interval)
        points.append((tokens[step], minutes_at(clock, step), _number(row.get("success")), low, high))
    return points


def spread(curves: Sequence[Sequence[Point]], column: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return x, mean, low and high of several curves over a common grid, which ends where the first of them does.

    Of one curve: its own points, and the interval of each.
    """
    if len(curves) == 1:
        array = np.asarray(curves[0], dtype=np.float64)
        return array[:, column], array[:, 2], array[:, 3], array[:, 4]
    xs = np.linspace(0.0, min(curve[-1][column] for curve in curves), _GRID)
    ys = np.asarray([np.interp(xs, [p[column] for p in curve], [p[2] for p in curve]) for curve in curves])
    return xs, ys.mean(axis=0), ys.min(axis=0), ys.max(axis=0)


def _draw(axes: Axes, name: str, curves: Sequence[Sequence[Point]], column: int, number: int) -> None:
    if not curves:
        return
    xs, mean, low, high = spread(curves, column)
    colour, style = COLOURS[number % len(COLOURS)], ("-", "--", ":")[number // len(COLOURS) % 3]
    axes.plot(xs, mean, color=colour, linestyle=style, label=f"{name} ({len(curves)})", linewidth=1.6)
    axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0)


def _number(value: Json) -> float:
    return float(value) if isinstance(value, int | float) else math.nan
