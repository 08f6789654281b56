"""The engine samples the distribution it reports, whatever else is in the batch, and ends where it should."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from coterie.engines import Completion, Request
from coterie.engines.torch import TorchEngine, candidate_key, sample_tokens
from coterie.errors import EngineError
from coterie.keyed import uniforms
from coterie.models.loading import load
from coterie.models.policy import Policy
from coterie.models.tiny import tiny_tokenizer
from coterie.policy_tables import LoraTable
from coterie.types import StopReason
from learning_toys import (
    RENDERER,
    VOCAB,
    bigram,
    gpt2,
    llama,
    lora_team,
    plain_logprobs,
    policy_of,
    request,
    sample,
    stirred,
    switch,
)

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.06,
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0, "sliding_window": 5,
}  # fmt: skip


def gemma3() -> PreTrainedModel:
    """Return a model of which one layer of two looks back 5 tokens."""
    config = Gemma3TextConfig(**SHAPE, layer_types=["sliding_attention", "full_attention"])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(1)
        return Gemma3ForCausalLM(config).float().eval()


def mistral() -> PreTrainedModel:
    """Return a model of which all layers look back 5 tokens."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return MistralForCausalLM(MistralConfig(**SHAPE)).float().eval()


ARCHITECTURES = pytest.mark.parametrize("make", [gpt2, llama])


def ragged_requests(seed: int) -> list[Request]:
    """Return acts of all sizes: prompts of 1 to 20 tokens, K of 1 to 8, limits of 1 to 12 tokens, 3 temperatures."""
    rng = random.Random(seed)
    return [
        request(
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))],
            candidates=rng.randint(1, 8),
            max_tokens=rng.randint(1, 12),
            temperature=rng.choice([0.6, 1.0, 1.3]),
            task=f"task{number}",
        )
        for number in range(12)
    ]


def bare(logprobs: torch.Tensor) -> list[float]:
    return [float(value) for value in logprobs]


# ---- the numbers it reports -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [gpt2, llama, gemma3, mistral])
def test_reported_logprobs_are_those_of_a_plain_pass(make: Callable[[], PreTrainedModel]) -> None:
    """Invariant 6: left padding, shared prompts, finished rows, mixed limits and sliding windows change no number."""
    model = make()
    requests = ragged_requests(1)
    results = TorchEngine({"main": policy_of(model, end_ids=range(1, 12))}).generate(requests)
    worst, lengths = 0.0, set()
    for asked, completions in zip(requests, results, strict=True):
        for completion in completions:
            item = sample(asked.prompt_ids, completion.ids, temperature=asked.sampling.temperature)
            expected = plain_logprobs(model, item).detach()
            worst = max(worst, float((expected - torch.tensor(completion.logprobs)).abs().max()))
            lengths.add(len(completion.ids))
    assert worst < 1e-5
    assert {1, 12} <= lengths, "the batch was meant to be ragged"


@ARCHITECTURES
def test_what_is_drawn_does_not_depend_on_the_batch(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    requests = ragged_requests(2)
    engine = TorchEngine({"main": policy_of(model, end_ids=range(1, 8))})
    together = engine.generate(requests)
    alone = [engine.generate([asked])[0] for asked in requests]
    backwards = engine.generate(requests[::-1])[::-1]
    for a, b, c in zip(together, alone, backwards, strict=True):
        assert [x.ids for x in a] == [x.ids for x in b] == [x.ids for x in c]
        for x, y in zip(a, b, strict=True):
            assert x.logprobs == pytest.approx(y.logprobs, abs=1e-5)


def test_equal_batches_give_equal_bits() -> None:
    requests = ragged_requests(3)
    engine = TorchEngine({"main": policy_of(gpt2())})
    assert engine.generate(requests) == engine.generate(requests)


def test_a_candidate_does_not_see_its_neighbours() -> None:
    """Candidate k of K = 8 is candidate k of K = 3, and of k asked for alone."""
    engine = TorchEngine({"main": policy_of(llama())})
    eight = engine.generate([request([5, 6, 7], candidates=8)])[0]
    three = engine.generate([request([5, 6, 7], candidates=3)])[0]
    assert [c.ids for c in eight[:3]] == [c.ids for c in three]
    assert len({c.ids for c in eight}) > 1


def test_a_finished_prompt_near_the_context_limit_does_not_disturb_longer_neighbours() -> None:
    """Positions of ended rows must not run beyond the context while the rest of the batch goes on."""
    rng = random.Random(0)
    long = request([rng.randrange(2, VOCAB) for _ in range(60)], max_tokens=4, candidates=2, task="long")
    short = [request([7 + i], max_tokens=40, candidates=2, task=f"short{i}") for i in range(3)]
    results = TorchEngine({"main": policy_of(gpt2(), end_ids=())}).generate([long, *short])
    assert [len(c.ids) for row in results for c in row] == [4, 4, *[40] * 6]
    for asked, completions in zip([long, *short], results, strict=True):
        for completion in completions:
            expected = plain_logprobs(gpt2(), sample(asked.prompt_ids, completion.ids)).detach()
            assert completion.logprobs == pytest.approx(bare(expected), abs=1e-5)


def test_log_prob_of_a_token_at_three_temperatures() -> None:
    """LOGP-01: logits [2, 1, 0], token 0."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for temperature, expected in ((1.0, -0.407606), (0.5, -0.142932), (2.0, -0.680270)):
        ids, logprobs = sample_tokens(logits, torch.tensor([temperature]), torch.tensor([0.0], dtype=torch.float64))
        assert ids.tolist() == [0]
        assert logprobs.item() == pytest.approx(expected, abs=1e-6)


def test_a_known_table_gives_exactly_its_log_probs() -> None:
    """LOGP-04: each log-prob is that of the token after its predecessor, the first after the last prompt token."""
    table = torch.randn(16, 16, generator=torch.Generator().manual_seed(3)) * 2
    asked = request([10, 11], candidates=8, max_tokens=5)
    completions = TorchEngine({"main": policy_of(bigram(table), end_ids=())}).generate([asked])[0]
    logprobs = torch.log_softmax(table, dim=-1)
    for completion in completions:
        before = [11, *completion.ids[:-1]]
        expected = [logprobs[a, b].item() for a, b in zip(before, completion.ids, strict=True)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


# ---- the distribution it draws from -----------------------------------------------------------------------------


def draws(model: PreTrainedModel, *, episodes: int, tokens: int = 1, candidates: int = 8) -> np.ndarray:
    """Return sampled ids, (episodes, candidates, tokens)."""
    requests = [
        request([3, 4], candidates=candidates, max_tokens=tokens, task=f"t{i}", seed=11) for i in range(episodes)
    ]
    results = TorchEngine({"main": policy_of(model, end_ids=())}).generate(requests)
    return np.array([[completion.ids for completion in row] for row in results])


def chi_square_p(ids: np.ndarray, probs: np.ndarray) -> float:
    counts = np.bincount(ids, minlength=len(probs)).astype(float)
    expected = probs * counts.sum()
    rare = expected < 5
    pooled = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    keep = pooled[1] > 0
    return float(stats.chisquare(pooled[0][keep], pooled[1][keep]).pvalue)


def test_20000_first_tokens_follow_the_softmax_and_candidates_are_independent() -> None:
    table = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    ids = draws(bigram(table), episodes=2500)[:, :, 0]
    assert chi_square_p(ids.reshape(-1), torch.softmax(table[4].double(), -1).numpy()) > 0.001
    for a, b in ((ids[:, 0], ids[:, 1]), (ids[:, 2], ids[:, 7]), (ids[:-1, 0], ids[1:, 0])):
        pairs = np.zeros((6, 6))
        np.add.at(pairs, (a, b), 1)
        assert stats.chi2_contingency(pairs).pvalue > 0.001


def test_following_tokens_follow_the_table_row_of_the_token_before() -> None:
    """Independence of positions: given the token before, the next one follows its row, and nothing else."""
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    ids = draws(bigram(torch.nn.functional.pad(table, (0, 1, 0, 1), value=-30.0)), episodes=600, tokens=3)
    ids = ids.reshape(-1, 3)
    probs = torch.softmax(torch.cat([table, torch.full((4, 1), -30.0)], dim=1).double(), -1).numpy()
    for row in range(4):
        assert chi_square_p(ids[ids[:, 0] == row, 1], probs[row]) > 0.001
        assert chi_square_p(ids[ids[:, 1] == row, 2], probs[row]) > 0.001


def test_defaults_of_a_saved_generation_config_do_not_leak_into_draws(tmp_path: Path) -> None:
    """LOGP-07: a folder that says top_k 2, temperature 0.1, a penalty and min_new_tokens is sampled as it is."""
    model = gpt2(5, positions=16)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=2, top_p=0.5, repetition_penalty=1.5, min_new_tokens=5, eos_token_id=1
    )
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load(str(tmp_path), seed=0, dtype="float32", context=None)
    ids = draws(loaded.model, episodes=2500)[:, :, 0].reshape(-1)
    probs = torch.softmax(loaded.model(torch.tensor([[3, 4]])).logits[0, -1].double(), -1).detach().numpy()
    assert chi_square_p(ids, probs) > 0.001
    assert set(ids.tolist()) - set(np.argsort(probs)[-2:].tolist())


def test_rare_tokens_of_a_50000_word_vocabulary_are_drawn_as_often_as_they_should() -> None:
    """40,000 tokens of mass 2.5e-8 each, 0.1% together. At 1.0 float32 numbers are 6e-8 apart: summed in float32 more
    than half of the bins have no width. Every uniform in the middle of a bin must draw that bin's token.
    """
    size = 50_000
    probs = torch.full((size,), 2.5e-8, dtype=torch.float64)
    probs[:10_000] = 0.999 / 10_000
    cdf = torch.log_softmax(probs.log().float(), -1).double().exp().numpy().cumsum()
    wanted = range(30_000, 30_250)
    middles = torch.tensor([(cdf[token - 1] + cdf[token]) / 2 / cdf[-1] for token in wanted])
    ids, logprobs = sample_tokens(probs.log().float().expand(250, -1), torch.ones(250), middles)
    assert ids.tolist() == list(wanted)
    assert logprobs.tolist() == pytest.approx([math.log(2.5e-8)] * 250, abs=1e-3)


def test_the_largest_uniform_takes_the_last_token_with_mass_and_never_one_without() -> None:
    """1.0 itself is never drawn, but a product with the sum may round up to the sum: then the last bin with mass."""
    logits = torch.full((4, 50_000), -math.inf)
    logits[:, 100:200] = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    edge = torch.tensor([0.0, 1.0 - 2.0**-53, 1.0, 0.5], dtype=torch.float64)
    ids, logprobs = sample_tokens(logits, torch.ones(4), edge)
    assert ids[:3].tolist() == [100, 199, 199]
    assert 100 <= ids[3] < 200
    assert bool(torch.isfinite(logprobs).all())


def test_a_zero_uniform_skips_tokens_without_mass_at_the_front() -> None:
    ids, logprobs = sample_tokens(
        torch.tensor([[-math.inf, -math.inf, 0.0, 0.0]]), torch.ones(1), torch.zeros(1, dtype=torch.float64)
    )
    assert ids.tolist() == [2]
    assert logprobs.item() == pytest.approx(-math.log(2))


def test_temperature_zero_takes_the_largest_logit_with_log_prob_zero() -> None:
    model = gpt2()
    completion = TorchEngine({"main": policy_of(model, end_ids=())}).generate(
        [request([9, 8, 7], temperature=0.0, max_tokens=6)]
    )[0][0]
    ids = [9, 8, 7]
    for _ in range(6):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert completion.ids == tuple(ids[3:])
    assert completion.logprobs == (0.0,) * 6


def test_greedy_and_sampled_acts_share_a_batch() -> None:
    engine = TorchEngine({"main": policy_of(gpt2(), end_ids=())})
    greedy, drawn = request([9, 8], temperature=0.0), request([9, 8, 3], task="other")
    together = engine.generate([greedy, drawn])
    assert [together[0][0].ids, together[1][0].ids] == [
        engine.generate([greedy])[0][0].ids,
        engine.generate([drawn])[0][0].ids,
    ]


def test_the_key_of_a_candidate_holds_everything_that_tells_draws_apart() -> None:
    base = request([1], seed=1, task="a", index=0, act=0)
    others = [
        request([1], seed=2, task="a"),
        request([1], seed=1, task="b"),
        request([1], seed=1, task="a", index=1),
        request([1], seed=1, task="a", act=1),
    ]
    keys = [candidate_key(base, 0), candidate_key(base, 1), *[candidate_key(other, 0) for other in others]]
    assert len(set(keys)) == 6
    assert candidate_key(request([1, 2, 3], seed=1, task="a", policy="p", version=9), 0) == keys[0]


def test_the_first_token_is_the_inverse_cdf_at_the_keyed_uniform() -> None:
    asked = request([3], max_tokens=1, candidates=4)
    model = gpt2()
    completions = TorchEngine({"main": policy_of(model, end_ids=())}).generate([asked])[0]
    cdf = torch.softmax(model(torch.tensor([[3]])).logits[0, -1].double(), -1).cumsum(0).detach().numpy()
    keys = np.array([candidate_key(asked, k) for k in range(4)], dtype=np.uint64)
    expected = np.searchsorted(cdf, uniforms(keys, np.array([0], dtype=np.uint64)), side="right")
    assert [completion.ids[0] for completion in completions] == expected.tolist()


# ---- where completions end --------------------------------------------------------------------------------------


def chain_model(texts: str) -> PreTrainedModel:
    """Return a model that writes these characters one after the other (all distinct), then the end token 1."""
    ids = [*RENDERER.text_ids(texts), 1]
    table = torch.zeros(VOCAB, VOCAB)
    for before, after in itertools.pairwise(ids):
        table[before, after] = 80.0
    return bigram(table)


def written(
    text: str, *, stop: tuple[str, ...] = (), max_tokens: int = 20, end_ids: tuple[int, ...] = (1,)
) -> Completion:
    policy = policy_of(chain_model(text), end_ids=end_ids)
    first = RENDERER.text_ids(text[0])
    return TorchEngine({"main": policy}).generate([request(first, stop=stop, max_tokens=max_tokens)])[0][0]


def test_a_stop_string_over_several_tokens_trims_the_text_and_keeps_every_sampled_id() -> None:
    """TOK-09: ids and log-probs stay equal in number, the last id is the one sampled last, the text is trimmed."""
    completion = written("-abc</ok>xyz", stop=("</ok>",))
    assert completion.stop_reason is StopReason.STOP
    assert completion.text == "abc"
    assert RENDERER.decode(completion.ids) == "abc</ok>"
    assert len(completion.ids) == len(completion.logprobs) == 8


def test_the_earliest_of_several_stop_strings_counts() -> None:
    completion = written("-abcdefg", stop=("ef", "cd"))
    assert (completion.text, len(completion.ids)) == ("ab", 4)


def test_a_stop_string_that_ends_inside_a_token_is_found() -> None:
    """TOK-09: the second token completes the stop string and goes on; the search is over text, not over tokens."""

    class Pieces:
        def decode(self, ids: list[int]) -> str:
            return "".join({10: "x</ans", 11: "wer> tail", 12: "y"}[i] for i in ids)

    table = torch.full((16, 16), -30.0)
    table[3, 10] = table[10, 11] = table[11, 12] = 80.0
    policy = policy_of(bigram(table))
    policy.renderer = Pieces()  # type: ignore[assignment]
    completion = TorchEngine({"main": policy}).generate([request([3], stop=("</answer>",))])[0][0]
    assert (completion.ids, completion.text, completion.stop_reason) == ((10, 11), "x", StopReason.STOP)


@pytest.mark.parametrize("end", [2, 11])
def test_any_of_several_end_ids_ends_and_is_kept(end: int) -> None:
    """TOK-09: end ids [2, 11]."""
    table = torch.full((16, 16), -30.0)
    table[5, 6] = table[6, end] = 80.0
    policy = policy_of(bigram(table), end_ids=(2, 11))
    completion = TorchEngine({"main": policy}).generate([request([5])])[0][0]
    assert (completion.ids, completion.stop_reason) == ((6, end), StopReason.END)
    assert len(completion.logprobs) == 2


def test_an_answer_of_only_the_end_token_has_one_id_and_no_text() -> None:
    """TOK-10."""
    table = torch.full((16, 16), -30.0)
    table[5, 1] = 80.0
    completion = TorchEngine({"main": policy_of(bigram(table))}).generate([request([5])])[0][0]
    assert (completion.ids, completion.text, completion.stop_reason) == ((1,), "", StopReason.END)


def test_max_tokens_ends_with_the_reason_length_and_an_end_token_in_time_wins() -> None:
    """TOK-03: an answer cut by length keeps exactly its ids."""
    cut, whole = written("-abcdefg", max_tokens=3), written("-abc", max_tokens=4)
    assert (RENDERER.decode(cut.ids), cut.stop_reason) == ("abc", StopReason.LENGTH)
    assert (whole.ids[-1], len(whole.ids), whole.stop_reason) == (1, 4, StopReason.END)


def test_single_letters_of_a_word_stay_the_ids_that_were_sampled() -> None:
    """TOK-01: the letters h, e, l, o (once each) are four ids, never re-encoded."""
    completion = written("-helo")
    assert completion.ids == (*RENDERER.text_ids("helo"), 1)
    assert completion.text == "helo"


# ---- versions, modes, refusals ----------------------------------------------------------------------------------


def test_another_version_and_an_unknown_policy_are_refused_before_anything_is_drawn() -> None:
    policy = policy_of(gpt2())
    engine = TorchEngine({"main": policy})
    policy.version = 4
    assert engine.version("main") == 4
    with pytest.raises(EngineError, match=r"asks policy 'main' at version 3; the engine has version 4"):
        engine.generate([request([1], version=3)])
    with pytest.raises(EngineError, match=r"no policy 'other'; this engine has \['main'\]"):
        engine.generate([request([1], policy="other", version=4)])


def test_policies_in_one_batch_answer_with_their_own_weights() -> None:
    """TEAM-04: A says 7 and B says 9, whatever the order."""
    models = {}
    for name, token in (("a", 7), ("b", 9)):
        table = torch.zeros(16, 16)
        table[:, token] = 50.0
        models[name] = policy_of(bigram(table), name=name)
    engine = TorchEngine(models)
    requests = [request([3 + i], policy="ab"[i % 2], max_tokens=2, task=f"t{i}") for i in range(6)]
    assert [row[0].ids for row in engine.generate(requests)] == [(7, 7), (9, 9)] * 3


def test_train_mode_dropout_and_gradient_checkpointing_change_nothing_and_are_restored() -> None:
    """LOGP-03 and LOGP-10."""
    model = gpt2()
    engine = TorchEngine({"main": policy_of(model, end_ids=())})
    asked = [request([5, 6], max_tokens=16, temperature=0.0), request([7], max_tokens=16, task="drawn")]
    expected = engine.generate(asked)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model.train()
    assert engine.generate(asked) == expected
    assert model.training
    model.activation_checkpointing_enable()
    assert engine.generate(asked) == expected
    assert model.training
    assert model.is_activation_checkpointing
    assert model.config.use_cache is not False


def test_results_come_in_the_order_of_the_requests_and_of_their_candidates() -> None:
    table = torch.full((16, 16), -30.0)
    for token in range(16):
        table[token, token] = 80.0
    engine = TorchEngine({"main": policy_of(bigram(table), end_ids=())})
    requests = [request([9] * (6 - i) + [i + 2], candidates=2, max_tokens=1, task=f"t{i}") for i in range(6)]
    assert [[c.ids for c in row] for row in engine.generate(requests)] == [[(i + 2,)] * 2 for i in range(6)]
    assert engine.generate([]) == []


# ---- adapters beside one model ----------------------------------------------------------------------------------


def say(policy: Policy, token: int) -> None:
    """Set an adapter of rank 1 beside c_proj so that it writes the token, 100 times as large as what is there."""
    assert policy.adapter is not None
    a, b = policy.adapter.weights().values()
    with torch.no_grad():
        a.fill_(1.0)
        b.zero_()
        b[token] = 100.0


def switches() -> dict[str, Policy]:
    return lora_team(switch(), "a", "b", lora=LoraTable(rank=1, target_modules=("mlp.c_proj",)))


def first_tokens(engine: TorchEngine, *names: str) -> list[set[int]]:
    asked = [request([3], policy=name, candidates=16, max_tokens=1, task=name) for name in names]
    return [{completion.ids[0] for completion in row} for row in engine.generate(asked)]


def test_each_role_draws_with_its_own_adapter_before_and_after_a_change() -> None:
    """TEAM-04: A says 7, B says 9, the base neither, in one batch and alone; a changed adapter is used at once."""
    team = switches()
    engine = TorchEngine(team)
    assert all(len(tokens) > 5 for tokens in first_tokens(engine, "a", "b", "base")), "fresh adapters say nothing"
    say(team["a"], 7)
    say(team["b"], 9)
    for _ in range(2):
        a, b, base, again = first_tokens(engine, "a", "b", "base", "a")
        assert (a, b, again) == ({7}, {9}, {7})
        assert len(base) > 5
        assert [first_tokens(engine, name)[0] for name in ("a", "b")] == [{7}, {9}]
        assert first_tokens(engine, "base")[0] == base
    say(team["a"], 9)
    say(team["b"], 7)
    assert first_tokens(engine, "a", "b") == [{9}, {7}]


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_mixed_batch_gives_what_each_adapter_gives_alone_in_one_pass(make: Callable[[], PreTrainedModel]) -> None:
    """Log-probs to 1e-5, over prompts of several lengths, several candidates, and rows that end early."""
    team = lora_team(make(), "a", "b")
    stirred(team["a"], 1)
    stirred(team["b"], 2)
    engine = TorchEngine(team)
    names = ["a", "base", "b", "a", "b", "base"]
    asked = [
        request([5 + i] * (1 + 2 * i), policy=name, candidates=1 + i % 3, max_tokens=2 + 2 * i, task=f"t{i}")
        for i, name in enumerate(names)
    ]
    passes: list[int] = []
    hook = team["a"].model.register_forward_hook(lambda *_: passes.append(1))
    mixed = engine.generate(asked)
    hook.remove()
    assert len(passes) == 12, "one pass over the prompts of all, then one per further token of the longest"
    for one, row in zip(asked, mixed, strict=True):
        [alone] = engine.generate([one])
        assert [c.ids for c in row] == [c.ids for c in alone]
        for left, right in zip(row, alone, strict=True):
            assert list(left.logprobs) == pytest.approx(list(right.logprobs), abs=1e-5)
            item = sample(one.prompt_ids, left.ids)
            with team[one.policy].alone():
                expected = plain_logprobs(team[one.policy].model, item).tolist()
            assert list(left.logprobs) == pytest.approx(expected, abs=1e-5)
    assert len({row[0].logprobs[:2] for row in mixed}) == 6


@pytest.mark.parametrize("make", [gpt2, llama])
def test_every_tensor_of_an_adapter_reaches_the_engine(make: Callable[[], PreTrainedModel]) -> None:
    """SYNC-03: change one tensor at a time; tensors without effect: none."""
    team = lora_team(make(), "a", "b")
    stirred(team["a"])
    engine = TorchEngine(team)
    asked = [request([5, 6], policy=name, max_tokens=3) for name in ("a", "b", "base")]
    before = engine.generate(asked)
    idle = []
    for name, weight in team["a"].weights().items():
        saved = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(-2.0)
        after = engine.generate(asked)
        if after[0][0].logprobs == before[0][0].logprobs:
            idle.append(name)
        assert after[1:] == before[1:], "the others draw as before"
        with torch.no_grad():
            weight.copy_(saved)
    assert idle == []


def test_end_ids_and_texts_are_those_of_each_rows_own_policy() -> None:
    team = switches()
    say(team["a"], 7)
    say(team["b"], 7)
    team["a"].end_ids = frozenset({7})
    done = TorchEngine(team).generate([request([3], policy=name, max_tokens=3) for name in ("a", "b")])
    assert [row[0].ids for row in done] == [(7,), (7, 7, 7)]
    assert [row[0].stop_reason for row in done] == [StopReason.END, StopReason.LENGTH]


def test_a_hook_that_fails_fails_the_batch_and_leaves_nothing_behind() -> None:
    """TEAM-04: an adapter that cannot be used is an error, never an answer of the base."""
    team = switches()
    say(team["a"], 7)
    engine = TorchEngine(team)
    asked = [request([3], policy=name, max_tokens=1, temperature=0.0) for name in ("a", "base")]
    expected = engine.generate(asked)
    handle = team["a"].model.transformer.h[0].mlp.c_proj.register_forward_hook(_fail)
    with pytest.raises(RuntimeError, match="broken"):
        engine.generate(asked)
    handle.remove()
    assert engine.generate(asked) == expected


def _fail(*_: object) -> None:
    raise RuntimeError("broken")
