"""What moves a policy's weights: the schedule of its learning rate, AdamW on float32 copies, and its saved state."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from coterie.config import OptimizerTable
from coterie.tensors import (
    flatten_optimizer,
    give_shards,
    load_tensors,
    restore_optimizer,
    restore_tensors,
    save_tensors,
    whole,
)
from coterie.types import Json

_CHANGE_PROBES = 4096
"""How many entries of each tensor are compared to say which share of the weights a step changed."""


def learning_rate(table: OptimizerTable, step: int, total: int, spent: float = 0.0) -> float:
    """Return the learning rate of optimiser step ``step`` (from 0) of ``total``.

    Linear warm-up to ``lr`` over ``warmup_steps`` (step 0 already moves), then constant, or linear or cosine to 0 at
    ``total``, or where the share ``spent`` of a budget of tokens is 1, whichever is nearer.
    """
    if step < table.warmup_steps:
        return table.lr * (step + 1) / table.warmup_steps
    done = (step - table.warmup_steps) / max(1, total - table.warmup_steps)
    done = min(1.0, max(done, spent))
    if table.schedule == "linear":
        return table.lr * (1.0 - done)
    if table.schedule == "cosine":
        return table.lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return table.lr


class Stepper:
    """Steps the weights of one policy, in place, along the gradients that lie in them."""

    def __init__(self, weights: Mapping[str, Parameter], table: OptimizerTable) -> None:
        """Take over weights by name. ``masters`` are what is stepped: the weights themselves where they are float32."""
        self.table = table
        self.names = list(weights)
        self.weights = list(weights.values())
        # Steps are taken on float32 copies: at 1.0 the spacing of bfloat16 is 0.0039, and small updates would be lost.
        exact = all(weight.dtype == torch.float32 for weight in self.weights)
        self.masters = self.weights if exact else [weight.detach().float().clone() for weight in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.masters,
            lr=table.lr,
            betas=table.betas,
            eps=table.eps,
            weight_decay=table.weight_decay,
            fused=True,
        )

    def forget(self) -> None:
        """Drop the gradients."""
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def clip(self) -> float:
        """Clip the gradient to ``max_grad_norm``; return the norm it had, which need not be finite."""
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight:
                master.grad = None if weight.grad is None else weight.grad.float()
        return float(whole(torch.nn.utils.clip_grad_norm_(self.masters, self.table.max_grad_norm)))

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Take a step along the clipped gradient; return the share of (probed) weights that it changed."""
        before = [_probe(weight).clone() for weight in self.weights]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            if master is not weight:
                weight.copy_(master)
        return _share_changed(before, [_probe(weight) for weight in self.weights])

    def save(self, folder: Path | None) -> dict[str, Json]:
        """Write weights, master copies and AdamW's tensors; return AdamW's settings, which are JSON.

        ``None``: write nothing, but give the process that writes its shards of them.
        """
        files = {"weights": _named(self.names, self.weights)}
        if self.masters is not self.weights:
            files["masters"] = _named(self.names, self.masters)
        files["optimizer"], settings = flatten_optimizer(self.optimizer, self.names)
        for name, tensors in files.items():
            if folder is None:
                give_shards(tensors)
            else:
                save_tensors(folder / f"{name}.safetensors", tensors)
        return settings

    def load(self, folder: Path, settings: Mapping[str, Json]) -> None:
        """Take over what ``save`` wrote and returned, bit for bit."""
        restore_tensors(folder / "weights.safetensors", _named(self.names, self.weights))
        if self.masters is not self.weights:
            restore_tensors(folder / "masters.safetensors", _named(self.names, self.masters))
        restore_optimizer(self.optimizer, self.names, load_tensors(folder / "optimizer.safetensors"), settings)


def _named(names: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in zip(names, tensors, strict=True)}


def _probe(weight: Tensor) -> Tensor:
    """Return evenly spread entries of a tensor, at most ``_CHANGE_PROBES``."""
    flat = whole(weight.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // _CHANGE_PROBES)]


def _share_changed(before: Sequence[Tensor], after: Sequence[Tensor]) -> float:
    """Return the share of entries that differ."""
    differ = sum(int((old != new).sum()) for old, new in zip(before, after, strict=True))
    return differ / max(1, sum(old.numel() for old in before))
