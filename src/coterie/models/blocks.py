"""Attention that computes only what a mask lets through, a block of queries at a time, for training on a CPU.

The queries of a packed row see little of it: in a trie of a prompt and its K completions, the prompt and their own
completion. So each block of queries is multiplied with the keys that any of them sees, and with no others.

Shapes: B rows, T tokens of a row, H heads on G key-value heads, D width of a head; of a block Q queries, N keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

QUERIES = 64
"""Queries of a block: enough for the matrix products, few enough to see about the same."""
SPARSE = 0.8
"""Share of all query-key pairs above which blocks save nothing."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``start`` to ``end`` of row ``row`` see the keys at ``columns``; ``hidden`` says which not, (Q, M).

    The first N - M of the keys are seen by all. ``columns`` is a slice where they stand together.
    """

    row: int
    start: int
    end: int
    columns: slice | Tensor
    width: int
    hidden: Tensor


_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The blocks of masks: all layers of a pass are given the same one."""


def blocks_of(mask: Tensor) -> tuple[Block, ...] | None:
    """Return the blocks of a mask, boolean (B, 1, T, T), True where a query may look; ``None`` if they save nothing."""
    if mask not in _known:
        _known[mask] = _blocks(mask)
    found: tuple[Block, ...] | None = _known[mask]
    return found


def _blocks(mask: Tensor) -> tuple[Block, ...] | None:
    rows, _, length, keys = mask.shape
    if mask.shape[1] != 1 or length != keys or length <= 2 * QUERIES:
        return None
    blocks = []
    for row in range(rows):
        for start in range(0, length, QUERIES):
            seen_QT = mask[row, 0, start : start + QUERIES]
            columns = seen_QT.any(dim=0).nonzero().squeeze(1)
            seen_QN = seen_QT[:, columns]
            free = int(seen_QN.all(dim=0).long().cumprod(0).sum())
            together = int(columns[-1]) - int(columns[0]) + 1 == len(columns)
            blocks.append(
                Block(
                    row=row,
                    start=start,
                    end=start + len(seen_QT),
                    columns=slice(int(columns[0]), int(columns[-1]) + 1) if together else columns,
                    width=len(columns),
                    hidden=~seen_QN[:, free:],
                )
            )
    computed = sum((block.end - block.start) * block.width for block in blocks)
    return tuple(blocks) if computed <= SPARSE * rows * length * length else None


def block_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: tuple[Block, ...]) -> Tensor:
    """Return the attention output (B, H, T, D) for a query (B, H, T, D) and keys and values (B, G, T, D).

    Under autocast it is computed in autocast's precision, forward and backward, as PyTorch's own attention is.
    """
    device = query.device.type
    if torch.is_autocast_enabled(device):
        query, key, value = (each.to(torch.get_autocast_dtype(device)) for each in (query, key, value))
    with torch.autocast(device, enabled=False):
        output: Tensor = _BlockAttention.apply(query * scale, key, value, blocks)  # type: ignore[no-untyped-call]
    return output


class _BlockAttention(torch.autograd.Function):
    """Keeps nothing of the scores: the backward pass computes them again, which is less work than to read them."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, blocks: tuple[Block, ...]) -> Tensor:
        out_BGhTD = _grouped(torch.empty_like(query, memory_format=torch.contiguous_format), key)
        queries = _grouped(query, key)
        for block in blocks:
            probs = _probs(queries, key, block)
            values = value[block.row][:, block.columns]
            out_BGhTD[block.row, :, :, block.start : block.end] = _by_head(torch.bmm(probs, values), queries)
        out = out_BGhTD.flatten(1, 2)
        ctx.save_for_backward(query, key, value, out)
        ctx.blocks = blocks
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out = ctx.saved_tensors
        grad = gradients[0]
        queries, grads = _grouped(query, key), _grouped(grad, key)
        # What the softmax takes off the gradient of every score of a query.
        exact = torch.promote_types(key.dtype, torch.float32)
        taken = _grouped((grad.to(exact) * out.to(exact)).sum(-1, keepdim=True).to(grad.dtype), key)
        to_query = torch.empty_like(queries, memory_format=torch.contiguous_format)
        # A key is in many blocks; their sum would lose digits in bfloat16.
        to_key, to_value = torch.zeros_like(key, dtype=exact), torch.zeros_like(value, dtype=exact)
        for block in ctx.blocks:
            row, columns = block.row, block.columns
            probs = _probs(queries, key, block)
            grad_GQD = _part(grads, block)
            of_scores = torch.bmm(grad_GQD, value[row][:, columns].transpose(1, 2))
            of_scores.sub_(_part(taken, block)).mul_(probs)
            of_queries = torch.bmm(of_scores, key[row][:, columns])
            to_query[row, :, :, block.start : block.end] = _by_head(of_queries, queries)
            _add(to_value[row], columns, torch.bmm(probs.transpose(1, 2), grad_GQD))
            _add(to_key[row], columns, torch.bmm(of_scores.transpose(1, 2), _part(queries, block)))
        return to_query.flatten(1, 2), to_key.to(key.dtype), to_value.to(value.dtype), None


def _grouped(heads: Tensor, key: Tensor) -> Tensor:
    """Return (B, H, T, X) as (B, G, H / G, T, X)."""
    return heads.view(heads.shape[0], key.shape[1], -1, *heads.shape[2:])


def _by_head(part: Tensor, queries: Tensor) -> Tensor:
    """Return (G, H / G * Q, X) as (G, H / G, Q, X)."""
    return part.view(part.shape[0], queries.shape[2], -1, part.shape[2])


def _part(grouped: Tensor, block: Block) -> Tensor:
    """Return the queries of a block, (G, H / G * Q, X)."""
    return grouped[block.row, :, :, block.start : block.end].flatten(1, 2)


def _probs(queries: Tensor, key: Tensor, block: Block) -> Tensor:
    """Return the attention probabilities of a block, (G, H / G * Q, N)."""
    scores = torch.bmm(_part(queries, block), key[block.row][:, block.columns].transpose(1, 2))
    ends = _by_head(scores, queries)[..., block.width - block.hidden.shape[1] :]
    ends.masked_fill_(block.hidden, float("-inf"))
    return scores.softmax(dim=-1)


def _add(total: Tensor, columns: slice | Tensor, part: Tensor) -> None:
    """Add the gradients of a block's keys to those of the row."""
    if isinstance(columns, slice):
        total[:, columns] += part
    else:
        total.index_add_(1, columns, part.to(total.dtype))
