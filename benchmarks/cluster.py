"""What the cluster brings and costs: episodes a second over environment workers, and the router's part of an act.

    python benchmarks/cluster.py [--out FOLDER] [--workers 1 8] [--tasks 48] [--repeats 5]

Writes cluster.json, and cluster.md for readers: the medians of the repeats. The environment blocks for 0.05 s in every
scoring, so that a worker plays one episode at a time; the engine answers at once. The CPUs of the cluster are numbers
that workers are counted against: they sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
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

RESULTS = Path(__file__).parent / "results" / "cluster"
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


def rollouts(
    cls: type[Env], workers: int, tasks: int, repeats: int, actor: Callable[..., Any]
) -> list[tuple[float, float]]:
    """Return of each rollout, after one unseen, its seconds by the clock and on a CPU of this process."""
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
    spent = []
    for step in range(repeats + 1):
        plays = plays_of(env.tasks("train", 0, tasks), seed=0, purpose="train", step=step, episodes_per_task=1)
        began, used = time.monotonic(), time.process_time()
        asyncio.run(router.play(rollout, plays))
        spent.append((time.monotonic() - began, time.process_time() - used))
    for worker in [*players, *pool.workers]:
        worker.stop()
    return spent[1:]


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on, and what else it did before."""
    import ray

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return {
        "processor": ", ".join(sorted(names)) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "ray": ray.__version__,
    }


def measure(workers: Sequence[int], tasks: int, repeats: int) -> dict[str, Any]:
    """Return all numbers; the cluster is started for them."""
    hardware = HardwareTable(backend="ray", local_cpus=max(workers) + 1)
    prepare(hardware)
    from coterie.cluster.actors import RayActor, Watch
    from coterie.cluster.start import connected

    rows: dict[str, Any] = {
        "machine": machine(),
        "sleep_s": SLEEP_S,
        "acts": ROUNDS,
        "tasks": tasks,
        "repeats": repeats,
    }
    with connected(hardware, Layout(pools=(), env_workers=max(workers)), 200 * 2**20) as address:
        actor = partial(
            RayActor, watch=Watch(address), deadline_s=600.0, max_restarts=0, tell=lambda kind, fields: None
        )
        rows["episodes_per_s"] = {}
        for count in workers:
            each = [tasks / clock for clock, _ in rollouts(Sleeper, count, tasks, repeats, actor)]
            rows["episodes_per_s"][str(count)] = {"median": statistics.median(each), "each": each}
        quick = rollouts(Quick, max(workers), tasks, repeats, actor)
    for place, name in enumerate(("router_ms_per_act", "router_cpu_ms_per_act")):
        each = [1e3 * spent[place] / ROUNDS / tasks for spent in quick]
        rows[name] = {"median": statistics.median(each), "each": each}
    return rows


def table(rows: dict[str, Any]) -> str:
    """Return the numbers as a page."""
    at, speeds = rows["machine"], rows["episodes_per_s"]
    first = next(iter(speeds.values()))["median"]
    head = (
        f"{at['cores']} cores ({at['processor']}), load before {at['load_before']}, Python {at['python']}, Ray "
        f"{at['ray']}. {rows['tasks']} episodes of {rows['acts']} acts, each scored in {rows['sleep_s']} s of sleep; "
        f"medians of {rows['repeats']} rollouts. By `python benchmarks/cluster.py`."
    )
    lines = [
        head,
        "",
        "| environment workers | episodes a second | times one worker |",
        "|---|---|---|",
    ]
    lines += [f"| {count} | {row['median']:.1f} | {row['median'] / first:.1f} |" for count, row in speeds.items()]
    clock, cpu = rows["router_ms_per_act"]["median"], rows["router_cpu_ms_per_act"]["median"]
    router = (
        f"The router's part of an act, with scores that do not sleep and {list(speeds)[-1]} workers, batches of "
        f"{rows['tasks']} acts: {clock:.2f} ms by the clock, {cpu:.2f} ms of a CPU of the run's own process."
    )
    return "\n".join([*lines, "", router]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tasks", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows = measure(sorted(options.workers), options.tasks, options.repeats)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cluster.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / "cluster.md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
