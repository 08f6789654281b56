"""Attention by blocks is attention: values and gradients, whatever a mask hides, computing only what it shows."""

from __future__ import annotations

import pytest
import torch

from coterie.models.attention import attention
from coterie.models.blocks import QUERIES, block_attention, chunks_of


def trie(prompt: int, count: int, length: int, padding: int = 0) -> torch.Tensor:
    """Return (T, T), True where a token of a prompt with ``count`` completions may look; padding sees itself."""
    total = prompt + count * length + padding
    mask = torch.ones(total, total, dtype=torch.bool).tril()
    for number in range(count):
        start = prompt + number * length
        mask[start : start + length, prompt:start] = False
    mask[total - padding :, : total - padding] = False
    return mask


def plain(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor
) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    keys, values = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ keys.transpose(-1, -2) * scale).masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ values


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("shape", [(100, 3, 50, 0), (70, 9, 17, 11), (200, 0, 0, 0)])
def test_values_and_gradients_are_those_of_plain_attention(
    heads: tuple[int, int], shape: tuple[int, int, int, int]
) -> None:
    """Float64, two rows of which the second is the prompt alone, so that rows differ."""
    generator = torch.Generator().manual_seed(0)
    first = trie(*shape)
    total = len(first)
    mask = torch.stack([first, trie(total, 0, 0)])[:, None]
    chunks = chunks_of(mask)
    assert chunks is not None
    inputs = [
        torch.randn(2, count, total, 8, generator=generator, dtype=torch.float64, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    ]
    towards = torch.randn(2, heads[0], total, 8, generator=generator, dtype=torch.float64)
    found, expected = block_attention(*inputs, 0.3, chunks), plain(*inputs, 0.3, mask)
    assert float((found - expected).detach().abs().max()) < 1e-12
    ours, theirs = torch.autograd.grad(found, inputs, towards), torch.autograd.grad(expected, inputs, towards)
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) < 1e-12


def test_under_autocast_it_trains_as_in_bfloat16_whatever_precision_its_inputs_have() -> None:
    """A rotary embedding in float32 gives queries and keys in float32 beside values in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    chunks = chunks_of(trie(100, 3, 50)[None, None])
    assert chunks is not None
    inputs = [torch.randn(1, 2, 250, 8, generator=generator, requires_grad=True) for _ in range(3)]
    towards = torch.randn(1, 2, 250, 8, generator=generator).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = block_attention(inputs[0], inputs[1], inputs[2].bfloat16(), 0.25, chunks)
    halves = [each.detach().bfloat16().requires_grad_() for each in inputs]
    expected = block_attention(*halves, 0.25, chunks)
    assert found.dtype == torch.bfloat16
    assert found.equal(expected)
    ours, theirs = torch.autograd.grad(found, inputs, towards), torch.autograd.grad(expected, halves, towards)
    assert [grad.dtype for grad in ours] == [torch.float32] * 3
    assert all(one.equal(other.float()) for one, other in zip(ours, theirs, strict=True))


def test_only_what_some_query_of_a_block_sees_is_computed() -> None:
    """Prompt 128, 4 completions of 64: a completion sees 192 keys, the prompt's blocks 128 and 64, padded to 128.

    The keys seen by all: the prompt and the completion's first token; 65, as the second block does not see all of it.
    """
    chunks = chunks_of(trie(128, 4, 64)[None, None])
    assert chunks is not None
    assert [tuple(chunk.keys_CN.shape) for chunk in chunks] == [(5, 192), (1, 64)]
    completions, beginning = chunks
    assert completions.queries_CQ[:, 0].tolist() == [128, 192, 256, 320, 64]
    assert completions.keys_CN[1].tolist() == [*range(128), *range(192, 256)]
    assert completions.keys_CN[4].tolist() == [0] * 64 + [*range(128)]
    assert completions.ends == (64, 63)  # in front the padding, in the end what a completion's tokens do not all see
    assert beginning.ends == (0, 63)
    assert completions.real_CQ is None


def test_a_block_with_fewer_queries_repeats_its_last_and_says_so() -> None:
    """Prompt 70, 9 completions of 17: 223 tokens, so that the last block has 31 queries."""
    chunks = chunks_of(trie(70, 9, 17)[None, None])
    assert chunks is not None
    short = [(chunk, place) for chunk in chunks for place, at in enumerate(chunk.queries_CQ[:, 0]) if at == 192]
    ((chunk, place),) = short
    assert chunk.real_CQ is not None
    assert chunk.real_CQ[place].sum() == 31
    assert chunk.queries_CQ[place].tolist() == [*range(192, 223), *[222] * 33]


def test_masks_that_hide_too_little_have_no_chunks() -> None:
    """Causal: of T = 192 two thirds are computed, 128 is one block of too few; without a mask nothing is saved."""
    assert chunks_of(trie(3 * QUERIES, 0, 0)[None, None]) is not None
    assert chunks_of(trie(2 * QUERIES, 0, 0)[None, None]) is None
    assert chunks_of(torch.ones(1, 1, 256, 256, dtype=torch.bool)) is None
    assert chunks_of(torch.ones(1, 1, 8, 256, dtype=torch.bool)) is None


@pytest.mark.parametrize("queries", [1, 5, 64, 65])
@torch.inference_mode()
def test_a_decode_step_attends_as_the_fused_kernel_does(queries: int) -> None:
    """6 heads on 2 key-value heads, float32, random visibility."""
    generator = torch.Generator().manual_seed(queries)
    query = torch.randn(3, 6, queries, 8, generator=generator)
    key, value = torch.randn(2, 3, 2, 90, 8, generator=generator)
    mask = torch.rand(3, 1, queries, 90, generator=generator) < 0.5
    mask[..., 0] = True
    module = torch.nn.Module()
    module.num_key_value_groups = 3
    found, _ = attention(module, query, key, value, mask, scaling=0.4)
    assert float((found - plain(query, key, value, 0.4, mask).transpose(1, 2)).abs().max()) < 1e-5
