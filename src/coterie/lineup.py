"""A recipe made real: the env, the loaded policies, the engine, and how roles are seated for one kind of play."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedModel

from coterie.batcher import ExpertDraw
from coterie.config import Recipe
from coterie.credit import CreditRule
from coterie.engines import Engine, Sampling
from coterie.engines.split import SplitEngine
from coterie.engines.torch import TorchEngine
from coterie.engines.vllm import VllmEngine
from coterie.env import Env, make_env
from coterie.errors import ConfigError
from coterie.keyed import keyed_random
from coterie.learners import Learns, learner_of
from coterie.machine import keep_freed_memory, multiplies_bfloat16
from coterie.models.adapters import Adapter, Resident
from coterie.models.attention import use_attention
from coterie.models.chat import ChatRenderer
from coterie.models.loading import LoadedModel
from coterie.models.policy import Policy
from coterie.rollout import Crew, Event, Limits, Rollout
from coterie.run_tables import EnvTable
from coterie.sandbox import shared
from coterie.team import Plan, Seating
from coterie.tensors import restore_tensors, save_tensors
from coterie.trained import RESIDENT, load_model
from coterie.types import Task

_log = logging.getLogger(__name__)


class Elsewhere(Crew, Protocol):
    """Other processes, of this machine or of others, that play and train for a lineup."""

    def make_learners(self) -> dict[str, Learns]:
        """Return a learner per trained policy, which starts from the lineup's weights as they are now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineup:
    """Everything that plays: a checked recipe, its policies by name, and the engine that samples from them."""

    recipe: Recipe
    policies: Mapping[str, Policy]
    engine: Engine
    bases: Mapping[str, PreTrainedModel]
    """Frozen copies of models as loaded, for policies whose KL refers to their base."""
    loaded: Mapping[str, LoadedModel] = field(default_factory=dict)
    """The policies' models (the same objects) with their tokenizers, as ``models.loading.save`` takes them."""
    residents: Mapping[str, Resident] = field(default_factory=dict)
    """Models with adapters beside them, by the first policy that has one there."""
    elsewhere: Elsewhere | None = None
    """Who plays and trains instead of this process; then the policies here are only as new as their versions say."""

    def make_env(self) -> Env:
        """Return a fresh env."""
        return make_env(self.recipe.env.name, self.recipe.env.options)

    def seats(self, *, temperature: float | None = None, step: int | None = None) -> dict[str, Seating]:
        """Return who plays each role at the policies' current versions.

        ``temperature`` overrides all roles' and makes the seats those of an evaluation: nobody is trained. ``step`` is
        that of training, in which some policies may pause; without one they all train.
        """
        sampling = self.recipe.sampling
        seats = {}
        for role, name in self.recipe.team.items():
            policy, own = self.policies[name], sampling.roles.get(role)
            train_temperature = sampling.temperature
            max_tokens, stop = sampling.max_tokens, sampling.stop
            if own is not None:
                train_temperature = train_temperature if own.temperature is None else own.temperature
                max_tokens = max_tokens if own.max_tokens is None else own.max_tokens
                stop = stop if own.stop is None else own.stop
            table = self.recipe.policies[name]
            trains = table.train != "frozen" if step is None else table.trains_at(step)
            seats[role] = Seating(
                policy=name,
                version=policy.version,
                renderer=policy.renderer,
                context=policy.context,
                sampling=Sampling(
                    temperature=train_temperature if temperature is None else temperature,
                    max_tokens=max_tokens,
                    stop=stop,
                ),
                trainable=temperature is None and trains,
                lookahead=(own.lookahead or 0) if own is not None and temperature is None and trains else 0,
            )
        return seats

    def plan(self, *, training: bool) -> Plan:
        """Return how candidates are drawn: as the recipe trains, or one per act for plain play."""
        sampling, credit = self.recipe.sampling, self.recipe.credit
        if not training:
            return Plan(mode="chain", num_candidates=1, alpha=credit.alpha, scorer_retries=self.recipe.train.retries)
        return Plan(
            mode=sampling.mode,
            num_candidates=sampling.num_candidates,
            select=sampling.select,
            select_temperature=sampling.select_temperature,
            alpha=credit.alpha,
            group_by=credit.group_by if sampling.mode == "chain" else (),
            scorer_retries=self.recipe.train.retries,
        )

    def credit_rule(self) -> CreditRule:
        """Return how the recipe makes values and advantages."""
        table, chain = self.recipe.credit, self.recipe.sampling.mode == "chain"
        return CreditRule(
            alpha=table.alpha,
            scale=table.scale,
            returns=table.returns,
            gamma=table.gamma,
            by_episode=chain,
            by_role="role" in table.group_by,
        )

    def rollout(
        self,
        *,
        training: bool,
        event: Event,
        before_batch: Callable[[], None],
        temperature: float | None = None,
        step: int | None = None,
        expert: ExpertDraw | None = None,
        limits: Limits | None = None,
    ) -> Rollout:
        """Return a rollout at the policies' current versions; plain play needs a ``temperature``. See ``seats``.

        ``limits`` left out are the recipe's.
        """
        train = self.recipe.train
        return Rollout(
            make_env=self.make_env,
            seats=self.seats(temperature=None if training else temperature, step=step),
            plan=self.plan(training=training),
            engine=self.engine,
            limits=limits
            or Limits(
                retries=train.retries,
                deadline_s=train.episode_deadline_s,
                max_failed_fraction=train.max_failed_fraction,
            ),
            event=event,
            before_batch=before_batch,
            expert=expert,
            crew=self.elsewhere,
        )

    def make_learners(self) -> dict[str, Learns]:
        """Return one learner per trained policy."""
        if self.elsewhere is not None:
            return self.elsewhere.make_learners()
        return {
            name: learner_of(self.recipe, self.policies[name], self.bases.get(name))
            for name in self.recipe.trained_policies
        }

    def save_warmed(self, folder: Path) -> None:
        """Write the models that a warm start has changed and no policy owns, each once, into its policy's folder."""
        for name, resident in self._warmed().items():
            save_tensors(folder / name / RESIDENT, resident.weights())

    def load_warmed(self, folder: Path) -> None:
        """Take over what ``save_warmed`` wrote."""
        for name, resident in self._warmed().items():
            restore_tensors(folder / name / RESIDENT, resident.weights())

    def _warmed(self) -> Mapping[str, Resident]:
        return self.residents if self.recipe.imitate is not None else {}


def check_env_fits(recipe: Recipe) -> Recipe:
    """Return the recipe with its env's options resolved; ``ConfigError`` where env and recipe do not go together."""
    env = make_env(recipe.env.name, recipe.env.options)
    roles = env.active_roles
    for role in recipe.team:
        if role not in roles:
            raise ConfigError(f"team.{role}: env {recipe.env.name!r} asks the roles {list(roles)}; no such role")
    missing = [role for role in roles if role not in recipe.team]
    if missing:
        raise ConfigError(
            f"[team]: role {missing[0]!r} of env {recipe.env.name!r} has no policy; add {missing[0]} = ..."
        )
    if recipe.sampling.mode == "tree":
        for role, policy in recipe.team.items():
            own = recipe.sampling.roles.get(role)
            scored = env.scores(role) or (own is not None and own.lookahead is not None)
            if recipe.policies[policy].train != "frozen" and not scored:
                able = [name for name in roles if env.scores(name)]
                raise ConfigError(
                    f"sampling.mode = 'tree', but env {recipe.env.name!r} cannot score candidates of role {role!r} at "
                    f"once (it can: {able}). Use mode = 'chain', sampling.roles.{role}.lookahead, or freeze policy "
                    f"{policy!r}"
                )
    for what, split, count in (
        ("eval.tasks", recipe.eval.split, recipe.eval.tasks),
        ("eval.final_tasks", recipe.eval.final_split, recipe.eval.final_tasks),
        ("train.tasks_per_step", "train", recipe.train.tasks_per_step),
    ):
        available = env.num_tasks(split)
        if available is not None and available < count:
            raise ConfigError(f"{what} = {count}: split {split!r} of env {recipe.env.name!r} has {available} tasks")
        env.tasks(split, 0, 1)
    options = env.options.model_dump(mode="json")
    return recipe.model_copy(update={"env": EnvTable.model_validate({"name": recipe.env.name, **options})})


def assemble(recipe: Recipe) -> Lineup:
    """Return the lineup of a checked recipe: every policy loaded, every limit compared with its context."""
    shared.configure(shared.SandboxSettings(slots=recipe.sandbox.slots, mode=recipe.sandbox.mode))
    if recipe.train.threads is not None:
        torch.set_num_threads(recipe.train.threads)
    keep_freed_memory()
    _warn_of_emulation(recipe)
    policies: dict[str, Policy] = {}
    bases: dict[str, PreTrainedModel] = {}
    models = _load_models(recipe)
    adapters, residents = _attach_adapters(recipe, models)
    for name, table in recipe.policies.items():
        loaded = models[name]
        renderer = ChatRenderer(
            loaded.tokenizer,
            template=table.template,
            options=table.template_options,
            policies=_same_tokens(name, models),
        )
        if table.train == "full" and table.kl.coef > 0.0 and table.kl.reference == "base":
            bases[name] = copy.deepcopy(loaded.model)
        policies[name] = Policy(
            name=name,
            model=loaded.model,
            renderer=renderer,
            context=loaded.context,
            end_ids=frozenset(loaded.end_ids | renderer.end_ids),
            adapter=adapters.get(name),
            checkpointing=table.gradient_checkpointing,
        )
    lineup = Lineup(
        recipe=recipe,
        policies=policies,
        engine=_engine(recipe, policies, models),
        bases=bases,
        loaded=models,
        residents=residents,
    )
    check_room(lineup)
    return lineup


def check_room(lineup: Lineup) -> None:
    """Raise ``ConfigError`` where a role's answers leave no room for a prompt in the context of its policy."""
    for role, seating in lineup.seats().items():
        if seating.sampling.max_tokens >= seating.context:
            raise ConfigError(
                f"role {role!r}: max_tokens = {seating.sampling.max_tokens} leaves no room for a prompt in the context "
                f"of policy {seating.policy!r}, {seating.context} tokens; lower sampling.max_tokens"
            )


def _engine(recipe: Recipe, policies: Mapping[str, Policy], models: Mapping[str, LoadedModel]) -> Engine:
    """Return what samples from the policies, each by the engine that the recipe gives it."""
    by_vllm = [name for name in policies if recipe.hardware.of(name).engine == "vllm"]
    by_torch = TorchEngine({name: policy for name, policy in policies.items() if name not in by_vllm})
    if not by_vllm:
        return by_torch
    vllm = VllmEngine({name: policies[name] for name in by_vllm}, {name: models[name] for name in by_vllm})
    if len(by_vllm) == len(policies):
        return vllm
    return SplitEngine({name: vllm if name in by_vllm else by_torch for name in policies})


def _load_models(recipe: Recipe) -> dict[str, LoadedModel]:
    """Return the policies' models. Those that change no weight of theirs share one where it is the same model.

    A frozen policy does not share a model that the warm start is about to train.
    """
    models: dict[str, LoadedModel] = {}
    shared: dict[tuple[str, str, int | None, bool], LoadedModel] = {}
    for name, table in recipe.policies.items():
        warmed = recipe.imitate is not None and table.train == "lora"
        key = (table.model, table.dtype, table.context, warmed)
        loaded = shared.get(key) if table.train != "full" else None
        if loaded is None:
            loaded = load_model(table.model, seed=recipe.seed, dtype=table.dtype, context=table.context)
            use_attention(loaded.model)
            loaded.model.requires_grad_(table.train == "full")
        if table.train != "full":
            shared[key] = loaded
        if table.gradient_checkpointing:
            _enable_checkpointing(name, loaded.model)
        models[name] = loaded
    return models


def _enable_checkpointing(name: str, model: PreTrainedModel) -> None:
    """Let a model's layers drop their activations where ``as_sampled`` says so."""
    if not model.supports_gradient_checkpointing:
        raise ConfigError(
            f"policies.{name}.gradient_checkpointing: {type(model).__name__} cannot do it; remove it, and lower "
            "train.micro_batch_tokens to save memory"
        )
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.disable_input_require_grads()  # asked for by another kind of checkpointing; it would cost a gradient


def _attach_adapters(
    recipe: Recipe, models: Mapping[str, LoadedModel]
) -> tuple[dict[str, Adapter], dict[str, Resident]]:
    """Return the policies' adapters, and the models beside which they are by the first policy of each."""
    adapters: dict[str, Adapter] = {}
    residents: dict[str, Resident] = {}
    by_model: dict[int, Resident] = {}
    for name, table in recipe.policies.items():
        if table.lora is not None:
            model = models[name].model
            if id(model) not in by_model:
                by_model[id(model)] = residents[name] = Resident(model)
            adapters[name] = by_model[id(model)].attach(name, table.lora, recipe.seed)
    for name, loaded in models.items():
        if name not in adapters and id(loaded.model) in by_model:
            adapters[name] = by_model[id(loaded.model)].adapter_off()
    return adapters, residents


def _same_tokens(name: str, models: Mapping[str, LoadedModel]) -> list[str]:
    """Return the policies whose ids mean the same as this one's; turns of others enter its prompts as text."""
    vocabulary = models[name].tokenizer.get_vocab()
    return [other for other, loaded in models.items() if other == name or loaded.tokenizer.get_vocab() == vocabulary]


class TaskStream:
    """The training tasks in order: endless where the env makes them, else epochs of keyed permutations."""

    def __init__(self, env: Env, split: str, seed: int, position: int = 0) -> None:
        """Start at ``position`` tasks from the beginning; it is the only state."""
        self._env = env
        self._split = split
        self._seed = seed
        self._size = env.num_tasks(split)
        self.position = position

    def take(self, count: int) -> list[Task]:
        """Return the next ``count`` tasks."""
        first, self.position = self.position, self.position + count
        if self._size is None:
            return self._env.tasks(self._split, first, count)
        return [self._env.tasks(self._split, self._index(place), 1)[0] for place in range(first, first + count)]

    def _index(self, place: int) -> int:
        """Return which task stands at a place of the stream."""
        assert self._size is not None
        order = list(range(self._size))
        keyed_random(self._seed, "epoch", self._split, place // self._size).shuffle(order)
        return order[place % self._size]


def _warn_of_emulation(recipe: Recipe) -> None:
    """Say so where a processor without instructions for bfloat16 is to compute in it."""
    here = {name: table for name, table in recipe.policies.items() if not recipe.hardware.of(name).update_gpus}
    where = [f"policies.{name}.dtype" for name, table in here.items() if table.dtype == "bfloat16"]
    where += ["train.precision"] if here and recipe.train.precision == "bfloat16" else []
    if where and not multiplies_bfloat16():
        _log.warning(
            "%s = 'bfloat16', and this processor has no instructions for it: a product takes as long as fifty and "
            "more in float32. Set 'auto' or 'float32'",
            where[0],
        )
