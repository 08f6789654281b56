"""What the cluster brings and costs: episodes a second over environment workers, and the router's part of an act.

    python benchmarks/cluster.py --out benchmarks/results/cluster.json [--workers 1 8] [--tasks 48]

The environment blocks for 0.05 s in every scoring, so that a worker plays one episode at a time; the engine answers at
once. The CPUs of the cluster are numbers that workers are counted against: they sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from coterie.cluster.entry import prepare
from coterie.cluster.placement import Layout
from coterie.config import parse_recipe
from coterie.engines import Completion, Request
from coterie.env import Env, Team
from coterie.hardware import HardwareTable
from coterie.observed import seats_of
from coterie.rollout import Rollout, plays_of
from coterie.team import Plan
from coterie.types import Outcome, Reward, Scored, StopReason, Task

SLEEP_S = 0.05
ROUNDS = 4


class Sleeper(Env):
    """Asks one role four times; every score blocks its whole process."""

    roles = scored_roles = ("player",)
    pause_s = SLEEP_S

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return [Task(id=f"{split}-{i}", split=split, seed=i, data={}) for i in range(start, start + count)]

    async def play(self, task: Task, team: Team) -> Outcome:
        for _ in range(ROUNDS):
            await team.act("player", "go", score=self._score)
        return Outcome(success=True, team=1.0)

    def _score(self, text: str) -> Scored[str]:
        time.sleep(self.pause_s)
        return Scored(Reward(1.0), text)


class Quick(Sleeper):
    """The same without a pause: what is left is the way there and back."""

    pause_s = 0.0


class Instant:
    """A rollout worker that answers at once."""

    def __init__(self, path: Sequence[str]) -> None:
        pass

    def generate(self, rollout: int, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        one = Completion(ids=(1,), logprobs=(0.0,), text="x", stop_reason=StopReason.END)
        return [(one,) * len(request.candidates) for request in requests]


def episodes_per_s(cls: type[Env], workers: int, tasks: int, actor: Callable[..., Any]) -> tuple[float, float, float]:
    """Return episodes a second (the best of three rollouts, after one unseen), and of batches the median of seconds.

    These are twice: by the clock, and on a CPU of this process.
    """
    import ray

    from coterie.cluster.crew import Router
    from coterie.cluster.engines import EnginePool
    from coterie.cluster.players import EnvWorker
    from coterie.cluster.start import spawn

    env = cls()
    seats = seats_of(env.roles)
    renderers = ray.put({role: seat.renderer for role, seat in seats.items()})
    recipe = parse_recipe(
        {
            "env": {"name": f"{Path(__file__).stem}:{cls.__name__}"},
            "policies": {role: {"model": "tiny", "train": "frozen"} for role in env.roles},
            "team": {role: role for role in env.roles},
            "train": {"steps": 1},
        },
        "benchmark",
    )
    pool = EnginePool([actor("engine", lambda: spawn(Instant, 0.0, "SPREAD"))])
    players = [actor(f"env {i}", lambda: spawn(EnvWorker, 0.0, "SPREAD", recipe, renderers)) for i in range(workers)]
    router = Router(players, dict.fromkeys(env.roles, pool))
    rollout = Rollout(make_env=cls, seats=seats, plan=Plan(mode="chain", num_candidates=1), engine=None)
    times, spent = [], []
    for step in range(4):
        plays = plays_of(env.tasks("train", 0, tasks), seed=0, purpose="train", step=step, episodes_per_task=1)
        began, used = time.monotonic(), time.process_time()
        asyncio.run(router.play(rollout, plays))
        times.append(time.monotonic() - began)
        spent.append(time.process_time() - used)
    for worker in [*players, *pool.workers]:
        worker.stop()
    best = min(times[1:])
    return tasks / best, statistics.median(times[1:]) / ROUNDS, statistics.median(spent[1:]) / ROUNDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tasks", type=int, default=48)
    options = parser.parse_args()
    hardware = HardwareTable(backend="ray", local_cpus=16)
    prepare(hardware)
    from coterie.cluster.actors import RayActor, Watch
    from coterie.cluster.start import connected

    layout = Layout(pools=(), env_workers=max(options.workers))
    with connected(hardware, layout, 200 * 2**20) as address:
        actor = partial(
            RayActor, watch=Watch(address), deadline_s=600.0, max_restarts=0, tell=lambda kind, fields: None
        )
        rows: dict[str, Any] = {"sleep_s": SLEEP_S, "rounds": ROUNDS, "tasks": options.tasks}
        for workers in options.workers:
            rows[f"episodes_per_s/{workers}"], _, _ = episodes_per_s(Sleeper, workers, options.tasks, actor)
        _, batch_s, cpu_s = episodes_per_s(Quick, max(options.workers), options.tasks, actor)
        rows["router_ms_per_batch"] = 1e3 * batch_s
        rows["router_ms_per_act"] = 1e3 * batch_s / options.tasks
        rows["router_cpu_ms_per_act"] = 1e3 * cpu_s / options.tasks
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
