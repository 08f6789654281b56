"""Weights of linear layers as the processor's matrix products read them, for as long as nobody changes the weights.

In bfloat16 a product on a CPU first brings its weight into that layout, every time; for the few rows of a decode step
this is a tenth of generation. The products are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class PackedWeights:
    """A copy of the weights of a model's linear layers, in the layout of the products; the model stays as it is."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Copy them; nothing is copied where it would not be faster: on accelerators, or in float32."""
        able = model.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        able = able and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        layers = [m for m in model.modules() if type(m) is nn.Linear and m.weight.dtype == torch.bfloat16]
        self._forwards = [(layer, partial(_linear, _packed(layer.weight), layer.bias)) for layer in layers if able]

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._forwards)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the layers multiply with the copies inside."""
        for layer, forward in self._forwards:
            vars(layer)["forward"] = forward
        try:
            yield
        finally:
            for layer, _ in self._forwards:
                del vars(layer)["forward"]


def _packed(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return packed


def _linear(packed: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    output: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, packed, bias, "none", [], "")
    return output
