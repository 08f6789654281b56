"""Trackers: what is opened, what is refused before a run, and what is only recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from coterie.errors import ConfigError
from coterie.trackers import open_trackers
from coterie.types import Failure


def ignored(failure: Failure) -> None:
    pytest.fail(f"{failure.where}: {failure.message}\n{failure.traceback}")


class FakeRun:
    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.calls.append(("log", (step, numbers)))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_tensorboard_gets_every_number_and_a_resumed_run_hides_what_it_repeats(tmp_path: Path) -> None:
    """OBS-06."""
    for first_step, last_step, value in ((0, 4, 1.0), (3, 5, 2.0)):
        (tracker,) = open_trackers(("tensorboard",), tmp_path, {}, ignored, first_step)
        for step in range(max(1, first_step), last_step + 1):
            tracker.log(step, {"loss": value})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services_get_the_run_by_name_so_that_a_resumed_one_continues_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, opened = FakeRun(), []
    module = ModuleType(name)
    monkeypatch.setattr(module, "init", lambda **options: opened.append(options) or run, raising=False)
    monkeypatch.setitem(sys.modules, name, module)
    for folder in ("a", "b"):
        (tmp_path / folder / "maze").mkdir(parents=True)
    (tracker,) = open_trackers((name,), tmp_path / "a" / "maze", {"seed": 3}, ignored)
    tracker.log(2, {"loss": 0.5})
    tracker.close()
    assert tracker.name == name
    assert opened[0]["name"].startswith("maze-")
    assert opened[0]["config"] == {"seed": 3}
    assert opened[0]["resume"] == "allow"
    assert run.calls == [("log", (2, {"loss": 0.5})), ("finish", None)]
    open_trackers((name,), tmp_path / "a" / "maze", {}, ignored, first_step=5)
    open_trackers((name,), tmp_path / "b" / "maze", {}, ignored)
    assert opened[1]["name"] == opened[0]["name"]
    assert opened[2]["name"] != opened[0]["name"], "another folder of the same name is another run"


def test_mlflow_gets_metrics_and_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    module = ModuleType("mlflow")
    for call in ("set_experiment", "start_run", "log_dict", "log_metrics", "end_run"):
        monkeypatch.setattr(
            module, call, lambda *args, _call=call, **options: calls.append((_call, (args, options))), raising=False
        )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    (tmp_path / "maze").mkdir()
    (tracker,) = open_trackers(("mlflow",), tmp_path / "maze", {"seed": 3}, ignored)
    tracker.log(2, {"loss": 0.5})
    tracker.close()
    assert calls[1:] == [
        ("start_run", ((), {"run_name": f"maze-{(tmp_path / 'maze' / '.run_id').read_text().strip()}"})),
        ("log_dict", (({"seed": 3}, "recipe.json"), {})),
        ("log_metrics", (({"loss": 0.5},), {"step": 2})),
        ("end_run", ((), {})),
    ]


def test_a_service_that_is_down_is_recorded_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reliability row 27."""

    def down(**options: object) -> None:
        raise ConnectionError("no network")

    module = ModuleType("wandb")
    monkeypatch.setattr(module, "init", down, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    failures: list[Failure] = []
    opened = open_trackers(("wandb", "tensorboard"), tmp_path, {}, failures.append)
    assert [tracker.name for tracker in opened] == ["tensorboard"]
    assert [(failure.where, failure.kind) for failure in failures] == [("tracker wandb: open", "ConnectionError")]
    opened[0].close()


def test_unknown_names_and_missing_packages_are_refused_before_anything_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="no tracker named 'tensorbord'"):
        open_trackers(("tensorboard", "tensorbord"), tmp_path, {}, ignored)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match=r"pip install 'coterie\[mlflow\]'"):
        open_trackers(("tensorboard", "mlflow"), tmp_path, {}, ignored)
    assert list(tmp_path.iterdir()) == []
