"""What plays environments in a worker process: a plain class, of which Ray makes an actor.

Apart from what samples and trains, so that it starts at once: nothing here imports torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from coterie.cluster.wire import Answers, Exchange, Job, Report, look_in
from coterie.config import Recipe
from coterie.engines import Completion, Request
from coterie.env import make_env
from coterie.errors import EngineError, EnvError
from coterie.rollout import Play, Rollout
from coterie.sandbox import shared
from coterie.team import Renderer


class EnvWorker:
    """An environment worker: plays its share of a rollout, and stops wherever all its episodes wait for acts.

    None of its methods is async: Ray would run an event loop around them, outside of the main thread.
    """

    def __init__(self, path: Sequence[str], recipe: Recipe, renderers: Mapping[str, Renderer]) -> None:
        """Play the recipe's env; ``renderers`` by policy. Programs run in a sandbox of this process."""
        look_in(path)
        shared.configure(shared.SandboxSettings(slots=recipe.sandbox.slots, mode=recipe.sandbox.mode))
        self._env = recipe.env
        self._renderers = renderers
        self._runner: asyncio.Runner | None = None
        self._table = _Table()

    def begin(self, job: Job, past: Sequence[Exchange] = ()) -> Report:
        """Play a job from its start; return where it stands once ``past`` has been answered as it was before.

        ``EnvError`` where the episodes ask something else than they did in the past.
        """
        self.drop()
        self._runner, self._table = asyncio.Runner(), _Table()
        rollout = Rollout(
            make_env=partial(make_env, self._env.name, self._env.options),
            seats={role: replace(seat, renderer=self._renderers[seat.policy]) for role, seat in job.seats.items()},
            plan=job.plan,
            engine=None,
            limits=job.limits,
            event=self._table.note,
            exchange=self._table.exchange,
        )
        report = self._runner.run(self._table.start(rollout, job.plays))
        for exchange in past:
            if report.requests != exchange.requests:
                self.drop()
                raise EnvError(
                    f"env {self._env.name!r}, played again after its worker was lost, asked for other acts than before "
                    f"(batch of {exchange.requests[0].episode.text()}). play() must depend only on the task, team.rng "
                    "and the texts that act() returned; check_env tests it"
                )
            report = self.go_on(exchange.answers)
        return report

    def go_on(self, answers: Answers) -> Report:
        """Give the answers to the requests of the last report; return the next one."""
        assert self._runner is not None
        return self._runner.run(self._table.go_on(answers))

    def drop(self) -> None:
        """Leave the episodes that are being played."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None


class _Table:
    """A rollout that stops at every batch: its event loop runs only from one report to the next."""

    def __init__(self) -> None:
        self._events: list[tuple[str, Mapping[str, str | int]]] = []

    def note(self, kind: str, fields: Mapping[str, str | int]) -> None:
        """Keep an event for the next report."""
        self._events.append((kind, dict(fields)))

    async def start(self, rollout: Rollout, plays: Sequence[Play]) -> Report:
        """Begin to play."""
        self._wanted: asyncio.Future[Sequence[Request]] = asyncio.get_running_loop().create_future()
        self._episodes = asyncio.create_task(rollout.play(plays))
        return await self._report()

    async def go_on(self, answers: Answers) -> Report:
        """Let the episodes go on from the answers to what they wanted."""
        self._wanted = asyncio.get_running_loop().create_future()
        self._answers.set_result(answers)
        return await self._report()

    async def exchange(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Want a batch, and wait for the call that brings the answers."""
        self._answers: asyncio.Future[Answers] = asyncio.get_running_loop().create_future()
        self._wanted.set_result(requests)
        answers = await self._answers
        if isinstance(answers, list):
            return answers
        raise EngineError(f"{answers.kind}: {answers.message}\n{answers.traceback}")

    async def _report(self) -> Report:
        """Return once the episodes want answers or have ended."""
        either: list[asyncio.Future[Any]] = [self._episodes, self._wanted]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        events, self._events = tuple(self._events), []
        if self._episodes.done():
            return Report(requests=(), episodes=tuple(self._episodes.result()), events=events)
        return Report(requests=tuple(self._wanted.result()), episodes=None, events=events)
