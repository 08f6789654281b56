"""The time of a run by its parts: every second counts once, for the innermost part that was open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie import spent
from coterie.cli import app
from coterie.spent import part, profiling


class Clock:
    """Says what the test tells it to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spent.time, "perf_counter", clock.perf_counter)
    return clock


def test_a_part_inside_another_is_counted_once(clock: Clock) -> None:
    """decode 1 + 4, sample 2, by hand."""
    with profiling() as found:
        clock.now += 10.0  # nobody's
        with part("decode"):
            clock.now += 1.0
            with part("sample"):
                clock.now += 2.0
            clock.now += 4.0
    assert found.seconds == {"decode": 5.0, "sample": 2.0}


def test_a_whole_part_keeps_the_time_of_what_is_entered_inside(clock: Clock) -> None:
    with profiling() as found:
        with part("evaluation", whole=True), part("decode"):
            clock.now += 3.0
        with part("decode"):
            clock.now += 1.0
    assert found.seconds == {"evaluation": 3.0, "decode": 1.0}


def test_a_part_that_raises_is_counted_and_closed(clock: Clock) -> None:
    with profiling() as found:
        with pytest.raises(ZeroDivisionError), part("forward"):
            clock.now /= 0.0
        with part("backward"):
            clock.now += 2.0
    assert found.seconds == {"forward": 0.0, "backward": 2.0}


def test_nothing_is_counted_while_nobody_asks(clock: Clock) -> None:
    with profiling() as found:
        pass
    with part("forward"):
        clock.now += 1.0
    assert found.seconds == {}


def test_train_profile_writes_where_the_time_went(tmp_path: Path) -> None:
    """All parts of a step are there, and the run's own files are those of a run without a profile."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        'description = "x"\ntrackers = []\n[env]\nname = "plan_path"\nsize = 3\nmax_rounds = 1\n'
        '[policies.shared]\nmodel = "tiny:width=16,layers=1,heads=2,positions=1024"\n'
        '[team]\ntool = "shared"\nplanner = "shared"\n'
        "[sampling]\nnum_candidates = 2\nmax_tokens = 4\n[train]\nsteps = 1\ntasks_per_step = 2\n"
        "[eval]\nfinal_tasks = 1\n"
    )
    run_dir = tmp_path / "run"
    done = CliRunner().invoke(app, ["train", str(recipe), "--out", str(run_dir), "--profile"])
    assert done.exit_code == 0, done.output
    assert "Where the time went" in done.output
    seconds = json.loads((run_dir / "profile.json").read_text())["seconds"]
    assert {"rollout: prefill", "rollout: decode", "rollout: sample", "rollout: environment"} <= set(seconds)
    assert {"update: pack", "records", "saving", "evaluation"} <= set(seconds)
    assert all(value >= 0.0 for value in seconds.values())
