"""A recipe made real: who shares a model with whom, who is trained when, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2LMHeadModel, PreTrainedModel

from coterie import lineup, policy_tables
from coterie.errors import ConfigError
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.policy_tables import PolicyTable
from learning_toys import MIX, TINY, WARM, toy_recipe


def lineup_of(*settings: str) -> Lineup:
    return assemble(check_env_fits(toy_recipe(*settings)))


def models_of(lineup: Lineup) -> dict[str, PreTrainedModel]:
    return {name: policy.model for name, policy in lineup.policies.items()}


def groups(lineup: Lineup) -> list[set[str]]:
    """Return which policies have one and the same model in memory."""
    found: dict[int, set[str]] = {}
    for name, model in models_of(lineup).items():
        found.setdefault(id(model), set()).add(name)
    return sorted(found.values(), key=sorted)


def storage(lineup: Lineup) -> int:
    """Return the bytes of all parameters of all policies, each tensor once."""
    weights = {w.data_ptr(): w.nbytes for model in models_of(lineup).values() for w in model.parameters()}
    return sum(weights.values())


# ---- one model for several policies -----------------------------------------------------------------------------


def test_adapters_and_frozen_policies_share_their_model_and_full_ones_own_theirs() -> None:
    lineup = lineup_of(*MIX)
    assert groups(lineup) == [{"a", "b", "frozen"}, {"main"}]
    assert list(lineup.residents) == ["a"]
    assert [policy.adapter is None for policy in lineup.policies.values()] == [True, False, False, False]
    assert [len(lineup.policies[name].weights()) for name in ("a", "b", "frozen")] == [8, 8, 0]


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("policies.b.dtype=bfloat16", [{"a", "frozen"}, {"b"}, {"main"}]),
        ("policies.b.context=20", [{"a", "frozen"}, {"b"}, {"main"}]),
        ("policies.frozen.model=tiny:width=16,layers=1,heads=2,positions=32", [{"a", "b"}, {"frozen"}, {"main"}]),
        (f"policies.main.model={TINY}", [{"a", "b", "frozen"}, {"main"}]),
    ],
)
def test_another_dtype_context_or_model_is_another_model_in_memory(setting: str, expected: list[set[str]]) -> None:
    assert groups(lineup_of(*MIX, setting)) == expected


def test_a_frozen_policy_does_not_share_a_model_that_the_warm_start_will_train() -> None:
    assert groups(lineup_of(*MIX, *WARM)) == [{"a", "b"}, {"frozen"}, {"main"}]


def test_a_second_adapter_costs_the_bytes_of_its_tensors() -> None:
    """Width 8, 1 layer, rank 8: 8 * ((8 + 24) + (8 + 8) + (8 + 32) + (32 + 8)) values of 4 bytes."""
    frozen = storage(lineup_of(*[s for s in MIX if not s.startswith("policies.b.")], f"policies.b.model={TINY}",
                               "policies.b.train=frozen"))  # fmt: skip
    assert storage(lineup_of(*MIX)) - frozen == 4 * 8 * (32 + 16 + 40 + 40)


def test_no_weight_of_a_shared_model_asks_for_a_gradient() -> None:
    lineup = lineup_of(*MIX)
    assert not any(weight.requires_grad for weight in lineup.policies["a"].model.parameters())
    assert all(weight.requires_grad for weight in lineup.policies["main"].model.parameters())


def test_adapters_start_from_the_seed_and_their_policys_name() -> None:
    first, again, other = (lineup_of(*MIX, f"seed={seed}") for seed in (0, 0, 1))
    values = [next(iter(lineup.policies["a"].weights().values())) for lineup in (first, again, other)]
    assert torch.equal(values[0], values[1])
    assert not torch.equal(values[0], values[2])
    assert not torch.equal(values[0], next(iter(first.policies["b"].weights().values())))


def test_a_target_that_matches_no_module_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ConfigError, match=r"policies.b.lora.target_modules: 'q_proj' .*\['c_attn', 'c_fc', 'c_proj'\]"):
        lineup_of(*MIX, 'policies.b.lora.target_modules=["q_proj"]')


def test_a_model_that_cannot_checkpoint_activations_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2LMHeadModel, "supports_gradient_checkpointing", False)
    with pytest.raises(ConfigError, match=r"policies.a.gradient_checkpointing: GPT2LMHeadModel cannot.*remove it"):
        lineup_of(*MIX, "policies.a.gradient_checkpointing=true")


# ---- who is trained when ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"update_every": 2}, [1, 3, 5]),
        ({"update_every": 2, "update_offset": 0}, [0, 2, 4]),
        ({"update_every": 2, "update_offset": 1}, [1, 3, 5]),
        ({"update_every": 3, "update_offset": 1}, [1, 4]),
        ({"update_every": 1, "update_offset": 0}, [0, 1, 2, 3, 4, 5]),
        ({"update_every": 4}, [3]),
        ({"train_until": 2}, [0, 1]),
        ({"update_every": 2, "train_until": 5}, [1, 3]),
        ({"train": "frozen"}, []),
    ],
)
def test_the_plan_says_in_which_steps_a_policy_is_trained(options: dict[str, object], steps: list[int]) -> None:
    table = PolicyTable.model_validate({"model": "tiny", **options})
    assert [step for step in range(6) if table.trains_at(step)] == steps


def test_the_seats_of_a_step_follow_the_plan() -> None:
    lineup = lineup_of(*MIX)

    def trained(**options: float | int | None) -> list[str]:
        return [role for role, seat in lineup.seats(**options).items() if seat.trainable]  # type: ignore[arg-type]

    assert trained(step=0) == ["first", "second"], "b waits, frozen never learns"
    assert trained(step=1) == trained() == ["first", "second", "third"]
    assert trained(temperature=1.0) == trained(temperature=1.0, step=1) == []


@pytest.mark.parametrize(("fast", "precision"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_settled_where_the_recipe_is_read(monkeypatch: pytest.MonkeyPatch, fast: bool, precision: str) -> None:
    monkeypatch.setattr(policy_tables, "multiplies_bfloat16", lambda: fast)
    recipe = toy_recipe("train.precision=auto", "policies.main.dtype=auto")
    assert (recipe.train.precision, recipe.policies["main"].dtype) == (precision, precision)


@pytest.mark.parametrize(
    ("fast", "setting", "warned"),
    [
        (False, "train.precision=bfloat16", "train.precision = 'bfloat16'"),
        (False, "policies.main.dtype=bfloat16", "policies.main.dtype = 'bfloat16'"),
        (False, "train.precision=float32", ""),
        (True, "train.precision=bfloat16", ""),
    ],
)
def test_bfloat16_without_instructions_for_it_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fast: bool, setting: str, warned: str
) -> None:
    monkeypatch.setattr(lineup, "multiplies_bfloat16", lambda: fast)
    assemble(toy_recipe(setting))
    assert bool(caplog.text) == bool(warned)
    assert warned in caplog.text
