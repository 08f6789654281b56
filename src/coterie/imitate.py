"""The supervised warm start: policies learn the formats, and some of the play, from the env's scripted experts.

Loss on completion tokens only, the end token included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch

from coterie.batch import pack, sample_of
from coterie.config import OptimizerTable, PolicyTable
from coterie.engines import Completion, Request
from coterie.env import Expert
from coterie.errors import ConfigError, TrainError
from coterie.keyed import keyed_random, stable_hash
from coterie.learner import scored_logits
from coterie.lineup import Lineup
from coterie.loss import token_logprobs
from coterie.models.policy import Policy, as_sampled
from coterie.rollout import Event, Play, plays_of
from coterie.run_tables import ImitateTable, TrainTable
from coterie.stepper import Stepper, learning_rate
from coterie.team import Plan
from coterie.types import Episode, Sample, StopReason

Progress = Callable[[str, int, int, float], None]
"""``progress(policies, step, steps, loss)``."""


def expert_draw(
    policies: Mapping[str, Policy], noise_of: Callable[[str, int], float]
) -> Callable[[Request, Expert | None], tuple[Completion, ...]]:
    """Return what answers acts with the env's experts instead of an engine. Log-probs are 0: nothing was sampled.

    ``noise_of`` gives the noise of an answer by the id of its task and its candidate number.
    """

    @cache
    def ids_of(policy: str, text: str) -> tuple[int, ...]:  # experts say the same again and again
        renderer = policies[policy].renderer
        return (*renderer.text_ids(text), renderer.end_id)

    def draw(request: Request, expert: Expert | None) -> tuple[Completion, ...]:
        if expert is None:
            raise ConfigError(f"role {request.role!r}: the env gives no expert for it, so there is nothing to imitate")
        episode = request.episode
        completions = []
        for candidate in request.candidates:
            key = ("expert", episode.seed, episode.purpose, episode.step, episode.task_id, episode.index, request.act)
            text = expert(keyed_random(*key, candidate), noise_of(episode.task_id, candidate))
            ids = ids_of(request.policy, text)
            completions.append(Completion(ids=ids, logprobs=(0.0,) * len(ids), text=text, stop_reason=StopReason.END))
        return tuple(completions)

    return draw


def demonstrations(
    lineup: Lineup, table: ImitateTable, event: Event, before_batch: Callable[[], None]
) -> list[Episode]:
    """Return training episodes played by the experts, with the answers to be imitated.

    The noise of those rises from the first episode to the last with the square of the way: most are nearly clean. As
    many more answers are drawn at the last noise, and any of all is played: so what is imitated is good play, in states
    that bad play leads to. From good play alone a role would learn to trust whatever the others say.
    """
    tasks = lineup.make_env().tasks("train", 0, table.episodes)
    low, high = table.noise
    noise = {task.id: low + (high - low) * (place / max(1, len(tasks) - 1)) ** 2 for place, task in enumerate(tasks)}
    demos = table.demos_per_act
    rollout = replace(
        lineup.rollout(training=True, event=event, before_batch=before_batch),
        plan=Plan(mode="tree", num_candidates=2 * demos, select="random"),
        expert=expert_draw(lineup.policies, lambda task, candidate: noise[task] if candidate < demos else high),
    )
    plays: list[Play] = plays_of(tasks, seed=lineup.recipe.seed, purpose="imitate", step=0, episodes_per_task=1)
    episodes = rollout.run(plays)
    return [replace(e, turns=tuple(turn for turn in e.turns if turn.candidate < demos)) for e in episodes]


def acts_of(episodes: Iterable[Episode], policies: Sequence[str]) -> list[list[Sample]]:
    """Return the demonstrations of some policies' roles, one list of samples per act."""
    acts: dict[str, list[Sample]] = {}
    for episode in episodes:
        for turn in episode.turns:
            if turn.policy in policies:
                acts.setdefault(turn.peers, []).append(sample_of(turn, 1.0))
    return list(acts.values())


def draw_acts(table: ImitateTable, step: int, count: int, seed: int) -> list[int]:
    """Return the acts of one batch, out of ``count`` in the order they were demonstrated.

    A window over a tenth of them moves from the first to the last while the steps go by, so that a policy learns what
    to do from clean demonstrations before it learns from noisy ones how often to stray.
    """
    width = max(1, count // 10)
    first = round((count - width) * step / max(1, table.steps - 1))
    rng = keyed_random("imitate", seed, step)
    return [first + rng.randrange(width) for _ in range(table.batch_acts)]


def imitate(
    policy: Policy,
    table: ImitateTable,
    acts: Sequence[Sequence[Sample]],
    seed: int,
    train: TrainTable,
    progress: Progress,
) -> float:
    """Train one policy on demonstrations; return the mean loss (nats per token) of the last tenth of the steps.

    Batches are drawn by key, so the result depends on the seed and the demonstrations only.
    """
    if not acts:
        raise TrainError(f"policy {policy.name!r}: no demonstrations for its roles")
    weights = list(policy.model_weights().values())
    autocast = train.precision == "bfloat16"
    optimizer = OptimizerTable(lr=table.lr, betas=(0.9, 0.98), warmup_steps=table.warmup_steps, schedule="linear")
    losses: list[float] = []
    model, device = policy.model, policy.model.device
    flags = [weight.requires_grad for weight in weights]
    dtype = model.dtype
    _cast(weights, torch.float32)  # in bfloat16 small steps would be lost; see the master copies of Learner
    _ask_for_gradients(weights, [True] * len(weights))
    stepper = Stepper(policy.model_weights(), optimizer)
    for step in range(table.steps):
        chosen = [sample for index in draw_acts(table, step, len(acts), seed) for sample in acts[index]]
        num_tokens = sum(len(sample.completion_ids) for sample in chosen)
        loss = 0.0
        shares = [1.0 / num_tokens] * len(chosen)
        for batch in pack(chosen, shares, train.micro_batch_tokens, device, policy.width):
            with as_sampled(model, policy.checkpointing):
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                    logits = scored_logits(model, batch)
                part = -(token_logprobs(logits, batch.targets_N) * batch.weights_N).sum()
                part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        norm = stepper.clip()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainError(
                f"warm start of policy {policy.name!r}, step {step + 1}: loss {loss:g}, gradient norm {norm:g}; "
                "expected finite numbers. Lower imitate.lr"
            )
        stepper.step(learning_rate(optimizer, step, table.steps))
        stepper.forget()
        losses.append(loss)
        progress(policy.name, step + 1, table.steps, loss)
    _cast(weights, dtype)
    _ask_for_gradients(weights, flags)
    tail = losses[-max(1, table.steps // 10) :]
    return sum(tail) / len(tail)


def warm_start(lineup: Lineup, event: Event, before_batch: Callable[[], None], progress: Progress) -> dict[str, float]:
    """Warm-start every trained policy; return the final loss by policy.

    A model learns from the demonstrations of its own policies' roles and of all others whose prompts are rendered to
    the same ids. Policies of one and the same model learn once and start equal. It is the model that learns, whole;
    adapters beside it still change nothing afterwards.
    """
    recipe = lineup.recipe
    table = recipe.imitate
    if table is None:
        raise ConfigError("the recipe has no [imitate] table, which says how long and from how many episodes to learn")
    episodes = demonstrations(lineup, table, event, before_batch)

    def tell(name: str, step: int, steps: int, loss: float) -> None:
        before_batch()
        progress(name, step, steps, loss)

    losses: dict[str, float] = {}
    for names in _groups(lineup):
        first = lineup.policies[names[0]]
        seed = stable_hash(recipe.seed, "imitate")
        alike = [n for n in recipe.trained_policies if lineup.policies[n].renderer.renders_like(first.renderer)]
        acts = acts_of(episodes, sorted({*names, *alike}))
        _check_fits(acts, first)
        loss = imitate(first, table, acts, seed, recipe.train, tell)
        for name in names:
            losses[name] = loss
            if lineup.policies[name].model is not first.model:
                _copy(first.model_weights(), lineup.policies[name].model_weights())
    return losses


def _check_fits(acts: Sequence[Sequence[Sample]], policy: Policy) -> None:
    """Raise ``TrainError`` where a prompt and its answer are longer than the policy's context."""
    for sample in (sample for act in acts for sample in act):
        length = len(sample.prompt_ids) + len(sample.completion_ids)
        if length > policy.context:
            raise TrainError(
                f"warm start: a demonstration for role {sample.role!r} has {length} tokens, prompt and answer, but the "
                f"context of policy {policy.name!r} is {policy.context}; use a longer context or a smaller task"
            )


def _groups(lineup: Lineup) -> list[list[str]]:
    """Return the trained policies by what they learn together: one model in memory, or models of one origin."""
    groups: list[list[str]] = []
    by_model: dict[int, list[str]] = {}
    by_origin: dict[str, list[str]] = {}
    for name in lineup.recipe.trained_policies:
        model, origin = id(lineup.policies[name].model), _origin(lineup.recipe.policies[name])
        group = by_model.get(model, by_origin.get(origin))
        if group is None:
            group = []
            groups.append(group)
        by_model.setdefault(model, group)
        by_origin.setdefault(origin, group)
        group.append(name)
    return groups


@torch.no_grad()
def _copy(source: Mapping[str, torch.nn.Parameter], target: Mapping[str, torch.nn.Parameter]) -> None:
    for name, weight in target.items():
        weight.copy_(source[name])


def _ask_for_gradients(weights: Sequence[torch.nn.Parameter], flags: Sequence[bool]) -> None:
    """Set whether each weight asks for a gradient; a shared model's weights do so during the warm start only."""
    for weight, flag in zip(weights, flags, strict=True):
        weight.requires_grad_(flag)


def _cast(weights: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Change the weights' dtype in place. Weights only: the buffers of rotary positions have a dtype of their own."""
    for weight in weights:
        weight.data = weight.data.to(dtype)


def _origin(table: PolicyTable) -> str:
    """Return what makes two policies start from the same weights and render alike."""
    return repr((table.model, table.dtype, table.context, table.template, sorted(table.template_options.items())))
