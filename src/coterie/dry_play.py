"""Plays without a model: every answer is empty. What they show of an env is known before anything runs."""

from __future__ import annotations

from collections.abc import Mapping

from coterie.batcher import ExpertDraw
from coterie.engines import Completion, Request
from coterie.env import Expert
from coterie.errors import ConfigError
from coterie.lineup import Lineup
from coterie.models.policy import Policy
from coterie.rollout import Limits, no_check, plays_of
from coterie.team import ContextOverflowError
from coterie.types import StopReason

DRY_TASKS = 2
"""How many tasks of a split are played so."""
_DEADLINE_S = 10.0


def empty_answers(policies: Mapping[str, Policy]) -> ExpertDraw:
    """Return what answers acts with an end token and nothing else."""

    def draw(request: Request, expert: Expert | None) -> tuple[Completion, ...]:  # noqa: ARG001
        end = policies[request.policy].renderer.end_id
        return (Completion(ids=(end,), logprobs=(0.0,), text="", stop_reason=StopReason.END),) * len(request.candidates)

    return draw


def check_prompts(lineup: Lineup, *splits: str) -> None:
    """Raise ``ConfigError`` where the first prompt of a role is longer than its policy's context, in a few tasks.

    Prompts are the shortest then, since they quote nothing but empty answers. One that grows too long later in a play
    only ends it. As many tasks may be too long as ``train.max_failed_fraction`` allows. What else fails here is not
    told: answers that are empty prove nothing.
    """
    for split in splits:
        num_episodes, found = _overflows(lineup, split)
        if len(found) > lineup.recipe.train.max_failed_fraction * num_episodes:
            raise ConfigError(found[0])


def _overflows(lineup: Lineup, split: str) -> tuple[int, list[str]]:
    """Return how many plays were made, and what is said of those in which a role's first prompt did not fit."""
    late: list[str] = []

    def note(kind: str, fields: Mapping[str, str | int]) -> None:
        if kind == "context_overflow":
            late.append(str(fields["error"]))

    rollout = lineup.rollout(
        training=False,
        event=note,
        before_batch=no_check,
        temperature=1.0,
        expert=empty_answers(lineup.policies),
        limits=Limits(retries=0, deadline_s=_DEADLINE_S, max_failed_fraction=1.0),
    )
    env = lineup.make_env()
    tasks = env.tasks(split, 0, min(DRY_TASKS, env.num_tasks(split) or DRY_TASKS))
    episodes = rollout.run(plays_of(tasks, seed=lineup.recipe.seed, purpose="play", step=0, episodes_per_task=1))
    at_once = [e.failure.message for e in episodes if e.failure and e.failure.kind == ContextOverflowError.__name__]
    acted = {turn.role for episode in episodes for turn in episode.turns}
    kept_out = [error for error in late if not any(error.startswith(f"role {role!r},") for role in acted)]
    return len(episodes), [*at_once, *kept_out]
