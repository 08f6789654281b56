"""Packing: nothing is lost, duplicated or seen by a neighbour, and every number is that of the plain pass."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from coterie.batch import MicroBatch, pack, sample_of, unpack
from coterie.learner import scored_logits
from coterie.loss import LossInput, LossSettings, aggregation_weights, policy_loss, token_logprobs
from coterie.types import EpisodeKey, Sample, StopReason, Turn
from learning_toys import VOCAB, bigram, gpt2, llama, lora_team, plain_logprobs, random_samples, sample, stirred

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 5, "head_dim": 8}
FAMILIES: dict[str, tuple[type[PreTrainedModel], type[PreTrainedConfig], dict[str, object]]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral": (MistralForCausalLM, MistralConfig, WINDOW),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}),
}


def family(name: str, tied: bool) -> PreTrainedModel:
    """Return a small model of an architecture, its weights so large that outputs differ clearly."""
    kind, config, own = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = kind(config(**SHAPE, **own, tie_word_embeddings=tied, initializer_range=0.06))
    return model.float().eval()


def packed(
    samples: Sequence[Sample], max_tokens: int, weights: Sequence[float] | None = None, width: int = 256
) -> list[MicroBatch]:
    return pack(samples, [1.0] * len(samples) if weights is None else weights, max_tokens, CPU, width)


def branching_samples(rng: random.Random, count: int) -> list[Sample]:
    """Return samples of which many begin alike: equal prompts, equal answers, cut prompts, turns that go on."""
    samples: list[Sample] = []
    while len(samples) < count:
        more = [rng.randrange(4) for _ in range(rng.randint(1, 5))]
        prompt: Sequence[int] = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        if samples:
            earlier = rng.choice(samples)
            cut = earlier.prompt_ids[: rng.randint(1, len(earlier.prompt_ids))]
            longer = [*earlier.prompt_ids, *earlier.completion_ids, *more]
            prompt = rng.choice([prompt, earlier.prompt_ids, earlier.prompt_ids, cut, [*cut, *more], longer[:40]])
        for _ in range(rng.randint(1, 4)):
            completion = [rng.randrange(4) for _ in range(rng.randint(1, 6))]
            advantage, temperature = rng.choice([-1.0, -0.25, 0.5, 2.0]), rng.choice([0.5, 1.0, 1.5])
            samples.append(sample(prompt, completion, advantage=advantage, temperature=temperature))
    return samples[:count]


def paths(batch: MicroBatch) -> list[tuple[int, list[int]]]:
    """Return (row, columns) of every sample: what its last token sees."""
    last = {member: place for place, member in enumerate(batch.members_N.tolist())}
    mask = batch.mask()[:, 0]
    found = [(int(batch.rows_N[place]), int(batch.placed_at_N[place])) for _, place in sorted(last.items())]
    return [(row, mask[row, column].nonzero().squeeze(1).tolist()) for row, column in found]


# ---- nothing lost, nothing duplicated ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_unpacking_gives_every_sample_once_whatever_the_budget(seed: int) -> None:
    """Invariant 5, over random batches with shared beginnings, budgets from 1 token up, and models of all widths."""
    rng = random.Random(seed)
    samples = rng.choice([random_samples, branching_samples])(rng, rng.randint(1, 40))
    budget = rng.choice([1, 5, 17, 40, 200, 10_000])
    batches = packed(samples, budget, [float(i + 1) for i in range(len(samples))], rng.choice([1, 16, 1024]))
    found = [index for batch in batches for index in batch.samples]
    assert sorted(found) == list(range(len(samples)))
    for batch in batches:
        rows, width = batch.ids_BT.shape
        assert rows == 1 or rows * width <= budget
        assert unpack(batch) == [(samples[i].prompt_ids, samples[i].completion_ids) for i in batch.samples]
        per_token = [(samples[i], i, token) for i in batch.samples for token in samples[i].completion_ids]
        assert [batch.samples[member] for member in batch.members_N.tolist()] == [i for _, i, _ in per_token]
        assert batch.targets_N.tolist() == [token for _, _, token in per_token]
        assert batch.ids_BT[batch.rows_N, batch.placed_at_N].tolist() == batch.targets_N.tolist()
        assert batch.weights_N.tolist() == [float(i + 1) for _, i, _ in per_token]
        assert batch.advantages_N.tolist() == [item.advantage for item, _, _ in per_token]
        assert batch.temperatures_N.tolist() == [item.temperature for item, _, _ in per_token]


@pytest.mark.parametrize("seed", range(20))
def test_a_token_sees_what_comes_before_it_in_its_own_sample_and_nothing_else(seed: int) -> None:
    """And each beginning stands once in a row: a column per distinct one, as its position counts."""
    rng = random.Random(seed)
    samples = branching_samples(rng, 40)
    for batch in packed(samples, rng.choice([30, 100, 10_000]), width=rng.choice([4, 1024])):
        mask = batch.mask()[:, 0]
        beginnings: dict[int, set[tuple[int, ...]]] = {}
        for member, (row, path) in zip(batch.samples, paths(batch), strict=True):
            sequence = samples[member].prompt_ids + samples[member].completion_ids
            assert batch.positions_BT[row, path].tolist() == list(range(len(sequence)))
            for count, column in enumerate(path, start=1):
                assert mask[row, column].nonzero().squeeze(1).tolist() == path[:count]
                beginnings.setdefault(row, set()).add(sequence[:count])
        width = batch.ids_BT.shape[1]
        for row, distinct in beginnings.items():
            assert mask[row, len(distinct) :, : len(distinct)].sum() == 0, "padding sees no token"
            assert batch.until_BT[row, len(distinct) :].tolist() == [width] * (width - len(distinct))
            assert bool((batch.until_BT[row, : len(distinct)] <= len(distinct)).all())


@pytest.mark.parametrize("seed", range(10))
def test_no_row_exceeds_the_budget_but_one_that_holds_a_single_sample(seed: int) -> None:
    rng = random.Random(100 + seed)
    samples = rng.choice([random_samples, branching_samples])(rng, 30)
    for batch in packed(samples, 14):
        for row in range(batch.ids_BT.shape[0]):
            members = batch.members_N[batch.rows_N == row].unique().tolist()
            tokens = [samples[batch.samples[i]].prompt_ids + samples[batch.samples[i]].completion_ids for i in members]
            assert len({ids[:count] for ids in tokens for count in range(1, len(ids) + 1)}) <= 14 or len(members) == 1


@pytest.mark.parametrize("seed", range(10))
def test_the_rows_do_not_depend_on_the_order_of_the_samples(seed: int) -> None:
    rng = random.Random(200 + seed)
    samples = branching_samples(rng, 40)
    shuffled = rng.sample(samples, len(samples))
    for one, other in zip(packed(samples, 60, width=16), packed(shuffled, 60, width=16), strict=True):
        assert torch.equal(one.ids_BT, other.ids_BT)
        assert torch.equal(one.until_BT, other.until_BT)
        assert unpack(one) == unpack(other)


def test_the_example_of_the_module_is_packed_as_it_is_drawn() -> None:
    """Prompt (p0 p1), completions (a0 a1) and (b0), and a later prompt (p0 p1 a0 a1 q0) with completion (c0)."""
    [batch] = packed([sample([20, 21], [30, 31]), sample([20, 21], [40]), sample([20, 21, 30, 31, 32], [33])], 100)
    assert batch.samples == (0, 2, 1)
    assert batch.ids_BT.tolist() == [[20, 21, 30, 31, 32, 33, 40]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 4, 5, 2]]
    assert batch.until_BT.tolist() == [[7, 7, 6, 6, 6, 6, 7]]
    assert batch.members_N.tolist() == [0, 0, 1, 2]
    assert batch.scored_at_N.tolist() == [1, 2, 4, 1]
    assert batch.placed_at_N.tolist() == [2, 3, 5, 6]
    assert batch.mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 1, 0],
        [1, 1, 0, 0, 0, 0, 1],
    ]


def test_nothing_is_packed_into_nothing() -> None:
    assert packed([], 100) == []


def test_equal_samples_are_all_kept_and_stand_once() -> None:
    """Candidates may have sampled the same; each counts, with its own advantage."""
    [batch] = packed([sample([1], [2, 3], advantage=a) for a in (1.0, -1.0, 0.5)], 100)
    assert unpack(batch) == [((1,), (2, 3))] * 3
    assert batch.ids_BT.tolist() == [[1, 2, 3]]
    assert batch.placed_at_N.tolist() == [1, 2] * 3
    assert batch.advantages_N.tolist() == [1.0, 1.0, -1.0, -1.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("completions", "rows"),
    [
        # A model of width 1: a row of n tokens costs n + n * n / 4. Prompt (1 2), so rows of 4 tokens cost 8.
        ([[3, 4], [5, 6]], [[1, 2, 3, 4, 5, 6]]),  # 6 + 9 = 15 < 8 + 8
        ([[3, 4], [5, 6], [7, 8]], [[1, 2, 3, 4, 5, 6], [1, 2, 7, 8]]),  # 8 + 16 = 24 > 15 + 8
        ([[3, 4], [3, 5], [7, 8]], [[1, 2, 3, 4, 5], [1, 2, 7, 8]]),  # 7 + 12.25 = 11.25 + 8: no gain
        ([[3, 4, 5], [6, 7, 8]], [[1, 2, 3, 4, 5], [1, 2, 6, 7, 8]]),  # 8 + 16 = 24 > 11.25 + 11.25
    ],
)
def test_rows_are_merged_where_that_costs_less(completions: list[list[int]], rows: list[list[int]]) -> None:
    found = [batch.ids_BT[0].tolist() for batch in packed([sample([1, 2], c) for c in completions], 8, width=1)]
    assert found == rows


def test_the_longest_common_beginnings_are_merged_first() -> None:
    """In lexical order the first two have 1 token in common, the last two 5; 11 tokens have room for one pair."""
    samples = [sample([1, *ids], [last]) for ids, last in (([2] * 4, 2), ([3] * 4, 4), ([3] * 4, 5))]
    assert [batch.samples for batch in packed(samples, 11)] == [(1, 2), (0,)]


def test_prompts_that_begin_alike_share_a_row() -> None:
    """Two roles that see the same map."""
    [batch] = packed([sample([1, 2, 3], [5]), sample([1, 2, 4], [5])], 100)
    assert batch.ids_BT.tolist() == [[1, 2, 3, 5, 4, 5]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 2, 3]]


def test_the_longest_rows_come_first() -> None:
    samples = [sample([i], [9] * n) for i, n in enumerate((2, 9, 4, 7))]
    widths = [batch.ids_BT.shape[1] for batch in packed(samples, 1)]
    assert widths == [10, 8, 5, 3]


def test_a_micro_batch_with_more_than_512_tokens_of_padding_is_two() -> None:
    """A row of 301, ten of 250 (510 to be padded), and some of 249, which do not fit in."""
    lengths = [300, *[249] * 10, *[248] * 3]
    samples = [sample([i], [9] * n) for i, n in enumerate(lengths)]
    assert [tuple(batch.ids_BT.shape) for batch in packed(samples, 10_000)] == [(11, 301), (3, 249)]


# ---- what carries loss ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "mask"),
    [
        ([5, 6, 2], [1, 1, 1, 0, 0]),  # TOK-02: the end token carries loss though padding looks the same
        ([2], [1, 0, 0, 0, 0]),  # TOK-02: an answer of only the end token
        ([5, 6, 7], [1, 1, 1, 0, 0]),  # TOK-03: cut by length, no end token
        ([5, 6, 7, 8, 9], [1, 1, 1, 1, 1]),  # TOK-03: full width, no end token
    ],
)
@pytest.mark.parametrize("end", [0, 2])
def test_exactly_the_sampled_tokens_carry_loss_also_where_they_look_like_padding(
    completion: list[int], mask: list[int], end: int
) -> None:
    """TOK-02 and TOK-03; rows are padded with id 0, so with end = 0 the end token looks like padding."""
    ids = [end if token == 2 else token for token in completion]
    [batch] = packed([sample([3], ids), sample([4], [7] * 5)], 100)
    row = next(r for r in range(2) if batch.ids_BT[r, 0] == 3)
    found = [0] * 6
    for column in batch.placed_at_N[batch.rows_N == row].tolist():
        found[column] = 1
    assert found == [0, *mask]
    assert (batch.until_BT[row] == 1 + len(completion)).tolist() == [True, *map(bool, mask)]


def test_the_pairs_of_a_known_table_are_scored_and_no_other() -> None:
    """LOGP-04: prompt of 3, completion of 2: P(t3 | t2) and P(t4 | t3), nothing else."""
    table = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    [batch] = packed([sample([10, 11, 12], [13, 14])], 100)
    found = token_logprobs(scored_logits(bigram(table), batch), batch.targets_N)
    logprobs = torch.log_softmax(table, -1)
    assert found.tolist() == pytest.approx([logprobs[12, 13].item(), logprobs[13, 14].item()], abs=1e-5)


def test_an_observation_between_turns_carries_no_loss_whatever_it_says() -> None:
    """TOK-07: what others said is in the prompt; a prompt that contains the completion's own ids changes no weight."""
    quiet, loud = sample([1, 2, 3], [7, 8]), sample([7, 8, 7], [7, 8])
    for item in (quiet, loud):
        [batch] = packed([item], 100)
        assert batch.placed_at_N.tolist() == [3, 4]
        assert batch.targets_N.tolist() == [7, 8]


# ---- equal to the plain pass ------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_log_probs_and_gradients_are_those_of_each_sample_alone(name: str, tied: bool) -> None:
    """Invariant 5: float32, max abs 1e-5. The plain pass knows nothing of packing and has its own sliding window.

    Of the gradient: norm of the difference / norm <= 1e-5, against the policy gradient written out: -A dlogp / N.
    """
    model, samples = family(name, tied), branching_samples(random.Random(5), 24)
    assert max(len(item.prompt_ids) for item in samples) > 10, "longer than the window"
    num_tokens = sum(len(item.completion_ids) for item in samples)
    plain = [plain_logprobs(model, item) for item in samples]
    torch.stack(
        [-item.advantage * own.sum() / num_tokens for item, own in zip(samples, plain, strict=True)]
    ).sum().backward()
    expected = gradients(model)
    for budget in (50, 10_000):
        for batch in packed(samples, budget):
            found = token_logprobs(scored_logits(model, batch), batch.targets_N, batch.temperatures_N)
            gap = found - torch.cat([plain[i] for i in batch.samples])
            assert float(gap.abs().max().detach()) < 1e-5
        loss, gradient = packed_gradient(model, samples, budget)
        assert float((gradient - expected).norm() / expected.norm()) <= 1e-5
        mean_advantage = sum(item.advantage * len(item.completion_ids) for item in samples) / num_tokens
        assert loss == pytest.approx(-mean_advantage, abs=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
def test_packing_beside_an_adapter_changes_neither_log_probs_nor_its_gradient(name: str) -> None:
    """Invariant 5 for LoRA: the adapter's weights alone have gradients."""
    policy = stirred(lora_team(family(name, tied=False), "main")["main"])
    samples = branching_samples(random.Random(8), 16)
    num_tokens = sum(len(item.completion_ids) for item in samples)
    with policy.alone():
        plain = [plain_logprobs(policy.model, item) for item in samples]
        for item, own in zip(samples, plain, strict=True):
            (-item.advantage * own.sum() / num_tokens).backward()
        expected = gradients(policy.model)
        for batch in packed(samples, 60):
            found = token_logprobs(scored_logits(policy.model, batch), batch.targets_N, batch.temperatures_N)
            gap = found - torch.cat([plain[i] for i in batch.samples])
            assert float(gap.abs().max().detach()) < 1e-5
        _, gradient = packed_gradient(policy.model, samples, 60)
    assert len(gradient) == sum(weight.numel() for weight in policy.weights().values())
    assert float((gradient - expected).norm() / expected.norm()) <= 1e-5


def gradients(model: PreTrainedModel) -> torch.Tensor:
    """Return all gradients as one vector, and forget them."""
    flat = torch.cat([weight.grad.reshape(-1) for weight in model.parameters() if weight.grad is not None])
    model.zero_grad()
    return flat


def packed_gradient(model: PreTrainedModel, samples: Sequence[Sample], budget: int) -> tuple[float, torch.Tensor]:
    """Return the policy loss of a batch and its gradient, by micro-batches of ``budget`` tokens."""
    weights = aggregation_weights([len(item.completion_ids) for item in samples], "token")
    total = 0.0
    for batch in packed(samples, budget, weights):
        logprobs = token_logprobs(scored_logits(model, batch), batch.targets_N, batch.temperatures_N)
        inputs = LossInput(
            logprobs_N=logprobs,
            old_logprobs_N=logprobs.detach(),
            sampler_logprobs_N=batch.sampler_logprobs_N,
            advantages_N=batch.advantages_N,
            weights_N=batch.weights_N,
        )
        loss = policy_loss(inputs, LossSettings()).loss
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def test_loss_and_gradient_depend_neither_on_the_micro_batches_nor_on_the_order() -> None:
    """LOSS-09 and LOSS-11."""
    model, samples = gpt2(), branching_samples(random.Random(7), 16)
    reference_loss, reference = packed_gradient(model, samples, 10_000)
    for budget, order in ((1, 1), (25, 1), (80, -1), (10_000, -1)):
        loss, gradient = packed_gradient(model, samples[::order], budget)
        assert loss == pytest.approx(reference_loss, abs=1e-6)
        assert float((gradient - reference).norm() / reference.norm()) <= 1e-5


@pytest.mark.parametrize("more", [1, 7, 40])
def test_a_samples_numbers_do_not_depend_on_padding(more: int) -> None:
    """LOSS-11: alone, and beside a row that is longer by 1, 7 and 40 tokens."""
    model, item = llama(), sample([5, 6], [7, 8, 9])
    alone = token_logprobs(scored_logits(model, packed([item], 100)[0]), torch.tensor([7, 8, 9]))
    [batch] = packed([item, sample([3], [4] * (4 + more))], 1000)
    assert batch.ids_BT.shape == (2, 5 + more)
    row = int((batch.ids_BT[:, 0] == 5).nonzero())
    beside = token_logprobs(scored_logits(model, batch)[batch.rows_N == row], torch.tensor([7, 8, 9]))
    assert float((alone - beside).abs().max().detach()) < 1e-5


def test_a_completion_does_not_feel_the_others_of_its_row() -> None:
    """Changing candidate b changes nothing of candidate a, exactly."""
    model = llama()
    found = []
    for other in ([9, 9, 9], [50, 51, 52]):
        [batch] = packed([sample([5, 6], [7, 8]), sample([5, 6], other)], 100)
        found.append(scored_logits(model, batch)[:2])
    assert torch.equal(found[0], found[1])


def test_padding_gives_no_nan_in_values_or_gradients() -> None:
    """A query over nothing would be NaN and spread through the batch's gradient."""
    for make in (gpt2, llama):
        model = make()
        loss, gradient = packed_gradient(model, [sample([1], [2]), sample([3] * 9, [4] * 20)], 1000)
        assert bool(torch.isfinite(gradient).all())
        assert loss == pytest.approx(-1.0)


def test_a_turn_becomes_a_sample_with_the_same_tokens() -> None:
    turn = Turn(
        episode=EpisodeKey(seed=0, purpose="train", step=3, task_id="t", index=0),
        act=1, candidate=2, role="writer", seat=0, round=0, policy="main", version=17, peers="p",
        prompt_ids=(3, 4), completion_ids=(9, 1), sampler_logprobs=(-0.2, -0.1), text="x", stop_reason=StopReason.END,
        temperature=0.7, played=False, trainable=True, reward=None, error=None,
    )  # fmt: skip
    assert sample_of(turn, -0.5) == Sample(
        policy="main", version=17, role="writer", peers="p", prompt_ids=(3, 4), completion_ids=(9, 1),
        sampler_logprobs=(-0.2, -0.1), advantage=-0.5, temperature=0.7,
    )  # fmt: skip


def test_the_toy_vocabulary_is_that_of_the_tokenizer() -> None:
    assert gpt2().config.vocab_size == VOCAB
