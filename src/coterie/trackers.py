"""Where numbers go besides the run folder: TensorBoard, and W&B, MLflow or trackio where they are installed.

A tracker is a convenience: whatever it raises is recorded and the run goes on.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from coterie.durable import atomic_write_text
from coterie.errors import ConfigError, guarded
from coterie.types import Failure, Json


class Tracker(Protocol):
    """A destination of numbers. It may raise: its caller guards every call."""

    @property
    def name(self) -> str:
        """The name it has in a recipe and in events."""
        ...

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Take the numbers of a step; names are paths (``"reward/planner"``)."""
        ...

    def close(self) -> None:
        """Write out what is buffered."""
        ...


class TensorBoardTracker:
    """TensorBoard event files in ``run_dir/tensorboard``."""

    name = "tensorboard"

    def __init__(self, run_dir: Path, first_step: int) -> None:
        """Open the writer; events at ``first_step`` and later, from before a resumption, are hidden."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=first_step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write one scalar per number."""
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class _RunTracker:
    """W&B and trackio, which share one interface: ``init`` a run, ``log`` to it, ``finish`` it."""

    def __init__(self, name: str, module: ModuleType, options: Mapping[str, Any]) -> None:
        self.name = name
        self._run = module.init(**options)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class _MlflowTracker:
    """MLflow, to wherever its own environment variables point."""

    name = "mlflow"

    def __init__(self, module: ModuleType, run_name: str, config: Mapping[str, Json]) -> None:
        self._module = module
        module.set_experiment("coterie")
        module.start_run(run_name=run_name)
        module.log_dict(dict(config), "recipe.json")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._module.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._module.end_run()


RUN_ID = ".run_id"
KNOWN = ("tensorboard", "wandb", "mlflow", "trackio")
_PACKAGES = {"tensorboard": "torch.utils.tensorboard"}


def open_trackers(
    names: tuple[str, ...],
    run_dir: Path,
    config: Mapping[str, Json],
    record: Callable[[Failure], None],
    first_step: int = 0,
) -> list[Tracker]:
    """Return the named trackers that open; one that fails to is handed to ``record`` and left out.

    A name that is not known, or whose package is not installed, is a ``ConfigError``: that can be put right before the
    run. ``config`` is the resolved recipe, for the services that show it.
    """
    modules = {name: _package(name) for name in names}
    opened: list[Tracker] = []
    for name, module in modules.items():
        with guarded(f"tracker {name}: open", record):
            opened.append(_open(name, module, run_dir, config, first_step))
    return opened


def check_trackers(names: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` where a tracker is not known or its package is not installed."""
    for name in names:
        _package(name)


def _open(name: str, module: ModuleType, run_dir: Path, config: Mapping[str, Json], first_step: int) -> Tracker:
    if name == "tensorboard":
        return TensorBoardTracker(run_dir, first_step)
    if name == "mlflow":
        return _MlflowTracker(module, _run_name(run_dir), config)
    run_name = _run_name(run_dir)
    options: dict[str, Any] = {"project": "coterie", "name": run_name, "config": dict(config), "resume": "allow"}
    if name == "wandb":
        options |= {"dir": str(run_dir), "id": run_name}
    return _RunTracker(name, module, options)


def _run_name(run_dir: Path) -> str:
    """Return the name a service knows the run by: the same after a resumption, another one in another folder.

    The folder's name alone would let two folders called ``run1`` draw into one curve.
    """
    path = run_dir / RUN_ID
    if not path.exists():
        atomic_write_text(path, uuid.uuid4().hex[:8] + "\n")
    return f"{run_dir.name}-{path.read_text(encoding='utf-8').strip()}"


def _package(name: str) -> ModuleType:
    """Return the imported package of a tracker."""
    if name not in KNOWN:
        raise ConfigError(f"no tracker named {name!r}: known are {list(KNOWN)}")
    try:
        return importlib.import_module(_PACKAGES.get(name, name))
    except ImportError as error:
        raise ConfigError(
            f"tracker {name!r}: its package cannot be imported ({error}). Install it with "
            f"pip install 'coterie[{name}]', or take it out of the recipe's trackers"
        ) from error
