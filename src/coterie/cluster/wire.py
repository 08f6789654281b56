"""What passes between the process of the run and its workers: plain records, and weights as bytes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from coterie.config import Recipe
from coterie.engines import Completion, Request
from coterie.env import Prompt
from coterie.errors import EngineError
from coterie.rollout import Limits, Play
from coterie.team import Plan, Seating
from coterie.types import Episode, Failure

if TYPE_CHECKING:  # it imports torch, and who plays environments needs none
    from coterie.learner import Update

Answers: TypeAlias = list[tuple[Completion, ...]] | Failure
"""What came of a batch: the completions of each request, or why there are none."""


class LostError(Exception):
    """A worker died, or did not answer in time; what it held is to be made again."""


class Actor(Protocol):
    """One worker process, and after it is lost its replacement."""

    name: str
    handle: Any
    """``handle.method.remote(...)`` calls the worker that is there now, and returns a reference to what comes of it."""

    def wait(self, ref: Any, doing: str) -> Any:
        """Return what a call of this worker comes to. ``doing`` says in errors what it was about.

        ``LostError`` where the worker died or let its deadline pass; what the call itself raises is raised here, and
        ``TrainError`` where the whole cluster is gone.
        """
        ...

    def restart(self, why: LostError) -> None:
        """Put a new worker in the place of a lost one; ``TrainError`` once it was replaced too often."""
        ...


@dataclass(frozen=True, slots=True)
class AbsentRenderer:
    """A renderer that is in the environment worker: renderers know tokenizers, so they travel once and not per job."""

    policy: str

    def render(self, prompt: Prompt) -> tuple[int, ...]:  # noqa: ARG002
        """Raise: the worker has put its own renderer in this one's place before anybody renders."""
        raise EngineError(f"policy {self.policy!r}: this renderer only stands for one in another process")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Episodes that one environment worker plays in one rollout."""

    plays: tuple[Play, ...]
    seats: Mapping[str, Seating]
    plan: Plan
    limits: Limits


def job_of(plays: Sequence[Play], seats: Mapping[str, Seating], plan: Plan, limits: Limits) -> Job:
    """Return a job that can travel: seats without renderers. How many may fail is counted over all jobs, not here."""
    bare = {role: replace(seat, renderer=AbsentRenderer(seat.policy)) for role, seat in seats.items()}
    return Job(plays=tuple(plays), seats=bare, plan=plan, limits=replace(limits, max_failed_fraction=1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A batch of one environment worker that has been answered; played again, the worker must ask the same."""

    requests: tuple[Request, ...]
    answers: Answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Where an environment worker stands: every live episode waits for ``requests``, or all ``episodes`` have ended."""

    requests: tuple[Request, ...]
    episodes: tuple[Episode, ...] | None
    events: tuple[tuple[str, Mapping[str, str | int]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What came of an update, and how many of the last ones were skipped."""

    update: Update
    skipped_in_a_row: int


def part_of(recipe: Recipe, policies: Sequence[str]) -> Recipe:
    """Return the recipe with these policies only, and the roles they play; enough to load them, not to train."""
    return recipe.model_copy(
        update={
            "policies": {name: recipe.policies[name] for name in policies},
            "team": {role: name for role, name in recipe.team.items() if name in policies},
        }
    )


def look_in(path: Sequence[str]) -> None:
    """Let modules be found here wherever they are found in the run's process: envs stand beside their recipe."""
    sys.path += [entry for entry in path if entry not in sys.path]
