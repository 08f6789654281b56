"""A Ray cluster for one run: connect to one or start one on this machine, place the workers on it, end them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from ray.cluster_utils import Cluster
from ray.exceptions import AuthenticationError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coterie.cluster.actors import RayActor, Tell, Watch, in_short
from coterie.cluster.crew import Router
from coterie.cluster.engines import EnginePool
from coterie.cluster.learners import RemoteLearner
from coterie.cluster.placement import Bundle, Layout, Pool, Seat, address_of, check_fits, local_nodes
from coterie.cluster.players import EnvWorker
from coterie.cluster.workers import EngineWorker, LearnerWorker
from coterie.config import Recipe
from coterie.errors import ConfigError, TrainError
from coterie.hardware import HardwareTable
from coterie.learners import Learns
from coterie.lineup import Lineup
from coterie.rollout import Play, Rollout
from coterie.tensors import tensor_bytes
from coterie.types import Episode

LOOPBACK = "127.0.0.1"
_STORE_BYTES = 200 * 2**20
"""The least that the object store of a node started here holds."""
_STORE_COPIES = 3
"""How many times the weights of all policies it holds: on their way, the last version, and the one before."""


@contextmanager
def started(lineup: Lineup, layout: Layout, tell: Tell, folder: Path) -> Iterator[RayTeam]:
    """Yield the workers of a run; afterwards they have ended, and so has the cluster if it was started for the run."""
    hardware = lineup.recipe.hardware
    with connected(hardware, layout, _store_bytes(lineup)) as address:
        check_fits(layout, nodes())
        team = RayTeam(lineup, layout, Watch(address), tell, folder)
        try:
            yield team
        finally:
            team.stop()


@contextmanager
def connected(hardware: HardwareTable, layout: Layout, store_bytes: int) -> Iterator[str]:
    """Yield the address of the cluster that this process is connected to; see ``hardware.address``.

    ``entry.prepare`` has set what Ray reads from the environment. A cluster that is started here is reached from this
    machine only, and ends with the block. ``ConfigError`` where there is none, or it will not have this process.
    """
    logging.getLogger("ray").setLevel(logging.WARNING)
    address = address_of(hardware)
    with nullcontext(address) if address is not None else started_here(hardware, layout, store_bytes) as there:
        # Ray itself asks for a quarter of an hour whether somebody is there.
        if not Watch(there).reachable():
            raise ConfigError(
                f"no Ray cluster at {there}: nothing takes connections there. Start one (docs/cluster.md), correct "
                "hardware.address or RAY_ADDRESS, or remove it, and a cluster is started on this machine"
            )
        try:
            ray.init(address=there, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError, RayError) as error:
            raise refused(there, error) from error
        try:
            yield str(ray.get_runtime_context().gcs_address)
        finally:
            ray.shutdown()


@contextmanager
def started_here(hardware: HardwareTable, layout: Layout, store_bytes: int) -> Iterator[str]:
    """Yield the address of a cluster that is started on this machine, and ends with the block."""
    me, cluster = psutil.Process(), Cluster()
    others = set(me.children())
    roots: set[psutil.Process] = set()
    family: set[psutil.Process] = set()
    try:
        for node in local_nodes(hardware, layout):
            cluster.add_node(
                num_cpus=int(node.cpus),
                num_gpus=int(node.gpus),
                object_store_memory=store_bytes,
                include_dashboard=False,
                node_ip_address=LOOPBACK,
            )
        roots = set(me.children()) - others
        family = _with_children(roots)
        yield cluster.address
    finally:
        family |= _with_children(roots)
        cluster.shutdown()
        # Ray leaves what a node has started to itself: it ends seconds later, and without a head minutes later.
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _with_children(roots: Iterable[psutil.Process]) -> set[psutil.Process]:
    """Return processes and all that they have started."""
    found = set(roots)
    for root in roots:
        with suppress(psutil.NoSuchProcess):
            found.update(root.children(recursive=True))
    return found


def refused(address: str, error: Exception) -> ConfigError:
    """Return what to say of a cluster that is there and will not have this process."""
    said = str(error.__cause__ or error)  # the cause is a whole traceback
    if isinstance(error, AuthenticationError) or "InvalidAuthToken" in said:
        return ConfigError(
            f"the Ray cluster at {address} wants another token than this process has. Copy ~/.ray/auth_token of its "
            "head to this machine and set RAY_AUTH_MODE=token"
        )
    if "Version mismatch" in said:
        return ConfigError(
            f"the Ray cluster at {address} has other versions than this process; install the same on all machines. "
            f"{said.strip()}"
        )
    return ConfigError(f"Ray cannot connect to the cluster at {address}: {in_short(error)}. See docs/cluster.md")


def nodes() -> list[Bundle]:
    """Return what each living node of the connected cluster has."""
    return [
        Bundle(node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in ray.nodes()
        if node["Alive"]
    ]


class RayTeam:
    """Implements ``coterie.lineup.Elsewhere``: environment, rollout and update workers on a connected cluster."""

    def __init__(self, lineup: Lineup, layout: Layout, watch: Watch, tell: Tell, folder: Path) -> None:
        """Make the workers that play. Those that train are made with the learners, from the weights of that time."""
        self._lineup = lineup
        self._layout = layout
        self._threads = torch.get_num_threads()
        hardware = lineup.recipe.hardware
        self._actor = partial(
            RayActor, watch=watch, deadline_s=hardware.deadline_s, max_restarts=hardware.max_restarts, tell=tell
        )
        self._watch = watch
        self._folder = folder.resolve()
        self._actors: list[RayActor] = []
        self._groups = [_reserve(pool, hardware.deadline_s) for pool in layout.pools]
        self._pools: dict[str, EnginePool] = {}
        for pool, group in zip(layout.pools, self._groups, strict=True):
            engines = EnginePool([self._engine(seat, group) for seat in pool.rollout])
            self._pools |= dict.fromkeys(pool.policies, engines)
        renderers = ray.put({name: policy.renderer for name, policy in lineup.policies.items()})
        make = partial(spawn, EnvWorker, 0.0, "SPREAD", lineup.recipe, renderers)
        workers = [self._new(f"environment worker {number}", make) for number in range(layout.env_workers)]
        self._router = Router(workers, self._pools)

    async def play(self, rollout: Rollout, plays: Sequence[Play]) -> list[Episode]:
        """Return one episode per play, in order."""
        return await self._router.play(rollout, plays)

    def make_learners(self) -> dict[str, Learns]:
        """Return a learner per trained policy; it and the engines have the weights that a warm start has left here."""
        learners: dict[str, Learns] = {}
        recipe = self._lineup.recipe
        for pool, group in zip(self._layout.pools, self._groups, strict=True):
            trained = [name for name in pool.policies if name in recipe.trained_policies]
            model: Any = None
            if recipe.imitate is not None and trained:
                model = ray.put(tensor_bytes(self._lineup.policies[trained[0]].model_weights()))
                self._pools[trained[0]].send_model(trained[0], model)
            for name in trained:
                make = partial(_learner, recipe, name, self._threads, model, group)
                workers = [self._new(seat.name, partial(make, seat)) for seat in pool.update if name in seat.policies]
                meeting, limit_s = self._folder / f".join-{name}", recipe.hardware.deadline_s
                learners[name] = RemoteLearner(
                    workers, self._lineup.policies[name], self._pools[name], meeting, limit_s
                )
        return {name: learners[name] for name in recipe.trained_policies}

    def stop(self) -> None:
        """End all workers, if there is still a cluster that could."""
        if self._watch.reachable():
            for actor in self._actors:
                actor.stop()
            for group in self._groups:
                remove_placement_group(group)

    # ---- machinery below ----------------------------------------------------------------------------------------

    def _engine(self, seat: Seat, group: PlacementGroup) -> RayActor:
        recipe = self._lineup.recipe
        place = _on(group, seat.bundle)
        return self._new(
            seat.name,
            partial(spawn, EngineWorker, seat.gpus, place, recipe, seat.policies, self._threads, seat.gpus),
        )

    def _new(self, name: str, make: Any) -> RayActor:
        actor = self._actor(name, make)
        self._actors.append(actor)
        return actor


def spawn(cls: type, gpus: float, strategy: Any, *args: Any) -> Any:
    """Return the handle of a new actor. Ray does not restart it: a restarted one would have lost what it held."""
    remote = ray.remote(cls)
    options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": strategy}
    return remote.options(**options).remote(tuple(sys.path), *args)


def _learner(recipe: Recipe, name: str, threads: int, model: Any, group: PlacementGroup, seat: Seat) -> Any:
    """Return the handle of a new update worker of a policy; ``model`` is what a warm start left, or ``None``."""
    place = _on(group, seat.bundle)
    return spawn(LearnerWorker, seat.gpus, place, recipe, name, threads, seat.gpus, model)


def _on(group: PlacementGroup, bundle: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)


def _reserve(pool: Pool, deadline_s: float) -> PlacementGroup:
    """Return the placement group of a pool once its devices are reserved."""
    bundles = [{"CPU": bundle.cpus} | ({"GPU": bundle.gpus} if bundle.gpus else {}) for bundle in pool.bundles]
    group = placement_group(bundles, strategy="PACK" if any(b.gpus for b in pool.bundles) else "SPREAD")
    if not group.wait(timeout_seconds=deadline_s):
        raise TrainError(
            f"the cluster did not give {', '.join(bundle.text() for bundle in pool.bundles)} for policies "
            f"{list(pool.policies)} within {deadline_s:g} s; is another run using it? See hardware.deadline_s"
        )
    return group


def _store_bytes(lineup: Lineup) -> int:
    """Return what an object store needs for the weights that pass through it."""
    models = [policy.model for policy in lineup.policies.values()]
    sizes: dict[int, int] = {id(w): w.numel() * w.element_size() for model in models for w in model.parameters()}
    return max(_STORE_BYTES, _STORE_COPIES * sum(sizes.values()))
