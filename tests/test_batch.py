"""Packing: nothing is lost, duplicated or seen by a neighbour, and every number is that of the plain pass."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from coterie.batch import MicroBatch, pack, sample_of, unpack
from coterie.learner import scored_logits
from coterie.loss import LossInput, LossSettings, aggregation_weights, policy_loss, token_logprobs
from coterie.types import EpisodeKey, Sample, StopReason, Turn
from learning_toys import VOCAB, bigram, gpt2, llama, plain_logprobs, random_samples, sample

CPU = torch.device("cpu")
ARCHITECTURES = pytest.mark.parametrize("make", [gpt2, llama])


def packed(samples: Sequence[Sample], max_tokens: int, weights: Sequence[float] | None = None) -> list[MicroBatch]:
    return pack(samples, [1.0] * len(samples) if weights is None else weights, max_tokens, CPU)


# ---- nothing lost, nothing duplicated ---------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_unpacking_gives_every_sample_once_whatever_the_budget(seed: int) -> None:
    """Invariant 5, over random batches with shared prompts and budgets from 1 token up."""
    rng = random.Random(seed)
    samples = random_samples(rng, rng.randint(1, 40))
    budget = rng.choice([1, 5, 17, 40, 200, 10_000])
    batches = packed(samples, budget, [float(i + 1) for i in range(len(samples))])
    found = [index for batch in batches for index in batch.samples]
    assert sorted(found) == list(range(len(samples)))
    for batch in batches:
        rows, width = batch.ids_BT.shape
        assert rows == 1 or rows * width <= budget
        assert unpack(batch) == [(samples[i].prompt_ids, samples[i].completion_ids) for i in batch.samples]
        per_token = [(samples[i], i, token) for i in batch.samples for token in samples[i].completion_ids]
        assert batch.targets_N.tolist() == [token for _, _, token in per_token]
        assert batch.ids_BT[batch.rows_N, batch.placed_at_N].tolist() == batch.targets_N.tolist()
        assert batch.weights_N.tolist() == [float(i + 1) for _, i, _ in per_token]
        assert batch.advantages_N.tolist() == [item.advantage for item, _, _ in per_token]
        assert batch.temperatures_N.tolist() == [item.temperature for item, _, _ in per_token]
        columns, index = batch.columns()
        assert columns[index].tolist() == batch.scored_at_N.tolist()


@pytest.mark.parametrize("seed", range(10))
def test_no_row_exceeds_the_budget_but_one_that_holds_a_single_sample(seed: int) -> None:
    rng = random.Random(100 + seed)
    samples = random_samples(rng, 30)
    for batch in packed(samples, 14):
        for row in range(batch.ids_BT.shape[0]):
            length = int((batch.segments_BT[row] >= 0).sum())
            assert length <= 14 or int(batch.segments_BT[row].max()) == 1


def test_the_example_of_the_module_is_packed_as_it_is_drawn() -> None:
    """Prompt (p0 p1), completions (a0 a1) and (b0)."""
    [batch] = packed([sample([20, 21], [30, 31]), sample([20, 21], [40])], 100)
    assert batch.ids_BT.tolist() == [[20, 21, 30, 31, 40]]
    assert batch.positions_BT.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.segments_BT.tolist() == [[0, 0, 1, 1, 2]]
    assert batch.scored_at_N.tolist() == [1, 2, 1]
    assert batch.placed_at_N.tolist() == [2, 3, 4]
    assert batch.mask()[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_nothing_is_packed_into_nothing() -> None:
    assert packed([], 100) == []


def test_equal_samples_are_both_kept() -> None:
    """Two candidates may have sampled the same; both count."""
    [batch] = packed([sample([1], [2, 3])] * 3, 100)
    assert unpack(batch) == [((1,), (2, 3))] * 3


def test_prompts_that_start_alike_do_not_share_a_row() -> None:
    [batch] = packed([sample([1, 2], [5]), sample([1, 2, 3], [5])], 100)
    assert batch.ids_BT.shape[0] == 2


def test_the_longest_rows_come_first() -> None:
    samples = [sample([i], [9] * n) for i, n in enumerate((2, 9, 4, 7))]
    widths = [batch.ids_BT.shape[1] for batch in packed(samples, 1)]
    assert widths == [10, 8, 5, 3]


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
    assert (batch.segments_BT[row, 1:] > 0).int().tolist() == mask


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


@ARCHITECTURES
@pytest.mark.parametrize("budget", [30, 10_000])
def test_packed_log_probs_are_those_of_each_sample_alone(make: Callable[[], PreTrainedModel], budget: int) -> None:
    """Invariant 5: float32, max abs 1e-5."""
    model, samples = make(), random_samples(random.Random(5), 24)
    seen = 0
    for batch in packed(samples, budget):
        found = token_logprobs(scored_logits(model, batch), batch.targets_N, batch.temperatures_N)
        expected = torch.cat([plain_logprobs(model, samples[i]) for i in batch.samples])
        assert float((found - expected).abs().max().detach()) < 1e-5
        seen += len(found)
    assert seen == sum(len(item.completion_ids) for item in samples)


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


@ARCHITECTURES
def test_packed_gradients_are_those_of_each_sample_alone(make: Callable[[], PreTrainedModel]) -> None:
    """Invariant 5: norm of the difference / norm <= 1e-5, against the policy gradient written out: -A dlogp / N."""
    model, samples = make(), random_samples(random.Random(6), 16)
    loss, found = packed_gradient(model, samples, 60)
    num_tokens = sum(len(item.completion_ids) for item in samples)
    for item in samples:
        (-item.advantage * plain_logprobs(model, item).sum() / num_tokens).backward()
    expected = gradients(model)
    assert float((found - expected).norm() / expected.norm()) <= 1e-5
    mean_advantage = sum(item.advantage * len(item.completion_ids) for item in samples) / num_tokens
    assert loss == pytest.approx(-mean_advantage, abs=1e-6)


def test_loss_and_gradient_depend_neither_on_the_micro_batches_nor_on_the_order() -> None:
    """LOSS-09 and LOSS-11."""
    model, samples = gpt2(), random_samples(random.Random(7), 16)
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
