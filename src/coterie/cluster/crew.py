"""The router: plays a rollout's episodes in environment workers, and has their acts answered by the engines.

A batch is what all live episodes of all workers wait for, in the order of its keys. So it is the batch that one process
would have run, however the episodes are spread.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.cluster.engines import EnginePool, acts_text
from coterie.cluster.wire import Actor, Answers, Exchange, Job, LostError, Report, job_of
from coterie.engines import Completion, Request
from coterie.errors import EngineError, TrainError, guarded
from coterie.rollout import Event, Play, Rollout
from coterie.types import Episode, Failure


class Router:
    """Implements ``coterie.rollout.Crew``."""

    def __init__(self, workers: Sequence[Actor], pools: Mapping[str, EnginePool]) -> None:
        """``pools``: by policy, its engines."""
        self._workers = list(workers)
        self._pools = pools
        self._rollouts = itertools.count()

    async def play(self, rollout: Rollout, plays: Sequence[Play]) -> list[Episode]:
        """Return one episode per play, in order. This process only waits meanwhile."""
        number, count = next(self._rollouts), len(self._workers)
        shares = [
            _Share(worker, job_of(plays[first::count], rollout.seats, rollout.plan, rollout.limits), rollout.event)
            for first, worker in enumerate(self._workers[: len(plays)])
        ]
        try:
            while waiting := [share for share in shares if share.requests()]:
                rollout.before_batch()
                batch = [(request, share) for share in waiting for request in share.requests()]
                batch.sort(key=lambda item: item[0].key())
                answers = self._generate(number, [request for request, _ in batch])
                for share in waiting:
                    mine = [place for place, (_, owner) in enumerate(batch) if owner is share]
                    share.go_on([answers[place] for place in mine] if isinstance(answers, list) else answers)
        finally:
            for share in shares:
                share.leave()
        episodes = {episode.key: episode for share in shares for episode in share.episodes}
        return [episodes[play.key] for play in plays]

    def _generate(self, rollout: int, requests: Sequence[Request]) -> Answers:
        """Return the completions of a batch, or the failure that all its acts get. ``TrainError`` ends the run."""
        failures: list[Failure] = []
        stops: list[TrainError] = []
        answers: dict[int, tuple[Completion, ...]] = {}
        with guarded("engine", failures.append):
            try:
                places: dict[EnginePool, list[int]] = {}
                for place, request in enumerate(requests):
                    places.setdefault(self._pool_of(request), []).append(place)
                begun = [pool.begin(rollout, [requests[i] for i in mine]) for pool, mine in places.items()]
                for mine, finish in zip(places.values(), begun, strict=True):
                    answers.update(zip(mine, finish(), strict=True))
            except TrainError as error:
                stops.append(error)
        if stops:
            raise stops[0]
        return failures[0] if failures else [answers[place] for place in range(len(requests))]

    def _pool_of(self, request: Request) -> EnginePool:
        pool = self._pools.get(request.policy)
        if pool is None:
            raise EngineError(f"no policy {request.policy!r}; the rollout workers have {sorted(self._pools)}")
        return pool


class _Share:
    """The part of a rollout that one environment worker plays."""

    def __init__(self, worker: Actor, job: Job, event: Event) -> None:
        self._worker = worker
        self._job = job
        self._event = event
        self._past: list[Exchange] = []
        self._report: Report | None = None
        self._losses = 0
        self._ref: Any = worker.handle.begin.remote(job)

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """The episodes, once they have ended."""
        return () if self._report is None or self._report.episodes is None else self._report.episodes

    def requests(self) -> tuple[Request, ...]:
        """Return what the episodes wait for, in the order of its keys; nothing once all have ended."""
        if self._report is None:
            self._report = self._wait()
            for kind, fields in self._report.events:
                self._event(kind, fields)
        return self._report.requests

    def go_on(self, answers: Answers) -> None:
        """Give the answers to ``requests``."""
        self._past.append(Exchange(requests=self.requests(), answers=answers))
        self._report = None
        self._ref = self._worker.handle.go_on.remote(answers)

    def leave(self) -> None:
        """Let the worker drop what it still plays; it does so before its next job."""
        if not self.episodes:
            self._worker.handle.drop.remote()

    def _wait(self) -> Report:
        """Return the next report. After a loss a fresh env plays the same again, given the answers it had before."""
        while True:
            try:
                report: Report = self._worker.wait(self._ref, self._doing())
                return report
            except LostError as lost:
                self._losses += 1
                self._worker.restart(lost)
                if self._losses > self._job.limits.retries:
                    return self._given_up(lost)
                self._ref = self._worker.handle.begin.remote(self._job, tuple(self._past))

    def _doing(self) -> str:
        episodes = f"the play of {len(self._job.plays)} episodes from {self._job.plays[0].key.text()} on"
        return f"{episodes}, after {acts_text(self._past[-1].requests)}" if self._past else f"{episodes}, at its start"

    def _given_up(self, lost: LostError) -> Report:
        """Return the end of a share whose every attempt took the worker down: all its episodes have failed."""
        failure = Failure(where=self._worker.name, kind=type(lost).__name__, message=str(lost), traceback="")
        episodes = tuple(
            Episode(key=p.key, task=p.task, turns=(), outcome=None, failure=failure, attempts=self._losses)
            for p in self._job.plays
        )
        events: list[tuple[str, Mapping[str, str | int]]] = []
        for play in self._job.plays:
            told = {"episode": play.key.text(), "where": failure.where, "error": failure.message}
            events.append(("episode_failed", {**told, "attempt": self._losses}))
        return Report(requests=(), episodes=episodes, events=tuple(events))
