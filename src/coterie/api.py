"""A trained team from Python: load a run, play tasks of one's own. Importing this loads no torch."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from coterie.env import Env
from coterie.types import Episode, Json, Task

if TYPE_CHECKING:
    from coterie.lineup import Lineup

_log = logging.getLogger(__name__)
OWN_SPLIT = "own"
"""The split of tasks that are given as data."""


def load(run: str | Path, *, checkpoint: Literal["last", "best"] = "last", settings: Sequence[str] = ()) -> TrainedTeam:
    """Return the team of a run folder with the weights of its last or best checkpoint; the folder is only read.

    ``settings`` override keys of the run's recipe, as ``--set`` does: ``("env.max_rounds=6",)``. Raises ``ConfigError``
    where the folder holds no run, ``CheckpointError`` where it holds no usable checkpoint.
    """
    from coterie.runs import open_run

    return TrainedTeam(open_run(Path(run).expanduser(), checkpoint, settings))


class TrainedTeam:
    """A team that plays: one answer per act, nothing chosen by reward, nothing is trained.

    Playing is deterministic: the same task, ``index`` and temperature give the same episode.
    """

    def __init__(self, lineup: Lineup) -> None:
        """Play with an assembled lineup; ``coterie.load`` makes one from a run."""
        self.lineup = lineup

    def __repr__(self) -> str:
        """Return the env, and each role with its policy and that policy's version."""
        policies = self.lineup.policies
        team = ", ".join(f"{role}: {name} (version {policies[name].version})" for role, name in self.roles.items())
        return f"<TrainedTeam for {self.lineup.recipe.env.name}; {team}>"

    @property
    def roles(self) -> dict[str, str]:
        """Role -> name of the policy that plays it."""
        return dict(self.lineup.recipe.team)

    def env(self) -> Env:
        """Return a fresh env of the run, with the run's options: it makes tasks, ``team.env().tasks("test", 0, 5)``."""
        return self.lineup.make_env()

    async def play(
        self, task: Task | Mapping[str, Json], *, index: int = 0, temperature: float | None = None
    ) -> Episode:
        """Return the episode of one task: a ``Task``, or the ``data`` of one.

        ``index`` tells plays of one task apart: each draws other tokens. ``temperature`` left out is that of the run's
        evaluations; 0 is greedy. Where the env cannot play the task, the episode has a ``failure`` and no outcome. The
        event loop stands still while a model generates.
        """
        (episode,) = await self.play_all([task], index=index, temperature=temperature)
        return episode

    def play_sync(
        self, task: Task | Mapping[str, Json], *, index: int = 0, temperature: float | None = None
    ) -> Episode:
        """Return ``play`` from code that is not async; in a notebook use ``await team.play(task)``."""
        return asyncio.run(self.play(task, index=index, temperature=temperature))

    async def play_all(
        self, tasks: Sequence[Task | Mapping[str, Json]], *, index: int = 0, temperature: float | None = None
    ) -> list[Episode]:
        """Return one episode per task, in order. Their acts are generated in common batches.

        A task that the env refuses (ConfigError or EnvError before its first act) has failed at once, all else that
        fails is tried again. Tasks must differ; to play one several times, call this with several values of ``index``.
        """
        from coterie.rollout import Limits, Play, no_check
        from coterie.types import EpisodeKey

        recipe = self.lineup.recipe
        rollout = self.lineup.rollout(
            training=False,
            event=_note,
            before_batch=no_check,
            temperature=recipe.eval.temperature if temperature is None else temperature,
            # What fails is returned, not raised: the other tasks have been played.
            limits=Limits(
                retries=recipe.train.retries,
                deadline_s=recipe.train.episode_deadline_s,
                max_failed_fraction=1.0,
                retry_refused=False,
            ),
        )
        plays = [
            Play(key=EpisodeKey(seed=recipe.seed, purpose="play", step=0, task_id=task.id, index=index), task=task)
            for task in map(_task_of, tasks)
        ]
        return await rollout.play(plays)


def _task_of(task: Task | Mapping[str, Json]) -> Task:
    """Return the task itself, or one made of data; its id and seed are a hash of the data."""
    from coterie.keyed import stable_hash

    if isinstance(task, Task):
        return task
    number = stable_hash(json.dumps(task, sort_keys=True))
    return Task(id=f"{OWN_SPLIT}:{number:016x}", split=OWN_SPLIT, seed=number % 2**31, data=task)


def _note(kind: str, fields: Mapping[str, str | int]) -> None:
    """Log what went wrong."""
    _log.warning("%s: %s", kind, ", ".join(f"{key}: {value}" for key, value in fields.items() if key != "traceback"))
