"""A few training acts of a recipe, taken apart for the checks of ``doctor``: what was asked, drawn, and trained on.

Everything runs through the parts that training runs through: rollout, renderer, engine, sorting, packing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from coterie.batch import MicroBatch, pack
from coterie.engines import Completion, Engine, Request
from coterie.env import Prompt
from coterie.lineup import Lineup
from coterie.rollout import no_check, no_event, plays_of
from coterie.run_tables import SamplingTable
from coterie.team import Renderer
from coterie.train import samples_by_policy
from coterie.types import Credit, Sample, Turn

NUM_TASKS = 2
_MAX_CANDIDATES = 4
_MAX_TOKENS = 48
_ADVANTAGES = (1.0, -0.5)
"""Given in turn instead of what the rewards say, so that there is a gradient; they do not cancel on equal answers."""

Packer = Callable[[Sequence[Sample], Sequence[float], int, torch.device, int], list[MicroBatch]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One act as the engine saw it, and what it answered."""

    request: Request
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the checks look at; a broken set-up is one of these with a part replaced.

    ``draws`` are of trained and frozen policies alike. ``prompts`` are those of each policy, as the env wrote them.
    ``samples`` is what the learner of each trained policy would be given, and ``pack`` makes its tensors.
    """

    lineup: Lineup
    draws: tuple[Draw, ...]
    prompts: Mapping[str, tuple[Prompt, ...]]
    samples: Mapping[str, tuple[Sample, ...]]
    pack: Packer = pack
    available_memory: int | None = None
    """Bytes the machine has left now that the models are loaded; ``None``: unknown."""

    @property
    def trained(self) -> tuple[str, ...]:
        """The policies that learn."""
        return self.lineup.recipe.trained_policies

    def batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Return samples of one policy as its learner packs them, every token with weight 1."""
        if not samples:
            return []
        policy, max_tokens = self.lineup.policies[samples[0].policy], self.lineup.recipe.train.micro_batch_tokens
        return self.pack(samples, [1.0] * len(samples), max_tokens, policy.model.device, policy.width)


class _Listening:
    """An engine that notes what it was asked and what it answered."""

    def __init__(self, engine: Engine, draws: list[Draw]) -> None:
        self._engine = engine
        self._draws = draws

    def version(self, policy: str) -> int:
        """Return the engine's version."""
        return self._engine.version(policy)

    def remembering(self) -> Engine:
        """Return the engine of a rollout, which notes in the same place."""
        return _Listening(self._engine.remembering(), self._draws)

    def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Return the engine's answers."""
        answers = self._engine.generate(requests)
        self._draws += [
            Draw(request=request, completions=completions)
            for request, completions in zip(requests, answers, strict=True)
        ]
        return answers


class _Reading:
    """A renderer that notes the prompts it was given."""

    def __init__(self, renderer: Renderer, prompts: list[Prompt]) -> None:
        self._renderer = renderer
        self._prompts = prompts

    def render(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the renderer's ids."""
        self._prompts.append(prompt)
        return self._renderer.render(prompt)


def take_probe(lineup: Lineup, available_memory: int | None = None) -> Probe:
    """Return the probe of a lineup: two training tasks, played with at most 4 candidates of at most 48 tokens.

    Raises ``TrainError`` where the env or the engine cannot play them.
    """
    short = replace(lineup, recipe=lineup.recipe.model_copy(update={"sampling": _shortened(lineup.recipe.sampling)}))
    draws: list[Draw] = []
    prompts: dict[str, list[Prompt]] = defaultdict(list)
    rollout = short.rollout(training=True, event=no_event, before_batch=no_check)
    rollout = replace(
        rollout,
        engine=_Listening(lineup.engine, draws),
        seats={
            role: replace(seat, renderer=_Reading(seat.renderer, prompts[seat.policy]))
            for role, seat in rollout.seats.items()
        },
        limits=replace(rollout.limits, retries=0, max_failed_fraction=0.0),
    )
    sampling = short.recipe.sampling
    tasks = lineup.make_env().tasks("train", 0, NUM_TASKS)
    repeats = sampling.num_candidates if sampling.mode == "chain" else 1
    plays = plays_of(tasks, seed=lineup.recipe.seed, purpose="play", step=0, episodes_per_task=repeats)
    turns = [turn for episode in rollout.run(plays) for turn in episode.turns]
    return Probe(
        lineup=lineup,
        draws=tuple(draws),
        prompts={name: tuple(found) for name, found in prompts.items()},
        samples=_samples(turns, lineup.recipe.trained_policies),
        available_memory=available_memory,
    )


def trained_ids(batch: MicroBatch) -> list[tuple[int, ...]]:
    """Return, per sample, the ids that have a weight in the loss, read from the tensors."""
    found: dict[int, list[int]] = defaultdict(list)
    columns = (batch.members_N, batch.targets_N, batch.weights_N)
    for member, target, weight in zip(*(column.tolist() for column in columns), strict=True):
        if weight != 0.0:
            found[member].append(target)
    return [tuple(ids) for ids in found.values()]


def _samples(turns: Sequence[Turn], policies: Sequence[str]) -> dict[str, tuple[Sample, ...]]:
    credits = [Credit(turn=turn, value=None, advantage=_ADVANTAGES[number % 2]) for number, turn in enumerate(turns)]
    sorted_samples = samples_by_policy(credits, dict.fromkeys(policies))
    return {name: tuple(samples) for name, samples in sorted_samples.items()}


def _shortened(sampling: SamplingTable) -> SamplingTable:
    """Return the sampling with few candidates and short answers: the checks need no more, and take less time."""
    roles = {
        role: own.model_copy(
            update={"max_tokens": None if own.max_tokens is None else min(own.max_tokens, _MAX_TOKENS)}
        )
        for role, own in sampling.roles.items()
    }
    return sampling.model_copy(
        update={
            "num_candidates": min(sampling.num_candidates, _MAX_CANDIDATES),
            "max_tokens": min(sampling.max_tokens, _MAX_TOKENS),
            "roles": roles,
        }
    )
