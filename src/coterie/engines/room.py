"""Room for the states of tokens that are still to be drawn.

Shapes: B prompts of a batch, G key-value heads, S columns with the room, D width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values, each (B, G, S, D), that are written in place: a layer without room copies all at every step.

    ``update`` returns all columns. Those that nothing was written to yet are zeros, and a mask has to hide them.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin with these states, which stay as they are; there is no room yet."""
        super().__init__()
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self.filled = keys.shape[2]

    def grow(self, columns: int) -> None:
        """Make room for so many more columns."""
        self.keys, self.values = (F.pad(states, (0, 0, 0, columns)) for states in (self.keys, self.values))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the states of new tokens where the room begins; return the whole."""
        end = self.filled + key_states.shape[2]
        self.keys[:, :, self.filled : end] = key_states
        self.values[:, :, self.filled : end] = value_states
        self.filled = end
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the columns that were written."""
        return self.filled


class Room:
    """All layers of a cache with room, and how much of it is left."""

    def __init__(self, cache: DynamicCache) -> None:
        """Change the layers of the cache; their tensors stay as they are."""
        self._layers = [RoomyLayer(layer.keys, layer.values) for layer in cache.layers]
        cache.layers[:] = self._layers

    @property
    def filled(self) -> int:
        """Columns that were written; new tokens come from there on."""
        return self._layers[0].filled

    @property
    def columns(self) -> int:
        """S."""
        return int(self._layers[0].keys.shape[2])

    def grow(self, columns: int) -> None:
        """Make room for so many more columns in every layer."""
        for layer in self._layers:
            layer.grow(columns)
