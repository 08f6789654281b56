"""A policy: weights with a name and a version, and what is needed to talk to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from coterie.models.adapters import BASE, Adapter
from coterie.models.chat import ChatRenderer


@dataclass(slots=True, kw_only=True)
class Policy:
    """One set of weights. The engine samples from ``model`` and the learner trains the same tensors, so there is no
    second copy that could be stale; ``version`` counts the optimiser steps those tensors have taken.

    With an ``adapter``, ``model`` is shared with other policies, and only the adapter's tensors are this policy's.
    """

    name: str
    model: PreTrainedModel
    renderer: ChatRenderer
    context: int
    end_ids: frozenset[int]
    version: int = field(default=0)
    adapter: Adapter | None = None
    checkpointing: bool = False
    """Whether training keeps only the inputs of the model's layers for the backward pass."""

    @property
    def route(self) -> str:
        """The adapter that its rows of a batch go through."""
        return BASE if self.adapter is None else self.adapter.key

    @property
    def width(self) -> int:
        """Hidden units of a layer of its model."""
        return int(self.model.config.get_text_config().hidden_size)

    def weights(self) -> dict[str, Parameter]:
        """Return what its training changes: the adapter's tensors, or all weights where it has a model of its own."""
        return dict(self.model.named_parameters()) if self.adapter is None else self.adapter.weights()

    def model_weights(self) -> dict[str, Parameter]:
        """Return the weights of its model, without any adapters, by the names they have without them."""
        return dict(self.model.named_parameters()) if self.adapter is None else self.adapter.resident.weights()

    def alone(self) -> AbstractContextManager[None]:
        """Return a context in which passes of ``model`` are this policy's, backward passes included."""
        return alone(self.adapter)


def alone(adapter: Adapter | None) -> AbstractContextManager[None]:
    """Return a context in which the adapter acts alone on its model; for ``None`` the model has no adapters."""
    return nullcontext() if adapter is None else adapter.resident.only(adapter.key)


@contextmanager
def as_sampled(model: PreTrainedModel, checkpointing: bool = False) -> Iterator[None]:
    """Run a model as it samples, without dropout, and leave it so.

    ``checkpointing`` keeps only the inputs of its layers for the backward pass. Such layers look whether they are in
    training mode themselves; what is inside of them stays in evaluation mode.
    """
    model.eval()
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if checkpointing else []
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        model.eval()
