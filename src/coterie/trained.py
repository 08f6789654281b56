"""Trained weights out of a run folder: which checkpoint, into which model; and a run's policy as a model of its own.

``run:FOLDER#POLICY`` names a policy of a run wherever a recipe names a model. ``#POLICY`` may be left out where the run
has one policy only; ``@best`` at the end takes the best checkpoint instead of the last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import GenerationConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coterie.checkpoint import BEST
from coterie.config import LoraTable, PolicyTable, Recipe, read_recipe
from coterie.errors import CheckpointError, ConfigError
from coterie.manifest import Checkpoint, NewerSchemaError, looks_whole, read_checkpoint
from coterie.models.chat import ChatRenderer
from coterie.models.loading import LoadedModel, load
from coterie.models.policy import Policy
from coterie.shipped import RECIPE_JSON
from coterie.tensors import check_owner, load_tensors, restore_tensors

Which = Literal["last", "best"]
PREFIX = "run:"
RESIDENT = "resident.safetensors"
"""In a policy's folder of a checkpoint: the model that it shares, where a warm start has trained it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedPolicy:
    """A policy in a run folder: the run's recipe, the policy's name and table, and the checkpoint to take it from.

    ``checkpoint`` is ``None`` for a frozen policy: no checkpoint holds weights of it.
    """

    run_dir: Path
    recipe: Recipe
    name: str
    checkpoint: Checkpoint | None

    @property
    def table(self) -> PolicyTable:
        """The policy's table in the run's recipe."""
        return self.recipe.policies[self.name]

    @property
    def roles(self) -> list[str]:
        """The roles it played in the run."""
        return [role for role, policy in self.recipe.team.items() if policy == self.name]


def find_policy(run_dir: Path, name: str | None, which: Which) -> TrainedPolicy:
    """Return a policy of a run; ``name`` may be ``None`` where there is one only. Nothing is loaded yet.

    ``ConfigError`` for no run and for an unknown policy (names those that exist), ``CheckpointError`` without a usable
    checkpoint.
    """
    if not (run_dir / RECIPE_JSON).is_file():
        raise ConfigError(f"{run_dir} holds no run: {RECIPE_JSON} is missing; give the folder that training wrote")
    recipe = read_recipe(run_dir / RECIPE_JSON)
    known = sorted(recipe.policies)
    if name is None and len(known) > 1:
        raise ConfigError(f"{run_dir} has several policies, {known}: say which one")
    chosen = known[0] if name is None else name
    if chosen not in recipe.policies:
        raise ConfigError(f"{run_dir} has no policy {chosen!r}; it has {known}")
    checkpoint = find_checkpoint(run_dir, which) if chosen in recipe.trained_policies else None
    return TrainedPolicy(run_dir=run_dir, recipe=recipe, name=chosen, checkpoint=checkpoint)


def find_checkpoint(run_dir: Path, which: Which) -> Checkpoint:
    """Return the best, or the newest checkpoint that verifies; nothing is changed in the folder."""
    if which not in ("last", "best"):
        raise ConfigError(f"checkpoint {which!r}: expected 'last' or 'best'")
    folder = run_dir / "checkpoints"
    paths = [folder / BEST] if which == "best" else sorted(folder.glob("step_*"), reverse=True)
    problems = []
    for path in filter(Path.is_dir, paths):
        try:
            return read_checkpoint(path)
        except NewerSchemaError:
            raise
        except CheckpointError as error:
            problems.append(str(error))
    whole = [path.name for path in sorted(folder.glob("step_*")) if looks_whole(path)]
    there = f"checkpoints that are there: {whole}" if whole else "there is no other checkpoint"
    if which == "best" and not problems:
        raise CheckpointError(
            f"{folder} holds no best checkpoint: it is written by validations while training (eval.every or "
            f"eval.every_tokens above 0), and none has been made; {there}. Take the last one: --checkpoint last, or "
            'checkpoint="last" in Python'
        )
    found = "; ".join(problems) or "none has been written yet, training writes the first one before its first step"
    raise CheckpointError(f"{folder} holds no usable {which} checkpoint: {found}" + (f"; {there}" * (which == "best")))


def load_weights(policy: Policy, folder: Path) -> None:
    """Give a policy the weights and version that its learner saved in a folder; no optimiser is made for it."""
    copy_weights(policy.weights(), folder, policy.name)
    policy.version = saved_version(folder)


def saved_version(folder: Path) -> int:
    """Return the version of the weights that a learner saved in a folder."""
    return int(json.loads((folder / "learner.json").read_text())["counters"]["version"])


@torch.no_grad()
def copy_weights(weights: Mapping[str, Parameter], folder: Path, name: str) -> None:
    """Copy what the learner of policy ``name`` saved in a folder into tensors of the same names and shapes."""
    for key, tensor in _saved(folder, name, {key: tuple(weight.shape) for key, weight in weights.items()}).items():
        weights[key].copy_(tensor)


def _saved(folder: Path, name: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return a policy's saved tensors, which must have these names and shapes."""
    path = folder / "weights.safetensors"
    check_owner(folder, json.loads((folder / "learner.json").read_text()), name)
    saved = load_tensors(path)
    odd = [
        key for key in shapes.keys() | saved.keys() if key not in saved or shapes.get(key) != tuple(saved[key].shape)
    ]
    if odd:
        raise CheckpointError(
            f"{path}: {len(odd)} tensors are missing or do not fit policy {name!r}, first {min(odd)!r}; the "
            "recipe must name the model that was trained"
        )
    return saved


@torch.no_grad()
def merge_adapter(model: PreTrainedModel, saved: Mapping[str, Tensor], lora: LoraTable) -> None:
    """Add a LoRA adapter's change to the weights it goes beside: W + B A * alpha / rank."""
    for key, a in saved.items():
        place, a_or_b = key.split(".lora_")
        if not a_or_b.startswith("A"):
            continue
        change = saved[f"{place}.lora_B.weight"].float() @ a.float() * (lora.alpha / lora.rank)
        module = model.get_submodule(place)
        weight = model.get_parameter(f"{place}.weight")
        weight.add_(change.T if isinstance(module, Conv1D) else change)  # Conv1D holds its weight transposed


def load_model(source: str, *, seed: int, dtype: str, context: int | None) -> LoadedModel:
    """Return the model of a recipe's ``model``: as ``models.loading.load`` does, and ``run:...`` besides."""
    if not source.startswith(PREFIX):
        return load(source, seed=seed, dtype=dtype, context=context)
    place = source.removeprefix(PREFIX)
    which: Which = "best" if place.endswith("@best") else "last"
    folder, _, name = place.removesuffix(f"@{which}").partition("#")
    policy = find_policy(Path(folder).expanduser(), name or None, which)
    return load_trained(policy, dtype=dtype, context=context)


def load_trained(policy: TrainedPolicy, *, dtype: str, context: int | None) -> LoadedModel:
    """Return the model of a trained policy: its base, with the trained weights copied in or the adapter merged in."""
    loaded = load_base(policy, dtype=dtype, context=context)
    if policy.checkpoint is None:
        return loaded
    if policy.table.lora is None:
        weights = dict(loaded.model.named_parameters())
        copy_weights(weights, policy.checkpoint.path / policy.name, policy.name)
    else:
        merge_adapter(loaded.model, adapter_tensors(policy, policy.checkpoint), policy.table.lora)
    return loaded


def load_base(policy: TrainedPolicy, *, dtype: str, context: int | None) -> LoadedModel:
    """Return the model that a policy's weights replace, or that its adapter goes beside: warm, if its run warmed it.

    The tokenizer's own chat template becomes the one that was trained with, options and all, and the generation config
    names every end token of it, so that plain ``transformers`` sees the same prompts and stops at the same tokens.
    """
    table = policy.table
    loaded = load_model(table.model, seed=policy.recipe.seed, dtype=dtype, context=context)
    if policy.checkpoint is not None and table.lora is not None:
        _take_over_warmth(loaded.model, policy, policy.checkpoint.path)
    renderer = ChatRenderer(loaded.tokenizer, template=table.template, options=table.template_options)
    if table.template is not None or table.template_options:
        loaded.tokenizer.chat_template = renderer.standalone_template()
    end_ids = loaded.end_ids | renderer.end_ids
    pad_id = loaded.model.generation_config.pad_token_id
    loaded.model.generation_config = GenerationConfig(eos_token_id=sorted(end_ids), pad_token_id=pad_id)
    return LoadedModel(loaded.model, loaded.tokenizer, loaded.context, frozenset(end_ids), loaded.source)


def adapter_tensors(policy: TrainedPolicy, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the tensors of a policy's adapter, by the names ``peft`` gives them without its prefix."""
    folder = checkpoint.path / policy.name
    check_owner(folder, json.loads((folder / "learner.json").read_text()), policy.name)
    return load_tensors(folder / "weights.safetensors")


def _take_over_warmth(model: PreTrainedModel, policy: TrainedPolicy, folder: Path) -> None:
    """Give a base, as loaded, the weights that the run's warm start left it with."""
    table = policy.table
    weights = dict(model.named_parameters())
    for other, its in policy.recipe.policies.items():
        shared = folder / other / RESIDENT  # written once, for the first policy of those that share the model
        same = (its.model, its.dtype, its.context) == (table.model, table.dtype, table.context)
        if same and its.lora is not None and shared.is_file():
            restore_tensors(shared, weights)
