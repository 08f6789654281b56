"""Room for tokens to come in a cache."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from coterie.engines.room import Room


def _cache(columns: int) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(2):
        states = torch.arange(float(columns)).view(1, 1, columns, 1) + 10 * layer
        cache.update(states, -states, layer)
    return cache


def test_new_states_are_written_where_the_room_begins_and_the_rest_is_zero() -> None:
    cache = _cache(3)
    room = Room(cache)
    assert (room.filled, room.columns) == (3, 3)
    room.grow(4)
    keys, values = cache.update(torch.tensor([[[[7.0], [8.0]]]]), torch.tensor([[[[5.0], [6.0]]]]), 1)
    assert keys.flatten().tolist() == [10, 11, 12, 7, 8, 0, 0]
    assert values.flatten().tolist() == [-10, -11, -12, 5, 6, 0, 0]
    cache.update(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1), 0)
    assert (room.filled, room.columns, cache.get_seq_length()) == (5, 7, 5)


def test_room_leaves_the_tensors_of_the_cache_as_they_were() -> None:
    cache = _cache(3)
    before = cache.layers[0].keys
    Room(cache).grow(2)
    cache.update(torch.ones(1, 1, 2, 1), torch.ones(1, 1, 2, 1), 0)
    assert before.flatten().tolist() == [0, 1, 2]


def test_rows_that_are_kept_keep_their_room() -> None:
    cache = DynamicCache()
    cache.update(torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1), torch.zeros(3, 1, 1, 1), 0)
    room = Room(cache)
    room.grow(2)
    cache.batch_select_indices(torch.tensor([2, 0]))
    assert (room.filled, room.columns) == (1, 3)
    keys, _ = cache.update(torch.tensor([8.0, 9.0]).view(2, 1, 1, 1), torch.zeros(2, 1, 1, 1), 0)
    assert keys.squeeze().tolist() == [[3, 8, 0], [1, 9, 0]]
