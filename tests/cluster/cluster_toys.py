"""Workers without Ray: the plain classes in this process, behind the interface that the run has of actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coterie.cluster.crew import Router
from coterie.cluster.engines import EnginePool
from coterie.cluster.learners import RemoteLearner
from coterie.cluster.placement import layout_of
from coterie.cluster.players import EnvWorker
from coterie.cluster.wire import LostError
from coterie.cluster.workers import EngineWorker, LearnerWorker
from coterie.errors import TrainError
from coterie.learners import Learns
from coterie.lineup import Lineup
from coterie.rollout import Play, Rollout
from coterie.tensors import tensor_bytes
from coterie.types import Episode

Loss = tuple[str, str, int]
"""(start of a worker's name, method, how many of its calls go well before the worker dies over one)."""


@dataclass
class FakeMethod:
    actor: FakeActor
    name: str
    num_returns: int = 1

    def options(self, num_returns: int) -> FakeMethod:
        return FakeMethod(self.actor, self.name, num_returns)

    def remote(self, *args: Any) -> Any:
        outcome = self.actor.run(self.name, args)
        return outcome if self.num_returns == 1 else [partial(nth, outcome, i) for i in range(self.num_returns)]


def nth(outcome: Callable[[], Any], place: int) -> Any:
    return outcome()[place]


class FakeHandle:
    def __init__(self, actor: FakeActor) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> FakeMethod:
        return FakeMethod(self._actor, name)


@dataclass
class FakeActor:
    """A worker in this process. References are callables that return what came of a call, or raise it."""

    name: str
    make: Callable[[], Any]
    losses: list[Loss] = field(default_factory=list)
    max_restarts: int = 3

    def __post_init__(self) -> None:
        self.worker, self.handle, self.restarts = self.make(), FakeHandle(self), 0
        self.calls: list[str] = []

    def run(self, method: str, args: Sequence[Any]) -> Callable[[], Any]:
        self.calls.append(method)
        place = next((i for i, (n, m, _) in enumerate(self.losses) if self.name.startswith(n) and m == method), None)
        if place is not None:
            name, _, left = self.losses.pop(place)
            if left:
                self.losses.insert(place, (name, method, left - 1))
            else:
                if isinstance(self.worker, EnvWorker):  # a process would take its event loop with it
                    apart(self.worker.drop)
                self.worker = None
        if self.worker is None:
            return partial(die, LostError(f"{self.name} died over {method}"))
        try:
            call = partial(getattr(self.worker, method), *[a() if callable(a) else a for a in args])
            value = apart(call)
        except Exception as error:  # noqa: BLE001
            return partial(die, error)
        return lambda: value

    def wait(self, ref: Callable[[], Any], doing: str) -> Any:
        return ref()

    def restart(self, why: LostError) -> None:
        self.restarts += 1
        if self.restarts > self.max_restarts:
            raise TrainError(f"{why}. It has been replaced {self.max_restarts} times") from why
        self.worker = self.make()


def apart(call: Callable[[], Any]) -> Any:
    """Return what a call returns in a thread of its own: the run's own thread has an event loop that runs meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


def die(error: Exception) -> Any:
    raise error


class FakeTeam:
    """What ``start.RayTeam`` is, in this process; implements ``coterie.lineup.Elsewhere``."""

    def __init__(self, lineup: Lineup, losses: Sequence[Loss] = (), max_restarts: int = 3) -> None:
        self.lineup, self.layout = lineup, layout_of(lineup)
        self.losses, self.max_restarts = list(losses), max_restarts
        self.actors: list[FakeActor] = []
        self.pools: dict[str, EnginePool] = {}
        for pool in self.layout.pools:
            engines = [
                self.actor(s.name, partial(EngineWorker, (), lineup.recipe, s.policies, 1, 0.0)) for s in pool.rollout
            ]
            self.pools |= dict.fromkeys(pool.policies, EnginePool(engines))
        renderers = {name: policy.renderer for name, policy in lineup.policies.items()}
        make = partial(EnvWorker, (), lineup.recipe, renderers)
        self.router = Router(
            [self.actor(f"environment worker {i}", make) for i in range(self.layout.env_workers)], self.pools
        )

    def actor(self, name: str, make: Callable[[], Any]) -> FakeActor:
        self.actors.append(FakeActor(name, make, self.losses, self.max_restarts))
        return self.actors[-1]

    async def play(self, rollout: Rollout, plays: Sequence[Play]) -> list[Episode]:
        return await self.router.play(rollout, plays)

    def make_learners(self) -> dict[str, Learns]:
        recipe = self.lineup.recipe
        learners: dict[str, Learns] = {}
        for name in recipe.trained_policies:
            model = None
            if recipe.imitate is not None:
                model = tensor_bytes(self.lineup.policies[name].model_weights())
                self.pools[name].send_model(name, model)
            worker = self.actor(f"update worker 0 of {name}", partial(LearnerWorker, (), recipe, name, 1, 0.0, model))
            learners[name] = RemoteLearner([worker], self.lineup.policies[name], self.pools[name], Path("unused"), 60.0)
        return learners


@contextmanager
def fake_placed(
    teams: list[FakeTeam], losses: Sequence[Loss], max_restarts: int, lineup: Lineup, tell: Any, folder: Path
) -> Iterator[Lineup]:
    """Stand for ``coterie.cluster.entry.placed``; ``teams`` gets the team."""
    threads = torch.get_num_threads()
    teams.append(FakeTeam(lineup, losses, max_restarts))
    yield replace(lineup, elsewhere=teams[0])
    torch.set_num_threads(threads)
