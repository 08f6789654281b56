"""Costs of a recipe, worked out by hand."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from coterie.config import Recipe, parse_recipe
from coterie.errors import TrainError
from coterie.estimate import (
    load_table,
    memory_table,
    policy_memory,
    readable_bytes,
    recipe_table,
    role_loads,
    team_memory,
)
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.types import Json

MODEL = "tiny:width=16,layers=2,heads=2,positions=64"


def recipe(*settings: tuple[str, str, Json], chain: bool = False) -> Recipe:
    raw: dict[str, dict[str, Json]] = {
        "env": {"name": "plan_path", "size": 3, "max_rounds": 3, "style": "compact"},
        "policies": {"p": {"model": MODEL}, "f": {"model": MODEL, "train": "frozen"}},
        "team": {"tool": "f", "planner": "p"},
        "sampling": {"num_candidates": 4, "max_tokens": 5, "mode": "chain" if chain else "tree"},
        "train": {"steps": 1, "micro_batch_tokens": 100},
        "eval": {"tasks": 1, "final_tasks": 1},
    }
    for table, key, value in settings:
        raw.setdefault(table, {})[key] = value
    return parse_recipe(raw, "test")


def lineup(*settings: tuple[str, str, Json], chain: bool = False) -> Lineup:
    return assemble(check_env_fits(recipe(*settings, chain=chain)))


def loads(team: Lineup) -> Sequence[tuple[object, ...]]:
    return [(load.role, load.policy, load.acts, load.candidates, load.tokens) for load in role_loads(team)]


def test_a_tree_draws_k_answers_of_trained_roles_and_one_of_frozen_ones() -> None:
    # nothing is solved by empty answers, so there are 3 rounds; planner: 3 acts of 4 candidates of 5 tokens
    assert loads(lineup()) == [("tool", "f", 3, 3, 15), ("planner", "p", 3, 12, 60)]


def test_a_chain_plays_k_episodes_of_one_answer_per_act() -> None:
    assert loads(lineup(chain=True)) == [("tool", "f", 12, 12, 60), ("planner", "p", 12, 12, 60)]


def test_lookahead_draws_an_answer_for_every_later_act_of_its_plays() -> None:
    # tool and planner in turns; after the first planner act come 2 acts of each, after the second 1 of each:
    # 4 candidates * 2 plays * (2 + 1) acts = 24 more for either role
    team = lineup(("sampling", "roles", {"planner": {"lookahead": 2}}))
    assert loads(team) == [("tool", "f", 3, 27, 135), ("planner", "p", 3, 36, 180)]


def test_prompt_tokens_are_those_of_the_longest_prompt() -> None:
    tool, planner = role_loads(lineup())
    # map 4 * 4, way to the goal 4, last answer and mark 4 + 1, three control tokens (user, end, assistant); the
    # planner's has one count and the way from the draft's end
    assert (tool.prompt_tokens, planner.prompt_tokens) == (16 + 4 + 5 + 3, 16 + 4 + 5 + 1 + 4 + 3)


def test_a_prompt_that_does_not_fit_is_an_error_of_the_check_too() -> None:
    with pytest.raises(TrainError, match="nothing is cut"):
        role_loads(lineup(("env", "size", 8)))


def test_memory_is_counted_by_parameter() -> None:
    team = lineup()
    trained, frozen = policy_memory(team, "p"), policy_memory(team, "f")
    count = trained.parameters
    assert count == sum(weight.numel() for weight in team.policies["p"].model.parameters())
    # float32: 4 bytes of weights and of gradients, two moments of 4 bytes
    assert (trained.weights, trained.gradients, trained.optimizer, trained.references) == (
        4 * count,
        4 * count,
        8 * count,
        0,
    )
    # 100 tokens of 2 layers * 16 units * 16 values * 4 bytes, and 3 float32 rows of 102 logits
    assert trained.activations == 100 * (2 * 16 * 16 * 4 + 102 * 3 * 4)
    assert (frozen.weights, frozen.gradients, frozen.optimizer, frozen.activations) == (4 * count, 0, 0, 0)
    assert frozen.total == 4 * count


def test_bfloat16_weights_have_float32_copies_and_a_kl_has_a_reference() -> None:
    team = lineup(("policies", "p", {"model": MODEL, "dtype": "bfloat16", "kl": {"coef": 0.1}}))
    memory = policy_memory(team, "p")
    count = memory.parameters
    # 2 bytes of weights and of the reference; per trained weight two moments, a copy and the copy's gradient
    assert (memory.weights, memory.references, memory.optimizer) == (2 * count, 2 * count, 16 * count)


LORA = {"model": MODEL, "train": "lora", "lora": {"rank": 2}}


def test_a_shared_model_is_counted_with_its_first_policy() -> None:
    # rank 2, width 16, 2 layers: 2 * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16)) values each
    own = 2 * 2 * (64 + 32 + 80 + 80)
    team = lineup(("policies", "p", {**LORA, "kl": {"coef": 0.1}}), ("policies", "f", LORA))
    first, second = policy_memory(team, "p"), policy_memory(team, "f")
    base = sum(weight.numel() for weight in team.policies["p"].model_weights().values())
    assert base + 2 * own <= sum(weight.numel() for weight in team.policies["p"].model.parameters())
    assert (first.parameters, second.parameters) == (base + own, own)
    assert (first.weights, second.weights) == (4 * (base + own), 4 * own)
    assert [(m.gradients, m.optimizer, m.references) for m in (first, second)] == [
        (4 * own, 8 * own, 4 * own),
        (4 * own, 8 * own, 0),
    ]
    assert first.activations == second.activations > 0


def test_a_frozen_policy_on_a_shared_model_costs_nothing_more() -> None:
    team = lineup(("policies", "p", LORA))
    assert policy_memory(team, "p").weights > 0
    assert policy_memory(team, "f").total == 0


def test_a_bfloat16_model_has_float32_adapters() -> None:
    own = 2 * 2 * (64 + 32 + 80 + 80)
    team = lineup(("policies", "p", {**LORA, "dtype": "bfloat16", "kl": {"coef": 0.1, "reference": "base"}}))
    memory = policy_memory(team, "p")
    assert memory.weights == 2 * (memory.parameters - own) + 4 * own
    assert (memory.gradients, memory.optimizer, memory.references) == (4 * own, 8 * own, 0)


def test_two_adapters_on_one_model_cost_at_most_115_percent_of_one() -> None:
    big = {"model": "tiny:positions=64", "train": "lora", "lora": {"rank": 4}}
    frozen = {"model": "tiny:positions=64", "train": "frozen"}
    totals, held = [], []
    for other in (frozen, big):
        team = lineup(("policies", "p", big), ("policies", "f", other))
        totals.append(team_memory([policy_memory(team, name) for name in ("p", "f")]).total)
        held.append(sum(weight.nbytes for weight in team.policies["p"].model.parameters()))
    assert 1.0 < totals[1] / totals[0] <= 1.15
    assert 1.0 < held[1] / held[0] <= 1.15


def test_checkpointed_layers_keep_one_value_each_and_one_layer_is_computed_at_a_time() -> None:
    plain, lean = (
        policy_memory(lineup(("policies", "p", {"model": MODEL, "gradient_checkpointing": lean})), "p")
        for lean in (False, True)
    )
    logits = 102 * 3 * 4
    assert plain.activations == 100 * (2 * 16 * 16 * 4 + logits)
    assert lean.activations == 100 * ((2 + 16) * 16 * 4 + logits)


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (5000 << 40, "5000.0 TiB")],
)
def test_bytes_are_readable(count: int, text: str) -> None:
    assert readable_bytes(count) == text


@pytest.mark.parametrize("width", [80, 60])
def test_no_key_and_no_number_is_broken_into_two_lines(width: int) -> None:
    settings = (
        ("policies", "p", {"model": MODEL, "optimizer": {"weight_decay": 0.125}}),
        ("train", "steps", 123456789),
    )
    written, console = recipe(*settings), Console(width=width, record=True, file=io.StringIO())
    team = lineup(*settings)
    console.print(recipe_table(written, team.recipe), crop=False)
    console.print(load_table(role_loads(team), team.recipe), crop=False)
    console.print(memory_table([policy_memory(team, name) for name in ("p", "f")]), crop=False)
    words = console.export_text().split()
    for word in ("policies.p.gradient_checkpointing", "policies.p.optimizer.weight_decay", "0.125", "123456789"):
        assert word in words
    assert all(f"{policy_memory(team, name).parameters:,}" in words for name in ("p", "f"))


def test_at_80_columns_descriptions_are_wrapped_and_nothing_is_wider() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    raw = recipe().model_dump(mode="json", by_alias=True, exclude_unset=True)
    written = parse_recipe({**raw, "description": "many words " * 20}, "test")
    console.print(recipe_table(written, written), crop=False)
    lines = console.export_text().splitlines()
    assert {len(line) for line in lines} == {80}
    assert sum("words" in line for line in lines) > 3
