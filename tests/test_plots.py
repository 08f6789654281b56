"""The picture of a run: which numbers become which curves, and that it can always be drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.plots import Curve, draw_curves, minutes_at, reward_curves, success_curves
from coterie.types import Json

METRICS: list[dict[str, Json]] = [
    {"step": 0, "success_selected": 0.25, "reward/tool": 0.5, "reward/walker": None, "loss": 3.0},
    {"step": 1, "success_selected": None, "reward/tool": 0.75, "reward/walker": 0.1},
]
EVALS: list[dict[str, Json]] = [
    {"step": 0, "success": 0.1, "success_ci95": [0.05, 0.2], "name": "before", "temperature": 1.0},
    {"step": 0, "success": 0.0, "success_ci95": [None, None], "name": "before_greedy", "temperature": 0.0},
    {"step": 1, "success": 0.3, "success_ci95": [0.2, 0.4], "name": "validation", "temperature": 1.0},
    {"step": 2, "success": 0.4, "success_ci95": [0.3, 0.5], "name": "after", "temperature": 1.0},
    {"step": 2, "success": 0.5, "success_ci95": [0.4, 0.6], "name": "after_greedy", "temperature": 0.0},
]


def write(run_dir: Path, num_metrics: int, num_evals: int) -> None:
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in METRICS[:num_metrics]))
    (run_dir / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in EVALS[:num_evals]))
    (run_dir / "timings.jsonl").write_text('{"step": 0, "time_s": 30.0}\n{"step": 1, "time_s": 90.0}\n')


def test_plain_play_is_one_line_per_temperature_from_before_to_after() -> None:
    assert success_curves(METRICS, EVALS) == [
        Curve("training (selected path)", ((1, 0.25),), 0),
        Curve("plain play, temperature 1", ((0, 0.1), (1, 0.3), (2, 0.4)), 2, ((0.05, 0.2), (0.2, 0.4), (0.3, 0.5))),
        Curve("plain play, greedy", ((0, 0.0), (2, 0.5)), 1),
    ]


def test_a_temperature_has_the_same_colour_whatever_else_is_drawn() -> None:
    assert [curve.colour for curve in success_curves([], EVALS)] == [2, 1]
    assert [curve.colour for curve in success_curves([], [EVALS[0]])] == [2]


def test_curves_leave_out_missing_values() -> None:
    assert reward_curves(METRICS) == [Curve("tool", ((1, 0.5), (2, 0.75)), 3), Curve("walker", ((2, 0.1),), 4)]
    assert success_curves([], [{"step": 3, "success": 1}]) == [Curve("plain play", ((3, 1.0),), 2)]
    assert success_curves([], []) == []


def test_a_number_of_steps_is_placed_at_the_last_time_noted_by_then_and_the_start_at_zero() -> None:
    clock = [(1, 30.0), (3, 90.0)]
    assert [minutes_at(clock, step) for step in (0, 1, 2, 3, 9)] == [0.0, 0.5, 0.5, 1.5, 1.5]
    assert minutes_at([], 4) == 0.0


@pytest.mark.parametrize(("num_metrics", "num_evals"), [(0, 0), (1, 0), (0, 1), (2, 5)])
def test_the_picture_is_drawn_with_no_row_one_row_and_several(tmp_path: Path, num_metrics: int, num_evals: int) -> None:
    write(tmp_path, num_metrics, num_evals)
    path = draw_curves(tmp_path)
    data = path.read_bytes()
    assert path == tmp_path / "curves.png"
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20], "big") == 1300
    assert sorted(found.name for found in tmp_path.iterdir()) == [
        "curves.png", "eval.jsonl", "metrics.jsonl", "timings.jsonl",
    ]  # fmt: skip


def test_the_picture_is_drawn_in_a_folder_without_journals(tmp_path: Path) -> None:
    assert draw_curves(tmp_path).stat().st_size > 1000
