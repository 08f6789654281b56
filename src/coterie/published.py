"""Checks without weights: what a recipe costs by the published dimensions of its models, kept beside the recipes.

``recipes/paper/models/NAME.json`` holds the hub id, the number of parameters as published, and the config. The model is
made without memory for its weights and its parameters are counted, so a wrong dimension does not go unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import RenderableType
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from coterie.config import Recipe
from coterie.display import titled
from coterie.engines.scripted import ScriptedEngine
from coterie.errors import ConfigError
from coterie.estimate import (
    MEMORY_PARTS,
    PolicyMemory,
    RoleLoad,
    policy_memory,
    readable_bytes,
    role_loads,
    team_memory,
)
from coterie.lineup import Lineup
from coterie.models.chat import ChatRenderer
from coterie.models.loading import DTYPES
from coterie.models.policy import Policy
from coterie.models.tiny import tiny_tokenizer
from coterie.run_tables import EnvTable
from coterie.shipped import published_files

_ROOM = 10_000_000
"""Context of the stand-in renderer, in characters: it must never be what cuts a prompt."""
_GPUS = (1, 8)
_DATA_KEYS = ("data", "test_data")
NOT_VERIFIED = (
    "that the model loads, and that its weights have these dimensions",
    "tokens of prompts: the tokenizer is not here, so prompts are counted in characters",
    "that the chat template renders the prompts, and that they fit into the context",
    "memory, speed and learning: nothing was run",
    "training on several GPUs: their numbers are arithmetic, weights, gradients and optimiser spread evenly over them",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A model by its published dimensions: hub id, number of parameters, and what makes a config of transformers."""

    model: str
    parameters: int
    config: Mapping[str, Any]

    def empty(self) -> PreTrainedModel:
        """Return the model without memory for its weights; ``ConfigError`` where it has other than ``parameters``."""
        options = dict(self.config)
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        counted = sum(weight.numel() for weight in model.parameters())
        if counted != self.parameters:
            raise ConfigError(
                f"{self.model}: its published dimensions make {counted:,} parameters, published are "
                f"{self.parameters:,}; correct the file in recipes/paper/models"
            )
        return model

    def cache_bytes(self, dtype: str) -> int:
        """Return the bytes of keys and values that generation keeps per token."""
        heads, width = self.config["num_key_value_heads"], self.config["head_dim"]
        return int(2 * self.config["num_hidden_layers"] * heads * width * DTYPES[dtype].itemsize)


def read_published(path: Path) -> PublishedModel:
    """Return the model of a file; ``ConfigError`` for one that does not hold what is needed."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    wanted = {field.name for field in fields(PublishedModel)}
    if set(raw) != wanted:
        raise ConfigError(f"{path}: expected the keys {sorted(wanted)}, got {sorted(raw)}")
    return PublishedModel(**raw)


def published_lineup(recipe: Recipe) -> tuple[Lineup, dict[str, PublishedModel]]:
    """Return a checked recipe's lineup without weights, and the model of each policy.

    It can be played with empty answers, a character being a token, and its parameters counted; it cannot generate.
    """
    known = {model.model: model for model in map(read_published, published_files())}
    renderer = ChatRenderer(tiny_tokenizer())
    models: dict[str, PublishedModel] = {}
    policies: dict[str, Policy] = {}
    for name, table in recipe.policies.items():
        if table.model not in known:
            raise ConfigError(
                f"--offline: the dimensions of {table.model!r} (policies.{name}.model) are not published here; known "
                f"are {sorted(known)}. Leave --offline out to load the model"
            )
        if table.lora is not None:
            raise ConfigError(f"--offline counts whole models; policies.{name} is an adapter. Leave --offline out")
        models[name] = known[table.model]
        model = models[name].empty().to(DTYPES[table.dtype])
        policies[name] = Policy(
            name=name, model=model, renderer=renderer, context=_ROOM, end_ids=frozenset({renderer.end_id})
        )
    return Lineup(recipe=recipe, policies=policies, engine=ScriptedEngine({}), bases={}), models


def without_data(recipe: Recipe) -> tuple[Recipe, tuple[str, ...]]:
    """Return the recipe with problems that are made on the spot, and the data sets that it would read instead."""
    options, sources = _made(recipe.env.options)
    return recipe.model_copy(update={"env": EnvTable.model_validate({"name": recipe.env.name, **options})}), sources


def offline_tables(recipe: Recipe) -> list[RenderableType]:
    """Return what a checked recipe costs by its models' published dimensions: tokens a step, and memory per GPU."""
    lineup, models = published_lineup(recipe)
    loads = role_loads(lineup)
    memories = [policy_memory(lineup, name) for name in recipe.policies]
    return [
        _tokens_table(recipe, loads),
        _memory_table(memories),
        _cache_table(recipe, models, loads),
    ]


def per_gpu(memory: PolicyMemory, gpus: int) -> int:
    """Return the bytes on each of several GPUs: activations are each one's own, the rest is spread evenly."""
    return -(-(memory.total - memory.activations) // gpus) + memory.activations


def _made(options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return options without data, those of a mixture's parts too, and the data."""
    made = {key: value for key, value in options.items() if key not in _DATA_KEYS}
    sources = [str(source) for key in _DATA_KEYS for source in options.get(key, ())]
    if "envs" in options:
        parts = [_made(part) for part in options["envs"]]
        made["envs"] = [own for own, _ in parts]
        sources += [source for _, own in parts for source in own]
    return made, tuple(sources)


def _tokens_table(recipe: Recipe, loads: Sequence[RoleLoad]) -> RenderableType:
    tasks = recipe.train.tasks_per_step
    table = Table("role", "policy")
    for column in ("acts per task", "answers per task", "prompt characters", "answer tokens", "tokens a step"):
        table.add_column(column, justify="right", min_width=len(column))
    for load in loads:
        numbers = (load.acts, load.candidates, load.prompt_tokens, load.max_tokens, load.tokens * tasks)
        table.add_row(load.role, load.policy, *(f"{number:,}" for number in numbers))
    total = sum(load.tokens for load in loads) * tasks
    shares = ", ".join(f"{total // gpus:,} on each of {gpus}" for gpus in _GPUS if gpus > 1)
    return titled(f"One step: {tasks} tasks, at most {total:,} tokens generated on one GPU, {shares}", table)


def _memory_table(memories: Sequence[PolicyMemory]) -> RenderableType:
    columns = [*memories, team_memory(memories)] if len(memories) > 1 else list(memories)
    table = Table("policy")
    for memory in columns:
        table.add_column(memory.policy, justify="right", min_width=len(f"{memory.parameters:,}"))
    table.add_row("parameters, counted", *(f"{memory.parameters:,}" for memory in columns))
    for part, count in MEMORY_PARTS.items():
        table.add_row(part, *(readable_bytes(count(memory)) for memory in columns))
    for gpus in _GPUS:
        label = "on one GPU" if gpus == 1 else f"on each of {gpus}"
        table.add_row(label, *(readable_bytes(per_gpu(memory, gpus)) for memory in columns))
    return titled("Memory, about (without the cache of generation)", table)


def _cache_table(recipe: Recipe, models: Mapping[str, PublishedModel], loads: Sequence[RoleLoad]) -> RenderableType:
    table = Table("policy", "bytes a token", "one answer with its whole context")
    for name, model in models.items():
        own = recipe.policies[name]
        context = own.context or int(model.config["max_position_embeddings"])
        each = model.cache_bytes(own.dtype)
        table.add_row(name, f"{each:,}", readable_bytes(each * context))
    answers = recipe.train.tasks_per_step * max(load.candidates // max(1, load.acts) for load in loads)
    return titled(f"Cache of generation; at most {answers:,} answers are made at once", table)
