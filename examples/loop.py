"""The whole algorithm in one file, on the library's parts: AT-GRPO (arXiv 2510.11062) for a team of two roles.

    python examples/loop.py                    the demo's recipe: warm start, reinforcement, evaluation on unseen maps
    python examples/loop.py train.steps=20     any key of the recipe can be set

Everything that makes a run convenient (resume, records, progress, validation) is left out; everything that makes it
right is here. Read it from the bottom up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coterie.batch import sample_of
from coterie.config import Recipe, read_recipe
from coterie.credit import CreditReport, CreditRule, assign
from coterie.evaluate import Score, evaluate
from coterie.imitate import warm_start
from coterie.learner import Learner
from coterie.lineup import Lineup, TaskStream, assemble, check_env_fits
from coterie.rollout import Play
from coterie.types import Episode, EpisodeKey, Sample

RECIPE = Path(__file__).parent.parent / "recipes" / "plan_path-tiny.toml"


def event(kind: str, fields: object) -> None:
    """Say what broke and was retried; in a healthy run this never prints."""
    print(kind, fields)


def go_on() -> None:
    """Called before every batch; a place to stop a long rollout."""


def quietly(policy: str, step: int, steps: int, loss: float) -> None:
    """Follow the warm start without a word."""


def play_tree(lineup: Lineup, stream: TaskStream, step: int) -> list[Episode]:
    """Play fresh tasks. At every act K candidates are drawn from one prompt, all are scored, the best is played.

    All randomness is derived from the key of the episode, so it does not matter how episodes are batched.
    """
    seed = lineup.recipe.seed
    plays = [
        Play(key=EpisodeKey(seed=seed, purpose="train", step=step, task_id=task.id, index=0), task=task)
        for task in stream.take(lineup.recipe.train.tasks_per_step)
    ]
    return lineup.rollout(training=True, event=event, before_batch=go_on).run(plays)


def give_credit(episodes: Sequence[Episode], recipe: Recipe) -> CreditReport:
    """Compare each candidate with its peers: the K answers of the same role to the same prompt at the same turn.

    Reward r = alpha * team + local; advantage A = (r - mean) / (std + eps) over the K.
    """
    rule = CreditRule(alpha=recipe.credit.alpha, scale=recipe.credit.scale)
    return assign(episodes, rule, set_size=recipe.sampling.num_candidates)


def samples_of(report: CreditReport, policy: str) -> list[Sample]:
    """Return all turns of the roles this policy plays, as token rows with an advantage."""
    return [
        sample_of(credit.turn, credit.advantage)
        for credit in report.credits
        if credit.advantage is not None and credit.turn.policy == policy
    ]


def make_learners(lineup: Lineup) -> dict[str, Learner]:
    """Return one learner per policy, whatever the number of roles that share it."""
    recipe = lineup.recipe
    return {
        name: Learner(
            lineup.policies[name],
            recipe.policies[name],
            recipe.loss,
            total_steps=recipe.train.steps,
            steps_per_batch=1,
            micro_batch_tokens=recipe.train.micro_batch_tokens,
            autocast=recipe.train.precision == "bfloat16",
        )
        for name in recipe.trained_policies
    }


def train(lineup: Lineup, tell: Callable[[str], None]) -> None:
    """Play, credit, one optimiser step per policy; again."""
    recipe = lineup.recipe
    learners = make_learners(lineup)
    stream = TaskStream(lineup.make_env(), "train", recipe.seed)
    for step in range(recipe.train.steps):
        episodes = play_tree(lineup, stream, step)
        report = give_credit(episodes, recipe)
        for name, learner in learners.items():
            learner.step(samples_of(report, name))
        solved = sum(episode.outcome is not None and episode.outcome.success for episode in episodes)
        tell(f"step {step + 1}/{recipe.train.steps}: solved with choice {solved}/{len(episodes)}")


def test(lineup: Lineup) -> Score:
    """Return the score of plain play (K = 1) on tasks of the test split."""
    table = lineup.recipe.eval
    score, _ = evaluate(
        lineup,
        split=table.final_split,
        tasks=table.final_tasks,
        plays=1,
        temperature=table.temperature,
        event=event,
        before_batch=go_on,
    )
    return score


def main(settings: Sequence[str]) -> float:
    """Run the recipe and return the success on unseen tasks."""
    lineup = assemble(check_env_fits(read_recipe(RECIPE, settings)))
    began = time.monotonic()
    warm_start(lineup, event, go_on, quietly)
    print(f"warm start: {time.monotonic() - began:.0f} s, success {test(lineup).success:.3f}")
    train(lineup, print)
    score = test(lineup)
    low, high = score.ci95
    print(f"success {score.success:.3f} [{low:.3f}, {high:.3f}] on {score.tasks} unseen tasks")
    print(f"{time.monotonic() - began:.0f} s in all")
    return score.success


if __name__ == "__main__":
    main(sys.argv[1:])
