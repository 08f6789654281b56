"""One on-policy step: it moves what it should, only that, in the right direction, and says what happened."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from coterie.config import OptimizerTable, PolicyTable
from coterie.credit import advantages_over
from coterie.engines.torch import TorchEngine
from coterie.errors import CheckpointError, TrainError
from coterie.learner import Learner, Update
from coterie.models.policy import Policy
from coterie.models.tiny import tiny_model
from coterie.run_tables import LossTable
from coterie.stepper import learning_rate
from coterie.types import Sample
from learning_toys import bigram, gpt2, llama, plain_logprobs, policy_of, request, sample

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def learner_of(
    policy: Policy,
    *,
    lr: float = 0.01,
    optimizer: dict[str, Any] | None = None,
    loss: dict[str, Any] | None = None,
    steps_per_batch: int = 1,
    micro_batch_tokens: int = 10_000,
    base: PreTrainedModel | None = None,
    **table: Any,
) -> Learner:
    return Learner(
        policy,
        PolicyTable.model_validate({"model": "tiny", "optimizer": {"lr": lr, **(optimizer or {})}, **table}),
        LossTable.model_validate(loss or {}),
        total_steps=100,
        steps_per_batch=steps_per_batch,
        micro_batch_tokens=micro_batch_tokens,
        autocast=False,
        base=base,
    )


def drawn(policy: Policy, advantages: Sequence[float], *, tokens: int = 3, step: int = 0) -> list[Sample]:
    """Return samples of the policy's own, with these advantages."""
    asked = request(
        [3, 4], candidates=len(advantages), max_tokens=tokens, policy=policy.name, version=policy.version, seed=step
    )
    completions = TorchEngine({policy.name: policy}).generate([asked])[0]
    return [
        sample(
            [3, 4], c.ids, advantage=a, logprobs=c.logprobs, policy=policy.name, version=policy.version
        )
        for c, a in zip(completions, advantages, strict=True)
    ]  # fmt: skip


def sha(model: PreTrainedModel) -> str:
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        digest.update(name.encode() + weight.detach().float().numpy().tobytes())
    return digest.hexdigest()


def small(seed: int = 0, vocab: int = 16, positions: int = 8) -> PreTrainedModel:
    return tiny_model(seed, width=16, layers=1, heads=2, positions=positions, vocab=vocab)


@torch.no_grad()
def undecided(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with outputs so small that all tokens are about equally likely."""
    model.get_output_embeddings().weight.mul_(0.1)
    return model


# ---- a bandit: does the reward go up? ---------------------------------------------------------------------------


def play_bandit(
    policies: dict[str, Policy], learners: dict[str, Learner], roles: dict[str, tuple[str, int]], *, steps: int,
    reward: Callable[[bool], float],
) -> list[Update]:  # fmt: skip
    """Train one-token answers: role -> (policy, target), K = 8, four acts per role and step."""
    engine, updates = TorchEngine(policies), []
    for step in range(steps):
        asked = [
            request(
                [3 + i, 2], candidates=8, max_tokens=1, policy=p, version=policies[p].version, seed=step, task=f"{r}{n}"
            )
            for i, (r, (p, _)) in enumerate(roles.items())
            for n in range(4)
        ]  # fmt: skip
        targets = [target for _, target in roles.values() for _ in range(4)]
        samples: dict[str, list[Sample]] = {name: [] for name in policies}
        for act, target, completions in zip(asked, targets, engine.generate(asked), strict=True):
            values = [reward(completion.ids[0] == target) for completion in completions]
            for completion, advantage in zip(completions, advantages_over(values, [1.0] * 8, "std"), strict=True):
                samples[act.policy].append(
                    sample(act.prompt_ids, completion.ids, advantage=advantage, logprobs=completion.logprobs,
                           policy=act.policy, version=act.version)
                )  # fmt: skip
        updates += [learners[name].step(samples[name]) for name in policies]
    return updates


def chance(policy: Policy, role: int, token: int) -> float:
    logits = policy.model(torch.tensor([[3 + role, 2]])).logits[0, -1]
    return float(torch.softmax(logits, -1)[token].detach())


@pytest.mark.parametrize("shared", [True, False])
def test_a_rewarded_token_becomes_likely_for_every_role(shared: bool) -> None:
    """OPT-05: P(token) from about 1/16 to above 0.9; role 0 is paid for 5, role 1 for 6."""
    names = ["both"] if shared else ["a", "b"]
    policies = {name: policy_of(undecided(small()), name=name, end_ids=(), context=8) for name in names}
    learners = {name: learner_of(policy, lr=0.02) for name, policy in policies.items()}
    roles = {"r0": (names[0], 5), "r1": (names[-1], 6)}
    first = [chance(policies[name], i, target) for i, (name, target) in enumerate(roles.values())]
    assert all(0.03 < p < 0.12 for p in first)
    play_bandit(policies, learners, roles, steps=60, reward=float)
    assert all(chance(policies[name], i, target) > 0.9 for i, (name, target) in enumerate(roles.values()))


def test_a_punished_token_becomes_rare() -> None:
    """OPT-05: reward -1 for token 5: P below 0.01."""
    policies = {"main": policy_of(small(), end_ids=(), context=8)}
    play_bandit(
        policies, {"main": learner_of(policies["main"], lr=0.02)}, {"r": ("main", 5)}, steps=100,
        reward=lambda hit: -float(hit),
    )  # fmt: skip
    assert chance(policies["main"], 0, 5) < 0.01


def test_constant_rewards_move_nothing_and_are_reported_as_no_step() -> None:
    """OPT-05 and invariant 9: no drift at all, version 0, stepped False."""
    policies = {"main": policy_of(small(), end_ids=(), context=8)}
    before = sha(policies["main"].model)
    updates = play_bandit(
        policies, {"main": learner_of(policies["main"])}, {"r": ("main", 5)}, steps=3, reward=lambda hit: 0.1 + 0.2
    )
    assert sha(policies["main"].model) == before
    assert [(u.stepped, u.skipped_non_finite, u.tokens, u.version, u.changed) for u in updates] == [
        (False, False, 0, 0, 0.0)
    ] * 3
    assert [u.loss for u in updates] == [None] * 3


# ---- the direction and size of one step -------------------------------------------------------------------------


def test_a_loss_of_zero_still_has_a_gradient() -> None:
    """LOSS-14: A = +1 and -1 of equal length: loss 0, the +1 answer goes up, the -1 answer goes down."""
    policy = policy_of(gpt2(spread=1.0), end_ids=())
    pair = drawn(policy, [1.0, -1.0])
    assert pair[0].completion_ids != pair[1].completion_ids
    before = [plain_logprobs(policy.model, item).sum().item() for item in pair]
    update = learner_of(policy, lr=1e-3).step(pair)
    after = [plain_logprobs(policy.model, item).sum().item() for item in pair]
    assert update.loss == pytest.approx(0.0, abs=1e-7)
    assert update.grad_norm is not None
    assert update.grad_norm > 0.01
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_the_reported_gradient_norm_is_that_of_the_written_out_policy_gradient() -> None:
    policy = policy_of(llama(spread=1.0), end_ids=())
    items = drawn(policy, [1.0, -0.5, 2.0])
    reference = copy.deepcopy(policy.model)
    for item in items:
        (-item.advantage * plain_logprobs(reference, item).sum() / 9).backward()
    expected = math.sqrt(sum(float((w.grad**2).sum()) for w in reference.parameters() if w.grad is not None))
    assert learner_of(policy).step(items).grad_norm == pytest.approx(expected, rel=1e-4)


def test_samples_without_advantage_count_in_the_mean_but_are_not_computed() -> None:
    """2 tokens with A = 1 and 6 with A = 0: loss -2/8, and 2 tokens went through the model."""
    policy = policy_of(gpt2(), end_ids=())
    items = [*drawn(policy, [1.0], tokens=2), *drawn(policy, [0.0], tokens=6)]
    update = learner_of(policy).step(items)
    assert update.tokens == 2
    assert update.loss == pytest.approx(-0.25, abs=1e-6)


def test_one_end_token_alone_is_trained_with_its_negative_advantage() -> None:
    """TOK-10: rewards [1, 1, 1, 0], the last answer is only the end token; it becomes less likely."""
    policy = policy_of(gpt2(spread=1.0), end_ids=(1,))
    advantages = advantages_over([1.0, 1.0, 1.0, 0.0], [1.0] * 4, "std")
    items = drawn(policy, list(advantages))
    before = plain_logprobs(policy.model, sample([3, 4], [1])).item()
    items[3] = replace(items[3], completion_ids=(1,), sampler_logprobs=(before,))
    update = learner_of(policy, lr=1e-3).step(items)
    assert update.loss is not None
    assert math.isfinite(update.loss)
    assert plain_logprobs(policy.model, sample([3, 4], [1])).item() < before


def test_the_step_does_not_depend_on_micro_batches() -> None:
    """LOSS-09: same loss, gradient norm and mismatch from one pass and from one pass per row."""
    updates = []
    for budget in (1, 10_000):
        policy = policy_of(llama(spread=1.0), end_ids=())
        updates.append(learner_of(policy, micro_batch_tokens=budget).step(drawn(policy, [1.0, -1.0, 0.5, 2.0])))
    assert updates[0].loss == pytest.approx(updates[1].loss, abs=1e-6)
    assert updates[0].grad_norm == pytest.approx(updates[1].grad_norm, rel=1e-5)
    assert updates[0].tokens == updates[1].tokens == 12


# ---- on-policy --------------------------------------------------------------------------------------------------


def test_samples_of_another_version_or_policy_are_refused() -> None:
    policy = policy_of(gpt2())
    learner, items = learner_of(policy), drawn(policy_of(gpt2()), [1.0, -1.0])
    before = sha(policy.model)
    with pytest.raises(TrainError, match=r"policy 'main' at version 0 was given a sample of 'main' at version 1"):
        learner.step([items[0], replace(items[1], version=1)])
    with pytest.raises(TrainError, match=r"given a sample of 'other' at version 0"):
        learner.step([replace(items[0], policy="other")])
    learner.step(items)
    with pytest.raises(TrainError, match=r"at version 1 was given a sample of 'main' at version 0"):
        learner.step(items)
    assert sha(policy.model) != before


def test_on_policy_numbers_of_the_first_step_are_exact() -> None:
    """Invariant 6: mismatch is rounding only, nothing is clipped; the float32 limit is 1e-4."""
    for make in (gpt2, llama):
        policy = policy_of(make(), end_ids=())
        update = learner_of(policy).step(drawn(policy, [1.0, -1.0, 0.5], tokens=8))
        assert update.mismatch is not None
        assert update.mismatch < 1e-5
        assert update.clip_fraction == 0.0


@pytest.mark.parametrize("error", [0.01, -0.01, math.nan])
def test_a_mismatch_above_the_limit_stops_before_any_weight_moves(error: float) -> None:
    policy = policy_of(gpt2())
    before = sha(policy.model)
    items = [
        replace(item, sampler_logprobs=tuple(value + error for value in item.sampler_logprobs))
        for item in drawn(policy, [1.0, -1.0])
    ]
    with pytest.raises(TrainError, match=r"mean \|sampler - learner log-prob\| is (0.01|nan).*limit is 0.0001"):
        learner_of(policy).step(items)
    assert (sha(policy.model), policy.version) == (before, 0)
    if math.isfinite(error):
        assert learner_of(policy, mismatch_limit=0.02).step(items).mismatch == pytest.approx(0.01, abs=1e-5)


def test_temperature_is_part_of_the_scored_distribution() -> None:
    """LOGP-01: at any temperature the ratio before the first update is 1."""
    policy = policy_of(gpt2(), end_ids=())
    asked = request([3, 4], candidates=6, temperature=0.6)
    completions = TorchEngine({"main": policy}).generate([asked])[0]
    items = [sample([3, 4], c.ids, logprobs=c.logprobs, temperature=0.6) for c in completions]
    wrong = [replace(item, temperature=1.0) for item in items]
    with pytest.raises(TrainError, match="mean"):
        learner_of(policy).step(wrong)
    update = learner_of(policy).step(items)
    assert update.mismatch is not None
    assert update.mismatch < 1e-5


def test_dropout_is_off_while_scoring() -> None:
    """LOGP-03: a model with dropout in train mode: passes agree with the sampler, nothing clipped, KL to start 0."""
    policy = policy_of(gpt2(), end_ids=())
    items = drawn(policy, [1.0, -1.0], tokens=8)
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    policy.model.train()
    update = learner_of(policy, kl={"coef": 0.1}).step(items)
    assert update.mismatch is not None
    assert update.mismatch < 1e-5
    assert (update.clip_fraction, update.kl) == (0.0, 0.0)


def test_several_steps_per_batch_keep_the_first_pass_as_old() -> None:
    """At the second step of a batch the ratio is no longer 1: a large step leaves the clip range."""
    once, thrice = (policy_of(gpt2(spread=1.0), end_ids=()) for _ in range(2))
    items = drawn(once, [1.0, -1.0, 1.0, -1.0], tokens=8)
    single = learner_of(once, lr=0.02).step(items)
    triple = learner_of(thrice, lr=0.02, steps_per_batch=3).step(items)
    assert (single.clip_fraction, single.version) == (0.0, 1)
    assert triple.version == thrice.version == 3
    assert triple.clip_fraction is not None
    assert triple.clip_fraction > 0.2
    assert triple.mismatch == single.mismatch, "mismatch is that of the first pass"
    assert triple.loss != single.loss


# ---- the KL penalty ---------------------------------------------------------------------------------------------


def test_kl_to_the_start_is_exactly_zero_first_and_positive_later() -> None:
    policy = policy_of(gpt2(spread=1.0), end_ids=())
    learner = learner_of(policy, lr=0.01, kl={"coef": 0.1, "reference": "start"})
    kls = [learner.step(drawn(policy, [1.0, -1.0], step=step)).kl for step in range(3)]
    assert kls[0] == 0.0
    assert kls[1] is not None
    assert kls[2] is not None
    assert kls[1] > 0.0
    assert kls[2] > 0.0


def test_kl_to_the_base_is_positive_where_training_starts_from_something_else() -> None:
    """TEAM-05: start from A0: KL to start is 0, KL to the base is not; and the other's learner changes neither."""
    base, warm = gpt2(1, spread=1.0), gpt2(2, spread=1.0)
    for reference, expected_zero in (("start", True), ("base", False)):
        policy = policy_of(copy.deepcopy(warm), end_ids=())
        learner = learner_of(policy, kl={"coef": 0.1, "reference": reference}, base=copy.deepcopy(base))
        assert learner.reference is not None
        before = sha(learner.reference)
        update = learner.step(drawn(policy, [1.0, -1.0]))
        assert (update.kl == 0.0) is expected_zero
        assert sha(learner.reference) == before
        assert sha(learner.reference) == sha(warm if expected_zero else base)


def test_with_a_kl_penalty_samples_without_advantage_are_trained_too() -> None:
    policy = policy_of(gpt2(1, spread=1.0), end_ids=())
    learner = learner_of(policy, kl={"coef": 1.0, "reference": "base"}, base=gpt2(2, spread=1.0))
    update = learner.step(drawn(policy, [0.0, 0.0]))
    assert (update.stepped, update.tokens) == (True, 6)
    assert update.grad_norm is not None
    assert update.grad_norm > 0.0


def test_a_base_reference_without_a_base_is_an_error() -> None:
    with pytest.raises(TrainError, match="needs the base model"):
        learner_of(policy_of(gpt2()), kl={"coef": 1.0, "reference": "base"})


def test_an_entropy_bonus_alone_raises_entropy() -> None:
    policy = policy_of(gpt2(spread=6.0), end_ids=())
    learner = learner_of(policy, loss={"entropy_coef": 1.0})
    entropies = [learner.step(drawn(policy, [1e-9, -1e-9], step=step)).entropy or 0.0 for step in range(6)]
    assert entropies[-1] > entropies[0] + 0.1


# ---- precision and faults ---------------------------------------------------------------------------------------


def constant_push(policy: Policy, learner: Learner, steps: int) -> list[Update]:
    """Reward the same token again and again, whatever is sampled: a gradient that keeps its sign."""
    updates = []
    for _ in range(steps):
        items = [replace(item, advantage=1.0) for item in drawn(policy, [1.0, 1.0], tokens=1)]
        updates.append(learner.step(items))
    return updates


def test_small_steps_on_bfloat16_weights_add_up_in_their_master_copies() -> None:
    """OPT-01: Adam at lr 5e-4 moves a weight of 1.0 by about 5e-4 per step; bfloat16 next to it is 0.9961 and 1.0078.

    One step shows nothing in the norms, 16 do: without master copies they would stay exactly 1.0 for ever.
    """
    policy = policy_of(small().to(torch.bfloat16), end_ids=(), context=8)
    learner = learner_of(policy, lr=5e-4, dtype="bfloat16")
    norm = policy.model.transformer.ln_f.weight
    first = constant_push(policy, learner, 1)[0]
    assert bool((norm.detach() == 1.0).all())
    assert 0.0 < first.changed < 1.0
    constant_push(policy, learner, 15)
    master = learner.stepper.masters[learner.stepper.names.index("transformer.ln_f.weight")]
    assert master.dtype == torch.float32
    assert 0.004 < float((master.detach() - 1.0).abs().max()) < 0.016
    assert float((norm.detach().float() - 1.0).abs().max()) >= 0.0039
    assert torch.equal(norm.detach(), master.detach().to(torch.bfloat16))


def test_a_float32_step_changes_nearly_every_weight() -> None:
    """OPT-01: changed > 0.9 after one step at an ordinary learning rate."""
    policy = policy_of(small(positions=3), end_ids=(), context=3)
    update = learner_of(policy, lr=1e-5).step([replace(i, advantage=1.0) for i in drawn(policy, [1.0, -1.0], tokens=1)])
    assert update.stepped
    assert update.changed > 0.9


def poison(model: PreTrainedModel, value: float = math.nan) -> torch.utils.hooks.RemovableHandle:
    weight = next(model.parameters())
    return weight.register_hook(lambda gradient: gradient * value)  # type: ignore[no-any-return, no-untyped-call]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gradient_that_is_not_finite_moves_no_weight_and_is_counted(value: float, dtype: str) -> None:
    """OPT-02: weights, master copies and optimiser state stay bit-identical; the other policy is not affected."""
    policy, other = (policy_of(gpt2().to(DTYPES[dtype]), name=name) for name in ("main", "other"))
    learner, neighbour = learner_of(policy, dtype=dtype), learner_of(other, dtype=dtype)
    learner.step(drawn(policy, [1.0, -1.0]))
    before = (
        sha(policy.model),
        copy.deepcopy(learner.stepper.optimizer.state_dict()),
        [m.clone() for m in learner.stepper.masters],
    )
    handle = poison(policy.model, value)
    updates = [learner.step(drawn(policy, [1.0, -1.0], step=step)) for step in (1, 2)]
    handle.remove()
    assert [(u.stepped, u.skipped_non_finite, u.changed, u.version) for u in updates] == [(False, True, 0.0, 1)] * 2
    assert not math.isfinite(updates[0].grad_norm or 0.0), "the norm is reported as it is"
    assert learner.skipped_in_a_row == 2
    assert sha(policy.model) == before[0]
    assert all(torch.equal(a, b) for a, b in zip(learner.stepper.masters, before[2], strict=True))
    for key, state in learner.stepper.optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(state[n]), torch.as_tensor(before[1]["state"][key][n])) for n in state)
    assert neighbour.step(drawn(other, [1.0, -1.0])).stepped
    assert learner.step(drawn(policy, [1.0, -1.0], step=3)).stepped
    assert learner.skipped_in_a_row == 0


def test_a_step_of_one_policy_changes_no_weight_of_another() -> None:
    """Invariant 7 and TEAM-02, over 3 steps and also for a frozen neighbour that shares the engine."""
    trained, frozen = policy_of(gpt2(), name="b"), policy_of(gpt2(), name="a")
    frozen.model.requires_grad_(False)
    before = sha(frozen.model)
    learner = learner_of(trained)
    for step in range(3):
        learner.step(drawn(trained, [1.0, -1.0], step=step))
    assert sha(frozen.model) == before
    assert sha(trained.model) != before
    assert all(weight.grad is None for weight in frozen.model.parameters())
    held = {id(p) for group in learner.stepper.optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for p in trained.model.parameters()}


# ---- the engine sees the new weights ----------------------------------------------------------------------------


def untied() -> PreTrainedModel:
    config = GPT2Config(vocab_size=102, n_embd=32, n_layer=1, n_head=2, n_positions=64, tie_word_embeddings=False,
                        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=None, eos_token_id=1)  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("make", [gpt2, llama, untied])
def test_after_a_step_the_engine_samples_with_the_stepped_weights(make: Callable[[], PreTrainedModel]) -> None:
    """SYNC-01 and SYNC-04 (tied and untied): its log-probs are the model's, before and after, with a shared prompt."""
    policy = policy_of(make(), end_ids=())
    learner, seen = learner_of(policy, lr=0.01), []
    for step in range(3):
        items = drawn(policy, [1.0, -1.0])
        for item in items:
            expected = plain_logprobs(policy.model, item).detach()
            assert list(item.sampler_logprobs) == pytest.approx(expected.tolist(), abs=1e-5)
        seen.append(items[0].sampler_logprobs[0])
        assert learner.step(items).version == step + 1
    assert len(set(seen)) == 3


def test_a_token_made_certain_by_training_is_what_the_engine_draws_next() -> None:
    """Invariant 7: a large step towards one token; the version asked for is the new one."""
    table = torch.zeros(16, 16)
    policy = policy_of(bigram(table), end_ids=())
    seven = sample([3], [7], logprobs=[math.log(1 / 16)])
    learner = learner_of(policy, lr=20.0, optimizer={"max_grad_norm": 1e9}, mismatch_limit=1e-3)
    learner.step([seven])
    completions = TorchEngine({"main": policy}).generate([request([3], candidates=8, max_tokens=1, version=1)])[0]
    assert {completion.ids for completion in completions} == {(7,)}


@pytest.mark.parametrize("make", [gpt2, llama])
def test_every_single_tensor_reaches_the_engine(make: Callable[[], PreTrainedModel]) -> None:
    """SYNC-03: perturb one tensor at a time: the engine's log-probs change, and are the model's."""
    policy = policy_of(make(), end_ids=())
    unchanged = drawn(policy, [1.0], tokens=4)[0]
    idle = []
    for name, weight in policy.model.named_parameters():
        saved = weight.detach().clone()
        with torch.no_grad():
            weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        item = drawn(policy, [1.0], tokens=4)[0]
        expected = plain_logprobs(policy.model, item).detach().tolist()
        assert list(item.sampler_logprobs) == pytest.approx(expected, abs=1e-4), name
        if item.sampler_logprobs == unchanged.sampler_logprobs:
            idle.append(name)
        with torch.no_grad():
            weight.copy_(saved)
    assert idle == []


# ---- its saved state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_learner_goes_on_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """CKPT-01: weights, master copies, optimiser state, counters and reference."""
    options: dict[str, Any] = {
        "dtype": dtype,
        "kl": {"coef": 0.1},
        "optimizer": {"schedule": "cosine", "warmup_steps": 2},
    }

    def fresh() -> tuple[Policy, Learner]:
        policy = policy_of(gpt2(spread=1.0).to(DTYPES[dtype]), end_ids=())
        return policy, learner_of(policy, lr=0.003, **options)

    policy, learner = fresh()
    for step in range(2):
        learner.step(drawn(policy, [1.0, -1.0], step=step))
    learner.save(tmp_path)
    straight = [learner.step(drawn(policy, [1.0, -1.0], step=step)) for step in (2, 3)]
    again, resumed = fresh()
    with torch.no_grad():
        next(again.model.parameters()).add_(0.25)  # what is there before must not matter
    resumed.load(tmp_path)
    assert again.version == 2
    assert [resumed.step(drawn(again, [1.0, -1.0], step=step)) for step in (2, 3)] == straight
    assert sha(again.model) == sha(policy.model)
    assert all(torch.equal(a, b) for a, b in zip(resumed.stepper.masters, learner.stepper.masters, strict=True))


def test_after_loading_the_engine_draws_with_the_loaded_weights(tmp_path: Path) -> None:
    """SYNC-06: the first rollout after a resumption."""
    table = torch.zeros(16, 16)
    table[:, 7] = 50.0
    changed = policy_of(bigram(table), end_ids=())
    changed.version = 5
    learner_of(changed).save(tmp_path)
    policy = policy_of(bigram(torch.zeros(16, 16)), end_ids=())
    engine = TorchEngine({"main": policy})
    learner_of(policy).load(tmp_path)
    completions = engine.generate([request([3], candidates=8, max_tokens=2, version=5)])[0]
    assert {completion.ids for completion in completions} == {(7, 7)}


@pytest.mark.parametrize("make", [gpt2, untied])
def test_a_saved_learner_reloads_with_equal_logits_tied_or_not(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    """SYNC-04."""
    policy = policy_of(make(), end_ids=())
    learner = learner_of(policy)
    learner.step(drawn(policy, [1.0, -1.0]))
    learner.save(tmp_path)
    again = policy_of(make(), end_ids=())
    learner_of(again).load(tmp_path)
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(policy.model(ids).logits, again.model(ids).logits)


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    """CKPT-07's kind: a file of other tensors must fail, not load as random."""
    learner_of(policy_of(gpt2())).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"weights.safetensors: tensors differ from the policy's"):
        learner_of(policy_of(llama())).load(tmp_path)


# ---- the schedule -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", {0: 0.25, 1: 0.5, 2: 0.75, 3: 1.0, 4: 1.0, 8: 1.0, 15: 1.0, 16: 1.0, 99: 1.0}),
        ("linear", {0: 0.25, 3: 1.0, 4: 1.0, 7: 0.75, 10: 0.5, 13: 0.25, 16: 0.0, 99: 0.0}),
        ("cosine", {0: 0.25, 3: 1.0, 4: 1.0, 8: 0.75, 10: 0.5, 12: 0.25, 16: 0.0, 99: 0.0}),
    ],
)
def test_the_learning_rate_follows_the_schedule(schedule: str, expected: dict[int, float]) -> None:
    """Warm-up of 4 steps, 16 in all: 12 steps of decay."""
    table = OptimizerTable.model_validate({"lr": 1.0, "warmup_steps": 4, "schedule": schedule})
    assert {step: learning_rate(table, step, 16) for step in expected} == pytest.approx(expected)


def test_the_rate_of_a_run_never_goes_up_and_down() -> None:
    """A schedule applied twice, or once per policy, alternates; after warm-up this one only falls."""
    policy = policy_of(small(), end_ids=(), context=8)
    learner = learner_of(policy, lr=0.5e-3, optimizer={"schedule": "linear", "warmup_steps": 2})
    rates = [update.lr for update in constant_push(policy, learner, 6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, *[0.5e-3 * (1 - i / 98) for i in range(4)]])


def test_an_update_reports_the_required_numbers() -> None:
    policy = policy_of(gpt2())
    numbers = learner_of(policy).step(drawn(policy, [1.0, -1.0])).numbers()
    assert {"version", "loss", "grad_norm", "entropy", "clip_fraction", "mismatch", "lr", "changed"} <= set(numbers)
