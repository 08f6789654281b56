"""Plays many episodes at once on one engine: deadlines, retries, plays that go on from others, failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from coterie.batcher import Batcher, Exchange, ExpertDraw, Guest
from coterie.engines import Engine
from coterie.env import Env
from coterie.errors import ConfigError, EnvError, TrainError, guarded
from coterie.keyed import stable_hash
from coterie.team import ContextOverflowError, LiveTeam, Plan, Seating
from coterie.types import Episode, EpisodeKey, Failure, Outcome, Purpose, Task, Turn

_REFUSALS = (ConfigError.__name__, EnvError.__name__)
Event = Callable[[str, Mapping[str, str | int]], None]
"""``event(kind, fields)``: where retries, failures and overflows are told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """One episode to be played: its key, its task, and recorded turns to take over before it goes on live."""

    key: EpisodeKey
    task: Task
    replayed: tuple[Turn, ...] = ()
    env_key: EpisodeKey | None = None
    """Whose the env's own randomness is, where tokens are to be drawn anew in the same game; ``None``: its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What may go wrong: attempts, seconds an env may take between two acts, the share of episodes that may fail."""

    retries: int = 2
    deadline_s: float = 600.0
    max_failed_fraction: float = 0.2
    retry_refused: bool = True
    """Whether a task is tried again that its env refused: a ConfigError or EnvError before the first act."""


def no_event(kind: str, fields: Mapping[str, str | int]) -> None:
    """Tell nobody."""


def no_check() -> None:
    """Let the batch run."""


class Crew(Protocol):
    """Those who play the episodes of a rollout somewhere else than in this process."""

    async def play(self, rollout: Rollout, plays: Sequence[Play]) -> list[Episode]:
        """Return one episode per play, in order, just as the rollout would have played them itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Everything that plays of one kind share. ``run`` plays them."""

    make_env: Callable[[], Env]
    seats: Mapping[str, Seating]
    plan: Plan
    engine: Engine | None
    """``None`` only where ``expert``, ``exchange`` or a ``crew`` answers instead."""
    limits: Limits = Limits()
    event: Event = no_event
    before_batch: Callable[[], None] = no_check
    """Runs before every batch; whatever it raises abandons the rollout."""
    expert: ExpertDraw | None = None
    exchange: Exchange | None = None
    """Answers instead of the engine, where that is in another process."""
    crew: Crew | None = None
    """Plays instead of this process; ``None``: nobody does. Experts answer in this process all the same."""

    def run(self, plays: Sequence[Play]) -> list[Episode]:
        """Return ``play`` from code that is not async."""
        return asyncio.run(self.play(plays))

    async def play(self, plays: Sequence[Play]) -> list[Episode]:
        """Return one episode per play, in order. Failed ones carry the failure and no turns.

        Raises ``TrainError`` when more than ``max_failed_fraction`` of them failed.
        """
        keys = {play.key for play in plays}
        if len(keys) != len(plays):
            raise TrainError(f"{len(plays)} plays have only {len(keys)} distinct keys; equal keys draw equal tokens")
        episodes = await self._run(plays)
        failed = [episode for episode in episodes if episode.failure is not None]
        if failed and len(failed) > self.limits.max_failed_fraction * len(episodes):
            first = failed[0].failure
            assert first is not None
            raise TrainError(
                f"{len(failed)} of {len(episodes)} episodes failed, allowed is a share of "
                f"{self.limits.max_failed_fraction:g}. The first, {failed[0].key.text()}: {first.where}: "
                f"{first.kind}: {first.message}\n{first.traceback}"
            )
        return episodes

    async def _run(self, plays: Sequence[Play]) -> list[Episode]:
        """Play all, side by side, while the batcher serves them."""
        if self.crew is not None and self.expert is None:
            return await self.crew.play(self, plays)
        engine = None if self.engine is None else self.engine.remembering()
        batcher = Batcher(engine, self.exchange, self.before_batch, self.expert)
        tasks = [batcher.seat(self._episode(play, batcher)) for play in plays]
        try:
            await batcher.serve()
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _episode(self, play: Play, batcher: Batcher) -> Episode:
        """Play one task, again from the start with a fresh env after a failure, up to the limit."""
        failures: list[Failure] = []
        ahead = 0
        for attempt in range(1, 2 + self.limits.retries):
            team, outcome = await self._attempt(play, batcher, failures.append)
            ahead += team.ahead_tokens
            if outcome is not None:
                return Episode(
                    key=play.key,
                    task=play.task,
                    turns=tuple(sorted(team.turns, key=lambda turn: (turn.act, turn.candidate))),
                    outcome=outcome,
                    failure=None,
                    attempts=attempt,
                    lookahead_tokens=ahead,
                )
            last = failures[-1]
            error = f"{last.kind}: {last.message}"
            about: dict[str, str | int] = {"episode": play.key.text(), "attempt": attempt, "where": last.where}
            self.event("episode_failed", about | {"error": error, "traceback": last.traceback})
            if not (self.limits.retry_refused or team.turns) and last.kind in _REFUSALS:
                break
        return Episode(
            key=play.key,
            task=play.task,
            turns=(),
            outcome=None,
            failure=failures[-1],
            attempts=attempt,
            lookahead_tokens=ahead,
        )

    async def _attempt(
        self, play: Play, batcher: Batcher, record: Callable[[Failure], None]
    ) -> tuple[LiveTeam, Outcome | None]:
        """Play once; return the team and the outcome, or no outcome after recording why."""
        outcome: Outcome | None = None
        deadline = asyncio.timeout(self.limits.deadline_s)
        guest = Guest(batcher, deadline, self.limits.deadline_s)
        team = LiveTeam(
            key=play.key,
            seats=self.seats,
            plan=self.plan,
            draw=guest.draw,
            record=lambda failure: self.event("score_failed", {"where": failure.where, "error": failure.message}),
            scoring=guest.scoring,
            replayed=play.replayed,
            env_key=play.env_key,
            # What experts show is not compared: nothing of it is worth looking ahead for.
            ahead=None
            if batcher.expert is not None
            else lambda branches, count: guest.watch(self._ahead(play, batcher, branches, count)),
        )
        batcher.guests.append(guest)
        try:
            with guarded(f"play of task {play.task.id!r}, {play.key.text()}", record):
                try:
                    async with deadline:
                        outcome = await self._outcome(play, team)
                except TimeoutError as error:
                    if not deadline.expired():
                        raise
                    raise EnvError(
                        f"nothing came from the env or its scorers for {self.limits.deadline_s:g} s after act "
                        f"{team.num_acts - 1}; see train.episode_deadline_s"
                    ) from error
        finally:
            guest.leave()
        return team, outcome

    def _ahead(
        self, play: Play, batcher: Batcher, branches: Sequence[tuple[Turn, ...]], count: int
    ) -> list[Coroutine[Any, Any, Episode]]:
        """Return the plays that go on from each branch of a play, ``count`` times, by the team as it is."""
        plain = replace(self, plan=replace(self.plan, mode="chain", num_candidates=1, group_by=()))
        game = play.env_key or play.key
        plays = []
        for branch in branches:
            step = stable_hash("ahead", play.key.text(), branch[-1].act, branch[-1].candidate) % 2**31
            for index in range(count):
                key = replace(play.key, purpose="play", step=step, index=index)
                plays.append(Play(key=key, task=play.task, replayed=branch, env_key=game))
        return [plain._episode(one, batcher) for one in plays]

    async def _outcome(self, play: Play, team: LiveTeam) -> Outcome:
        """Return the outcome of a fresh env's play; a context that is full after the first act ends it truncated."""
        try:
            outcome = await self.make_env().play(play.task, team)
        except ContextOverflowError as full:
            if not team.turns:
                raise
            self.event("context_overflow", {"episode": play.key.text(), "error": str(full)})
            return Outcome(success=False, team=None, truncated=True, metrics={"context_overflow": 1.0})
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # by the deadline or the end of the rollout
                raise
            raise EnvError("play() let a CancelledError of a task it had cancelled itself escape") from error
        if not isinstance(outcome, Outcome):
            raise EnvError(f"play() must return an Outcome, got {type(outcome).__name__}")
        return outcome


def plays_of(tasks: Sequence[Task], *, seed: int, purpose: Purpose, step: int, episodes_per_task: int) -> list[Play]:
    """Return the plays of a batch of tasks: each task ``episodes_per_task`` times, a task that recurs goes on counting.

    ``index`` is stamped here and never computed back.
    """
    seen: dict[str, int] = {}
    plays = []
    for task in tasks:
        for _ in range(episodes_per_task):
            index = seen.get(task.id, 0)
            seen[task.id] = index + 1
            key = EpisodeKey(seed=seed, purpose=purpose, step=step, task_id=task.id, index=index)
            plays.append(Play(key=key, task=task))
    return plays


def replay(rollout: Rollout, episode: Episode, upto: int) -> Episode:
    """Return the episode played again: its acts before ``upto`` as recorded, from there on live.

    A fresh env gets the recorded texts; the roles, seats and prompt ids it asks for must be the recorded ones, or it
    fails with ``EnvError`` inside a ``TrainError``. So a branch is continued, or an act drawn anew, by whatever team,
    engine and plan ``rollout`` has, as long as it renders prompts to the same ids. Taken-over turns are not trained.
    """
    recorded = episode.played
    if not 0 <= upto <= len(recorded):
        raise TrainError(f"replay of {episode.key.text()} up to act {upto}: it has acts 0 to {len(recorded) - 1}")
    turns = tuple(turn for turn in episode.turns if turn.act < upto)
    return rollout.run([Play(key=episode.key, task=episode.task, replayed=turns)])[0]
