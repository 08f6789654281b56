"""What samples and what trains in a worker process: plain classes, of which Ray makes actors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from coterie.cluster.wire import Stepped, look_in, part_of
from coterie.config import Recipe
from coterie.engines import Completion, Engine, Request
from coterie.faults import fault_point
from coterie.learner import Learner
from coterie.learners import learner_of
from coterie.lineup import Lineup, assemble
from coterie.sharded import ShardedLearner, join, shard
from coterie.tensors import copy_tensors, give_shards, tensor_bytes, tensors_of
from coterie.types import Sample

TORN = -1
"""The version of weights while they are being replaced; no request names it."""


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
        """Load the policy, and over it the weights that a warm start left in its model; make its learner.

        Where several workers are to share the learner, it is made when they have joined.
        """
        look_in(path)
        lineup = load_part(recipe, [policy], threads, gpus)
        self._recipe, self._rank = recipe, 0
        self._policy = lineup.policies[policy]
        if model is not None:
            copy_tensors(tensors_of(model), dict(self._policy.model_weights()), "the run's process")
        if recipe.hardware.of(policy).update_workers == 1:
            # The recipe as it is: what is said of all policies together must be true of it.
            self._learner: Learner = learner_of(recipe, self._policy, lineup.bases.get(policy))

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
        if self._rank:
            give_shards(self._policy.weights())
            return self._policy.version, b""
        return self._policy.version, tensor_bytes(self._policy.weights())

    def save(self, folder: str) -> None:
        """Write all state into a folder that every node sees. With several workers the first one writes."""
        self._learner.save(None if self._rank else Path(folder))

    def load(self, folder: str) -> int:
        """Take over what ``save`` wrote; return how many of the last updates had been skipped."""
        self._learner.load(Path(folder))
        return self._learner.skipped_in_a_row
