"""The loss: hand-computed numbers, and an independent float64 loop as oracle; entry ids name known faults."""

# ruff: noqa: N803, N806 - shape suffixes, as in coterie.loss
from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.loss import (
    Aggregation,
    LossInput,
    LossOutput,
    LossSettings,
    aggregation_weights,
    from_padded,
    k3,
    policy_loss,
    to_padded,
    token_entropy,
    token_logprobs,
    token_scores,
)

AGGREGATIONS: tuple[tuple[Aggregation, int | None], ...] = (("token", None), ("sequence", None), ("constant", 64))


def vector(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def ratios(values: list[float], advantage: float, settings: LossSettings | None = None) -> tuple[LossOutput, Tensor]:
    """The loss of tokens with these ratios (old = 0), each of weight 1 / number, and the leaf of log-probs."""
    logprobs = torch.tensor(values, dtype=torch.float64).log().requires_grad_()
    zeros = torch.zeros_like(logprobs)
    inputs = LossInput(
        logprobs_N=logprobs,
        old_logprobs_N=zeros,
        sampler_logprobs_N=zeros,
        advantages_N=torch.full_like(zeros, advantage),
        weights_N=torch.full_like(zeros, 1.0 / len(values)),
    )
    return policy_loss(inputs, settings or LossSettings()), logprobs


# ---- the clipped surrogate ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advantage", "ratio", "objective", "gradient"),
    [(1.0, 1.5, 1.2, 0.0), (1.0, 0.5, 0.5, 0.5), (-1.0, 1.5, -1.5, -1.5), (-1.0, 0.5, -0.8, 0.0), (0.0, 1.5, 0.0, 0.0)],
)
def test_the_clip_is_pessimistic_for_both_signs(
    advantage: float, ratio: float, objective: float, gradient: float
) -> None:
    # LOSS-01: objective and gradient are minus those of the loss
    output, logprobs = ratios([ratio], advantage)
    torch.autograd.backward(output.loss)
    assert logprobs.grad is not None
    assert -output.loss.item() == pytest.approx(objective, abs=1e-12)
    assert -logprobs.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_the_two_clip_limits_are_separate() -> None:
    # LOSS-01: 1.3 is cut at 1.28
    output, _ = ratios([1.3], 1.0, LossSettings(clip_low=0.2, clip_high=0.28))
    assert -output.loss.item() == pytest.approx(1.28, abs=1e-12)


def test_ratios_are_per_token() -> None:
    # LOSS-05: one product for the whole answer would give 0.90, its geometric mean 0.96549
    old, new = vector(0.40, 0.25, 0.50).log(), vector(0.50, 0.20, 0.45).log()
    inputs = LossInput(
        logprobs_N=new,
        old_logprobs_N=old,
        sampler_logprobs_N=old,
        advantages_N=vector(1, 1, 1),
        weights_N=torch.full((3,), aggregation_weights([3], "token")[0], dtype=torch.float64),
    )
    output = policy_loss(inputs, LossSettings())
    assert (-output.per_token_N).tolist() == pytest.approx([1.2, 0.8, 0.9])
    assert -output.loss.item() == pytest.approx(0.9666667, abs=1e-7)


@pytest.mark.parametrize(("advantage", "low", "high"), [(1.0, 0.0, 1.0), (-1.0, 1.0, 0.0)])
def test_clip_counts_tell_which_side_was_cut(advantage: float, low: float, high: float) -> None:
    # OBS-02
    sums = ratios([1.5, 1.0, 0.5, 1.1], advantage)[0].sums
    assert (sums["clipped_low"], sums["clipped_high"], sums["outside"], sums["num_tokens"]) == (low, high, 2.0, 4.0)


def test_masked_tokens_are_in_no_clip_count() -> None:
    # OBS-02: mask [1,1,0,0], A = +1: one of two
    ratio_BT = torch.tensor([[1.5, 1.0, 0.5, 1.1]])
    zeros = torch.zeros(1, 4)
    inputs = from_padded(
        mask_BT=torch.tensor([[True, True, False, False]]),
        logprobs_BT=ratio_BT.log(),
        old_logprobs_BT=zeros,
        sampler_logprobs_BT=zeros,
        advantages_B=torch.ones(1),
        weights_B=torch.ones(1),
    )
    sums = policy_loss(inputs, LossSettings()).sums
    assert (sums["clipped_high"], sums["outside"], sums["num_tokens"]) == (1.0, 1.0, 2.0)


def test_a_loss_of_zero_has_a_gradient_that_moves_both_answers_the_right_way() -> None:
    # LOSS-14: first pass, A = [+1, -1], equal lengths; logits of two answers of two tokens each
    logits = torch.tensor([[0.3, -0.2, 0.1], [0.0, 0.4, -0.5]] * 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([0, 1, 2, 0])

    def loss_at(values: Tensor, old: Tensor) -> Tensor:
        inputs = LossInput(
            logprobs_N=token_logprobs(values, ids),
            old_logprobs_N=old,
            sampler_logprobs_N=old,
            advantages_N=vector(1, 1, -1, -1),
            weights_N=torch.full((4,), 0.25, dtype=torch.float64),
        )
        return policy_loss(inputs, LossSettings()).loss

    before = token_logprobs(logits, ids)
    loss = loss_at(logits, before)  # the same tensor, attached: detaching is the loss's own business
    (grad,) = torch.autograd.grad(loss, logits)
    assert abs(loss.item()) < 1e-7
    # -A * d logp, per token a quarter
    expected = torch.autograd.grad((token_logprobs(logits, ids) * vector(1, 1, -1, -1)).sum() * -0.25, logits)[0]
    assert torch.allclose(grad, expected, atol=1e-12)
    assert grad.abs().max() > 0.01
    for row, col in itertools.product(range(4), range(3)):
        step = torch.zeros_like(logits)
        step[row, col] = 1e-5
        old = before.detach()
        slope = (loss_at(logits.detach() + step, old) - loss_at(logits.detach() - step, old)) / 2e-5
        assert slope.item() == pytest.approx(grad[row, col].item(), abs=1e-4)
    after = token_logprobs(logits.detach() - 0.5 * grad, ids)
    assert ((after - before)[:2] > 0).all()
    assert ((after - before)[2:] < 0).all()


def test_the_ratio_is_exactly_one_at_the_first_step() -> None:
    # LOGP-01: at any temperature, before the first update, in float32
    torch.manual_seed(0)
    logits, ids = torch.randn(50, 30) * 5, torch.randint(0, 30, (50,))
    for temperature in (0.5, 0.6, 1.0, 2.0):
        logprobs = token_logprobs(logits, ids, temperature)
        ones = torch.ones(50)
        inputs = LossInput(
            logprobs_N=logprobs,
            old_logprobs_N=logprobs,
            sampler_logprobs_N=logprobs,
            advantages_N=ones,
            weights_N=ones,
        )
        output = policy_loss(inputs, LossSettings(importance_cap=2.0))
        assert output.per_token_N.tolist() == [-1.0] * 50
        assert (output.sums["outside"], output.sums["mismatch"], output.sums["old_kl"]) == (0.0, 0.0, 0.0)


# ---- shapes and masks ---------------------------------------------------------------------------------------------


def padded(mask_BT: Tensor, advantages_B: Tensor, **changes: Tensor) -> LossInput:
    zeros = torch.zeros(mask_BT.shape)
    parts = {"logprobs_BT": zeros, "old_logprobs_BT": zeros, "sampler_logprobs_BT": zeros} | changes
    return from_padded(mask_BT=mask_BT, advantages_B=advantages_B, weights_B=torch.ones(mask_BT.shape[0]), **parts)


def test_advantages_never_broadcast() -> None:
    # LOSS-03: three rows of length 1, ratios 1
    mask_BT = torch.ones(3, 1, dtype=torch.bool)
    output = policy_loss(padded(mask_BT, torch.tensor([3.0, 0.0, -3.0])), LossSettings())
    per_token_BT = to_padded(output.per_token_N, mask_BT)
    assert per_token_BT.shape == (3, 1)
    assert per_token_BT.flatten().tolist() == [-3.0, 0.0, 3.0]
    for shape in ((3, 1, 1), (1, 3), (3, 1), (1,), ()):
        with pytest.raises(ValueError, match=r"advantages_B has shape .*mask_BT \(3, 1\)"):
            padded(mask_BT, torch.ones(shape))


@pytest.mark.parametrize(
    "name", ["logprobs_BT", "old_logprobs_BT", "sampler_logprobs_BT", "ref_logprobs_BT", "entropy_BT"]
)
def test_padded_inputs_of_another_shape_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} has shape \(3, 1\), mask_BT \(3, 2\)"):
        padded(torch.ones(3, 2, dtype=torch.bool), torch.ones(3), **{name: torch.zeros(3, 1)})


def test_a_mask_of_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="expected bool"):
        padded(torch.ones(3, 2), torch.ones(3))


@pytest.mark.parametrize(
    "name",
    ["old_logprobs_N", "sampler_logprobs_N", "advantages_N", "weights_N", "ref_logprobs_N", "entropy_N"],
)
@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (1,), (4,), ()])
def test_flat_inputs_of_another_shape_are_refused(name: str, shape: tuple[int, ...]) -> None:
    # LOSS-03: the kind of fault
    parts: dict[str, Tensor] = dict.fromkeys(
        ("logprobs_N", "old_logprobs_N", "sampler_logprobs_N", "advantages_N", "weights_N"), torch.zeros(3)
    )
    with pytest.raises(ValueError, match=rf"{name} has shape .*logprobs_N \(3,\)"):
        LossInput(**(parts | {name: torch.zeros(shape)}))


@pytest.mark.parametrize("bad", [torch.zeros(3, 1), torch.zeros(3, dtype=torch.bfloat16)])
def test_log_probs_must_be_flat_and_at_least_float32(bad: Tensor) -> None:
    with pytest.raises(ValueError, match="logprobs_N"):
        LossInput(logprobs_N=bad, old_logprobs_N=bad, sampler_logprobs_N=bad, advantages_N=bad, weights_N=bad)


@pytest.mark.parametrize("hidden", [-200.0, -math.inf, math.nan, math.inf])
def test_what_masked_slots_hold_reaches_neither_loss_nor_gradient(hidden: float) -> None:
    # LOSS-04: logp [-1, 0], old [-1, hidden], mask [1, 0]
    logprobs_BT = torch.tensor([[-1.0, 0.0]], requires_grad=True)
    other_BT = torch.tensor([[-1.0, hidden]])
    mask_BT = torch.tensor([[True, False]])
    inputs = padded(
        mask_BT,
        torch.ones(1),
        logprobs_BT=logprobs_BT,
        old_logprobs_BT=other_BT,
        sampler_logprobs_BT=other_BT,
        ref_logprobs_BT=other_BT,
        entropy_BT=other_BT,
    )
    output = policy_loss(inputs, LossSettings(kl_coef=1.0, entropy_coef=0.0, importance_cap=2.0))
    torch.autograd.backward(output.loss)
    assert logprobs_BT.grad is not None
    assert output.loss.item() == -1.0
    assert logprobs_BT.grad.tolist() == [[-1.0, 0.0]]
    assert all(math.isfinite(value) for value in output.sums.values())


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("old", [-200.0, -90.0])
def test_an_absurd_ratio_at_a_valid_token_leaves_the_gradient_finite(advantage: float, old: float) -> None:
    # LOSS-04: the same overflow where the mask does not help; exp(200) is inf in float32
    logprobs = torch.tensor([0.0, -1.0], requires_grad=True)
    inputs = LossInput(
        logprobs_N=logprobs,
        old_logprobs_N=torch.tensor([old, -1.0]),
        sampler_logprobs_N=torch.tensor([-300.0, -1.0]),
        advantages_N=torch.full((2,), advantage),
        weights_N=torch.full((2,), 0.5),
    )
    output = policy_loss(inputs, LossSettings(importance_cap=5.0))
    torch.autograd.backward(output.loss)
    assert logprobs.grad is not None
    assert torch.isfinite(output.loss)
    assert logprobs.grad[0] == 0.0
    assert logprobs.grad[1].item() == -0.5 * advantage


@pytest.mark.parametrize(("aggregation", "constant"), AGGREGATIONS)
def test_a_row_contributes_the_same_however_wide_the_padding(aggregation: Aggregation, constant: int | None) -> None:
    # LOSS-11: alone, and padded by 1, 7 and 100 beside a second row
    torch.manual_seed(1)
    row = torch.randn(3)
    found = []
    for width in (3, 4, 10, 103):
        mask_BT = torch.zeros(2, width, dtype=torch.bool)
        mask_BT[0, :3] = True
        mask_BT[1, 0] = True
        logprobs_BT = torch.full((2, width), -5.0)
        logprobs_BT[0, :3] = row
        weights = aggregation_weights(mask_BT.sum(1).tolist(), aggregation, constant)
        zeros = torch.zeros(2, width)
        inputs = from_padded(
            mask_BT=mask_BT,
            logprobs_BT=logprobs_BT,
            old_logprobs_BT=zeros,
            sampler_logprobs_BT=zeros,
            advantages_B=torch.tensor([1.0, -2.0]),
            weights_B=torch.tensor(weights),
        )
        output = policy_loss(inputs, LossSettings(clip_low=1.0, clip_high=9.0))
        found.append((to_padded(output.per_token_N, mask_BT)[0, :3].tolist(), output.loss.item(), weights))
    assert found == [found[0]] * 4


def test_only_the_tokens_of_actions_carry_kl() -> None:
    # LOSS-12: KL of 7 nats on an observation token only; the loss of the actions is as without it
    mask_BT = torch.tensor([[True, False, True, True]])
    ref_BT = torch.tensor([[0.0, -7.0, 0.0, 0.0]])
    with_kl = policy_loss(padded(mask_BT, torch.ones(1), ref_logprobs_BT=ref_BT), LossSettings(kl_coef=1.0))
    without = policy_loss(padded(mask_BT, torch.ones(1)), LossSettings())
    assert with_kl.loss.item() == without.loss.item() == -3.0
    assert with_kl.sums["ref_kl"] == 0.0


# ---- KL to the reference ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ref", "value", "slope"), [(-1.5, 0.106531, 0.393469), (-0.5, 0.148721, -0.648721)])
def test_k3_has_its_value_and_its_direction(ref: float, value: float, slope: float) -> None:
    # LOSS-06
    logprob = vector(-1.0, grad=True)
    kl = k3(logprob, vector(ref))
    torch.autograd.backward(kl.sum())
    assert logprob.grad is not None
    assert kl.item() == pytest.approx(value, abs=1e-6)
    assert logprob.grad.item() == pytest.approx(slope, abs=1e-6)


def test_a_step_on_the_kl_term_alone_moves_the_policy_towards_the_reference() -> None:
    # LOSS-06
    ref_logits = vector(1.0, 0.0, -1.0)
    logits = vector(-1.0, 0.5, 0.5, grad=True)
    ids = torch.tensor([0, 1, 2])

    def distance(values: Tensor) -> float:
        policy, ref = torch.log_softmax(values, 0), torch.log_softmax(ref_logits, 0)
        return float((policy.exp() * (policy - ref)).sum())

    logprobs = token_logprobs(logits.expand(3, 3), ids)
    inputs = LossInput(
        logprobs_N=logprobs,
        old_logprobs_N=logprobs,
        sampler_logprobs_N=logprobs,
        advantages_N=vector(0, 0, 0),
        weights_N=logprobs.exp(),  # the expectation over the policy
        ref_logprobs_N=token_logprobs(ref_logits.expand(3, 3), ids),
    )
    loss = policy_loss(inputs, LossSettings(kl_coef=0.5)).loss
    torch.autograd.backward(loss)
    assert logits.grad is not None
    assert loss.item() == pytest.approx(0.5 * distance(logits.detach()), abs=1e-12)
    assert distance(logits.detach() - 0.1 * logits.grad) < distance(logits.detach())


@pytest.mark.parametrize(("d", "expected"), [(1e-4, 5.0e-9), (3e-4, 4.5e-8), (-1e-4, 5.0e-9)])
def test_small_kl_survives_float32(d: float, expected: float) -> None:
    # LOSS-08: exp(d) - 1 - d gives 0 here
    assert k3(torch.zeros(1), torch.tensor([d])).item() == pytest.approx(expected, rel=0.01)


def test_k3_is_accurate_and_never_negative_over_its_whole_range() -> None:
    # LOSS-08: the kind of fault; both sides of where the series ends, value and gradient
    d = torch.cat([torch.logspace(-9, 1, 400, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    d = torch.cat([d, -d]).float()
    logprobs = torch.zeros_like(d, requires_grad=True)
    kl = k3(logprobs, d)
    torch.autograd.backward(kl.sum())
    exact = [math.expm1(x) - x if abs(x) > 1e-3 else x * x / 2 + x**3 / 6 + x**4 / 24 for x in d.tolist()]
    assert logprobs.grad is not None
    assert kl.min() >= 0
    assert kl.tolist() == pytest.approx(exact, rel=1e-5)
    assert logprobs.grad.tolist() == pytest.approx([-math.expm1(x) for x in d.tolist()], rel=2e-5)


def test_k3_refuses_shapes_that_would_broadcast() -> None:
    with pytest.raises(ValueError, match=r"\(3, 1\), reference \(3,\)"):
        k3(torch.zeros(3, 1), torch.zeros(3))


# ---- aggregation and micro-batches --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "constant", "expected"), [("token", None, 1.8), ("sequence", None, 1.5), ("constant", 64, 18 / 128)]
)
@pytest.mark.parametrize("lengths", [(2, 8), (2, 8, 0), (0, 2, 8)])
def test_each_aggregation_has_its_own_mean(
    aggregation: Aggregation, constant: int | None, expected: float, lengths: tuple[int, ...]
) -> None:
    # LOSS-09: A has 2 tokens of loss 1, B 8 tokens of loss 2; LOSS-11: the constant is the configured one
    weights = aggregation_weights(lengths, aggregation, constant)
    loss_of = {2: 1.0, 8: 2.0, 0: 99.0}
    total = sum(w * n * loss_of[n] for w, n in zip(weights, lengths, strict=True))
    assert total == pytest.approx(expected, abs=1e-12)


def test_a_batch_without_tokens_has_weights_of_zero_and_a_loss_of_zero() -> None:
    assert aggregation_weights([0, 0], "token") == [0.0, 0.0]
    assert aggregation_weights([], "sequence") == []
    empty = torch.zeros(0, requires_grad=True)
    output = policy_loss(
        LossInput(
            logprobs_N=empty, old_logprobs_N=empty, sampler_logprobs_N=empty, advantages_N=empty, weights_N=empty
        ),
        LossSettings(),
    )
    torch.autograd.backward(output.loss)
    assert (output.loss.item(), output.sums["num_tokens"]) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("lengths", "aggregation", "constant"),
    [([-1], "token", None), ([1], "constant", None), ([1], "constant", 0), ([1], "token", 64)],
)
def test_weights_of_nonsense_are_refused(lengths: list[int], aggregation: Aggregation, constant: int | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        aggregation_weights(lengths, aggregation, constant)


@pytest.mark.parametrize(("aggregation", "constant"), AGGREGATIONS)
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_order(
    aggregation: Aggregation, constant: int | None
) -> None:
    # LOSS-09: micro-batches of 5, 2, 1, by token budget, shuffled; float32
    torch.manual_seed(9)
    lengths = [2, 8, 1, 5, 3]
    weights = aggregation_weights(lengths, aggregation, constant)
    hidden, ids = [torch.randn(n, 4) for n in lengths], [torch.randint(0, 6, (n,)) for n in lengths]
    advantages = [1.0, -0.5, 0.0, 2.0, -1.0]
    old = [-1.8 + 0.1 * torch.randn(n) for n in lengths]
    settings = LossSettings(kl_coef=0.1, entropy_coef=0.01, importance_cap=1.5)

    def run(parts: list[list[int]]) -> tuple[float, Tensor, dict[str, float]]:
        head = torch.linspace(-1, 1, 24).reshape(6, 4).requires_grad_()
        loss, sums = 0.0, dict[str, float]()
        for part in parts:
            logits = torch.cat([hidden[i] for i in part]) @ head.T
            old_N = torch.cat([old[i] for i in part])
            inputs = LossInput(
                logprobs_N=token_logprobs(logits, torch.cat([ids[i] for i in part])),
                old_logprobs_N=old_N,
                sampler_logprobs_N=old_N - 0.3,
                advantages_N=torch.cat([torch.full((lengths[i],), advantages[i]) for i in part]),
                weights_N=torch.cat([torch.full((lengths[i],), weights[i]) for i in part]),
                ref_logprobs_N=old_N + 0.2,
                entropy_N=token_entropy(logits),
            )
            output = policy_loss(inputs, settings)
            torch.autograd.backward(output.loss)
            loss += output.loss.item()
            sums = {name: sums.get(name, 0.0) + value for name, value in output.sums.items()}
        assert head.grad is not None
        return loss, head.grad, sums

    loss, grad, sums = run([[0, 1, 2, 3, 4]])
    assert grad.norm() > 0.01
    for parts in ([[0, 1], [2, 3], [4]], [[0], [1], [2], [3], [4]], [[1], [0, 2, 3, 4]], [[4, 2], [3], [1, 0]]):
        other_loss, other_grad, other_sums = run(parts)
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert (other_grad - grad).abs().max().item() < 1e-6
        assert other_sums == pytest.approx(sums, rel=1e-5, abs=1e-6)


# ---- the oracle ---------------------------------------------------------------------------------------------------


def oracle(rows: dict[str, list[float]], settings: LossSettings) -> tuple[float, list[float]]:
    """Loss and d loss / d logprob, token by token in Python floats, from the formulas alone."""
    loss, slopes = 0.0, []
    for i, logprob in enumerate(rows["logprobs_N"]):
        old, advantage = rows["old_logprobs_N"][i], rows["advantages_N"][i]
        ratio = math.exp(logprob - old)
        bounded = max(1 - settings.clip_low, min(1 + settings.clip_high, ratio))
        if ratio * advantage <= bounded * advantage:
            value, slope = -ratio * advantage, -ratio * advantage
        else:
            value, slope = -bounded * advantage, 0.0
        if settings.importance_cap is not None:
            rho = min(math.exp(old - rows["sampler_logprobs_N"][i]), settings.importance_cap)
            value, slope = value * rho, slope * rho
        gap = rows["ref_logprobs_N"][i] - logprob
        value += settings.kl_coef * (math.exp(gap) - 1 - gap)
        slope += settings.kl_coef * (1 - math.exp(gap))
        value -= settings.entropy_coef * rows["entropy_N"][i]
        loss += rows["weights_N"][i] * value
        slopes.append(rows["weights_N"][i] * slope)
    return loss, slopes


@pytest.mark.parametrize(
    "settings",
    [
        LossSettings(clip_low=low, clip_high=high, kl_coef=kl, entropy_coef=entropy, importance_cap=cap)
        for (low, high), kl, entropy, cap in itertools.product(
            [(0.2, 0.2), (0.1, 0.28), (1.0, 9.0)], [0.0, 0.3], [0.0, 0.05], [None, 1.2, 0.7]
        )
    ],
)
def test_the_loss_equals_a_plain_loop_for_every_combination(settings: LossSettings) -> None:
    rng = random.Random(repr(settings))
    for _ in range(3):
        size = rng.randint(1, 40)
        names = ("logprobs_N", "old_logprobs_N", "sampler_logprobs_N", "ref_logprobs_N")
        rows = {name: [-2.0 + rng.gauss(0, 0.4) for _ in range(size)] for name in names}
        rows["advantages_N"] = [rng.choice([0.0, rng.gauss(0, 1)]) for _ in range(size)]
        rows["weights_N"] = [rng.random() / size for _ in range(size)]
        rows["entropy_N"] = [rng.random() for _ in range(size)]
        tensors = {name: vector(*values, grad=True) for name, values in rows.items()}
        output = policy_loss(LossInput(**tensors), settings)
        torch.autograd.backward(output.loss)
        loss, slopes = oracle(rows, settings)
        assert output.loss.item() == pytest.approx(loss, abs=1e-12)
        gradient = tensors["logprobs_N"].grad
        assert gradient is not None
        assert gradient.tolist() == pytest.approx(slopes, abs=1e-12)
        detached = set(tensors) - {"logprobs_N", "entropy_N"}
        assert {name for name in detached if tensors[name].grad is not None} == set()


def test_a_flat_peer_set_has_no_policy_gradient_at_all() -> None:
    # ADV-01: exactly 0, not approximately
    output, logprobs = ratios([1.5, 1.0, 0.5, 1.1], 0.0)
    torch.autograd.backward(output.loss)
    assert logprobs.grad is not None
    assert logprobs.grad.abs().tolist() == [0.0] * 4


def test_the_importance_weight_is_capped_counted_and_off_by_default() -> None:
    # LOGP-02: an engine that renormalised over 0.8 of the mass says log-probs too high by 0.223144
    base = vector(0.5, 0.3).log()
    inputs = LossInput(
        logprobs_N=base,
        old_logprobs_N=base,
        sampler_logprobs_N=vector(0.625, 0.375).log(),
        advantages_N=vector(1, 1),
        weights_N=vector(0.5, 0.5),
    )
    off = policy_loss(inputs, LossSettings())
    assert off.loss.item() == -1.0
    assert off.sums["mismatch"] / 2 == pytest.approx(0.223144, abs=1e-6)  # never silent
    assert "importance" not in off.sums
    on = policy_loss(inputs, LossSettings(importance_cap=2.0))
    assert on.loss.item() == pytest.approx(-0.8)
    assert on.sums["importance"] == pytest.approx(1.6)
    assert on.sums["importance_capped"] == 0.0
    capped = policy_loss(replace(inputs, sampler_logprobs_N=vector(0.1, 0.3).log()), LossSettings(importance_cap=2.0))
    assert capped.per_token_N.tolist() == pytest.approx([-2.0, -1.0])
    assert capped.sums["importance_capped"] == 1.0


def test_metrics_of_inputs_that_were_not_given_are_absent() -> None:
    # OBS-01: absent, not 0
    sums = ratios([1.0], 1.0)[0].sums
    assert {"ref_kl", "entropy", "importance"} & set(sums) == set()


@pytest.mark.parametrize(
    ("settings", "missing"), [({"kl_coef": 0.1}, "ref_logprobs_N"), ({"entropy_coef": 0.1}, "entropy_N")]
)
def test_a_term_without_its_input_is_refused(settings: dict[str, float], missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} is None"):
        ratios([1.0], 1.0, LossSettings(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_low": 1.1},
        {"clip_low": -0.1},
        {"clip_high": -0.1},
        {"kl_coef": -1.0},
        {"kl_coef": math.nan},
        {"entropy_coef": math.inf},
        {"importance_cap": 0.0},
        {"importance_cap": math.nan},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        LossSettings(**settings)


# ---- log-probs of tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.407606), (0.5, -0.142932), (2.0, -0.680270)])
def test_temperature_divides_the_logits(temperature: float, expected: float) -> None:
    # LOGP-01: dividing the log-prob at 0.5 would give -0.815212
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    ids = torch.tensor([0])
    assert token_logprobs(logits, ids, temperature).item() == pytest.approx(expected, abs=1e-6)
    assert token_logprobs(logits, ids, torch.tensor([temperature])).item() == pytest.approx(expected, abs=1e-6)


def test_each_token_of_a_packed_row_can_have_its_own_temperature() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    found = token_logprobs(logits, torch.tensor([0, 0, 0]), torch.tensor([1.0, 0.5, 2.0]))
    assert found.tolist() == pytest.approx([-0.407606, -0.142932, -0.680270], abs=1e-6)


def test_a_token_is_scored_by_the_logits_of_the_position_before_it() -> None:
    # LOGP-04: bigram table; prompt 0 1 2, completion 3 4 -> P(3|2), P(4|3); the first prompt token has no log-prob
    table = torch.randn(5, 5, generator=torch.Generator().manual_seed(4))
    tokens = torch.tensor([0, 1, 2, 3, 4])
    logprobs = token_logprobs(table[tokens][:-1], tokens[1:])
    assert logprobs.shape == (4,)
    expected = torch.log_softmax(table, -1)
    assert logprobs[2:].tolist() == [expected[2, 3].item(), expected[3, 4].item()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_cast_before_the_softmax(dtype: torch.dtype) -> None:
    # LOGP-06
    logits = torch.tensor([[30.0, 29.9], [29.9, 30.0]], dtype=dtype)
    ids = torch.tensor([0, 0])
    found = token_logprobs(logits, ids)
    a, b = float(logits[0, 0]), float(logits[0, 1])
    exact = [-math.log1p(math.exp(b - a)), -math.log1p(math.exp(a - b))]
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(exact, abs=1e-6)
    assert token_entropy(logits).dtype == torch.float32


def test_log_probs_and_entropy_have_the_right_gradient() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    ids = torch.tensor([0, 5, 2, 2])
    assert torch.autograd.gradcheck(lambda x: token_logprobs(x, ids, 0.7), logits)
    assert torch.autograd.gradcheck(lambda x: token_entropy(x, 0.7), logits)


def test_entropy_has_its_known_values_also_with_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf]], requires_grad=True)
    entropy = token_entropy(logits)
    torch.autograd.backward(entropy.sum())
    assert entropy.tolist() == pytest.approx([math.log(4), math.log(2)])
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_a_temperature_that_scores_nothing_is_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match="expected > 0"):
        token_logprobs(torch.zeros(1, 3), torch.tensor([0]), temperature)


def test_logits_and_ids_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ids \(3,\), logits \(4, 5\)"):
        token_logprobs(torch.zeros(4, 5), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"temperature \(1,\), logits \(4, 5\)"):
        token_logprobs(torch.zeros(4, 5), torch.zeros(4, dtype=torch.long), torch.ones(1))


def test_padding_and_gathering_are_inverse() -> None:
    mask_BT = torch.tensor([[True, False, True], [False, True, False]])
    assert to_padded(torch.tensor([1.0, 2.0, 3.0]), mask_BT).tolist() == [[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_in_one_go_are_the_log_probs_and_entropies(dtype: torch.dtype) -> None:
    """More rows than a stretch holds, temperatures that differ, a token that cannot be; gradients as well."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(11, 60_000, generator=generator, dtype=torch.float64) * 4).to(dtype)
    logits[3, 5] = -math.inf
    ids, temperatures = torch.arange(11), torch.linspace(0.5, 1.5, 11)
    towards = torch.randn(11, generator=generator, dtype=torch.float64)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    logprobs, entropies = token_scores(ours, ids, temperatures)
    expected = token_logprobs(theirs, ids, temperatures)
    assert logprobs.dtype == expected.dtype
    assert not entropies.requires_grad
    near = 1e-12 if dtype == torch.float64 else 2e-5
    assert float((logprobs - expected).detach().abs().max()) < near
    # Against the exact ones: some processors' own log_softmax is off by 4e-5 on so many tokens.
    exact = logits.double(), temperatures.double()
    assert float((logprobs - token_logprobs(exact[0], ids, exact[1])).detach().abs().max()) < near
    assert float((entropies - token_entropy(*exact)).abs().max()) < near
    (logprobs * towards).sum().backward()
    (expected * towards).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert ours.grad.dtype == dtype
    assert float((ours.grad - theirs.grad).double().norm() / theirs.grad.double().norm()) < 1e-5


def test_scores_refuse_shapes_that_differ() -> None:
    with pytest.raises(ValueError, match="expected"):
        token_scores(torch.zeros(4, 5), torch.zeros(3, dtype=torch.long), torch.ones(4))
    with pytest.raises(ValueError, match="expected"):
        token_scores(torch.zeros(4, 5), torch.zeros(4, dtype=torch.long), torch.ones(1))
