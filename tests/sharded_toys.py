"""One of the processes of a sharded learner, and the same in one process; run as ``python sharded_toys.py ARGS``."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from coterie.batch import pack
from coterie.config import LossTable, OptimizerTable
from coterie.learner import Learner
from coterie.loss import aggregation_weights
from coterie.models.policy import Policy
from coterie.policy_tables import LoraTable, PolicyTable
from coterie.sharded import ShardedLearner, join, shard
from coterie.tensors import give_shards, save_tensors
from coterie.types import Sample
from learning_toys import gpt2, llama, lora_team, policy_of, random_samples, stirred

MICRO_BATCH_TOKENS = 40


def policy(kind: str) -> Policy:
    if kind == "full":
        return policy_of(gpt2())
    return stirred(lora_team(llama(), "main", lora=LoraTable(rank=2))["main"])


def learner(kind: str, owner: Policy, cls: type[Learner] = Learner) -> Learner:
    table = PolicyTable(
        model="tiny",
        train="lora" if kind == "lora" else "full",
        optimizer=OptimizerTable(lr=0.01),
        mismatch_limit=1e9,
    )
    return cls(
        owner,
        table,
        LossTable(),
        total_steps=2,
        steps_per_batch=1,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
        autocast=False,
    )


def samples(step: int) -> list[Sample]:
    """Return samples of ``main`` at a version, all with an advantage."""
    drawn = random_samples(random.Random(step), 12)
    return [replace(item, policy="main", version=step, advantage=item.advantage or 0.5) for item in drawn]


def num_batches(owner: Policy) -> int:
    items = samples(0)
    weights = aggregation_weights([len(item.completion_ids) for item in items], "token", None)
    return len(pack(items, weights, MICRO_BATCH_TOKENS, torch.device("cpu"), owner.width))


def gradients(trainer: Learner) -> dict[str, torch.Tensor]:
    """Return the gradient of the first batch, by name, with nothing moved."""
    trainer._gradients(trainer._batches(samples(0)), None)
    return {name: weight.grad for name, weight in trainer.policy.weights().items()}


def main(store: str, rank: int, world: int, kind: str, out: Path, source: str) -> None:
    torch.set_num_threads(1)
    join(Path(store), rank, world, 120.0)
    owner = policy(kind)
    shard(owner)
    trainer = learner(kind, owner, ShardedLearner)
    first = gradients(trainer)
    if rank:
        give_shards(first)
    else:
        save_tensors(out / "gradients.safetensors", first)
    if source:
        trainer.load(Path(source))
    updates = [trainer.step(samples(trainer.policy.version)) for _ in range(2 - trainer.policy.version)]
    trainer.save(None if rank else out)
    if rank == 0:
        (out / "updates.json").write_text(json.dumps([update.numbers() for update in updates]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]), sys.argv[6])
