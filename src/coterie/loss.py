"""The policy loss, as pure tensor functions: (log-probs, advantages, weights) -> loss and sums of metrics.

Losses work on flat vectors of valid completion tokens; nothing that is masked, padded or said by somebody else gets
this far, so it can neither overflow nor count. Shapes::

    N  valid completion tokens of a micro-batch, in any order
    B  rows of a padded batch      T  padded width      V  vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from coterie.errors import ConfigError

Aggregation: TypeAlias = Literal["token", "sequence", "constant"]

MAX_LOG_RATIO = 20.0
"""Ratios beyond e^20 mean nothing and exp would overflow; inf in the branch not taken gives a NaN gradient."""
SMALL_KL = 0.05
"""Below this |difference|, k3 is summed as a series: in float32, exp(d) - 1 - d would cancel to 0 or below."""
_STRETCH = 2**18
"""Logits that are held in float32 at a time."""
_LOWEST = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the loss is made of. ``importance_cap`` C turns the truncated importance weight on; ``None`` is rho = 1."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance_cap: float | None = None

    def __post_init__(self) -> None:
        if not (0.0 <= self.clip_low <= 1.0 and self.clip_high >= 0.0):
            raise ConfigError(
                f"clip_low = {self.clip_low}, clip_high = {self.clip_high}: expected 0 <= clip_low <= 1, clip_high >= 0"
            )
        if not (math.isfinite(self.kl_coef) and self.kl_coef >= 0.0 and math.isfinite(self.entropy_coef)):
            raise ConfigError(
                f"kl_coef = {self.kl_coef}, entropy_coef = {self.entropy_coef}: expected finite numbers, kl_coef >= 0"
            )
        if self.importance_cap is not None and not self.importance_cap > 0.0:
            raise ConfigError(f"importance_cap = {self.importance_cap}: expected a number > 0, or none for no weight")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInput:
    """Per-token vectors of one micro-batch, all of shape (N,); log-probs in nats, float32 or float64.

    ``logprobs_N`` carries the gradient, everything else is detached inside (but ``entropy_N``). ``old_logprobs_N`` are
    the learner's own at the batch's first pass (at the first step: ``logprobs_N.detach()``). ``weights_N`` come from
    ``aggregation_weights`` of the whole batch, so that micro-batch losses add up to the batch's.
    """

    logprobs_N: Tensor
    old_logprobs_N: Tensor
    sampler_logprobs_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    ref_logprobs_N: Tensor | None = None
    entropy_N: Tensor | None = None

    def __post_init__(self) -> None:
        expected = self.logprobs_N.shape
        if len(expected) != 1:
            raise ValueError(f"logprobs_N has shape {tuple(expected)}: expected one flat vector (N,)")
        if self.logprobs_N.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"logprobs_N is {self.logprobs_N.dtype}: expected float32; use token_logprobs")
        others = {
            "old_logprobs_N": self.old_logprobs_N,
            "sampler_logprobs_N": self.sampler_logprobs_N,
            "advantages_N": self.advantages_N,
            "weights_N": self.weights_N,
            "ref_logprobs_N": self.ref_logprobs_N,
            "entropy_N": self.entropy_N,
        }
        for name, tensor in others.items():
            if tensor is not None and tensor.shape != expected:  # equal shapes, never broadcast
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)}, logprobs_N {tuple(expected)}: expected equal"
                )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """``loss`` (scalar, with gradient) = sum of weight * per-token loss; ``per_token_N`` detached and unweighted.

    ``sums`` are sums over the N tokens, to be added up over micro-batches and divided by ``num_tokens``: ``ratio``;
    ``clipped_low``, ``clipped_high`` (tokens whose gradient the clip cut), ``outside`` (ratio outside the clip range,
    whatever the sign); ``old_kl`` (k3 from the first pass); ``mismatch`` (|old - sampler log-prob|); ``importance``
    and ``importance_capped`` when it is on; ``ref_kl`` and ``entropy`` when given.
    """

    loss: Tensor
    per_token_N: Tensor
    sums: dict[str, float]


def policy_loss(inputs: LossInput, settings: LossSettings) -> LossOutput:
    """Return the clipped surrogate -min(w A, clip(w) A) * rho + kl_coef * k3 - entropy_coef * entropy.

    w = exp(logprob - old) per token; rho = min(exp(old - sampler), C), detached. Shapes as in ``LossInput``; design.md
    section 5, "Loss". Raises ``ValueError`` where a term is on and its input is missing.
    """
    old_N = inputs.old_logprobs_N.detach()
    advantages_N = inputs.advantages_N.detach()
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high

    # Not a constant 1 at the first step: its value is 1, its gradient is that of the log-prob.
    ratio_N = (inputs.logprobs_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    # min after the product: for A < 0 the larger of the two ratios is the pessimistic one.
    per_token_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
    gap_N = old_N - inputs.sampler_logprobs_N.detach()
    seen = {
        "num_tokens": torch.ones_like(old_N),
        "ratio": ratio_N,
        "clipped_low": (advantages_N < 0) & (ratio_N < low),
        "clipped_high": (advantages_N > 0) & (ratio_N > high),
        "outside": (ratio_N < low) | (ratio_N > high),
        "old_kl": k3(inputs.logprobs_N.detach(), old_N),
        "mismatch": gap_N.abs(),
    }
    if settings.importance_cap is not None:
        # Capped before exp, so a token the sampler called impossible gives C and not inf.
        rho_N = gap_N.clamp(max=math.log(settings.importance_cap)).exp()
        per_token_N = per_token_N * rho_N
        seen |= {"importance": rho_N, "importance_capped": gap_N > math.log(settings.importance_cap)}
    if inputs.ref_logprobs_N is not None:
        kl_N = k3(inputs.logprobs_N, inputs.ref_logprobs_N.detach())
        if settings.kl_coef:
            per_token_N = per_token_N + settings.kl_coef * kl_N
        seen["ref_kl"] = kl_N
    elif settings.kl_coef:
        raise ValueError(f"kl_coef = {settings.kl_coef} but ref_logprobs_N is None: expected the reference's log-probs")
    if inputs.entropy_N is not None:
        if settings.entropy_coef:
            per_token_N = per_token_N - settings.entropy_coef * inputs.entropy_N
        seen["entropy"] = inputs.entropy_N
    elif settings.entropy_coef:
        raise ValueError(f"entropy_coef = {settings.entropy_coef} but entropy_N is None: expected token_entropy")

    loss = (inputs.weights_N.detach() * per_token_N).sum()
    return LossOutput(loss=loss, per_token_N=per_token_N.detach(), sums=_sums(seen))


def _sums(seen: dict[str, Tensor]) -> dict[str, float]:
    """Return the sum of each vector; stacked, so that an accelerator is waited for once."""
    totals = torch.stack([vector.detach().float().sum() for vector in seen.values()]).tolist()
    return dict(zip(seen, totals, strict=True))


def aggregation_weights(lengths: Sequence[int], aggregation: Aggregation, constant: int | None = None) -> list[float]:
    """Return, per sequence of the whole batch, the weight of each of its tokens.

    ``token``: 1 / all tokens. ``sequence``: 1 / (sequences * own length). ``constant``: 1 / (sequences * constant).
    Sequences without tokens have weight 0.0 and are not counted. Example, lengths 2 and 8: token 0.1 and 0.1,
    sequence 0.25 and 0.0625, constant 64 gives 1/128 twice.
    """
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths has {min(lengths)}: expected numbers of tokens, 0 or more")
    if (aggregation == "constant") != (constant is not None) or (constant is not None and constant < 1):
        raise ValueError(
            f"aggregation = {aggregation!r} with constant = {constant}: expected a constant >= 1 with 'constant' only"
        )
    num_tokens = sum(lengths)
    num_sequences = sum(length > 0 for length in lengths)
    weights = []
    for length in lengths:
        if length == 0:
            weights.append(0.0)
        elif aggregation == "token":
            weights.append(1.0 / num_tokens)
        else:
            weights.append(1.0 / (num_sequences * (length if constant is None else constant)))
    return weights


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy || reference) per sampled token: exp(d) - 1 - d, d = ref - logprob; >= 0.

    Shapes must be equal. Exact in float32 near the reference, gradient included (Schulman, "Approximating KL
    divergence", estimator k3).
    """
    if logprobs.shape != ref_logprobs.shape:
        raise ValueError(f"log-probs {tuple(logprobs.shape)}, reference {tuple(ref_logprobs.shape)}: expected equal")
    d = ref_logprobs - logprobs
    series = 0.5 * d * d * (1.0 + d / 3.0 * (1.0 + d / 4.0 * (1.0 + d / 5.0 * (1.0 + d / 6.0 * (1.0 + d / 7.0)))))
    return torch.where(d.abs() < SMALL_KL, series, torch.expm1(d) - d)


def token_logprobs(logits: Tensor, ids: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Return log softmax(logits / temperature) at ``ids``, in float32 (float64 for float64 logits), nats.

    ``logits`` (..., V) must already be those that predict ``ids`` (...): of the position before. ``temperature`` is a
    number > 0 or a tensor of the shape of ``ids``, one per token. One float32 copy of the logits is kept for the
    backward pass.
    """
    if ids.shape != logits.shape[:-1]:
        raise ValueError(f"ids {tuple(ids.shape)}, logits {tuple(logits.shape)}: expected logits of shape (*ids, V)")
    return _log_softmax(logits, temperature).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def token_entropy(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """Return the entropy (nats) of softmax(logits / temperature), shape (...) for logits (..., V), -inf allowed."""
    logprobs = _log_softmax(logits, temperature)
    probs = logprobs.exp()
    return -(probs * logprobs.masked_fill(probs == 0, 0.0)).sum(-1)  # 0 * -inf would be NaN


def token_scores(logits_NV: Tensor, ids_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probs, entropies), both (N,), as ``token_logprobs`` and ``token_entropy`` do, in one go.

    Only the log-probs carry a gradient. Beside the logits nothing of their size is kept: a few rows at a time go
    through all steps while a processor's caches hold them, in the backward pass again.
    """
    if ids_N.shape != logits_NV.shape[:-1] or temperatures_N.shape != ids_N.shape:
        raise ValueError(
            f"ids {tuple(ids_N.shape)}, temperatures {tuple(temperatures_N.shape)}, logits {tuple(logits_NV.shape)}: "
            "expected (N,), (N,) and (N, V)"
        )
    scores: tuple[Tensor, Tensor] = _TokenScores.apply(logits_NV, ids_N, temperatures_N)  # type: ignore[no-untyped-call]
    return scores


class _TokenScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, ids_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(logits_NV.dtype, torch.float32)
        logprobs_N = logits_NV.new_empty(ids_N.shape, dtype=exact)
        entropy_N, normaliser_N = torch.empty_like(logprobs_N), torch.empty_like(logprobs_N)
        for rows in _stretches(logits_NV):
            part = logits_NV[rows].to(exact) / temperatures_N[rows].to(exact)[:, None]
            highest_n = part.amax(dim=-1)
            part -= highest_n[:, None]
            probs = part.exp()
            total_n = probs.sum(dim=-1)
            picked_n = part.gather(1, ids_N[rows][:, None]).squeeze(1)
            logprobs_N[rows] = picked_n - total_n.log()
            # Impossible tokens count nothing: 0 * -inf would be NaN.
            entropy_N[rows] = total_n.log() - part.clamp_(min=_LOWEST).mul_(probs).sum(dim=-1) / total_n
            normaliser_N[rows] = highest_n + total_n.log()
        ctx.save_for_backward(logits_NV, ids_N, temperatures_N, normaliser_N)
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        logits_NV, ids_N, temperatures_N, normaliser_N = ctx.saved_tensors
        exact = normaliser_N.dtype
        out_NV = torch.empty_like(logits_NV)
        for rows in _stretches(logits_NV):
            temperature_n1 = temperatures_N[rows].to(exact)[:, None]
            grad_n1 = gradients[0][rows][:, None] / temperature_n1
            part = logits_NV[rows].to(exact) / temperature_n1
            part.sub_(normaliser_N[rows][:, None]).exp_().mul_(-grad_n1)
            out_NV[rows] = part.scatter_add_(1, ids_N[rows][:, None], grad_n1).to(out_NV.dtype)
        return out_NV, None, None


def _stretches(logits_NV: Tensor) -> list[slice]:
    """Return the rows in stretches of about as many logits as caches hold; an accelerator takes more at a time."""
    size = _STRETCH if logits_NV.device.type == "cpu" else 256 * _STRETCH
    count = max(1, size // logits_NV.shape[1])
    return [slice(start, start + count) for start in range(0, len(logits_NV), count)]


def _log_softmax(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """Scale the logits, not the log-probs, and never in less than float32: bfloat16 loses up to 0.1 nats at 30."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    if isinstance(temperature, Tensor):
        if temperature.shape != logits.shape[:-1]:
            raise ValueError(
                f"temperature {tuple(temperature.shape)}, logits {tuple(logits.shape)}: expected one per token"
            )
        exact = exact / temperature.to(exact.dtype).unsqueeze(-1)
    elif not temperature > 0.0:
        raise ValueError(f"temperature = {temperature}: expected > 0; greedy tokens have no log-prob to train on")
    elif temperature != 1.0:
        exact = exact / temperature
    return torch.log_softmax(exact, dim=-1)


def from_padded(
    *,
    mask_BT: Tensor,
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    sampler_logprobs_BT: Tensor,
    advantages_B: Tensor,
    weights_B: Tensor,
    ref_logprobs_BT: Tensor | None = None,
    entropy_BT: Tensor | None = None,
) -> LossInput:
    """Return the flat input of a padded batch: valid tokens row by row, advantage and weight repeated over each row.

    ``mask_BT`` is boolean. Masked slots are left behind before any arithmetic, so whatever they hold (-inf, NaN) gives
    a gradient of exactly 0. Raises ``ValueError`` naming both shapes where one differs.
    """
    if mask_BT.dtype != torch.bool or mask_BT.dim() != 2:
        raise ValueError(f"mask_BT is {mask_BT.dtype} {tuple(mask_BT.shape)}: expected bool (B, T)")

    def valid(name: str, values: Tensor) -> Tensor:
        if values.shape != mask_BT.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, mask_BT {tuple(mask_BT.shape)}: expected equal")
        return values[mask_BT]

    def repeated(name: str, values: Tensor) -> Tensor:
        if values.shape != mask_BT.shape[:1]:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, mask_BT {tuple(mask_BT.shape)}: expected (B,)")
        return values.unsqueeze(1).expand(mask_BT.shape)[mask_BT]

    return LossInput(
        logprobs_N=valid("logprobs_BT", logprobs_BT),
        old_logprobs_N=valid("old_logprobs_BT", old_logprobs_BT),
        sampler_logprobs_N=valid("sampler_logprobs_BT", sampler_logprobs_BT),
        advantages_N=repeated("advantages_B", advantages_B),
        weights_N=repeated("weights_B", weights_B),
        ref_logprobs_N=None if ref_logprobs_BT is None else valid("ref_logprobs_BT", ref_logprobs_BT),
        entropy_N=None if entropy_BT is None else valid("entropy_BT", entropy_BT),
    )


def to_padded(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """Return flat values back in their slots of (B, T), 0 where masked; the inverse of ``from_padded``'s order."""
    values_BT = values_N.new_zeros(mask_BT.shape)
    values_BT[mask_BT] = values_N
    return values_BT
