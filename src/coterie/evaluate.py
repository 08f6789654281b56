"""Plain play: one candidate per act, nothing chosen by reward. Success with its interval, over tasks and plays."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.keyed import stable_hash
from coterie.lineup import Lineup
from coterie.record import mean
from coterie.rollout import Event, plays_of
from coterie.types import Episode, Json

_RESAMPLES = 2000
_Z95 = 1.959964
"""The normal distribution has 95% of its mass within so many standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What an evaluation found. ``success`` is the mean over tasks of the share of their plays that were solved.

    ``ci95`` is its 95% interval, see ``success_ci95``. ``by_label``: success and number of tasks by each label
    of the env, ``label_ci95`` the interval of each. Failed episodes are not unsolved ones; they are in ``failed``.
    """

    split: str
    tasks: int
    plays: int
    temperature: float
    failed: int
    success: float
    ci95: tuple[float, float]
    pass_at_k: Mapping[int, float]
    reward_team: float | None
    rounds: float | None
    by_label: Mapping[str, tuple[float, int]]
    label_ci95: Mapping[str, tuple[float, float]]
    metrics: Mapping[str, float]

    def row(self) -> dict[str, Json]:
        """Return the row of ``eval.jsonl``."""
        row: dict[str, Json] = {
            "split": self.split,
            "tasks": self.tasks,
            "plays": self.plays,
            "temperature": self.temperature,
            "episodes_failed": self.failed,
            "success": self.success,
            "success_ci95": list(self.ci95),
            "reward/team": self.reward_team,
            "rounds_mean": self.rounds,
        }
        row |= {f"pass@{k}": value for k, value in self.pass_at_k.items()}
        for label, (success, tasks) in sorted(self.by_label.items()):
            row |= {f"by/{label}/success": success, f"by/{label}/tasks": tasks}
            row[f"by/{label}/success_ci95"] = list(self.label_ci95[label])
        return row | {f"metric/{name}": value for name, value in sorted(self.metrics.items())}


def success_ci95(shares: Sequence[float], plays: int) -> tuple[float, float]:
    """Return the 95% interval of the mean of the tasks' shares of solved plays; (nan, nan) without tasks.

    With one play per task it is Wilson's score interval, which also has a width where no task or every task was solved;
    with several it is a bootstrap over tasks, because plays of one task are not independent.
    """
    return wilson_ci95(round(sum(shares)), len(shares)) if plays == 1 else bootstrap_ci95(shares)


def wilson_ci95(solved: int, tasks: int) -> tuple[float, float]:
    """Return Wilson's 95% score interval of a share (Wilson 1927); (nan, nan) for 0 tasks."""
    if not tasks:
        return (math.nan, math.nan)
    share, z2 = solved / tasks, _Z95 * _Z95
    centre = share + z2 / (2 * tasks)
    half = _Z95 * math.sqrt(share * (1.0 - share) / tasks + z2 / (4 * tasks * tasks))
    scale = 1.0 + z2 / tasks
    # Exact at the ends, where rounding would leave 1e-17 instead of 0.
    low = 0.0 if solved == 0 else (centre - half) / scale
    high = 1.0 if solved == tasks else (centre + half) / scale
    return low, high


def bootstrap_ci95(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of the mean over tasks; (nan, nan) without values."""
    if not values:
        return (math.nan, math.nan)
    rng = np.random.default_rng(seed)
    array = np.asarray(values, dtype=np.float64)
    means = np.sort([array[rng.integers(0, len(array), len(array))].mean() for _ in range(_RESAMPLES)])
    return float(means[int(0.025 * _RESAMPLES)]), float(means[int(0.975 * _RESAMPLES) - 1])


def pass_at_k(solved: int, plays: int, k: int) -> float:
    """Return the unbiased estimate of P(at least one of k plays solves), from ``solved`` of ``plays``."""
    if not 0 <= solved <= plays or not 1 <= k <= plays:
        raise ValueError(f"pass@{k} of {solved}/{plays}: expected solved <= plays and 1 <= k <= plays")
    return 1.0 - math.comb(plays - solved, k) / math.comb(plays, k)


def score_episodes(episodes: Iterable[Episode], *, split: str, plays: int, temperature: float) -> Score:
    """Return the score of played episodes, grouped by their task."""
    by_task: dict[str, list[Episode]] = defaultdict(list)
    failed = 0
    for episode in episodes:
        if episode.outcome is None:
            failed += 1
        else:
            by_task[episode.key.task_id].append(episode)
    shares: dict[str, float] = {}
    labels: dict[str, list[float]] = defaultdict(list)
    metrics: dict[str, list[float]] = defaultdict(list)
    solved_of: list[tuple[int, int]] = []
    rewards: list[float | None] = []
    rounds: list[float] = []
    for task_id, group in by_task.items():
        outcomes = [episode.outcome for episode in group if episode.outcome is not None]
        solved = sum(outcome.success for outcome in outcomes)
        shares[task_id] = solved / len(outcomes)
        solved_of.append((solved, len(outcomes)))
        rewards += [outcome.team for outcome in outcomes]
        rounds += [1.0 + max((turn.round for turn in episode.turns), default=0) for episode in group]
        for outcome in outcomes:
            for name, value in outcome.metrics.items():
                metrics[name].append(value)
        for name, label in outcomes[0].labels.items():
            labels[f"{name}={label}"].append(shares[task_id])
    complete = [pair for pair in solved_of if pair[1] == plays]
    ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= plays and plays > 1]
    return Score(
        split=split,
        tasks=len(by_task),
        plays=plays,
        temperature=temperature,
        failed=failed,
        success=sum(shares.values()) / len(shares) if shares else math.nan,
        ci95=success_ci95(list(shares.values()), plays),
        pass_at_k={k: sum(pass_at_k(*pair, k) for pair in complete) / len(complete) for k in ks if complete},
        reward_team=mean(rewards),
        rounds=mean(rounds),
        by_label={name: (sum(values) / len(values), len(values)) for name, values in labels.items()},
        label_ci95={name: success_ci95(values, plays) for name, values in labels.items()},
        metrics={name: sum(values) / len(values) for name, values in metrics.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How much more one team solved than another on the same tasks: the mean over tasks, and its 95% interval.

    ``differing``: tasks of which the teams solved unequal shares; where there is none, the interval says nothing.
    """

    tasks: int
    differing: int
    success: float
    ci95: tuple[float, float]


def paired_difference(episodes: Iterable[Episode], others: Iterable[Episode]) -> Difference:
    """Return how much more of its plays ``episodes`` solved than ``others``, over the tasks that both have played.

    The interval is a bootstrap over tasks of the difference per task: what makes a task hard for both cancels.
    """
    return difference_of(_solved_share(episodes), _solved_share(others))


def difference_of(shares: Mapping[str, float], other_shares: Mapping[str, float]) -> Difference:
    """Return the paired difference of two teams from the share of solved plays of each by task id."""
    differences = [share - other_shares[task] for task, share in shares.items() if task in other_shares]
    return Difference(
        tasks=len(differences),
        differing=sum(difference != 0.0 for difference in differences),
        success=_mean(differences),
        ci95=bootstrap_ci95(differences),
    )


def solved_counts(episodes: Iterable[Episode]) -> dict[str, tuple[int, int]]:
    """Return (solved, played) by task id; failed plays are left out, and so are tasks that have no other."""
    counts: dict[str, tuple[int, int]] = {}
    for episode in episodes:
        if episode.outcome is not None:
            solved, played = counts.get(episode.key.task_id, (0, 0))
            counts[episode.key.task_id] = (solved + episode.outcome.success, played + 1)
    return counts


def _solved_share(episodes: Iterable[Episode]) -> dict[str, float]:
    """Return the share of solved plays by task id; failed plays are left out."""
    return {task: solved / played for task, (solved, played) in solved_counts(episodes).items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def evaluate(
    lineup: Lineup,
    *,
    split: str,
    tasks: int,
    plays: int,
    temperature: float,
    event: Event,
    before_batch: Callable[[], None],
) -> tuple[Score, list[Episode]]:
    """Return the score of plain play on the first ``tasks`` tasks of a split, and its episodes.

    Its random numbers are those of the purpose ``eval``: training is not disturbed, and every evaluation of the same
    policies gives the same.
    """
    instances = lineup.make_env().tasks(split, 0, tasks)
    rollout = lineup.rollout(training=False, event=event, before_batch=before_batch, temperature=temperature)
    step = stable_hash("eval", split) % 2**31
    keys = plays_of(instances, seed=lineup.recipe.seed, purpose="eval", step=step, episodes_per_task=plays)
    episodes = rollout.run(keys)
    return score_episodes(episodes, split=split, plays=plays, temperature=temperature), episodes
