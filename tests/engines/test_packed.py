"""Weights laid out for products: the same numbers to the bit, and never older than the model's."""

from __future__ import annotations

import torch

from coterie.engines import Completion, Request
from coterie.engines.packed import PackedWeights
from coterie.engines.torch import TorchEngine
from learning_toys import llama, lora_team, policy_of, request, stirred

SUPPORTED = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def acts(version: int = 0) -> list[Request]:
    return [
        request([3, 4, 5, number], candidates=3, max_tokens=6, task=f"t{number}", version=version) for number in (6, 7)
    ]


def drawn(engine: TorchEngine, version: int = 0) -> list[tuple[Completion, ...]]:
    return engine.generate(acts(version))


def test_all_linear_layers_are_laid_out_in_bfloat16_and_none_in_float32() -> None:
    model = llama()
    layers = sum(type(module) is torch.nn.Linear for module in model.modules())
    assert len(PackedWeights(model)) == 0
    assert len(PackedWeights(model.bfloat16())) == (layers if SUPPORTED else 0)


def test_the_model_is_as_before_once_they_are_not_used() -> None:
    model = llama().bfloat16()
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        before = model(ids).logits
        with PackedWeights(model).used():
            inside = model(ids).logits
    assert torch.equal(before, inside)
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_engine_with_a_memory_draws_what_one_without_draws() -> None:
    engine = TorchEngine({"main": policy_of(llama().bfloat16())})
    assert drawn(engine.remembering()) == drawn(engine)


def test_new_weights_of_a_new_version_are_laid_out_anew() -> None:
    model = llama().bfloat16()
    policy = policy_of(model)
    remembering = TorchEngine({"main": policy}).remembering()
    before = drawn(remembering)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(-1.5)
    policy.version = 1
    after = drawn(remembering, 1)
    assert after == drawn(TorchEngine({"main": policy}), 1)
    assert after != before


def test_adapters_beside_weights_that_are_laid_out_change_what_is_drawn_each_for_its_own_policy() -> None:
    team = lora_team(llama().bfloat16(), "tool", "planner")
    for number, name in enumerate(("tool", "planner")):
        stirred(team[name], number)
    asked = [request([3, 4, 5, 6], candidates=3, max_tokens=6, policy=name) for name in team]
    engine = TorchEngine(team)
    remembered = engine.remembering().generate(asked)
    assert remembered == engine.generate(asked)
    assert len(set(remembered)) == 3
