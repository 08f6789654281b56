"""The errors of Coterie, and the one place that catches everything.

::

    CoterieError
    ├── ConfigError       before anything starts: a recipe, an option, a file that cannot work
    ├── EnvError          an environment or its scorer raised; recorded on the episode
    ├── EngineError       generation failed; recorded on the episode
    ├── SandboxError      model-written code could not be run (not: it ran and failed); recorded on the episode
    └── TrainError        the run stops
        └── CheckpointError   a checkpoint is missing, damaged or of another run

A message says what was found, what was expected, where, and what to change.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from coterie.types import Failure


class CoterieError(Exception):
    """The root of all errors that Coterie raises itself."""


class ConfigError(CoterieError, ValueError):
    """A recipe, an option or an input that cannot work; raised before anything is written."""


class EnvError(CoterieError, RuntimeError):
    """An environment, or the scorer of one, raised or returned something that is not a verdict."""


class EngineError(CoterieError, RuntimeError):
    """An engine did not generate what was asked for."""


class SandboxError(CoterieError, RuntimeError):
    """The sandbox itself failed; says nothing about the program it should have run."""


class TrainError(CoterieError, RuntimeError):
    """The run cannot go on."""


class CheckpointError(TrainError):
    """A checkpoint is missing, damaged, or belongs to another run."""


@contextmanager
def guarded(where: str, record: Callable[[Failure], None]) -> Iterator[None]:
    """Run a block; when it raises, hand a ``Failure`` to ``record`` and go on after the block.

    The only broad handler of the package. It is for code that is not ours (environments, scorers, trackers), where one
    failure must not end a run. Interrupts and cancellation pass through: they are not ``Exception``.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001
        record(
            Failure(
                where=where,
                kind=type(error).__name__,
                message=str(error),
                traceback="".join(traceback.format_exception(error)),
            )
        )
