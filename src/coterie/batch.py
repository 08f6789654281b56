"""Samples to packed tensors, what they begin alike with stored once, and back again.

A row is a prefix trie of samples (prompt and completion in one), written depth first: each token follows those it
answers to, and a whole branch stands together. So a token is seen from its own column on until its branch ends. With
prompt (p0 p1), its completions (a0 a1) and (b0), and a later prompt (p0 p1 a0 a1 q0) with completion (c0)::

    token      p0  p1  a0  a1  q0  c0  b0
    position    0   1   2   3   4   5   2
    until       7   7   6   6   6   6   7      the first column that does not see it any more
    loss        -   -   a   a   -   c   b
    scored at       (p1 for a0 and b0, a0 for a1, q0 for c0)

Shapes: B rows, T row tokens, N completion tokens of the batch in the order of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from coterie.types import Sample, Turn

_EVEN_WIDTHS = 4
"""Attention of a row this many times as long as the model's layers are wide costs as much as all else.

Counted in multiplications it is 6. Kernels make attention, with a mask, dearer than that.
"""
_MAX_PADDING = 512
"""Tokens; a micro-batch with more padding is two, since another pass costs less than that."""


def sample_of(turn: Turn, advantage: float) -> Sample:
    """Return a turn as a row for the learner."""
    return Sample(
        policy=turn.policy,
        version=turn.version,
        role=turn.role,
        peers=turn.peers,
        prompt_ids=turn.prompt_ids,
        completion_ids=turn.completion_ids,
        sampler_logprobs=turn.sampler_logprobs,
        advantage=advantage,
        temperature=turn.temperature,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model together. ``samples`` says which samples of the batch they hold, in order."""

    ids_BT: torch.Tensor
    positions_BT: torch.Tensor
    until_BT: torch.Tensor
    """The first column that does not see the token any more; T for padding."""
    samples: tuple[int, ...]
    members_N: torch.Tensor
    """Whose each completion token is, by the place in ``samples``."""
    rows_N: torch.Tensor
    scored_at_N: torch.Tensor
    """Row and column whose logits predict each completion token."""
    placed_at_N: torch.Tensor
    """Column where each completion token itself stands. Samples that begin alike have columns in common."""
    targets_N: torch.Tensor
    sampler_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    """Aggregation weight of each token, fixed over the whole batch, so that micro-batches add up to its loss."""
    temperatures_N: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Return (B, 1, T, T), True where the query (third axis) may see the key (fourth axis)."""
        columns_T = torch.arange(self.ids_BT.shape[1], device=self.ids_BT.device)
        causal_TT = columns_T[:, None] >= columns_T[None, :]
        open_BTT = columns_T[None, :, None] < self.until_BT[:, None, :]
        # Padding sees only padding before it and itself, never nothing: a softmax over nothing is NaN and spreads.
        return (causal_TT & open_BTT)[:, None]


@dataclass(frozen=True, slots=True)
class _Row:
    """Samples of a trie by their number in the batch, in lexical order of their tokens, which is depth first.

    ``shared`` counts the tokens that each has in common with the one before it, 0 for the first.
    """

    members: tuple[int, ...]
    shared: tuple[int, ...]
    length: int


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences begin alike with."""
    for count, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return count
    return min(len(first), len(second))


def _cost(length: int, width: int) -> float:
    """Return what a row costs, in tokens of a row so short that attention costs nothing."""
    return length * (1.0 + length / (_EVEN_WIDTHS * width))


def _rows(samples: Sequence[Sample], max_tokens: int, width: int) -> list[_Row]:
    """Return the rows of a batch. They depend on the tokens alone, not on the order of the samples.

    At first every sample is a row. From the longest common beginning to the shortest, neighbours in lexical order
    become one row where that is cheaper and stays within ``max_tokens``.
    """
    sequences = [sample.prompt_ids + sample.completion_ids for sample in samples]
    order = sorted(range(len(samples)), key=lambda number: (sequences[number], len(samples[number].prompt_ids)))
    shared = [0, *(_shared(sequences[one], sequences[other]) for one, other in pairwise(order))]
    # A row is a stretch of the order. ``last`` and ``length`` hold at its first place, ``first`` at its last.
    first, last = list(range(len(order))), list(range(len(order)))
    length = [len(sequences[number]) for number in order]
    for place in sorted(range(1, len(order)), key=lambda place: -shared[place]):
        left, end = first[place - 1], last[place]
        merged = length[left] + length[place] - shared[place]
        apart = _cost(length[left], width) + _cost(length[place], width)
        if merged <= max_tokens and _cost(merged, width) < apart:
            first[end], last[left], length[left] = left, end, merged
    rows = []
    start = 0
    while start < len(order):
        end = last[start] + 1
        rows.append(_Row(tuple(order[start:end]), (0, *shared[start + 1 : end]), length[start]))
        start = end
    return rows


def pack(
    samples: Sequence[Sample],
    weights: Sequence[float],
    max_tokens: int,
    device: torch.device,
    width: int,
) -> list[MicroBatch]:
    """Return micro-batches of at most ``max_tokens`` padded tokens (a single longer sample goes alone).

    ``weights`` is one per sample: the aggregation weight of each of its tokens. ``width`` of the model's layers says
    what attention costs: a narrow model's rows are shorter. Rows are ordered by length, longest first, so that padding
    is small and the largest memory need comes first. Nothing is lost or duplicated.
    """
    rows = sorted(_rows(samples, max_tokens, width), key=lambda row: -row.length)
    chunks: list[list[_Row]] = []
    padding = 0
    for row in rows:
        padding += chunks[-1][0].length - row.length if chunks else 0
        if not chunks or chunks[-1][0].length * (len(chunks[-1]) + 1) > max_tokens or padding > _MAX_PADDING:
            chunks.append([])
            padding = 0
        chunks[-1].append(row)
    return [_micro_batch(samples, weights, chunk, device) for chunk in chunks]


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a row, and the columns of each of its samples from first to last token."""

    ids: list[int]
    positions: list[int]
    until: list[int]
    paths: list[list[int]]


def _tokens(samples: Sequence[Sample], row: _Row) -> _Tokens:
    """Write down a row: of each sample the tokens that the one before it does not have."""
    ids: list[int] = []
    positions: list[int] = []
    until = [row.length] * row.length
    paths: list[list[int]] = [[]]
    for member, shared in zip(row.members, row.shared, strict=True):
        sequence = samples[member].prompt_ids + samples[member].completion_ids
        for column in paths[-1][shared:]:
            until[column] = len(ids)
        paths.append([*paths[-1][:shared], *range(len(ids), len(ids) + len(sequence) - shared)])
        ids += sequence[shared:]
        positions += range(shared, len(sequence))
    return _Tokens(ids, positions, until, paths[1:])


def _micro_batch(
    samples: Sequence[Sample], weights: Sequence[float], rows: Sequence[_Row], device: torch.device
) -> MicroBatch:
    """Return the tensors of some rows."""
    width = max(row.length for row in rows)
    ids, positions, until = [], [], []
    members: list[int] = []
    row_of: list[int] = []
    scored_at: list[int] = []
    placed_at: list[int] = []
    targets: list[int] = []
    sampler: list[float] = []
    advantages: list[float] = []
    token_weights: list[float] = []
    temperatures: list[float] = []
    numbers = [member for row in rows for member in row.members]
    place = 0
    for number, row in enumerate(rows):
        tokens = _tokens(samples, row)
        for member, path in zip(row.members, tokens.paths, strict=True):
            sample = samples[member]
            prompt, count = len(sample.prompt_ids), len(sample.completion_ids)
            members += [place] * count
            row_of += [number] * count
            scored_at += path[prompt - 1 : -1]
            placed_at += path[prompt:]
            targets += sample.completion_ids
            sampler += sample.sampler_logprobs
            advantages += [sample.advantage] * count
            token_weights += [weights[member]] * count
            temperatures += [sample.temperature] * count
            place += 1
        padding = width - row.length
        ids.append(tokens.ids + [0] * padding)
        positions.append(tokens.positions + [0] * padding)
        until.append(tokens.until + [width] * padding)
    return MicroBatch(
        ids_BT=torch.tensor(ids, device=device),
        positions_BT=torch.tensor(positions, device=device),
        until_BT=torch.tensor(until, device=device),
        samples=tuple(numbers),
        members_N=torch.tensor(members, device=device),
        rows_N=torch.tensor(row_of, device=device),
        scored_at_N=torch.tensor(scored_at, device=device),
        placed_at_N=torch.tensor(placed_at, device=device),
        targets_N=torch.tensor(targets, device=device),
        sampler_logprobs_N=torch.tensor(sampler, dtype=torch.float32, device=device),
        advantages_N=torch.tensor(advantages, dtype=torch.float32, device=device),
        weights_N=torch.tensor(token_weights, dtype=torch.float32, device=device),
        temperatures_N=torch.tensor(temperatures, dtype=torch.float32, device=device),
    )


def unpack(batch: MicroBatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (prompt ids, completion ids) of every sample of a micro-batch, in its order, read from the tensors.

    A sample is what its last token sees; its completion begins at the first column that is its target.
    """
    mask_BTT = batch.mask()[:, 0]
    result = []
    for member in sorted(set(batch.members_N.tolist())):
        own_N = batch.members_N == member
        row, placed = int(batch.rows_N[own_N][0]), batch.placed_at_N[own_N]
        path = mask_BTT[row, placed[-1]].nonzero().squeeze(1)
        ids = tuple(batch.ids_BT[row, path].tolist())
        start = int((path < placed[0]).sum())
        result.append((ids[:start], ids[start:]))
    return result
