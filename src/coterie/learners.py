"""What trains a policy, wherever it is, and how the one in this process is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedModel

from coterie.config import Recipe
from coterie.learner import Learner, Update
from coterie.models.policy import Policy
from coterie.types import Sample


class Learns(Protocol):
    """What trains one policy, wherever it is; ``Learner`` is the one in this process."""

    @property
    def skipped_in_a_row(self) -> int:
        """How many of the last updates were not finite and changed no weight."""
        ...

    def begin(self, samples: Sequence[Sample], spent: float = 0.0) -> Callable[[], Update]:
        """Begin ``Learner.step``; return what waits for its end. Learners of other policies may begin meanwhile."""
        ...

    def save(self, folder: Path) -> None:
        """Write all its state into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Take over everything ``save`` wrote, bit for bit."""
        ...

    def kept(self, folder: Path) -> None:
        """Hear where the state that was saved last stays until the next one is kept."""
        ...


def learner_of(recipe: Recipe, policy: Policy, base: PreTrainedModel | None, kind: type[Learner] = Learner) -> Learner:
    """Return the learner of a policy as the recipe says; ``base`` is the model as loaded, for a KL to it."""
    train = recipe.train
    return kind(
        policy,
        recipe.policies[policy.name],
        recipe.loss,
        total_steps=recipe.num_updates(policy.name) * train.steps_per_batch,
        steps_per_batch=train.steps_per_batch,
        micro_batch_tokens=train.micro_batch_tokens,
        autocast=train.precision == "bfloat16",
        base=base,
        engine=recipe.hardware.of(policy.name).engine,
    )
