"""Prompts that go on from known beginnings give the numbers of whole prompts, for every family, and never old ones."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import learning_toys
from coterie.engines import Completion, Request
from coterie.engines.torch import TorchEngine
from coterie.models.policy import Policy
from learning_toys import VOCAB, lora_team, plain_logprobs, policy_of, request, sample, stirred

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def spread(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Return a model whose weights are one and a half times as large as usual, so that outputs differ clearly."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        model = make().float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
    return model


def gpt2() -> PreTrainedModel:
    return learning_toys.gpt2(spread=1.5)


def llama() -> PreTrainedModel:
    return learning_toys.llama(spread=1.5)


def qwen2() -> PreTrainedModel:
    return spread(lambda: Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in _SIZES.items() if k != "head_dim"})))


def qwen3() -> PreTrainedModel:
    return spread(lambda: Qwen3ForCausalLM(Qwen3Config(**_SIZES)))


def gemma3() -> PreTrainedModel:
    return spread(lambda: Gemma3ForCausalLM(Gemma3TextConfig(**_SIZES, sliding_window=64)))


FAMILIES = pytest.mark.parametrize("make", [gpt2, llama, qwen2, qwen3])


@contextlib.contextmanager
def prompt_passes(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Give the (rows, columns) of the passes over prompts; those over new tokens ask for all logits."""
    passes: list[tuple[int, int]] = []

    def note(module: torch.nn.Module, args: object, options: Mapping[str, object]) -> None:
        ids = options["input_ids"]
        if "logits_to_keep" in options and isinstance(ids, torch.Tensor):
            passes.append((ids.shape[0], ids.shape[1]))

    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    yield passes
    hook.remove()


def three_acts(names: Sequence[str], temperature: float) -> list[list[Request]]:
    """Return batches of 24: prompts with 30 tokens in common, those prompts continued, and a mixture.

    The mixture: equal to an earlier prompt, leaving an earlier one early, and new ones of other lengths.
    """
    rng = random.Random(5)

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, VOCAB) for _ in range(count)]

    system = ids(30)
    first = [system + ids(10) for _ in range(24)]
    second = [prompt + ids(rng.randint(1, 6)) for prompt in first]
    third = [*second[:14], *[prompt[:20] + ids(22) for prompt in second[14:20]], *[ids(3 + 10 * i) for i in range(4)]]
    return [
        [
            request(
                prompt,
                policy=names[i % len(names)],
                candidates=1 + i % 2,
                max_tokens=6,
                temperature=temperature,
                task=f"t{i}",
                act=act,
            )
            for i, prompt in enumerate(prompts)
        ]
        for act, prompts in enumerate((first, second, third))
    ]


def tokens(passes: Sequence[tuple[int, int]]) -> int:
    return sum(rows * columns for rows, columns in passes)


Play = list[list[tuple[Completion, ...]]]


def played(engine: TorchEngine, acts: Sequence[Sequence[Request]]) -> Play:
    remembering = engine.remembering()
    return [remembering.generate(batch) for batch in acts]


def compare(reused: Play, engine: TorchEngine, acts: Sequence[Sequence[Request]]) -> None:
    """Compare with each request alone, which is a whole prompt in one pass."""
    for batch, results in zip(acts, reused, strict=True):
        for asked, completions in zip(batch, results, strict=True):
            [alone] = engine.generate([asked])
            assert [c.ids for c in completions] == [c.ids for c in alone]
            for left, right in zip(completions, alone, strict=True):
                assert left.logprobs == pytest.approx(right.logprobs, abs=1e-5)


@FAMILIES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reuse_gives_the_numbers_of_whole_prompts(make: Callable[[], PreTrainedModel], temperature: float) -> None:
    """Log-probs to 1e-5, the same greedy text; the passes over prompts are those that the rules say."""
    model = make()
    engine = TorchEngine({"main": policy_of(model, end_ids=())})
    acts = three_acts(["main"], temperature)
    with prompt_passes(model) as passes:
        reused = played(engine, acts)
    assert passes[:3] == [(1, 30), (24, 10), (24, 6)], "30 tokens once, then 10 each; then at most 6 new ones"
    assert passes[3][0] < 24
    assert passes[4][0] == 24
    assert tokens(passes[3:]) < 24 * 46 * 0.75
    compare(reused, engine, acts)
    for asked, completions in zip(acts[2], reused[2], strict=True):
        expected = plain_logprobs(model, sample(asked.prompt_ids, completions[0].ids)).detach().tolist()
        assert temperature == 0.0 or list(completions[0].logprobs) == pytest.approx(expected, abs=1e-5)


@FAMILIES
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adapters_share_beginnings_only_with_themselves(
    make: Callable[[], PreTrainedModel], temperature: float
) -> None:
    """Three policies beside one model get the same 30 tokens; the first pass computes them for each.

    Then each gets the whole prompts that another one had: what that one computed must not be used.
    """
    team = lora_team(make(), "a", "b")
    stirred(team["a"], 1)
    stirred(team["b"], 2)
    engine = TorchEngine(team)
    acts = [*three_acts(["a", "b", "base"], temperature), *three_acts(["b", "base", "a"], temperature)[1:]]
    with prompt_passes(team["a"].model) as passes:
        reused = played(engine, acts)
    assert passes[:3] == [(3, 30), (24, 10), (24, 6)]
    compare(reused, engine, acts)


def test_a_model_with_a_sliding_window_computes_whole_prompts_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = gemma3()
    engine = TorchEngine({"main": policy_of(model, end_ids=())})
    acts = three_acts(["main"], 1.0)
    with prompt_passes(model) as passes, caplog.at_level(logging.INFO, logger="coterie.engines.torch"):
        reused = played(engine, acts)
    assert passes == [(24, 40), (24, 46), (24, 46)]
    compare(reused, engine, acts)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("Gemma3ForCausalLM: prompts that begin alike are each computed whole")


def test_a_model_that_takes_no_positions_computes_whole_prompts() -> None:
    """Without given positions the model counts columns, padding included."""
    model = gpt2()
    plain = model.forward

    def forward(input_ids: torch.Tensor, **options: object) -> object:
        return plain(input_ids, **options)

    model.forward = forward
    engine = TorchEngine({"main": policy_of(model, end_ids=())})
    with prompt_passes(model) as passes:
        played(engine, three_acts(["main"], 1.0))
    assert passes == [(24, 40), (24, 46), (24, 46)]


# ---- never old, never different -----------------------------------------------------------------------------------


def team_of(make: Callable[[], PreTrainedModel], lora: bool) -> dict[str, Policy]:
    if not lora:
        return {"a": policy_of(make(), name="a", end_ids=())}
    team = lora_team(make(), "a", "b")
    stirred(team["a"], 1)
    return team


@pytest.mark.parametrize("lora", [False, True])
def test_after_an_update_the_engine_never_serves_old_states(lora: bool) -> None:
    """Weights changed and version raised in the middle of a rollout: the bits of an engine that is new."""
    team = team_of(llama, lora)
    engine = TorchEngine(team)
    acts = three_acts(["a"], 1.0)
    remembering = engine.remembering()
    before = [remembering.generate(batch) for batch in acts]
    again = remembering.generate(acts[1])
    with torch.no_grad():
        for weight in team["a"].weights().values():
            weight.mul_(1.1)
    team["a"].version = 1
    raised = [[request_at(asked, 1) for asked in batch] for batch in acts]
    after = [remembering.generate(batch) for batch in raised]
    assert [row[0].ids for row in again] == [row[0].ids for row in before[1]]
    assert after == played(TorchEngine(team), raised)
    assert all(old[0].logprobs != new[0].logprobs for old, new in zip(before[1], after[1], strict=True))


def request_at(asked: Request, version: int) -> Request:
    """Return a request for another version of its policy."""
    return request(
        asked.prompt_ids,
        policy=asked.policy,
        version=version,
        candidates=len(asked.candidates),
        max_tokens=asked.sampling.max_tokens,
        task=asked.episode.task_id,
        act=asked.act,
    )


def test_an_update_of_any_policy_frees_what_was_kept() -> None:
    team = team_of(gpt2, True)
    engine = TorchEngine(team).remembering()
    engine.generate(three_acts(["a"], 1.0)[0])
    kept = engine._prefixes()
    assert kept.num_tokens == 1 * 30 + 24 * 40
    assert engine._prefixes() is kept
    team["b"].version += 1
    assert engine._prefixes().num_tokens == 0


def test_a_rollout_draws_the_same_bits_whatever_came_before_it_or_runs_beside_it() -> None:
    """A run that goes on from a checkpoint has an engine that knows nothing of earlier rollouts."""
    model = llama()
    engine = TorchEngine({"main": policy_of(model)})
    acts = three_acts(["main"], 1.0)
    engine.generate(acts[2])
    expected = played(engine, acts)
    one, other = engine.remembering(), engine.remembering()
    one.generate(acts[1])
    assert [(other.generate(batch), one.generate(batch))[0] for batch in acts] == expected
    assert played(TorchEngine({"main": policy_of(model)}), acts) == expected


def test_outside_of_a_rollout_changed_weights_are_used_at_once_even_at_the_same_version() -> None:
    policy = policy_of(gpt2(), end_ids=())
    engine = TorchEngine({"main": policy})
    batch = three_acts(["main"], 1.0)[0]
    played(engine, [batch])
    before = engine.generate(batch)
    with torch.no_grad():
        for weight in policy.weights().values():
            weight.mul_(1.1)
    after = engine.generate(batch)
    assert after == TorchEngine({"main": policy}).generate(batch)
    assert after[0][0].logprobs != before[0][0].logprobs


def test_forgetting_in_the_middle_changes_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit so small that beginnings computed first are dropped before they are used."""
    monkeypatch.setattr("coterie.engines.prefix.PrefixCache.__init__.__defaults__", (20,))
    engine = TorchEngine({"main": policy_of(llama(), end_ids=())})
    acts = three_acts(["main"], 1.0)
    reused = played(engine, acts)
    compare(reused, engine, acts)


@pytest.mark.parametrize("lora", [False, True])
def test_linear_layers_are_given_whole_tensors_never_slices(lora: bool) -> None:
    """Torch multiplies a slice with a weight that asks for no gradient by copying the weight for every row."""
    team = team_of(llama, lora)
    model, slices, calls = team["a"].model, [], []

    def look(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        calls.append(type(module).__name__)
        slices.extend(tuple(x.shape) for x in args if not x.is_contiguous())

    hooks = [
        module.register_forward_pre_hook(look) for module in model.modules() if isinstance(module, torch.nn.Linear)
    ]
    engine = TorchEngine(team).remembering()
    for batch in three_acts(["a"], 1.0):
        engine.generate(batch)
    for hook in hooks:
        hook.remove()
    assert len(calls) > 100
    assert slices == []
