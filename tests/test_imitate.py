"""The warm start: policies learn the experts' answers, end token included, by a loss over completions only."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.batch import sample_of
from coterie.errors import ConfigError, TrainError
from coterie.imitate import acts_of, demonstrations, draw_acts, expert_draw, imitate, warm_start
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.models.loading import save
from coterie.models.policy import Policy
from coterie.run_tables import ImitateTable
from coterie.types import Sample
from learning_toys import PER_ROLE, RENDERER, plain_logprobs, policy_of, request, sample, toy_recipe

IMITATE = (
    "imitate.steps=30",
    "imitate.episodes=6",
    "imitate.batch_acts=8",
    "imitate.lr=0.01",
    "imitate.noise=[0.0, 0.0]",
)


def nothing(*_: Any) -> None:
    """Take anything, do nothing."""


def lineup_of(*settings: str) -> Lineup:
    return assemble(check_env_fits(toy_recipe(*IMITATE, *settings)))


def table_of(lineup: Lineup) -> Any:
    assert lineup.recipe.imitate is not None
    return lineup.recipe.imitate


def weights_of(lineup: Lineup, name: str) -> list[torch.Tensor]:
    return [weight.detach().clone() for weight in lineup.policies[name].model.parameters()]


def test_demonstrations_are_the_experts_texts_with_the_end_token() -> None:
    lineup = lineup_of()
    episodes = demonstrations(lineup, table_of(lineup), nothing, nothing)
    turns = [turn for episode in episodes for turn in episode.turns]
    assert len(turns) == 6 * 4 * 4
    assert {turn.completion_ids for turn in turns} == {(*RENDERER.text_ids("q"), RENDERER.end_id)}
    assert {turn.text for turn in turns} == {"q"}
    assert {turn.episode.purpose for turn in turns} == {"imitate"}


def test_demonstrations_are_the_same_at_every_call_and_differ_between_candidates_and_seeds() -> None:
    lineup = lineup_of("imitate.noise=[1.0, 1.0]")
    first, second = ([t.text for e in demonstrations(lineup, table_of(lineup), nothing, nothing) for t in e.turns]
                     for _ in range(2))  # fmt: skip
    assert first == second
    assert set(first) == {"x", "y", "z"}
    other = lineup_of("imitate.noise=[1.0, 1.0]", "seed=1")
    assert [t.text for e in demonstrations(other, table_of(other), nothing, nothing) for t in e.turns] != first


def test_acts_hold_the_answers_to_one_prompt_of_the_asked_policies_only() -> None:
    lineup = lineup_of(*PER_ROLE)
    episodes = demonstrations(lineup, table_of(lineup), nothing, nothing)
    acts = acts_of(episodes, ["other"])
    assert [len(act) for act in acts] == [4] * (6 * 2)
    assert {sample.role for act in acts for sample in act} == {"second"}
    assert all(len({sample.prompt_ids for sample in act}) == 1 for act in acts)


def test_a_warm_start_makes_the_experts_answer_likely_and_reports_the_loss() -> None:
    lineup = lineup_of()
    seen: list[tuple[str, int, int, float]] = []
    losses = warm_start(lineup, nothing, nothing, lambda *row: seen.append(row))
    assert [row[:3] for row in seen] == [("main", step + 1, 30) for step in range(30)]
    assert seen[0][3] > math.log(102), "less is known at first than any of 102 characters"
    assert losses == {"main": pytest.approx(sum(row[3] for row in seen[-3:]) / 3)}
    assert losses["main"] < 1.0
    assert lineup.policies["main"].version == 0


def test_the_loss_is_the_mean_over_completion_tokens() -> None:
    """A first loss, by hand: -mean log P over the tokens of the drawn acts, prompts excluded."""
    lineup = lineup_of("imitate.steps=1", "imitate.batch_acts=12")
    policy = lineup.policies["main"]
    acts = [[sample([5, 6], [7, 1]), sample([5, 6], [8, 9, 1])], [sample([4], [1])]] * 15
    drawn = [acts[index] for index in draw_acts(table_of(lineup), 0, 30, 0)]
    assert {len(act) for act in drawn} == {1, 2}
    items: list[Sample] = [item for act in drawn for item in act]
    num_tokens = sum(5 if len(act) == 2 else 1 for act in drawn)
    expected = -sum(plain_logprobs(policy.model, item).sum().item() for item in items) / num_tokens
    loss = imitate(policy, table_of(lineup), acts, 0, lineup.recipe.train, nothing)
    assert loss == pytest.approx(expected, abs=1e-5)


def test_policies_of_one_model_learn_once_and_start_equal() -> None:
    lineup = lineup_of(*PER_ROLE)
    started: list[str] = []
    losses = warm_start(lineup, nothing, nothing, lambda name, *_: started.append(name))
    assert set(started) == {"main"}
    assert losses["main"] == losses["other"]
    assert all(torch.equal(a, b) for a, b in zip(weights_of(lineup, "main"), weights_of(lineup, "other"), strict=True))
    same = {id(weight) for weight in lineup.policies["main"].model.parameters()}
    assert not same & {id(weight) for weight in lineup.policies["other"].model.parameters()}


@pytest.mark.parametrize("template", [None, "plain"])
def test_models_learn_all_roles_that_are_rendered_alike_and_else_their_own(
    template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: dict[str, set[str]] = {}

    def noted(policy: Policy, table: ImitateTable, acts: Sequence[Sequence[Sample]], *_: object) -> float:
        learned[policy.name] = {sample.role for act in acts for sample in act}
        return 0.5

    monkeypatch.setattr("coterie.imitate.imitate", noted)
    other = ["policies.other.model=tiny:width=8,layers=1,heads=2,positions=32"]
    lineup = lineup_of(*PER_ROLE, *other, *([] if template is None else [f"policies.other.template={template}"]))
    assert warm_start(lineup, nothing, nothing, nothing) == {"main": 0.5, "other": 0.5}
    both = {"first", "second"}
    own = {"main": {"first"}, "other": {"second"}}
    assert learned == ({"main": both, "other": both} if template is None else own)


def test_a_frozen_policy_is_left_as_it_is() -> None:
    lineup = lineup_of(*PER_ROLE, "policies.other.train=frozen")
    before = weights_of(lineup, "other")
    assert set(warm_start(lineup, nothing, nothing, nothing)) == {"main"}
    assert all(torch.equal(a, b) for a, b in zip(before, weights_of(lineup, "other"), strict=True))


def test_bfloat16_policies_learn_in_float32_and_stay_bfloat16() -> None:
    """OPT-01: at lr 1e-4, norm weights of 1.0 would never move in bfloat16; as it is, 60 steps of 1e-4 show."""
    settings = ("policies.main.dtype=bfloat16", "imitate.steps=60", "imitate.lr=2e-4", "imitate.warmup_steps=0")
    lineup = lineup_of(*settings)
    warm_start(lineup, nothing, nothing, nothing)
    model = lineup.policies["main"].model
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert float((model.transformer.ln_f.weight.detach().float() - 1.0).abs().max()) >= 0.0039


def test_a_loss_that_is_not_finite_stops_the_warm_start() -> None:
    lineup = lineup_of()
    weight = next(lineup.policies["main"].model.parameters())
    weight.register_hook(lambda gradient: gradient * math.nan)
    with pytest.raises(TrainError, match=r"warm start of policy 'main', step 1: loss 6.*gradient norm nan"):
        warm_start(lineup, nothing, nothing, nothing)


def test_it_can_be_interrupted_between_any_two_steps() -> None:
    calls = iter([None] * 5)

    def stop() -> None:
        if next(calls, True):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_start(lineup_of(), nothing, stop, nothing)


def test_a_role_without_an_expert_and_a_policy_without_demonstrations_are_errors() -> None:
    draw: Callable[..., object] = expert_draw({"main": policy_of(torch.nn.Module())}, lambda task_id, candidate: 0.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="role 'role': the env gives no expert for it"):
        draw(request([1]), None)
    lineup = lineup_of()
    with pytest.raises(TrainError, match="policy 'main': no demonstrations for its roles"):
        imitate(lineup.policies["main"], table_of(lineup), [], 0, lineup.recipe.train, nothing)


def test_a_demonstration_longer_than_the_context_is_refused_before_a_model_sees_it() -> None:
    lineup = lineup_of()
    length = max(
        len(turn.prompt_ids) + len(turn.completion_ids)
        for episode in demonstrations(lineup, table_of(lineup), nothing, nothing)
        for turn in episode.turns
    )
    fits = lineup_of(f"policies.main.context={length}")
    assert len(demonstrations(fits, table_of(fits), nothing, nothing)) == 6
    short = lineup_of(f"policies.main.context={length - 1}")
    message = f"a demonstration for role '.*' has {length} tokens.* context of policy 'main' is {length - 1};"
    with pytest.raises(TrainError, match=message):
        warm_start(short, nothing, nothing, nothing)


def test_without_a_table_there_is_no_warm_start() -> None:
    lineup = assemble(check_env_fits(toy_recipe()))
    with pytest.raises(ConfigError, match=r"the recipe has no \[imitate\] table"):
        warm_start(lineup, nothing, nothing, nothing)


def test_two_warm_starts_give_equal_bits() -> None:
    weights = []
    for _ in range(2):
        lineup = lineup_of("imitate.noise=[0.5, 0.5]")
        warm_start(lineup, nothing, nothing, nothing)
        weights.append(weights_of(lineup, "main"))
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_a_demonstration_becomes_a_sample_of_its_ids() -> None:
    lineup = lineup_of()
    [turn, *_] = demonstrations(lineup, table_of(lineup), nothing, nothing)[0].turns
    item = sample_of(turn, 1.0)
    assert item.completion_ids == turn.completion_ids
    assert item.sampler_logprobs == (0.0, 0.0)


def test_noise_rises_from_the_first_demonstration_to_the_last_and_batches_follow_it() -> None:
    lineup = lineup_of("imitate.episodes=60", "imitate.noise=[0.0, 1.0]")
    episodes = demonstrations(lineup, table_of(lineup), nothing, nothing)
    right = [sum(turn.text == "q" for turn in episode.turns) for episode in episodes]
    assert right[0] == len(episodes[0].turns)
    assert right[-1] == 0
    assert sum(right[:20]) > sum(right[20:40]) > sum(right[40:])
    table = table_of(lineup)
    drawn = [draw_acts(table, step, 1000, 0) for step in (0, table.steps // 2, table.steps - 1)]
    assert all(len(batch) == table.batch_acts for batch in drawn)
    assert max(drawn[0]) < 200 <= min(drawn[1])
    assert max(drawn[1]) < 800 <= min(drawn[2])
    assert max(drawn[2]) < 1000
    assert draw_acts(table, 3, 1, 0) == [0] * table.batch_acts


# ---- adapters ---------------------------------------------------------------------------------------------------

LORA = (*PER_ROLE, "policies.main.train=lora", "policies.other.train=lora")


def logits_of(lineup: Lineup, name: str) -> torch.Tensor:
    policy = lineup.policies[name]
    with torch.no_grad(), policy.alone():
        return policy.model(input_ids=torch.tensor([[3, 4, 5]]), use_cache=False).logits  # type: ignore[no-any-return]


def test_adapters_on_one_model_start_from_one_warm_start_of_the_whole_model() -> None:
    """It is what a policy of its own that plays both roles would learn; the adapters still change nothing."""
    lineup, shared = lineup_of(*LORA), lineup_of()
    started: list[str] = []
    losses = warm_start(lineup, nothing, nothing, lambda name, *_: started.append(name))
    expected = warm_start(shared, nothing, nothing, nothing)
    assert set(started) == {"main"}
    assert losses == {"main": expected["main"], "other": expected["main"]}
    model = lineup.policies["main"].model_weights()
    assert all(torch.equal(model[name], weight) for name, weight in shared.policies["main"].model.named_parameters())
    assert torch.equal(logits_of(lineup, "main"), logits_of(lineup, "other"))
    assert torch.equal(logits_of(lineup, "main"), logits_of(shared, "main"))
    assert not any(weight.requires_grad for weight in lineup.policies["main"].model.parameters())


@pytest.mark.parametrize("first", ["main", "other"])
def test_a_whole_model_and_an_adapter_of_the_same_origin_start_equal(first: str) -> None:
    lineup = lineup_of(*PER_ROLE, f"policies.{first}.train=lora")
    losses = warm_start(lineup, nothing, nothing, nothing)
    assert losses["main"] == losses["other"]
    assert torch.equal(logits_of(lineup, "main"), logits_of(lineup, "other"))
    assert lineup.policies["main"].model is not lineup.policies["other"].model


def test_adapters_on_one_model_learn_together_also_where_they_render_differently() -> None:
    lineup = lineup_of(*LORA, "policies.other.template=plain")
    started: list[str] = []
    assert set(warm_start(lineup, nothing, nothing, lambda name, *_: started.append(name))) == {"main", "other"}
    assert started == ["main"] * 30


def test_a_warm_model_with_adapters_is_written_as_a_plain_one(tmp_path: Path) -> None:
    lineup = lineup_of(*LORA)
    warm_start(lineup, nothing, nothing, nothing)
    save(lineup.loaded["main"], tmp_path, weights=lineup.policies["main"].model_weights())
    again = assemble(check_env_fits(toy_recipe(f"policies.main.model={tmp_path}")))
    assert torch.equal(logits_of(again, "main"), logits_of(lineup, "main"))


def test_a_bfloat16_model_with_adapters_learns_in_float32() -> None:
    lineup = lineup_of(*LORA, "policies.main.dtype=bfloat16", "policies.other.dtype=bfloat16")
    losses = warm_start(lineup, nothing, nothing, nothing)
    assert losses["main"] < 1.5
    dtypes = {weight.dtype for weight in lineup.policies["main"].model_weights().values()}
    assert dtypes == {torch.bfloat16}
    assert {weight.dtype for weight in lineup.policies["main"].weights().values()} == {torch.float32}


def test_half_of_what_is_played_is_noisier_than_what_is_imitated() -> None:
    lineup = lineup_of("imitate.episodes=200", "imitate.noise=[0.0, 1.0]")
    first = demonstrations(lineup, table_of(lineup), nothing, nothing)[:4]
    acts: dict[str, list[bool]] = {}
    for turn in (turn for episode in first for turn in episode.turns):
        assert turn.text == "q", "at the beginning only clean answers are imitated"
        acts.setdefault(turn.peers, []).append(turn.played)
    assert {len(played) for played in acts.values()} == {4}
    shown = sum(any(played) for played in acts.values())
    assert 0 < shown < len(acts), "some acts go on from an answer that is not imitated, some from one that is"
