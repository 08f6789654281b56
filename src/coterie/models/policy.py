"""A policy: weights with a name and a version, and what is needed to talk to them."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import PreTrainedModel

from coterie.models.chat import ChatRenderer


@dataclass(slots=True, kw_only=True)
class Policy:
    """One set of weights. The engine samples from ``model`` and the learner trains the same tensors, so there is no
    second copy that could be stale; ``version`` counts the optimiser steps those tensors have taken.
    """

    name: str
    model: PreTrainedModel
    renderer: ChatRenderer
    context: int
    end_ids: frozenset[int]
    version: int = field(default=0)
