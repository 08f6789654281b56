"""Prompts through the model, as far as their beginnings are not known already.

Shapes: B prompts, P tokens of the longest (all padded on the left), N known tokens and R others of the rows that have
most of them, H key-value heads, D width of a head, V vocabulary.

A pass over the rests sees N + R columns, ``[padding, known][padding, rest]``. Then the columns are moved together, so
that whoever goes on from here finds the same layout whatever was known: ``[padding, prompt]``, P columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from coterie.engines.prefix import NOTHING, Found, PrefixCache, Prompt, States, plan
from coterie.models.adapters import Adapter
from coterie.models.attention import layer_masks


def can_go_on(model: PreTrainedModel) -> bool:
    """Return whether prompts may go on from known beginnings: all layers keep all tokens, positions can be given."""
    layers = DynamicCache(config=model.config).layers
    plain = all(type(layer) is DynamicLayer for layer in layers)
    return plain and "position_ids" in inspect.signature(model.forward).parameters


def routed(adapter: Adapter | None, routes: Sequence[str]) -> AbstractContextManager[None]:
    """Return a context in which row i of a pass goes through adapter ``routes[i]``; ``None``: there are no adapters."""
    return nullcontext() if adapter is None else adapter.resident.rows(routes)


def prefill(
    model: PreTrainedModel, adapter: Adapter | None, prompts: Sequence[Prompt], kept: PrefixCache | None
) -> tuple[DynamicCache, torch.Tensor]:
    """Return (states of the prompts, (B, P) on the left padded; logits after them, (B, V)).

    Goes on from what ``kept`` has, and leaves there what it computes; ``None``: whole prompts, nothing kept.
    """
    known = [NOTHING] * len(prompts)
    if kept is not None:
        known = [kept.find(prompt) for prompt in prompts]
        chosen = plan(prompts, [found.length for found in known])
        if chosen is None:
            known = [NOTHING] * len(prompts)
        elif chosen.beginnings:
            firsts = [kept.find(prompt) for prompt in chosen.beginnings]
            cache, _ = _go_on(model, adapter, chosen.beginnings, firsts)
            kept.keep(_states(chosen.beginnings, cache))
            known = [kept.find(prompt) for prompt in prompts]
    cache, logits_BV = _go_on(model, adapter, prompts, known)
    if kept is not None:
        kept.keep(_states(prompts, cache))
    return cache, logits_BV


def _states(prompts: Sequence[Prompt], cache: DynamicCache) -> States:
    """Return what a cache holds now; the cache makes new tensors when it grows, so these stay as they are."""
    return States(tuple(prompts), tuple((layer.keys, layer.values) for layer in cache.layers))


def _go_on(
    model: PreTrainedModel, adapter: Adapter | None, prompts: Sequence[Prompt], known: Sequence[Found]
) -> tuple[DynamicCache, torch.Tensor]:
    """Run what is not known of the prompts in one pass; return as ``prefill``."""
    device = model.device
    lengths_B = torch.tensor([len(prompt.ids) for prompt in prompts], device=device)
    known_B = torch.tensor([found.length for found in known], device=device)
    rests = [prompt.ids[found.length :] for prompt, found in zip(prompts, known, strict=True)]
    past, width = max(found.length for found in known), max(len(rest) for rest in rests)
    cache = _gathered(known, past, device)
    ids_BR = torch.tensor([[0] * (width - len(rest)) + list(rest) for rest in rests], device=device)
    places_BR = torch.arange(width, device=device)[None, :] - (width - lengths_B)[:, None]
    causal_RR = torch.ones(width, width, dtype=torch.bool, device=device).tril()
    # A padding query sees itself, or its softmax would be over nothing: NaN, which spreads even when masked.
    itself_RR = torch.eye(width, dtype=torch.bool, device=device)
    own_BRR = (causal_RR & (places_BR >= known_B[:, None])[:, None, :]) | itself_RR
    known_places_BN = torch.arange(past, device=device)[None, :] - (past - known_B)[:, None]
    past_B1N = (known_places_BN >= 0)[:, None, :].expand(-1, width, -1)
    mask_BRS = torch.cat([past_B1N, own_BRR], dim=-1)[:, None]
    with routed(adapter, [prompt.owner[1] for prompt in prompts]):
        logits_B1V = model(
            input_ids=ids_BR,
            attention_mask=layer_masks(model, mask_BRS, places_BR, torch.cat([known_places_BN, places_BR], dim=-1)),
            position_ids=places_BR.clamp(min=0),
            cache=cache,
            use_cache=True,
            # By number, not as 1: that would hand the output layer a slice, and to multiply a slice with weights that
            # ask for no gradient, torch writes a copy of them for every row.
            logits_to_keep=torch.tensor([width - 1], device=device),
        ).logits
    if past:
        _close_gaps(cache, lengths_B, known_B, past, width)
    return cache, logits_B1V[:, -1]


def _gathered(known: Sequence[Found], past: int, device: torch.device) -> DynamicCache:
    """Return a cache that holds the known beginnings, padded on the left to ``past`` tokens."""
    cache = DynamicCache()
    rows_of: dict[States, list[int]] = {}
    for row, found in enumerate(known):
        if found.states is not None:
            rows_of.setdefault(found.states, []).append(row)
    if not rows_of:
        return cache
    sources = []
    for states, rows in rows_of.items():
        chosen = [known[row] for row in rows]
        # Row r of the states begins at column P - len(prompt), and here at column N - length.
        shifts = [states.width - len(states.prompts[found.row].ids) - past + found.length for found in chosen]
        columns_bN = torch.arange(past, device=device)[None, :] + torch.tensor(shifts, device=device)[:, None]
        taken_b = torch.tensor([found.row for found in chosen], device=device)
        sources.append((states, torch.tensor(rows, device=device), taken_b, columns_bN.clamp(min=0)))
    for number, (keys, values) in enumerate(sources[0][0].layers):
        pair = []
        for part, like in enumerate((keys, values)):
            out_BHND = like.new_zeros(len(known), like.shape[1], past, like.shape[3])
            for states, rows_b, taken_b, columns_bN in sources:
                out_BHND[rows_b] = _picked(states.layers[number][part][taken_b], columns_bN)
            pair.append(out_BHND)
        cache.update(pair[0], pair[1], number)
    return cache


def _close_gaps(cache: DynamicCache, lengths_B: torch.Tensor, known_B: torch.Tensor, past: int, width: int) -> None:
    """Move the columns of every row together: from ``[padding, known][padding, rest]`` to ``[padding, prompt]``."""
    longest = int(lengths_B.max())
    places_BP = torch.arange(longest, device=lengths_B.device)[None, :] - (longest - lengths_B)[:, None]
    from_known_BP = past - known_B[:, None] + places_BP
    from_rest_BP = past + width - lengths_B[:, None] + places_BP
    columns_BP = torch.where(places_BP < known_B[:, None], from_known_BP, from_rest_BP).clamp(min=0)
    for layer in cache.layers:
        layer.keys, layer.values = _picked(layer.keys, columns_BP), _picked(layer.values, columns_BP)


def _picked(states_BHSD: torch.Tensor, columns_BC: torch.Tensor) -> torch.Tensor:
    """Return the columns of each row, (B, H, C, D).

    Whole vectors are copied: ``gather``, which looks each of their numbers up, takes twenty times as long.
    """
    rows, heads, length, width = states_BHSD.shape
    firsts_BH1 = torch.arange(rows * heads, device=columns_BC.device).view(rows, heads, 1) * length
    places_BHC = firsts_BH1 + columns_BC[:, None, :]
    return states_BHSD.reshape(-1, width).index_select(0, places_BHC.flatten()).view(*places_BHC.shape, width)
