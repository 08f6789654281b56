"""Attention that computes only what a mask lets through, a block of queries at a time, for training on a CPU.

The queries of a packed row see little of it: in a trie of a prompt and its K completions, the prompt and their own
completion. So each block of queries is multiplied with the keys that any of them sees, and with no others. Blocks with
about as many keys go together, as one batch of matrix products.

Shapes: B rows, T tokens of a row, H heads on G key-value heads, h = H / G, D width of a head; C blocks of a chunk, Q
queries of a block, N keys of the block of the chunk that has most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

QUERIES = 64
"""Queries of a block: enough for the matrix products, few enough to see about the same."""
SPARSE = 0.8
"""Share of all query-key pairs above which blocks save nothing."""
_TOGETHER = 4096
"""Keys of all blocks of a chunk, about: enough work for all cores, and scores that their caches hold."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Blocks that are computed together: of block c the queries and the keys of row ``rows[c]``."""

    rows_C: Tensor
    queries_CQ: Tensor
    """Columns of the queries; a block with fewer than Q has its last one again."""
    real_CQ: Tensor | None
    """Which queries are not such repetitions; ``None``: all."""
    keys_CN: Tensor
    """Columns of the keys; a block with fewer than N has column 0 again, in front and hidden."""
    hidden_CQM: Tensor
    """Which of the first M1 and last M2 keys a query does not see, M = M1 + M2. Those between are seen by all."""
    ends: tuple[int, int]
    """M1, M2."""

    def places(self, heads: int, groups: int, length: int) -> tuple[Tensor, Tensor]:
        """Return where queries, (C, G, h, Q), and keys, (C, G, N), stand in (B * heads * T)."""
        heads_Gh = torch.arange(heads, device=self.rows_C.device).view(groups, -1)
        groups_G = torch.arange(groups, device=self.rows_C.device)
        of_queries = (self.rows_C[:, None, None] * heads + heads_Gh)[..., None] * length
        of_keys = (self.rows_C[:, None] * groups + groups_G)[..., None] * length
        return of_queries + self.queries_CQ[:, None, None], of_keys + self.keys_CN[:, None]


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The chunks of masks: all layers of a pass are given the same one."""


def chunks_of(mask: Tensor) -> tuple[Chunk, ...] | None:
    """Return the chunks of a mask, boolean (B, 1, T, T), True where a query may look; ``None`` if they save nothing."""
    if mask not in _known:
        _known[mask] = _chunks(mask)
    found: tuple[Chunk, ...] | None = _known[mask]
    return found


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries of a row from ``start`` on, the columns that any of them sees, and which of those each does not see."""

    row: int
    start: int
    columns: Tensor
    hidden_QN: Tensor


def _chunks(mask: Tensor) -> tuple[Chunk, ...] | None:
    rows, _, length, keys = mask.shape
    if mask.shape[1] != 1 or length != keys or length <= 2 * QUERIES:
        return None
    blocks = []
    for row in range(rows):
        for start in range(0, length, QUERIES):
            seen_QT = mask[row, 0, start : start + QUERIES]
            columns = seen_QT.any(dim=0).nonzero().squeeze(1)
            blocks.append(_Block(row, start, columns, ~seen_QT[:, columns]))
    computed = sum(block.hidden_QN.numel() for block in blocks)
    if computed > SPARSE * rows * length * length:
        return None
    blocks.sort(key=lambda block: (-len(block.columns), block.row, block.start))
    together = [[blocks[0]]]
    for block in blocks[1:]:
        widest = len(together[-1][0].columns)
        # What is padded is computed too.
        alike = widest - len(block.columns) <= QUERIES
        if alike and widest * (len(together[-1]) + 1) <= _TOGETHER:
            together[-1].append(block)
        else:
            together.append([block])
    return tuple(_chunk(chosen) for chosen in together)


def _chunk(blocks: Sequence[_Block]) -> Chunk:
    """Return the tensors of some blocks, the one with most keys first."""
    device = blocks[0].columns.device
    size, width = max(len(block.hidden_QN) for block in blocks), len(blocks[0].columns)
    queries_CQ = torch.empty(len(blocks), size, dtype=torch.long, device=device)
    keys_CN = torch.zeros(len(blocks), width, dtype=torch.long, device=device)
    hidden_CQN = torch.ones(len(blocks), size, width, dtype=torch.bool, device=device)
    for index, block in enumerate(blocks):
        count, seen = block.hidden_QN.shape
        queries_CQ[index] = block.start + torch.arange(size, device=device).clamp(max=count - 1)
        keys_CN[index, width - seen :] = block.columns
        hidden_CQN[index, :count, width - seen :] = block.hidden_QN
        hidden_CQN[index, count:, width - seen :] = block.hidden_QN[-1]
    counts_C = torch.tensor([len(block.hidden_QN) for block in blocks], device=device)
    real_CQ = torch.arange(size, device=device) < counts_C[:, None]
    free = (~hidden_CQN.any(dim=1).any(dim=0)).nonzero().squeeze(1).tolist()
    before, after = _around(free, width)
    return Chunk(
        rows_C=torch.tensor([block.row for block in blocks], device=device),
        queries_CQ=queries_CQ,
        real_CQ=None if bool(real_CQ.all()) else real_CQ,
        keys_CN=keys_CN,
        hidden_CQM=torch.cat([hidden_CQN[..., :before], hidden_CQN[..., width - after :]], dim=-1),
        ends=(before, after),
    )


def _around(free: Sequence[int], width: int) -> tuple[int, int]:
    """Return how many columns there are before and after the longest run of free ones."""
    best, start = (0, 0), 0
    for index, column in enumerate(free):
        if index and column != free[index - 1] + 1:
            start = index
        best = max(best, (index + 1 - start, start))
    length, start = best
    return (free[start], width - free[start] - length) if length else (width, 0)


def block_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, chunks: tuple[Chunk, ...]) -> Tensor:
    """Return the attention output (B, H, T, D) for a query (B, H, T, D) and keys and values (B, G, T, D).

    Under autocast it is computed in autocast's precision, forward and backward, as PyTorch's own attention is.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    with torch.autocast(device, enabled=False):
        output: Tensor = _BlockAttention.apply(query * scale, key, value, chunks)  # type: ignore[no-untyped-call]
    return output


class _BlockAttention(torch.autograd.Function):
    """Keeps nothing of the scores: the backward pass computes them again, which is less work than to read them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunks: tuple[Chunk, ...]) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        heads, groups, length = query.shape[1], key.shape[1], query.shape[2]
        out = torch.empty_like(query)
        for chunk in chunks:
            of_queries, of_keys = chunk.places(heads, groups, length)
            queries, keys, values = _at(query, of_queries), _at(key, of_keys), _at(value, of_keys)
            _write(out, of_queries, torch.bmm(_probs(queries, keys, chunk), values))
        ctx.save_for_backward(query, key, value, out)
        ctx.chunks = chunks
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out = ctx.saved_tensors
        grad = gradients[0].contiguous()
        heads, groups, length = query.shape[1], key.shape[1], query.shape[2]
        # What the softmax takes off the gradient of every score of a query.
        exact = torch.promote_types(key.dtype, torch.float32)
        taken = (grad.to(exact) * out.to(exact)).sum(-1, keepdim=True).to(grad.dtype)
        to_query = torch.empty_like(query)
        # A key is in many blocks; their sum would lose digits in bfloat16.
        to_key, to_value = torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
        for chunk in ctx.chunks:
            of_queries, of_keys = chunk.places(heads, groups, length)
            queries, keys, values = _at(query, of_queries), _at(key, of_keys), _at(value, of_keys)
            grads = _at(grad, of_queries)
            if chunk.real_CQ is not None:
                # What is there twice must count once: as if nothing came back for the repetitions.
                repeated = ~chunk.real_CQ[:, None, None].expand_as(of_queries).reshape(grads.shape[0], -1, 1)
                grads = grads.masked_fill(repeated, 0.0)
            probs = _probs(queries, keys, chunk)
            of_scores = torch.bmm(grads, values.transpose(1, 2))
            of_scores.sub_(_at(taken, of_queries)).mul_(probs)
            _write(to_query, of_queries, torch.bmm(of_scores, keys), chunk.real_CQ)
            _add(to_value, of_keys, torch.bmm(probs.transpose(1, 2), grads))
            if chunk.real_CQ is not None:
                of_scores = of_scores.masked_fill(repeated, 0.0)
            _add(to_key, of_keys, torch.bmm(of_scores.transpose(1, 2), queries))
        return to_query, to_key.to(key.dtype), to_value.to(value.dtype), None


def _at(states: Tensor, places: Tensor) -> Tensor:
    """Return what stands at some places of (B, heads, T, X), as (C * G, rest, X)."""
    taken = states.view(-1, states.shape[-1]).index_select(0, places.flatten())
    return taken.view(places.shape[0] * places.shape[1], -1, states.shape[-1])


def _write(states: Tensor, places: Tensor, found: Tensor, real_CQ: Tensor | None = None) -> None:
    """Write (C * G, h * Q, X) to the places of (B, heads, T, X), only what is real."""
    flat, rows = places.flatten(), found.reshape(-1, states.shape[-1])
    if real_CQ is not None:
        real = real_CQ[:, None, None].expand_as(places).flatten()
        flat, rows = flat[real], rows[real]
    states.view(-1, states.shape[-1]).index_copy_(0, flat, rows)


def _add(total: Tensor, places: Tensor, part: Tensor) -> None:
    """Add the gradients of the chunk's keys, (C * G, N, D), to those of all, (B, G, T, D)."""
    total.view(-1, total.shape[-1]).index_add_(0, places.flatten(), part.flatten(0, 1).to(total.dtype))


def _probs(queries: Tensor, keys: Tensor, chunk: Chunk) -> Tensor:
    """Return the attention probabilities of a chunk, (C * G, h * Q, N)."""
    scores = torch.bmm(queries, keys.transpose(1, 2))
    blocks, size = chunk.queries_CQ.shape
    by_head = scores.view(blocks, -1, size, scores.shape[-1])
    before, after = chunk.ends
    if before:
        by_head[..., :before].masked_fill_(chunk.hidden_CQM[:, None, :, :before], float("-inf"))
    if after:
        by_head[..., -after:].masked_fill_(chunk.hidden_CQM[:, None, :, before:], float("-inf"))
    return scores.softmax(dim=-1)
