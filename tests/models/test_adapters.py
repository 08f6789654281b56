"""Adapters beside one resident model: whose tensors are whose, which act in a pass, and what asks for gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from coterie.errors import ConfigError
from coterie.models.adapters import BASE, Adapter, Resident
from coterie.policy_tables import LoraTable
from learning_toys import gpt2, llama, stirred

IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 1], [2, 2, 3, 3]])
MODELS = [gpt2, llama]
Make = Callable[[], PreTrainedModel]


def logits(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]


def through(adapter: Adapter, ids: torch.Tensor = IDS) -> torch.Tensor:
    """Return the logits with one adapter acting."""
    with adapter.resident.only(adapter.key):
        return logits(adapter.resident.model, ids)


def asking(model: PreTrainedModel) -> set[int]:
    return {id(weight) for weight in model.parameters() if weight.requires_grad}


def ids_of(adapter: Adapter) -> set[int]:
    return {id(weight) for weight in adapter.weights().values()}


# ---- what a fresh adapter is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fresh_adapter_changes_no_bit_and_neither_does_one_that_is_off(make: Make, dtype: torch.dtype) -> None:
    """LOGP-03: B = 0."""
    model = make().to(dtype)
    before = logits(model)
    resident = Resident(model)
    fresh = resident.attach("a", LoraTable(), seed=0)
    stirred(resident.attach("b", LoraTable(), seed=0))
    assert torch.equal(through(fresh), before)
    assert torch.equal(logits(model), before)
    assert torch.equal(through(resident.adapter_off()), before)
    assert {weight.dtype for weight in fresh.weights().values()} == {torch.float32}


def test_the_tensors_of_an_adapter_are_counted_by_hand() -> None:
    """Width 32, rank 8, per layer: 8 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32)) = 4096 values."""
    adapter = Resident(gpt2()).attach("a", LoraTable(), seed=0)
    parts = ["attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"]
    assert sorted(adapter.weights()) == sorted(
        f"transformer.h.{i}.{part}.lora_{x}.weight" for i in (0, 1) for part in parts for x in "AB"
    )
    assert sum(weight.numel() for weight in adapter.weights().values()) == 2 * 4096


def test_alpha_over_rank_scales_what_an_adapter_adds() -> None:
    """Alpha 16 and rank 8: twice B A x, beside the module's own output."""
    model = gpt2()
    adapter = Resident(model).attach("a", LoraTable(rank=8, alpha=16.0, target_modules=("c_fc",)), seed=0)
    stirred(adapter)
    module = model.transformer.h[0].mlp.c_fc
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    weights = [adapter.weights()[f"transformer.h.0.mlp.c_fc.lora_{part}.weight"] for part in "AB"]
    with torch.no_grad(), adapter.resident.only(adapter.key):
        added = module(x) - module.base_layer(x)
        assert torch.allclose(added, 2.0 * x @ weights[0].T @ weights[1].T, atol=1e-5)
    assert float(added.abs().max()) > 0.1


def values(policy: str, seed: int, others: int = 0) -> list[torch.Tensor]:
    resident = Resident(gpt2())
    for number in range(others):
        resident.attach(f"other{number}", LoraTable(rank=2), seed=9)
    return [weight.detach().clone() for weight in resident.attach(policy, LoraTable(), seed=seed).weights().values()]


def test_first_values_depend_on_seed_and_policy_and_on_nothing_else() -> None:
    state = torch.get_rng_state()
    first = values("a", 0)
    assert torch.equal(torch.get_rng_state(), state), "the global random state was used"
    torch.rand(3)
    assert all(torch.equal(x, y) for x, y in zip(first, values("a", 0, others=2), strict=True))
    for other in (values("b", 0), values("a", 1)):
        assert not any(torch.equal(x, y) for x, y in zip(first[::2], other[::2], strict=True))
    assert not torch.equal(first[0], first[8]), "two layers of one shape differ"
    # A is uniform within 1 / sqrt(32) = 0.1768, its 256 values come close to the bound; B is 0
    assert 0.16 < float(first[0].abs().max()) <= 0.17678
    assert all(bool((b == 0.0).all()) for b in first[1::2])


def test_policies_may_have_any_name() -> None:
    """Module names may not hold dots, and peft looks for some words inside of names."""
    resident = Resident(gpt2())
    for name in ("a.b", "lora_A", "default", "__base__", "keys", "train"):
        stirred(resident.attach(name, LoraTable(), seed=0))
    assert len(set(resident.weights())) == len(dict(gpt2().named_parameters()))


# ---- one model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
def test_the_models_own_weights_keep_their_names_and_bits(make: Make) -> None:
    model = make()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    resident = Resident(model)
    stirred(resident.attach("a", LoraTable(), seed=0))
    after = resident.weights()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_two_adapters_share_every_weight_of_the_model() -> None:
    """By memory: the bytes of all parameters are those of one model and two adapters."""
    model = gpt2()
    base = sum(weight.numel() for weight in model.parameters())
    resident = Resident(model)
    first, second = (resident.attach(name, LoraTable(rank=2), seed=0) for name in "ab")
    assert first.resident.model is second.resident.model is model
    # rank 2: 2 layers of 2 * 512 values
    assert sum(weight.numel() for weight in model.parameters()) == base + 2 * 2048
    assert not ids_of(first) & ids_of(second)


# ---- which adapter acts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
def test_rows_of_a_mixed_batch_go_through_their_own_adapters(make: Make) -> None:
    resident = Resident(make())
    a = stirred(resident.attach("a", LoraTable(), seed=0), 1)
    b = stirred(resident.attach("b", LoraTable(rank=3, target_modules=(resident_target(resident),)), seed=0), 2)
    routes = [a.key, BASE, b.key]
    with resident.rows(routes):
        mixed = logits(resident.model)
        routes[:] = [b.key, BASE]
        fewer = logits(resident.model, IDS[:2])
    alone = [through(adapter) for adapter in (a, resident.adapter_off(), b)]
    for row in range(3):
        assert torch.allclose(mixed[row], alone[row][row], atol=1e-5), row
        others = [alone[other][row] for other in range(3) if other != row]
        assert all(float((mixed[row] - other).abs().max()) > 0.01 for other in others)
    assert torch.allclose(fewer[0], alone[2][0], atol=1e-5)
    assert torch.allclose(fewer[1], alone[1][1], atol=1e-5)


def resident_target(resident: Resident) -> str:
    return "c_fc" if resident.model.config.model_type == "gpt2" else "q_proj"


@pytest.mark.parametrize("same", [True, False])
def test_nothing_of_a_batch_stays_behind_not_even_after_an_error(same: bool) -> None:
    model = gpt2()
    before = logits(model)
    resident = Resident(model)
    a, b = (stirred(resident.attach(name, LoraTable(), seed=0), 3) for name in "ab")
    with pytest.raises(RuntimeError, match="broken"), resident.rows([a.key, a.key if same else b.key]):
        raise RuntimeError("broken")
    assert torch.equal(logits(model), before)
    with pytest.raises(RuntimeError, match="broken"), resident.only(b.key):
        raise RuntimeError("broken")
    assert torch.equal(logits(model), before)
    assert asking(model) == set()


def test_a_batch_of_another_number_of_rows_is_an_error() -> None:
    resident = Resident(gpt2())
    a = resident.attach("a", LoraTable(), seed=0)
    with resident.rows([a.key, BASE]), pytest.raises(ValueError, match="Length of `adapter_names`"):
        logits(resident.model)


def test_exactly_the_acting_adapter_asks_for_gradients() -> None:
    """TEAM-02: peft gives and takes these flags when it activates and adds adapters; here they cannot be wrong."""
    resident = Resident(gpt2())
    a, b = (resident.attach(name, LoraTable(), seed=0) for name in "ab")
    for adapter in (a, b, a, resident.adapter_off()):
        assert asking(resident.model) == set()
        with resident.only(adapter.key):
            assert asking(resident.model) == ids_of(adapter)
    c = resident.attach("c", LoraTable(target_modules=("c_fc",)), seed=0)
    assert asking(resident.model) == set()
    with resident.only(a.key):
        assert asking(resident.model) == ids_of(a)
    with resident.only(c.key):
        assert asking(resident.model) == ids_of(c)
    with resident.rows([a.key, b.key, c.key]):
        assert not logits(resident.model).requires_grad


def test_a_backward_pass_reaches_the_acting_adapter_only() -> None:
    resident = Resident(llama())
    a, b = (stirred(resident.attach(name, LoraTable(), seed=0)) for name in "ab")
    with resident.only(b.key):
        resident.model(input_ids=IDS, use_cache=False).logits.sum().backward()
    assert all(weight.grad is not None and bool(weight.grad.abs().sum() > 0) for weight in b.weights().values())
    reached = {id(weight) for weight in resident.model.parameters() if weight.grad is not None}
    assert reached == ids_of(b)
    assert not reached & ids_of(a)


def test_a_copy_has_the_same_values_and_a_life_of_its_own() -> None:
    resident = Resident(gpt2())
    a = stirred(resident.attach("a", LoraTable(), seed=0))
    copy = resident.copy(a)
    start = through(a)
    assert torch.equal(through(copy), start)
    stirred(a, 5)
    assert torch.equal(through(copy), start)
    assert not torch.equal(through(a), start)
    assert resident.copy(resident.adapter_off()).key == BASE


# ---- targets ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "count"),
    [("all-linear", 8), (("c_fc",), 2), (("c_proj",), 4), (("transformer.h.1.mlp.c_fc", "c_attn"), 3)],
)
def test_targets_are_names_or_their_last_parts(targets: str | tuple[str, ...], count: int) -> None:
    adapter = Resident(gpt2()).attach("a", LoraTable.model_validate({"target_modules": targets}), seed=0)
    assert len(adapter.targets) == count
    assert len(adapter.weights()) == 2 * count


@pytest.mark.parametrize(
    ("make", "target", "known"),
    [
        (gpt2, "q_proj", r"\['c_attn', 'c_fc', 'c_proj'\]"),
        (gpt2, "proj", "'c_proj'"),
        (gpt2, "wte", "'c_fc'"),
        (llama, "lm_head", r"\['down_proj', 'gate_proj', 'k_proj', 'o_proj', 'q_proj', 'up_proj', 'v_proj'\]"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_with_what_there_is(make: Make, target: str, known: str) -> None:
    resident = Resident(make())
    with pytest.raises(ConfigError, match=rf"policies.a.lora.target_modules: '{target}' matches no linear.*{known}"):
        resident.attach("a", LoraTable(target_modules=(target,)), seed=0)


def test_adapters_beside_different_modules_do_not_disturb_each_other() -> None:
    resident = Resident(llama())
    a = stirred(resident.attach("a", LoraTable(target_modules=("q_proj",)), seed=0))
    before = through(a)
    b = stirred(resident.attach("b", LoraTable(rank=2, target_modules=("q_proj", "up_proj")), seed=0))
    assert torch.equal(through(a), before)
    assert not torch.allclose(through(b), before)
