"""Plays many episodes at once on one engine: batching of acts, deadlines, retries, and the account of failures."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coterie.engines import Completion, Engine, Request
from coterie.env import Env, Expert
from coterie.errors import ConfigError, EngineError, EnvError, TrainError, guarded
from coterie.faults import fault_point
from coterie.team import ContextOverflowError, LiveTeam, Plan, Seating
from coterie.types import Episode, EpisodeKey, Failure, Outcome, Purpose, Task, Turn

_SETTLE_PASSES = 4
"""Passes of the event loop without news after which every live episode is taken to wait: a task that awaits only acts
and scores asks for its next act within one pass, ``asyncio.gather`` needs one more to start its children."""

_REFUSALS = (ConfigError.__name__, EnvError.__name__)
Event = Callable[[str, Mapping[str, str | int]], None]
"""``event(kind, fields)``: where retries, failures and overflows are told."""
ExpertDraw = Callable[[Request, Expert | None], tuple[Completion, ...]]
Exchange = Callable[[Sequence[Request]], Awaitable[list[tuple[Completion, ...]]]]
"""``await exchange(requests)``: what ``Engine.generate`` returns, from an engine that is somewhere else."""


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


class _Guest:
    """One attempt of one episode at the batcher's table."""

    def __init__(self, batcher: _Batcher, deadline: asyncio.Timeout, deadline_s: float) -> None:
        self.batcher = batcher
        self.deadline = deadline
        self.deadline_s = deadline_s
        self.waiting: list[tuple[Request, asyncio.Future[tuple[Completion, ...]]]] = []
        self.num_scoring = 0
        self.gone = False

    async def draw(self, request: Request, expert: Expert | None) -> tuple[Completion, ...]:
        """Return the completions of a request once its batch has run; the deadline stands still meanwhile."""
        if self.gone:
            raise EnvError(f"act {request.act} of {request.episode.text()} came after its episode had ended")
        if self.batcher.expert is not None:
            return self.batcher.expert(request, expert)
        future: asyncio.Future[tuple[Completion, ...]] = asyncio.get_running_loop().create_future()
        self.waiting.append((request, future))
        self._changed()
        try:
            return await future
        finally:
            # still on the list only if the env itself gave up on the act, for example by a timeout of its own
            self.waiting = [item for item in self.waiting if item[1] is not future]
            self._changed()

    def scoring(self, change: int) -> None:
        """Count the acts whose candidates are being scored; a batch does not run meanwhile."""
        self.num_scoring += change
        self._changed()

    def _changed(self) -> None:
        """Let the deadline stand still while this episode can do nothing but wait, start it anew otherwise."""
        if self.gone or self.deadline.expired():
            return
        loop = asyncio.get_running_loop()
        self.deadline.reschedule(None if self.idle else loop.time() + self.deadline_s)
        self.batcher.news()

    @property
    def idle(self) -> bool:
        """True when this episode can only go on after a batch."""
        return bool(self.waiting) and self.num_scoring == 0

    def leave(self) -> None:
        """Take this attempt from the table; acts it left behind are dropped."""
        self.gone = True
        for _, future in self.waiting:
            future.cancel()
        self.waiting = []
        self.batcher.guests.remove(self)
        self.batcher.news()


class _Batcher:
    """Runs the engine when all live episodes wait, with the batch ordered by key.

    So a batch depends on the episodes alone, not on timing: the deterministic clock of design section 5.
    """

    def __init__(
        self,
        engine: Engine | None,
        exchange: Exchange | None,
        before_batch: Callable[[], None],
        expert: ExpertDraw | None,
    ) -> None:
        self.engine = engine
        self.exchange = exchange
        self.before_batch = before_batch
        self.expert = expert
        self.guests: list[_Guest] = []
        self.live = 0
        self._count = 0
        self._changed = asyncio.Event()

    def news(self) -> None:
        """Say that an episode asked, ended, or came."""
        self._count += 1
        self._changed.set()

    async def serve(self) -> None:
        """Serve batches until no episode is live; raises what ``before_batch`` raises."""
        while self.live:
            if await self._settled():
                await self._run()
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _settled(self) -> bool:
        """Return True once every live episode waits and nothing has happened for some passes of the loop."""
        quiet, seen = 0, self._count
        while quiet < _SETTLE_PASSES:
            if len(self.guests) < self.live or not all(guest.idle for guest in self.guests):
                return False
            await asyncio.sleep(0)
            quiet = quiet + 1 if seen == self._count else 0
            seen = self._count
        return True

    async def _run(self) -> None:
        """Generate for everything that waits; an engine failure goes to every act of the batch."""
        self.before_batch()
        batch = sorted((item for guest in self.guests for item in guest.waiting), key=lambda item: item[0].key())
        for guest in self.guests:
            guest.waiting = []
        requests = [request for request, _ in batch]
        failures: list[Failure] = []
        results: list[tuple[Completion, ...]] = []
        with guarded("engine", failures.append):
            fault_point("rollout-batch", requests[0].episode.step)
            if self.exchange is not None:
                results = await self.exchange(requests)
            else:
                assert self.engine is not None
                results = self.engine.generate(requests)
            check_completions(requests, results)
        for index, (_, future) in enumerate(batch):
            if failures:
                future.set_exception(EngineError(f"{failures[0].kind}: {failures[0].message}\n{failures[0].traceback}"))
            else:
                future.set_result(results[index])


def check_completions(requests: Sequence[Request], results: Sequence[tuple[Completion, ...]]) -> None:
    """Raise ``EngineError`` unless every request got its candidates, each with ids and finite log-probs <= 0.

    A failed generation is an error, never a turn and never a stand-in end token (design: invariants 1 and 2).
    """
    if len(results) != len(requests):
        raise EngineError(f"the engine answered {len(results)} of {len(requests)} requests")
    for request, completions in zip(requests, results, strict=True):
        name = f"act {request.act} of {request.episode.text()}"
        if len(completions) != len(request.candidates):
            raise EngineError(f"{name}: asked for {len(request.candidates)} candidates, got {len(completions)}")
        for completion in completions:
            ids, logprobs = len(completion.ids), len(completion.logprobs)
            if ids != logprobs or ids < 1:
                raise EngineError(
                    f"{name}: a completion has {ids} ids and {logprobs} log-probs; expected equal and >= 1"
                )
            if ids > request.sampling.max_tokens:
                raise EngineError(f"{name}: {ids} tokens came, {request.sampling.max_tokens} were allowed")
            if not all(math.isfinite(value) and value <= 0.0 for value in completion.logprobs):
                raise EngineError(f"{name}: log-probs must be finite and <= 0, got {min(completion.logprobs)}")


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
        batcher = _Batcher(engine, self.exchange, self.before_batch, self.expert)
        batcher.live = len(plays)
        tasks = [asyncio.create_task(self._episode(play, batcher)) for play in plays]
        try:
            await batcher.serve()
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _episode(self, play: Play, batcher: _Batcher) -> Episode:
        """Play one task, again from the start with a fresh env after a failure, up to the limit."""
        failures: list[Failure] = []
        try:
            for attempt in range(1, 2 + self.limits.retries):
                turns, outcome = await self._attempt(play, batcher, failures.append)
                if outcome is not None:
                    return Episode(
                        key=play.key, task=play.task, turns=turns, outcome=outcome, failure=None, attempts=attempt
                    )
                last = failures[-1]
                error = f"{last.kind}: {last.message}"
                about: dict[str, str | int] = {"episode": play.key.text(), "attempt": attempt, "where": last.where}
                self.event("episode_failed", about | {"error": error, "traceback": last.traceback})
                if not (self.limits.retry_refused or turns) and last.kind in _REFUSALS:
                    break
            return Episode(key=play.key, task=play.task, turns=(), outcome=None, failure=failures[-1], attempts=attempt)
        finally:
            batcher.live -= 1
            batcher.news()

    async def _attempt(
        self, play: Play, batcher: _Batcher, record: Callable[[Failure], None]
    ) -> tuple[tuple[Turn, ...], Outcome | None]:
        """Play once; return the turns and the outcome, or no outcome after recording why."""
        outcome: Outcome | None = None
        deadline = asyncio.timeout(self.limits.deadline_s)
        guest = _Guest(batcher, deadline, self.limits.deadline_s)
        team = LiveTeam(
            key=play.key,
            seats=self.seats,
            plan=self.plan,
            draw=guest.draw,
            record=lambda failure: self.event("score_failed", {"where": failure.where, "error": failure.message}),
            scoring=guest.scoring,
            replayed=play.replayed,
            env_key=play.env_key,
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
        return tuple(sorted(team.turns, key=lambda turn: (turn.act, turn.candidate))), outcome

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
