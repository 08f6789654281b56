"""Generation in process with any Hugging Face causal LM: each prompt is computed once for its K candidates, and what
prompts have in common at their beginning is computed once for them (``engines.prefix``, ``engines.prefill``).

Shapes: B prompts of one batch, K candidates, P prompt tokens (left-padded), V vocabulary, S keys seen so far.

A decode step gives the model one row per prompt with K query tokens, one per candidate, all at the same position. The
cache of the row then holds the prompt once and the K new tokens of every step; a mask lets candidate k see the prompt
and its own tokens only. So keys and values of the prompt are never copied per candidate, and attention to them is one
matrix product. There is always room for the tokens of some steps (``engines.room``), which the mask hides until then.

Policies that share one model are generated together, each row through its policy's adapter. A row is one prompt, so
nothing computed with one adapter is ever seen through another.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from coterie.engines import Completion, Request
from coterie.engines.packed import PackedWeights
from coterie.engines.prefill import can_go_on, prefill, routed
from coterie.engines.prefix import PrefixCache, Prompt
from coterie.engines.room import Room
from coterie.errors import EngineError
from coterie.keyed import stable_hash, uniforms
from coterie.models.attention import layer_masks
from coterie.models.policy import Policy
from coterie.spent import part
from coterie.types import StopReason

log = logging.getLogger(__name__)

_MAX_BATCH_TOKENS = 65536
"""Prompt plus possible completion tokens of one batch; more is split, so that the cache stays within memory."""
_ROOM_STEPS = 16
"""Decode steps that the cache is enlarged for at a time: larger copies all states less often, but has more to hide."""
_CDF_BLOCK = 64
"""Tokens that are summed to one bin of the coarse CDF."""
_SAMPLED_TOGETHER = 2**18
"""Probabilities that are held at a time."""


def candidate_key(request: Request, candidate: int) -> int:
    """Return the random key of one candidate; with the token position it gives the uniform of every token."""
    episode = request.episode
    return stable_hash(
        episode.seed, "token", episode.purpose, episode.step, episode.task_id, episode.index, request.act, candidate
    )


def asked(policies: Mapping[str, Policy], request: Request) -> Policy:
    """Return the policy that a request names; ``EngineError`` where it is not there, or not at that version."""
    policy = policies.get(request.policy)
    if policy is None:
        raise EngineError(f"no policy {request.policy!r}; this engine has {sorted(policies)}")
    if policy.version != request.version:
        raise EngineError(
            f"act {request.act} of {request.episode.text()} asks policy {request.policy!r} at version "
            f"{request.version}; the engine has version {policy.version}"
        )
    return policy


def sample_tokens(
    logits_NV: torch.Tensor, temperatures_N: torch.Tensor, uniforms_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, log-probs), both (N,): inverse-CDF draws from softmax(logits / temperature); 0 means greedy.

    The log-prob is that of the sampled distribution in float32. The CDF is summed in float64: float32 sums leave
    thousands of bins of a large vocabulary with zero width. The last bin with mass takes what rounding leaves over.
    """
    # A few rows at a time, which the caches of a processor hold through all the steps.
    rows = max(1, _SAMPLED_TOGETHER // logits_NV.shape[1]) if logits_NV.device.type == "cpu" else len(logits_NV)
    stretches = [slice(start, start + rows) for start in range(0, len(logits_NV), rows)]
    drawn = [_sample_rows(logits_NV[some], temperatures_N[some], uniforms_N[some]) for some in stretches]
    return torch.cat([ids for ids, _ in drawn]), torch.cat([logprobs for _, logprobs in drawn])


def _sample_rows(
    logits_NV: torch.Tensor, temperatures_N: torch.Tensor, uniforms_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ``sample_tokens`` does. The CDF goes in two levels: over blocks of C tokens, then within one."""
    greedy_N = temperatures_N == 0.0
    highest_N, best_N = logits_NV.max(dim=-1)
    scaled_NV = logits_NV.float() - highest_N.float()[:, None]
    scaled_NV /= torch.where(greedy_N, 1.0, temperatures_N)[:, None]
    mass_NV = scaled_NV.exp()
    mass_NBC = F.pad(mass_NV, (0, -mass_NV.shape[1] % _CDF_BLOCK)).view(len(mass_NV), -1, _CDF_BLOCK)
    blocks_NB = mass_NBC.sum(dim=-1, dtype=torch.float64)
    cdf_NB = blocks_NB.cumsum(dim=-1)
    total_N = cdf_NB[:, -1]
    targets_N = uniforms_N * total_N
    block_N = _bin(cdf_NB, targets_N, blocks_NB)
    before_N = (cdf_NB.gather(1, block_N[:, None]) - blocks_NB.gather(1, block_N[:, None])).squeeze(1)
    inside_NC = mass_NBC[torch.arange(len(block_N), device=block_N.device), block_N].double()
    ids_N = block_N * _CDF_BLOCK + _bin(inside_NC.cumsum(dim=-1), (targets_N - before_N).clamp(min=0.0), inside_NC)
    picked_N = scaled_NV.gather(1, ids_N[:, None]).squeeze(1) - total_N.log().float()
    return torch.where(greedy_N, best_N, ids_N), torch.where(greedy_N, 0.0, picked_N).clamp(max=0.0)


def _bin(cdf_NB: torch.Tensor, targets_N: torch.Tensor, mass_NB: torch.Tensor) -> torch.Tensor:
    """Return the bin of each target, the last one with mass where rounding leaves something over."""
    bins_N = torch.searchsorted(cdf_NB, targets_N[:, None], right=True).squeeze(1)
    last_N = mass_NB.shape[1] - 1 - (mass_NB > 0.0).flip(1).long().argmax(dim=1)
    return torch.minimum(bins_N, last_N)


@dataclass(slots=True)
class _Candidate:
    """One candidate while it grows."""

    request: Request
    policy: Policy
    key: int
    ids: list[int]
    logprobs: list[float]
    stop: StopReason | None = None
    text: str | None = None


class TorchEngine:
    """Samples from the policies' own tensors; deterministic for equal batches on one machine and thread count."""

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        """Serve these policies by name."""
        self._policies = dict(policies)
        self._kept: PrefixCache | None = None
        self._kept_of: dict[str, int] = {}
        self._packed: dict[int, PackedWeights] = {}
        self._goes_on: dict[int, bool] = {}

    def remembering(self) -> TorchEngine:
        """Return this engine with a memory: prompts go on from what it has computed of earlier ones, same weights.

        It has a copy of bfloat16 weights too, laid out for its products. No weight may change without a new version.
        """
        engine = TorchEngine(self._policies)
        engine._kept, engine._goes_on = PrefixCache(), self._goes_on
        return engine

    def version(self, policy: str) -> int:
        """Return the version of the weights it would generate with now."""
        return self._policies[policy].version

    def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Return one completion per candidate for each request, in order; ``EngineError`` for another version."""
        by_model: dict[int, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_model[id(asked(self._policies, request).model)].append(index)
        results: dict[int, tuple[Completion, ...]] = {}
        kept = self._prefixes()
        for indices in by_model.values():
            for chunk in _chunks(indices, requests):
                chosen = [requests[index] for index in chunk]
                policies = [self._policies[request.policy] for request in chosen]
                batch = _Batch(policies, chosen, kept if self._can_go_on(policies[0].model) else None)
                with self._weights(policies[0].model):
                    results.update(zip(chunk, batch.run(), strict=True))
        return [results[index] for index in range(len(requests))]

    def _prefixes(self) -> PrefixCache:
        """Return what prompts of this call may go on from: nothing from before any update of any policy."""
        versions = {name: policy.version for name, policy in self._policies.items()}
        if self._kept is None:
            return PrefixCache()
        if versions != self._kept_of:
            # A version is part of what states are found by, so none would be used; but they would take memory.
            self._kept, self._kept_of = PrefixCache(), versions
            self._packed = {}
        return self._kept

    def _weights(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Return a context in which a model's weights are laid out for products, if this engine has a memory."""
        if self._kept is None:
            return nullcontext()
        if id(model) not in self._packed:
            self._packed[id(model)] = PackedWeights(model)
        return self._packed[id(model)].used()

    def _can_go_on(self, model: PreTrainedModel) -> bool:
        """Return whether prompts of a model may go on from known beginnings; say once if not."""
        if id(model) not in self._goes_on:
            self._goes_on[id(model)] = can_go_on(model)
            if not self._goes_on[id(model)]:
                log.info(
                    "%s: prompts that begin alike are each computed whole; some layers do not keep all tokens, or "
                    "positions cannot be given",
                    type(model).__name__,
                )
        return self._goes_on[id(model)]


def _chunks(indices: Sequence[int], requests: Sequence[Request]) -> list[list[int]]:
    """Return the indices in order of prompt length, cut so that padded prompts and completions fit the limit."""
    ordered = sorted(indices, key=lambda index: len(requests[index].prompt_ids))
    chunks: list[list[int]] = [[]]
    for index in ordered:
        request = requests[index]
        room = len(request.prompt_ids) + len(request.candidates) * request.sampling.max_tokens
        if chunks[-1] and room * (len(chunks[-1]) + 1) > _MAX_BATCH_TOKENS:
            chunks.append([])
        chunks[-1].append(index)
    return chunks


class _Batch:
    """Acts of policies that share one model, generated together."""

    def __init__(self, policies: Sequence[Policy], requests: Sequence[Request], kept: PrefixCache | None) -> None:
        """``policies`` is one per request; prompts go on from what is ``kept``, ``None``: they are computed whole."""
        self.model = policies[0].model
        self.device = self.model.device
        self.adapter = policies[0].adapter
        self.routes = [policy.route for policy in policies]
        self.prompts = [
            Prompt((id(policy.model), policy.route, policy.version), request.prompt_ids)
            for policy, request in zip(policies, requests, strict=True)
        ]
        self.kept = kept
        self.context = max(policy.context for policy in policies)
        self.requests = list(requests)
        self.K = max(len(request.candidates) for request in requests)
        # A row with fewer candidates than K is filled with copies of its first; they are dropped in the end.
        self.grid = [
            [_Candidate(request, policy, candidate_key(request, number), [], []) for number in _filled(request, self.K)]
            for policy, request in zip(policies, requests, strict=True)
        ]
        self.rows = list(range(len(requests)))

    @torch.inference_mode()
    def run(self) -> list[tuple[Completion, ...]]:
        """Return the completions of every request."""
        training = self.model.training
        self.model.eval()
        try:
            with part("rollout: prefill"):
                cache, logits_BV = prefill(self.model, self.adapter, self.prompts, self.kept)
            with routed(self.adapter, self.routes), part("rollout: decode"):
                self._decode(cache, logits_BV)
        finally:
            self.model.train(training)
        return [
            tuple(self._completion(candidate) for candidate in row[: len(request.candidates)])
            for request, row in zip(self.requests, self.grid, strict=True)
        ]

    def _decode(self, cache: DynamicCache, logits_BV: torch.Tensor) -> None:
        """Draw token after token until every candidate has ended; the cache and the logits are those of the prompts."""
        lengths_B = torch.tensor([len(request.prompt_ids) for request in self.requests], device=self.device)
        logits_BKV = logits_BV[:, None].expand(-1, self.K, -1)
        width = int(lengths_B.max())
        room = Room(cache)
        # (B, 1, K, S): what the candidates of a row may see. First the prompt without its left padding.
        seen_BP = torch.arange(width, device=self.device)[None, :] >= width - lengths_B[:, None]
        mask_BKS = seen_BP[:, None, None, :].expand(-1, 1, self.K, -1)
        own_KK = torch.eye(self.K, dtype=torch.bool, device=self.device)[None, None]
        # Positions of those keys, counted from the end of each row's prompt, so that all rows have the same.
        places_1S = torch.arange(-width, 0, device=self.device)[None, :]
        position = 0
        while True:
            with part("rollout: sample"):
                tokens_BK = self._sample(logits_BKV, position)
            alive = [i for i, row in enumerate(self.rows) if any(c.stop is None for c in self.grid[row])]
            if not alive:
                return
            if len(alive) <= len(self.rows) // 2:
                keep_B = torch.tensor(alive, device=self.device)
                cache.batch_select_indices(keep_B)
                lengths_B, mask_BKS, tokens_BK = lengths_B[keep_B], mask_BKS[keep_B], tokens_BK[keep_B]
                self.rows = [self.rows[i] for i in alive]
                self.routes[:] = [self.routes[i] for i in alive]
            if room.filled + self.K > room.columns:
                more = self.K * min(_ROOM_STEPS, self._steps_left(position))
                room.grow(more)
                mask_BKS, places_1S = F.pad(mask_BKS, (0, more)), F.pad(places_1S, (0, more))
            here = slice(room.filled, room.filled + self.K)
            mask_BKS[..., here] = own_KK
            places_1S[:, here] = position
            here_1K = places_1S[:, here]
            logits_BKV = self.model(
                input_ids=tokens_BK,
                attention_mask=layer_masks(self.model, mask_BKS, here_1K, places_1S),
                # Ended rows that are still carried along may be beyond the context; learned positions end there.
                position_ids=(lengths_B + position).clamp(max=self.context - 1)[:, None].expand(-1, self.K),
                cache=cache,
                use_cache=True,
            ).logits
            position += 1

    def _steps_left(self, position: int) -> int:
        """Return how many more tokens the longest candidate may have, after those up to a position."""
        return max(1, max(self.requests[row].sampling.max_tokens for row in self.rows) - 1 - position)

    def _sample(self, logits_BKV: torch.Tensor, position: int) -> torch.Tensor:
        """Draw the next token of every live candidate, note it, and return all (B, K)."""
        cells = [candidate for row in self.rows for candidate in self.grid[row]]
        keys = np.array([cell.key for cell in cells], dtype=np.uint64)
        uniforms_N = torch.from_numpy(uniforms(keys, np.array([position], dtype=np.uint64))).to(self.device)
        temperatures_N = torch.tensor([cell.request.sampling.temperature for cell in cells], device=self.device)
        ids_N, logprobs_N = sample_tokens(logits_BKV.reshape(len(cells), -1), temperatures_N, uniforms_N)
        for cell, token, logprob in zip(cells, ids_N.tolist(), logprobs_N.tolist(), strict=True):
            if cell.stop is None:
                cell.ids.append(token)
                cell.logprobs.append(logprob)
                self._end(cell)
        return ids_N.view(len(self.rows), self.K)

    def _end(self, cell: _Candidate) -> None:
        """Set why a candidate ends, if it does."""
        ending = cell.request.sampling.ending(cell.ids, cell.policy.end_ids, cell.policy.renderer.decode)
        if ending is not None:
            cell.stop, cell.text = ending

    def _completion(self, cell: _Candidate) -> Completion:
        """Return the finished record of a candidate."""
        assert cell.stop is not None
        text = cell.policy.renderer.decode(cell.ids) if cell.text is None else cell.text
        return Completion(ids=tuple(cell.ids), logprobs=tuple(cell.logprobs), text=text, stop_reason=cell.stop)


def _filled(request: Request, width: int) -> list[int]:
    """Return the candidate numbers of a request, filled up to ``width`` with the first."""
    return [*request.candidates, *[request.candidates[0]] * (width - len(request.candidates))]
