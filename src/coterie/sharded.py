"""One learner in several processes: weights, gradients and optimiser state are sharded over them (FSDP2).

Every process is given the same samples and packs the same micro-batches; process r of n computes every n-th of them,
from the r-th on. Gradients are summed over the processes, so that they are those that a single process computes.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from coterie.batch import MicroBatch
from coterie.errors import ConfigError
from coterie.learner import Learner, scored_logits
from coterie.models.policy import Policy, as_sampled
from coterie.policy_tables import PolicyTable


def check_can_shard(name: str, table: PolicyTable) -> None:
    """Raise ``ConfigError`` for a policy whose learner cannot be sharded."""
    if table.kl.coef > 0.0:
        raise ConfigError(
            f"policies.{name}.kl: its reference is not sharded; use update_workers = 1 for this policy, or kl.coef = 0"
        )


def join(store: Path, rank: int, world: int, limit_s: float) -> None:
    """Make this process number ``rank`` of ``world``. They meet in a file that all of them see."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=limit_s),
    )


def shard(policy: Policy) -> None:
    """Shard a policy's model over the processes that have joined: layer by layer, then what is outside of layers."""
    model = policy.model
    mesh = init_device_mesh(model.device.type, (dist.get_world_size(),))
    for layer in [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Weights of tokens are fixed over the batch: gradients are summed, not averaged; gloo knows plain sums.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if policy.adapter is not None:
        policy.adapter.resident.find_again()


class ShardedLearner(Learner):
    """A ``Learner`` of a policy that was sharded. All processes must call the same methods in the same order."""

    def _gradients(
        self, batches: Sequence[MicroBatch], old: Sequence[Tensor] | None
    ) -> tuple[float, Counter[str], list[Tensor]]:
        """Leave the whole batch's gradient in the weights; loss and metrics are of all, log-probs of the own share."""
        rank, world = dist.get_rank(), dist.get_world_size()
        mine = batches[rank::world]
        total, sums, passed = super()._gradients(mine, old)
        if len(mine) * world < len(batches):
            self._pass_along(batches[0])
        parts: list[tuple[float, dict[str, float]]] = [(0.0, {})] * world
        dist.all_gather_object(parts, (total, dict(sums)))
        together = Counter[str]()
        for _, part in parts:
            together.update(part)
        return sum(part for part, _ in parts), together, passed

    def _pass_along(self, batch: MicroBatch) -> None:
        """Take part in a pass of the others, who cannot have weights or sum gradients without this process."""
        with self.policy.alone(), as_sampled(self.policy.model, self.policy.checkpointing):
            with self._precision():
                logits_NV = scored_logits(self.policy.model, batch)
            (logits_NV.float().sum() * 0.0).backward()  # type: ignore[no-untyped-call]
