"""Which workers a run has, what they need, and whether a cluster has it. Plain arithmetic; nothing is started here."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from coterie.config import Recipe
from coterie.errors import ConfigError
from coterie.hardware import HardwareTable
from coterie.lineup import Lineup
from coterie.sharded import check_can_shard


@dataclass(frozen=True, slots=True)
class Bundle:
    """Devices that are on one node and go to the same workers. A share of a GPU is a number below 1."""

    cpus: float
    gpus: float

    def text(self) -> str:
        """Return it in words."""
        return f"{self.cpus:g} CPU" + (f" + {self.gpus:g} GPU" if self.gpus else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One worker, and on which bundle of its pool it stands."""

    name: str
    policies: tuple[str, ...]
    bundle: int
    gpus: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The workers of one policy, or of policies that share a model in memory, and so the engines with it."""

    policies: tuple[str, ...]
    bundles: tuple[Bundle, ...]
    rollout: tuple[Seat, ...]
    update: tuple[Seat, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """All workers of a run."""

    pools: tuple[Pool, ...]
    env_workers: int

    @property
    def bundles(self) -> list[Bundle]:
        """Everything that must be placed."""
        return [bundle for pool in self.pools for bundle in pool.bundles] + [Bundle(1.0, 0.0)] * self.env_workers

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (worker, policies, devices) of every worker, for a reader."""
        rows = []
        for pool in self.pools:
            where = "+".join(pool.policies)
            for seat in (*pool.rollout, *pool.update):
                rows.append((seat.name, ", ".join(seat.policies), f"{where}/{seat.bundle}: {_devices(seat)}"))
        return rows + [(f"environment worker {number}", "", "1 CPU") for number in range(self.env_workers)]


def _devices(seat: Seat) -> str:
    return Bundle(1.0, seat.gpus).text()


def layout_of(lineup: Lineup) -> Layout:
    """Return the workers of a lineup; ``ConfigError`` where policies that share a model would have other engines."""
    recipe = lineup.recipe
    by_model: dict[int, list[str]] = {}
    for name, policy in lineup.policies.items():
        by_model.setdefault(id(policy.model), []).append(name)
    pools = tuple(_pool(recipe, tuple(names)) for names in by_model.values())
    return Layout(pools=pools, env_workers=recipe.hardware.env_workers)


def check_fits(layout: Layout, nodes: Sequence[Bundle]) -> None:
    """Raise ``ConfigError`` unless every bundle finds room on a node, the largest first."""
    left = [[node.cpus, node.gpus] for node in nodes]
    for bundle in sorted(layout.bundles, key=lambda b: (-b.gpus, -b.cpus)):
        room = next((n for n in left if n[0] >= bundle.cpus and n[1] >= bundle.gpus), None)
        if room is None:
            need = Bundle(sum(b.cpus for b in layout.bundles), sum(b.gpus for b in layout.bundles))
            there = ", ".join(node.text() for node in nodes) or "none"
            raise ConfigError(
                f"[hardware] needs {need.text()} in {len(layout.bundles)} bundles, and one of {bundle.text()} finds no "
                f"room: the cluster's nodes have {there}. Lower rollout_workers, update_workers, env_workers or the "
                "GPUs of a worker, or add nodes"
            )
        room[0] -= bundle.cpus
        room[1] -= bundle.gpus


def address_of(hardware: HardwareTable) -> str | None:
    """Return the address of the cluster to connect to; ``None``: one is started here."""
    return hardware.address or os.environ.get("RAY_ADDRESS")


def local_nodes(hardware: HardwareTable, layout: Layout) -> list[Bundle]:
    """Return the nodes of a cluster that is started here. Their CPUs are a number that workers are counted against."""
    largest = max(bundle.cpus for bundle in layout.bundles)
    share = math.ceil(sum(bundle.cpus for bundle in layout.bundles) / hardware.local_nodes + largest)
    # All nodes are this machine: a GPU that several of them had would be given away several times. So one has them all.
    beside_gpus = math.ceil(sum(bundle.cpus for bundle in layout.bundles if bundle.gpus))
    cpus = max(share, beside_gpus) if hardware.local_cpus is None else hardware.local_cpus
    return [Bundle(cpus, torch.cuda.device_count()), *[Bundle(cpus, 0)] * (hardware.local_nodes - 1)]


# ---- machinery below ------------------------------------------------------------------------------------------------


def _pool(recipe: Recipe, names: tuple[str, ...]) -> Pool:
    tables = {name: recipe.hardware.of(name) for name in names}
    first = tables[names[0]]
    for name, table in tables.items():
        if _engines(table) != _engines(first):
            raise ConfigError(
                f"hardware.policies.{name}: policies {list(names)} share one model in memory, and so their rollout "
                f"workers; {name!r} has rollout_workers, rollout_gpus = {_engines(table)}, {names[0]!r} "
                f"{_engines(first)}. Give them the same"
            )
    _refuse_unsharded(recipe, tables)
    bundles = [Bundle(1.0, first.rollout_gpus)] * first.rollout_workers
    rollout = [
        Seat(name=f"rollout worker {i} of {'+'.join(names)}", policies=names, bundle=i, gpus=first.rollout_gpus)
        for i in range(first.rollout_workers)
    ]
    update = []
    for name in (name for name in names if name in recipe.trained_policies):
        table = tables[name]
        for i in range(table.update_workers):
            place = i
            if table.colocated and i < first.rollout_workers:
                bundles[i] = Bundle(bundles[i].cpus + 1.0, bundles[i].gpus + table.update_gpus)
            else:
                place = len(bundles)
                bundles.append(Bundle(1.0, table.update_gpus))
            update.append(
                Seat(name=f"update worker {i} of {name}", policies=(name,), bundle=place, gpus=table.update_gpus)
            )
    return Pool(policies=names, bundles=tuple(bundles), rollout=tuple(rollout), update=tuple(update))


def _refuse_unsharded(recipe: Recipe, tables: Mapping[str, HardwareTable]) -> None:
    """Raise ``ConfigError`` for policies with several update workers whose learner cannot be sharded."""
    for name, table in tables.items():
        if table.update_workers != 1 and name in recipe.trained_policies:
            check_can_shard(name, recipe.policies[name])


def _engines(table: HardwareTable) -> tuple[object, ...]:
    return table.rollout_workers, table.rollout_gpus
