"""What runs in a worker process. Plain classes: Ray makes actors of them, tests use them as they are."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coterie.cluster.wire import Answers, Exchange, Job, Report, Stepped, part_of
from coterie.config import Recipe
from coterie.engines import Completion, Engine, Request
from coterie.env import make_env
from coterie.errors import EngineError, EnvError
from coterie.faults import fault_point
from coterie.learners import learner_of
from coterie.lineup import Lineup, assemble
from coterie.rollout import Play, Rollout
from coterie.sandbox import shared
from coterie.sharded import ShardedLearner, join, shard
from coterie.team import Renderer
from coterie.tensors import copy_tensors, tensor_bytes, tensors_of
from coterie.types import Sample

TORN = -1
"""The version of weights while they are being replaced; no request names it."""


def look_in(path: Sequence[str]) -> None:
    """Let modules be found here wherever they are found in the run's process: envs stand beside their recipe."""
    sys.path += [entry for entry in path if entry not in sys.path]


def load_part(recipe: Recipe, policies: Sequence[str], threads: int, gpus: float) -> Lineup:
    """Return the lineup of some policies in this process, with the thread count that all processes of the run have."""
    torch.set_num_threads(threads)  # Ray sets one of its own, and results depend on it
    lineup = assemble(part_of(recipe, policies))
    if gpus:
        for model in [*(policy.model for policy in lineup.policies.values()), *lineup.bases.values()]:
            model.to("cuda")
    return lineup


class EngineWorker:
    """A rollout worker: the engine of policies that share a model, or of one that shares none."""

    def __init__(self, path: Sequence[str], recipe: Recipe, policies: Sequence[str], threads: int, gpus: float) -> None:
        """Load the policies at version 0. ``path`` is the ``sys.path`` of the run's process."""
        look_in(path)
        self._lineup = load_part(recipe, policies, threads, gpus)
        self._rollout = -1
        self._engine: Engine = self._lineup.engine

    def load_model(self, policy: str, weights: bytes) -> None:
        """Take over the weights of a policy's model, adapters aside: a warm start has changed them."""
        targets = dict(self._lineup.policies[policy].model_weights())
        copy_tensors(tensors_of(weights), targets, f"the model of policy {policy!r} from the run's process")

    def load(self, policy: str, version: int, weights: bytes) -> int:
        """Take over what training changes of a policy; return the version that is served from now on.

        All or nothing: whatever goes wrong on the way, no act is answered by a mixture of two versions.
        """
        served = self._lineup.policies[policy]
        served.version = TORN
        copy_tensors(tensors_of(weights), dict(served.weights()), f"version {version} of policy {policy!r}")
        fault_point("weight-sync", version)
        served.version = version
        return self._lineup.engine.version(policy)

    def generate(self, rollout: int, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Return one completion per candidate for each request; what a rollout computes is remembered until the next.

        ``EngineError`` where a request names another version than is served.
        """
        if rollout != self._rollout:
            self._rollout, self._engine = rollout, self._lineup.engine.remembering()
        return self._engine.generate(requests)


class LearnerWorker:
    """An update worker: the learner of one policy, or with others its share of it."""

    def __init__(
        self, path: Sequence[str], recipe: Recipe, policy: str, threads: int, gpus: float, model: bytes | None
    ) -> None:
        """Load the policy, over it the weights that a warm start left in its model, and make its learner."""
        look_in(path)
        lineup = load_part(recipe, [policy], threads, gpus)
        self._recipe, self._rank = recipe, 0
        self._policy = lineup.policies[policy]
        if model is not None:
            copy_tensors(tensors_of(model), dict(self._policy.model_weights()), "the run's process")
        # The recipe as it is: what is said of all policies together must be true of it.
        self._learner = learner_of(recipe, self._policy, lineup.bases.get(policy))

    def join(self, store: str, rank: int, world: int, limit_s: float) -> None:
        """Share the policy with the other update workers from now on; they meet in the file ``store``."""
        join(Path(store), rank, world, limit_s)
        shard(self._policy)
        self._rank = rank
        self._learner = learner_of(self._recipe, self._policy, None, ShardedLearner)

    def step(self, samples: Sequence[Sample], spent: float) -> tuple[Stepped, bytes | None]:
        """Return what ``Learner.step`` returns, and the new weights if it changed any."""
        before = self._policy.version
        update = self._learner.step(samples, spent)
        stepped = Stepped(update=update, skipped_in_a_row=self._learner.skipped_in_a_row)
        return stepped, self.weights()[1] if update.version != before else None

    def weights(self) -> tuple[int, bytes]:
        """Return the version and what training changes of the policy; of several workers the first one returns it."""
        data = tensor_bytes(self._policy.weights())  # in all of them: they gather it together
        return self._policy.version, b"" if self._rank else data

    def save(self, folder: str) -> None:
        """Write all state into a folder that every node sees. With several workers the first one writes."""
        with tempfile.TemporaryDirectory() as unused:
            self._learner.save(Path(unused if self._rank else folder))

    def load(self, folder: str) -> int:
        """Take over what ``save`` wrote; return how many of the last updates had been skipped."""
        self._learner.load(Path(folder))
        return self._learner.skipped_in_a_row


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
