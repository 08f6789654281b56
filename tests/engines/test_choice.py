"""Which engine samples from which policy, as the recipe says; vLLM itself is asked in tests/with_vllm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from coterie.config import dump_recipe, parse_recipe
from coterie.engines import Completion, Request
from coterie.engines.scripted import ScriptedEngine
from coterie.engines.split import SplitEngine
from coterie.engines.torch import TorchEngine
from coterie.errors import ConfigError, EngineError
from coterie.lineup import assemble, check_env_fits
from learning_toys import request, toy_recipe


class Counting(ScriptedEngine):
    """A scripted engine that knows how many rollouts it has begun."""

    begun = 0

    def remembering(self) -> ScriptedEngine:
        self.begun += 1
        return self


def says(text: str) -> Counting:
    def script(asked: Request) -> Sequence[str]:
        return [text] * len(asked.candidates)

    return Counting(script, versions={"a": 3})


def texts(answers: Sequence[tuple[Completion, ...]]) -> list[str]:
    return [completion.text for row in answers for completion in row]


def test_acts_go_to_the_engine_of_their_policy_and_come_back_in_order() -> None:
    one, two = says("one"), says("two")
    engine = SplitEngine({"a": one, "b": two, "c": one}).remembering()
    asked = [request([5], policy=name, version=3 if name == "a" else 0) for name in ("b", "a", "c", "b")]
    assert texts(engine.generate(asked)) == ["two", "one", "one", "two"]
    assert [[item.policy for item in batch] for batch in one.batches + two.batches] == [["a", "c"], ["b", "b"]]
    assert (one.begun, two.begun) == (1, 1)
    assert (engine.version("a"), engine.version("b")) == (3, 0)


def test_an_engine_without_acts_is_not_asked_and_an_unknown_policy_is_an_error() -> None:
    one, two = says("one"), says("two")
    engine = SplitEngine({"a": one, "b": two})
    engine.generate([request([5], policy="b")])
    assert one.batches == []
    with pytest.raises(EngineError, match=r"no policy 'x'; this engine has \['a', 'b'\]"):
        engine.generate([request([5], policy="x")])


def test_torch_samples_unless_the_recipe_says_otherwise() -> None:
    assert isinstance(assemble(check_env_fits(toy_recipe())).engine, TorchEngine)


@pytest.mark.parametrize("setting", ["hardware.engine=vllm", "hardware.policies.main.engine=vllm"])
def test_without_the_package_vllm_is_refused_with_the_remedy(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.engines.vllm.folder_of", lambda name: None)
    with pytest.raises(ConfigError, match=r'not installed: pip install vllm, .* or use engine = "torch"'):
        assemble(check_env_fits(toy_recipe(setting)))


def test_a_tiny_model_is_nothing_for_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.engines.vllm.folder_of", Path)
    with pytest.raises(ConfigError, match='vLLM has no such model; use engine = "torch"'):
        assemble(check_env_fits(toy_recipe("hardware.engine=vllm")))


def test_where_vllm_samples_the_importance_weight_is_on_unless_the_recipe_says_otherwise() -> None:
    assert toy_recipe().loss.importance_cap is None
    assert toy_recipe("hardware.policies.main.engine=torch").loss.importance_cap is None
    assert toy_recipe("hardware.engine=vllm").loss.importance_cap == 2.0
    assert toy_recipe("hardware.policies.main.engine=vllm").loss.importance_cap == 2.0
    own = toy_recipe("hardware.engine=vllm", "loss.importance_cap=5")
    assert own.loss.importance_cap == 5.0
    assert parse_recipe(dump_recipe(own), "again") == own


def test_on_one_machine_the_engine_may_be_chosen_and_nothing_else_of_the_hardware() -> None:
    assert toy_recipe("hardware.engine=vllm").hardware.of("main").engine == "vllm"
    mixed = toy_recipe("hardware.engine=vllm", "hardware.policies.main.engine=torch").hardware
    assert mixed.of("main").engine == "torch"
    with pytest.raises(ConfigError, match='policies is read only with backend = "ray"'):
        toy_recipe("hardware.policies.main.rollout_workers=2")
