"""How packed rows attend: masks by position, and PyTorch's fused kernel but where it is slow.

On a CPU the fused kernel computes what a mask hides as well, and its backward pass takes five times as long in bfloat16
as plain matrix products do. There, and only while gradients are recorded, attention goes by blocks
(``models.blocks``), or is written out where a row is too short for them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from coterie.models.blocks import block_attention, blocks_of

NAME = "coterie"
_LONGEST_WRITTEN_OUT = 512
"""Tokens; above this the scores of written-out attention, kept for the backward pass, cost more memory than time."""


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
        torch.is_grad_enabled()
        and query.device.type == "cpu"
        and attention_mask is not None
        and attention_mask.dtype == torch.bool
        and dropout == 0.0
        and options.get("position_bias") is None
        and options.get("softcap") is None
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if ours and attention_mask is not None:
        blocks = blocks_of(attention_mask)
        if blocks is not None:
            return block_attention(query, key, value, scale, blocks).transpose(1, 2).contiguous(), None
    short = query.dtype == torch.bfloat16 and key.shape[2] <= _LONGEST_WRITTEN_OUT
    if not (ours and short) or attention_mask is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
        return output
    groups = query.shape[1] // key.shape[1]
    keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = torch.matmul(query * scale, keys.transpose(-1, -2)).masked_fill(~attention_mask, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1), values).transpose(1, 2).contiguous(), None


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
