"""Samples to packed tensors, each shared prompt stored once, and back again.

A row is one prompt followed by the completions that answer it. With prompt (p0 p1) and completions (a0 a1), (b0)::

    token      p0  p1  a0  a1  b0
    position    0   1   2   3   2
    segment     0   0   1   1   2      a token sees earlier tokens of segment 0 and of its own segment
    loss        -   -   a   a   b
    scored at       (p1 for a0 and b0, a0 for a1)

Shapes: B rows, T row tokens, N completion tokens of the batch in the order of its samples, Q columns that are scored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from coterie.types import Sample, Turn


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
    segments_BT: torch.Tensor
    """0 prompt, 1, 2, ... completions, -1 padding."""
    samples: tuple[int, ...]
    rows_N: torch.Tensor
    scored_at_N: torch.Tensor
    """Row and column whose logits predict each completion token."""
    placed_at_N: torch.Tensor
    """Column where each completion token itself stands."""
    targets_N: torch.Tensor
    sampler_logprobs_N: torch.Tensor
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    """Aggregation weight of each token, fixed over the whole batch, so that micro-batches add up to its loss."""
    temperatures_N: torch.Tensor

    def mask(self) -> torch.Tensor:
        """Return (B, 1, T, T), True where the query (third axis) may see the key (fourth axis)."""
        segments_BT = self.segments_BT
        width = segments_BT.shape[1]
        causal_TT = torch.ones(width, width, dtype=torch.bool, device=segments_BT.device).tril()
        same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
        prompt_B1T = (segments_BT == 0)[:, None, :]
        # Padding sees only padding before it and itself, never nothing: a softmax over nothing is NaN and spreads.
        return ((same_BTT | prompt_B1T) & causal_TT)[:, None]

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (columns_Q, index_N): the columns any row is scored at, and for each token its place among them."""
        columns_Q, index_N = torch.unique(self.scored_at_N, return_inverse=True)
        return columns_Q, index_N


@dataclass(frozen=True, slots=True)
class _Row:
    """A prompt and the samples that answer it, by their number in the batch."""

    prompt_ids: tuple[int, ...]
    members: tuple[int, ...]
    length: int


def _rows(samples: Sequence[Sample], max_tokens: int) -> list[_Row]:
    """Return the rows of a batch: one per distinct prompt, split where its completions exceed ``max_tokens``."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for number, sample in enumerate(samples):
        by_prompt.setdefault(sample.prompt_ids, []).append(number)
    rows = []
    for prompt_ids, members in by_prompt.items():
        current: list[int] = []
        length = len(prompt_ids)
        for number in members:
            more = len(samples[number].completion_ids)
            if current and length + more > max_tokens:
                rows.append(_Row(prompt_ids, tuple(current), length))
                current, length = [], len(prompt_ids)
            current.append(number)
            length += more
        rows.append(_Row(prompt_ids, tuple(current), length))
    return rows


def pack(
    samples: Sequence[Sample], weights: Sequence[float], max_tokens: int, device: torch.device
) -> list[MicroBatch]:
    """Return micro-batches of at most ``max_tokens`` padded tokens (a single longer row goes alone).

    ``weights`` is one per sample: the aggregation weight of each of its tokens. Rows are ordered by length, longest
    first, so that padding is small and the largest memory need comes first. Nothing is lost or duplicated.
    """
    rows = sorted(_rows(samples, max_tokens), key=lambda row: (-row.length, row.members))
    chunks: list[list[_Row]] = []
    for row in rows:
        if not chunks or chunks[-1][0].length * (len(chunks[-1]) + 1) > max_tokens:
            chunks.append([])
        chunks[-1].append(row)
    return [_micro_batch(samples, weights, chunk, device) for chunk in chunks]


def _micro_batch(
    samples: Sequence[Sample], weights: Sequence[float], rows: Sequence[_Row], device: torch.device
) -> MicroBatch:
    """Return the tensors of some rows."""
    width = max(row.length for row in rows)
    ids, positions, segments = [], [], []
    row_of: list[int] = []
    scored_at: list[int] = []
    placed_at: list[int] = []
    targets: list[int] = []
    sampler: list[float] = []
    advantages: list[float] = []
    token_weights: list[float] = []
    temperatures: list[float] = []
    for number, row in enumerate(rows):
        prompt = len(row.prompt_ids)
        row_ids, row_positions, row_segments = list(row.prompt_ids), list(range(prompt)), [0] * prompt
        for segment, member in enumerate(row.members, start=1):
            sample, start = samples[member], len(row_ids)
            count = len(sample.completion_ids)
            row_ids += sample.completion_ids
            row_positions += range(prompt, prompt + count)
            row_segments += [segment] * count
            row_of += [number] * count
            scored_at += [prompt - 1, *range(start, start + count - 1)]
            placed_at += range(start, start + count)
            targets += sample.completion_ids
            sampler += sample.sampler_logprobs
            advantages += [sample.advantage] * count
            token_weights += [weights[member]] * count
            temperatures += [sample.temperature] * count
        padding = width - len(row_ids)
        ids.append(row_ids + [0] * padding)
        positions.append(row_positions + [0] * padding)
        segments.append(row_segments + [-1] * padding)
    return MicroBatch(
        ids_BT=torch.tensor(ids, device=device),
        positions_BT=torch.tensor(positions, device=device),
        segments_BT=torch.tensor(segments, device=device),
        samples=tuple(member for row in rows for member in row.members),
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
    """Return (prompt ids, completion ids) of every sample of a micro-batch, in its order, read from the tensors."""
    result = []
    for row in range(batch.ids_BT.shape[0]):
        ids, segments = batch.ids_BT[row], batch.segments_BT[row]
        prompt = tuple(ids[segments == 0].tolist())
        result += [(prompt, tuple(ids[segments == k].tolist())) for k in range(1, int(segments.max()) + 1)]
    return result
