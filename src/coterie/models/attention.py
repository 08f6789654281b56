"""How packed rows attend: masks by position, and PyTorch's fused kernel but where it is slow.

On a CPU the fused kernel computes what a mask hides as well, wants keys once per head of the queries, and its backward
pass takes five times as long in bfloat16 as plain matrix products do. There attention goes by blocks
(``models.blocks``), or is written out where a row is too short for them or a decode step has few queries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from coterie.models.blocks import block_attention, chunks_of

NAME = "coterie"
_LONGEST_WRITTEN_OUT = 512
"""Tokens; above this the scores of written-out attention, kept for the backward pass, cost more memory than time."""
_FEW_QUERIES = 64
"""The candidates of a prompt in a decode step: the fused kernel takes up to six times as long as plain products."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Return the attention output, (batch, queries, heads, width of a head), as transformers' interface wants it.

    ``attention_mask`` is boolean, True where a query may look.
    """
    ours = (
        query.device.type == "cpu"
        and attention_mask is not None
        and attention_mask.dtype == torch.bool
        and attention_mask.shape[0] == query.shape[0]
        and dropout == 0.0
        and options.get("position_bias") is None
        and options.get("softcap") is None
    )
    if ours and attention_mask is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        chunks = chunks_of(attention_mask)
        if chunks is not None:
            return block_attention(query, key, value, scale, chunks).transpose(1, 2).contiguous(), None
        short = query.dtype == torch.bfloat16 and key.shape[2] <= _LONGEST_WRITTEN_OUT
        # Never by whether gradients are recorded: a reference's log-probs must be the policy's to the bit.
        if short or (query.shape[2] <= _FEW_QUERIES and query.shape[2] < key.shape[2]):
            return _written_out(query * scale, key, value, attention_mask), None
    output: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
    )
    return output


def _written_out(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return attention as two matrix products; heads that share keys and values are one product with them."""
    rows, heads, queries, width = query.shape
    groups = key.shape[1]
    scores = torch.matmul(query.reshape(rows, groups, -1, width), key.transpose(-1, -2))
    scores = scores.view(rows, groups, -1, queries, key.shape[2]).masked_fill_(~mask[:, :, None], float("-inf"))
    output = torch.matmul(scores.softmax(dim=-1).flatten(2, 3), value)
    return output.view(rows, heads, queries, -1).transpose(1, 2).contiguous()


def layer_masks(
    model: PreTrainedModel, seen: Tensor, query_positions: Tensor, key_positions: Tensor
) -> Tensor | dict[str, Tensor]:
    """Return what a model's forward pass takes as ``attention_mask``.

    That is ``seen``, (batch, 1, queries, keys), True where a query may look, and for layers with a sliding window the
    part of it within the window, counted by positions, (batch, queries) and (batch, keys). transformers applies no
    window to a mask with four axes.
    """
    config = vars(model.config.get_text_config())  # not every architecture's has these
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window is None or (kinds is not None and "sliding_attention" not in kinds):
        return seen
    near = query_positions[:, :, None] - key_positions[:, None, :] < window
    windowed = seen & near[:, None]
    # Where all layers are alike, the model takes one mask.
    return windowed if kinds is None else {"full_attention": seen, "sliding_attention": windowed}


def use_attention(model: PreTrainedModel) -> None:
    """Make a model attend through ``attention``; it stays the same model for everybody else."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
