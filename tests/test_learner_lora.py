"""Training an adapter beside a resident model: it moves itself and nothing else, and is saved as itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from coterie.config import LoraTable, PolicyTable
from coterie.engines.torch import TorchEngine
from coterie.errors import CheckpointError
from coterie.learner import Learner, Update
from coterie.models.policy import Policy
from coterie.run_tables import LossTable
from coterie.types import Sample
from learning_toys import gpt2, llama, lora_team, plain_logprobs, policy_of, request, sample, stirred, switch

MODELS = [gpt2, llama]
Make = Callable[[], PreTrainedModel]


def learner_of(policy: Policy, *, lr: float = 0.01, **table: Any) -> Learner:
    raw = {"model": "tiny", "train": "lora", "optimizer": {"lr": lr}, **table}
    return Learner(
        policy,
        PolicyTable.model_validate(raw),
        LossTable(),
        total_steps=100,
        steps_per_batch=1,
        micro_batch_tokens=10_000,
        autocast=False,
    )


def drawn(policy: Policy, advantages: Sequence[float], *, step: int = 0, tokens: int = 4) -> list[Sample]:
    """Return samples of the policy's own, with these advantages."""
    asked = request([3, 4], candidates=len(advantages), max_tokens=tokens, policy=policy.name, version=policy.version,
                    seed=step)  # fmt: skip
    [completions] = TorchEngine({policy.name: policy}).generate([asked])
    return [
        sample([3, 4], c.ids, advantage=a, logprobs=c.logprobs, policy=policy.name, version=policy.version)
        for c, a in zip(completions, advantages, strict=True)
    ]


def train(learner: Learner, steps: int, first: int = 0) -> list[Update]:
    return [learner.step(drawn(learner.policy, [1.0, -1.0], step=first + step)) for step in range(steps)]


def sha(weights: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for weight in weights:
        digest.update(weight.detach().float().numpy().tobytes())
    return digest.hexdigest()


def prints(team: dict[str, Policy]) -> dict[str, str]:
    """Return the SHA-256 of every adapter, and of the model under ``base``."""
    own = {name: sha(policy.weights().values()) for name, policy in team.items() if name != "base"}
    return {**own, "base": sha(team["base"].model_weights().values())}


def held(learner: Learner) -> set[int]:
    return {id(p) for group in learner.stepper.optimizer.param_groups for p in group["params"]}


def logits(policy: Policy) -> torch.Tensor:
    with torch.no_grad(), policy.alone():
        return policy.model(input_ids=torch.tensor([[3, 4, 5, 6]]), use_cache=False).logits  # type: ignore[no-any-return]


# ---- it moves itself and nothing else ---------------------------------------------------------------------------


def check_that_only_b_moves(team: dict[str, Policy], learner: Learner) -> None:
    before = prints(team)
    train(learner, 3, first=learner.policy.version)
    after = prints(team)
    assert {name for name in before if after[name] != before[name]} == {"b"}
    assert held(learner) == {id(weight) for weight in team["b"].weights().values()}
    assert all(weight.grad is None for weight in team["b"].model.parameters())
    assert not any(weight.requires_grad for weight in team["b"].model.parameters())


@pytest.mark.parametrize("make", MODELS)
def test_training_b_leaves_a_and_the_model_bit_for_bit(make: Make, tmp_path: Path) -> None:
    """TEAM-02: also after another adapter came, after saving and loading, and loaded in the other order."""
    team = lora_team(make(), "a", "b")
    stirred(team["a"])
    learner = learner_of(team["b"])
    check_that_only_b_moves(team, learner)

    resident = team["b"].adapter.resident  # type: ignore[union-attr]
    team["c"] = policy_of(team["b"].model, name="c", end_ids=())
    team["c"].adapter = stirred(resident.attach("c", LoraTable(rank=2), seed=0))
    check_that_only_b_moves(team, learner)

    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (learner if name == "b" else learner_of(team["a"])).save(tmp_path / name)
    again = lora_team(make(), "b", "a")
    loaded = {name: learner_of(again[name]) for name in ("b", "a")}
    for name, one in loaded.items():
        one.load(tmp_path / name)
    assert [sha(again[name].weights().values()) for name in "ab"] == [prints(team)[name] for name in "ab"]
    check_that_only_b_moves(again, loaded["b"])


@pytest.mark.parametrize("make", MODELS)
def test_the_step_is_that_of_the_written_out_gradient_of_the_adapter(make: Make) -> None:
    """Gradient norm and loss by a plain pass of each sample alone; sampler and learner agree to 1e-5."""
    team = lora_team(make(), "a", "b")
    policy, other = stirred(team["a"], 1), stirred(team["b"], 2)
    items = drawn(policy, [1.0, -0.5, 2.0])
    weights = list(policy.weights().values())
    with policy.alone():
        loss = sum(-item.advantage * plain_logprobs(policy.model, item).sum() / 12 for item in items)
        gradients = torch.autograd.grad(loss, weights)
    expected = sum(float((gradient**2).sum()) for gradient in gradients) ** 0.5
    before = logits(other)
    update = learner_of(policy).step(items)
    assert update.grad_norm == pytest.approx(expected, rel=1e-4)
    assert update.mismatch is not None
    assert update.mismatch < 1e-5
    assert (update.version, other.version, update.stepped, update.clip_fraction) == (1, 0, True, 0.0)
    assert torch.equal(logits(other), before)


def test_a_token_made_likely_by_training_is_drawn_by_that_policy_only() -> None:
    """TEAM-04 after updates: A is taught 7 and B 9; the base stays as it was."""
    team = lora_team(switch(), "a", "b")
    learners = {name: learner_of(team[name], lr=0.05) for name in "ab"}
    before = logits(team["base"])
    for _ in range(25):
        for name, token in (("a", 7), ("b", 9)):
            with torch.no_grad(), team[name].alone():
                logprob = plain_logprobs(team[name].model, sample([3], [token])).item()
            learners[name].step([sample([3], [token], logprobs=[logprob], policy=name, version=team[name].version)])
    asked = [
        request([3], policy=name, version=team[name].version, candidates=8, max_tokens=1) for name in ("a", "b", "base")
    ]
    a, b, base = ({completion.ids[0] for completion in row} for row in TorchEngine(team).generate(asked))
    assert (a, b) == ({7}, {9})
    assert len(base) > 3
    assert torch.equal(logits(team["base"]), before)


def test_small_steps_of_an_adapter_beside_a_bfloat16_model_are_not_lost() -> None:
    """OPT-01: the adapter is float32: at lr 1e-5 nearly all values of B move in one step, and again in the next."""
    team = lora_team(gpt2(spread=1.0).to(torch.bfloat16), "a")
    stirred(team["a"])
    learner = learner_of(team["a"], lr=1e-5, dtype="bfloat16")
    assert learner.stepper.masters is learner.stepper.weights
    assert all(update.changed > 0.9 for update in train(learner, 2))


def test_dropout_anywhere_is_off_while_scoring() -> None:
    """LOGP-03: two passes are equal, and so are sampler and learner."""
    team = lora_team(gpt2(), "a")
    stirred(team["a"])
    for module in team["a"].model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    team["a"].model.train()
    update = learner_of(team["a"], kl={"coef": 0.1}).step(drawn(team["a"], [1.0, -1.0], tokens=8))
    assert update.mismatch is not None
    assert update.mismatch < 1e-5
    assert (update.clip_fraction, update.kl) == (0.0, 0.0)


# ---- the KL penalty ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("reference", ["start", "base"])
def test_the_kl_of_a_fresh_adapter_is_exactly_zero_first_and_positive_later(make: Make, reference: str) -> None:
    """LOGP-03."""
    team = lora_team(make(), "a")
    learner = learner_of(team["a"], kl={"coef": 0.1, "reference": reference})
    kls = [update.kl for update in train(learner, 3)]
    assert kls[0] == 0.0
    assert kls[2] is not None
    assert kls[2] > 0.0


def test_kl_to_the_start_of_an_adapter_that_is_not_fresh_is_zero_and_to_the_base_it_is_not() -> None:
    """TEAM-05: the reference is a second adapter beside the same model, or none; never a second model."""
    kls, sizes = [], []
    for reference in ("start", "base"):
        team = lora_team(gpt2(spread=1.0), "a")
        stirred(team["a"])
        before = sum(weight.numel() for weight in team["a"].model.parameters())
        learner = learner_of(team["a"], kl={"coef": 0.1, "reference": reference})
        assert learner.reference is team["a"].model
        sizes.append(sum(weight.numel() for weight in team["a"].model.parameters()) - before)
        kls.append(train(learner, 1)[0].kl)
    assert kls[0] == 0.0
    assert kls[1] is not None
    assert kls[1] > 1e-3
    assert sizes == [2 * 4096, 0]


def test_training_another_adapter_does_not_move_a_reference() -> None:
    """TEAM-05: reference log-probs bit-identical."""
    team = lora_team(gpt2(), "a", "b")
    stirred(team["a"], 1)
    stirred(team["b"], 2)
    learner = learner_of(team["a"], kl={"coef": 0.1})
    items = drawn(team["a"], [1.0, -1.0])
    [batch] = learner._batches(items)
    before = learner._reference_logprobs(batch)
    train(learner_of(team["b"], lr=0.1), 3)
    train(learner, 2)
    after = learner._reference_logprobs(batch)
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


# ---- activations computed twice ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("make", MODELS)
def test_gradient_checkpointing_computes_layers_twice_and_changes_nothing_else(make: Make, lora: bool) -> None:
    """LOGP-10: the same step and the same draws after it; the model is left in evaluation mode."""
    results = []
    for checkpointing in (False, True):
        model = make()
        team = lora_team(model, "a") if lora else {"a": policy_of(model, name="a", end_ids=())}
        policy = stirred(team["a"]) if lora else team["a"]
        if checkpointing:
            model.activation_checkpointing_enable()
            model.disable_input_require_grads()
            policy.checkpointing = True
        layer = model.transformer.h[0].mlp if model.config.model_type == "gpt2" else model.model.layers[0].mlp
        items, passes = drawn(policy, [1.0, -1.0]), []
        hook = layer.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        update = learner_of(policy, train="lora" if lora else "full").step(items)
        hook.remove()
        after = drawn(policy, [1.0], step=1)[0]
        assert not any(module.training for module in model.modules())
        results.append((len(passes), update.loss, update.grad_norm, after.completion_ids, after.sampler_logprobs))
    plain, twice = results
    assert (plain[0], twice[0]) == (1, 2)
    assert twice[1:3] == pytest.approx(plain[1:3], rel=1e-5)
    assert twice[3] == plain[3]
    assert list(twice[4]) == pytest.approx(list(plain[4]), abs=1e-5)


# ---- its saved state --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kl", [None, {"coef": 0.1}, {"coef": 0.1, "reference": "base"}])
def test_a_loaded_learner_goes_on_bit_for_bit_and_only_adapters_are_written(
    kl: dict[str, Any] | None, tmp_path: Path
) -> None:
    """CKPT-01 and CKPT-07."""
    options = {} if kl is None else {"kl": kl}
    team = lora_team(gpt2(spread=1.0), "a", "b")
    learner = learner_of(team["a"], **options)
    train(learner, 2)
    learner.save(tmp_path)
    straight = train(learner, 2, first=2)

    tensors = load_file(tmp_path / "weights.safetensors")
    assert set(tensors) == set(team["a"].weights()), "no weight of the model, no other adapter, no adapter's name"
    assert sum(tensor.numel() for tensor in tensors.values()) == 2 * 4096
    assert (tmp_path / "reference.safetensors").exists() == (kl == {"coef": 0.1})

    again = lora_team(gpt2(spread=1.0), "b", "a")
    stirred(again["a"], 8)  # what is there before must not matter
    resumed = learner_of(again["a"], **options)
    resumed.load(tmp_path)
    assert again["a"].version == 2
    assert train(resumed, 2, first=2) == straight
    assert prints(again)["a"] == prints(team)["a"]


def test_a_renamed_key_or_another_shape_fails_and_changes_nothing(tmp_path: Path) -> None:
    """CKPT-07: not a warning."""
    team = lora_team(gpt2(), "a")
    learner = learner_of(team["a"])
    learner.save(tmp_path)
    path = tmp_path / "weights.safetensors"
    saved = load_file(path)
    before = prints(team)
    first = next(iter(saved))
    save_file({name.replace(first, f"base_model.model.{first}"): t for name, t in saved.items()}, path)
    with pytest.raises(
        CheckpointError, match=r"weights.safetensors: tensors differ from the policy's, first '.*' of 2"
    ):
        learner.load(tmp_path)
    save_file({name: t[:1].contiguous() if name == first else t for name, t in saved.items()}, path)
    with pytest.raises(CheckpointError, match=r"has shape \(1, 32\), the policy's \(8, 32\)"):
        learner.load(tmp_path)
    assert prints(team) == before


def test_the_file_of_one_role_goes_into_the_slot_of_another_only_when_asked_for(tmp_path: Path) -> None:
    """CKPT-07."""
    team = lora_team(gpt2(), "a", "b")
    stirred(team["a"])
    learner_of(team["a"]).save(tmp_path)
    assert json.loads((tmp_path / "learner.json").read_text())["policy"] == "a"
    b, before = learner_of(team["b"]), prints(team)
    with pytest.raises(
        CheckpointError, match=r"holds the state of policy 'a', expected that of 'b'.*ask for the other"
    ):
        b.load(tmp_path)
    assert prints(team) == before
    b.load(tmp_path, of="a")
    assert prints(team)["b"] == prints(team)["a"] == before["a"]


def test_after_loading_the_engine_draws_with_the_loaded_adapter(tmp_path: Path) -> None:
    """SYNC-06: the first rollout after a resumption; the other role still draws with its own."""
    lora = LoraTable(rank=1, target_modules=("mlp.c_proj",))
    team = lora_team(switch(), "a", "b", lora=lora)
    with torch.no_grad():
        a, b = team["a"].weights().values()
        a.fill_(1.0)
        b[7] = 100.0
    team["a"].version = 5
    learner_of(team["a"]).save(tmp_path)
    again = lora_team(switch(), "a", "b", lora=lora)
    engine = TorchEngine(again)
    learner_of(again["a"]).load(tmp_path)
    asked = [
        request([3], policy=name, version=version, candidates=8, max_tokens=1) for name, version in (("a", 5), ("b", 0))
    ]
    drawn_a, drawn_b = ({completion.ids[0] for completion in row} for row in engine.generate(asked))
    assert drawn_a == {7}
    assert len(drawn_b) > 3


class Products(TorchDispatchMode):
    """Notes the shapes that matrix products come out with."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.add(tuple(out.shape))
        return out


@pytest.mark.parametrize("make", MODELS)
def test_no_gradient_of_the_models_own_matrices_is_computed_for_an_adapter(make: Make) -> None:
    """It would come out of a product in the shape of the weight, as it does where the model itself is trained."""
    adapted = lora_team(make(), "a", lora=LoraTable(rank=3))["a"]
    own = {tuple(w.shape) for w in adapted.model_weights().values() if w.dim() == 2 and w.shape[0] != w.shape[1]}
    own |= {shape[::-1] for shape in own}
    found = {}
    for name, learner in (
        ("lora", learner_of(adapted)),
        ("full", learner_of(policy_of(make(), name="a"), train="full")),
    ):
        samples = drawn(learner.policy, [1.0, -1.0], tokens=3)  # 2 + 3 + 3 tokens: no weight has a side of 8
        with Products() as products:
            assert learner.step(samples).stepped
        found[name] = products.shapes & own
    assert found["lora"] == set()
    assert found["full"]
