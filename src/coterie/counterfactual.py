"""What a turn was really worth: its act answered anew many times, everything before it as it happened.

The brute-force advantage of a turn is Q - V: Q is the mean value of episodes that go on from the turn with the team as
it is, V that of episodes that answer the same act anew. It needs many plays per turn, so it is no way to train; it is
the measure of one: ``agreement`` says how an estimator's advantages go with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from coterie.credit import assign, episode_value
from coterie.errors import TrainError
from coterie.keyed import keyed_random, stable_hash
from coterie.lineup import Lineup
from coterie.rollout import Event, Play, Rollout, plays_of
from coterie.team import Plan
from coterie.types import Credit, Episode, EpisodeKey, Json, Turn

Value = Callable[[Episode], float]
_PLAIN = Plan(mode="chain", num_candidates=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookahead:
    """A turn with the mean value of the plays that went on from it, and of those that answered its act anew.

    ``error`` is the standard error of ``advantage``, from the spread of both.
    """

    turn: Turn
    value: float
    baseline: float
    error: float

    @property
    def advantage(self) -> float:
        """How much better the turn is than what the team would have said."""
        return self.value - self.baseline


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How the advantages of an estimator go with those of lookahead, over the turns that have both.

    ``correlation`` is Pearson's, NaN where one of the two is constant. ``same_sign``: share of the turns with an
    estimated advantage other than 0 whose lookahead has its sign.
    """

    turns: int
    states: int
    correlation: float
    same_sign: float

    def row(self) -> dict[str, Json]:
        """Return it as JSON."""
        return {
            "turns": self.turns,
            "states": self.states,
            "correlation": self.correlation if math.isfinite(self.correlation) else None,
            "same_sign": self.same_sign if math.isfinite(self.same_sign) else None,
        }


def lookahead(
    rollout: Rollout, episode: Episode, act: int, value: Value, *, continuations: int, resamples: int
) -> list[Lookahead]:
    """Return, for every candidate of an act, what it is worth against the act answered anew.

    The acts before are replayed as recorded, for ``continuations`` plays from each candidate and ``resamples`` that
    draw the act itself; from there on ``rollout``'s team plays plainly, one candidate per act. The env's own
    randomness is that of the episode. Raises ``TrainError`` for an act that the episode does not have, or where every
    play failed.
    """
    candidates = [turn for turn in episode.turns if turn.act == act]
    if not candidates:
        raise TrainError(f"episode {episode.key.text()} has no act {act}: it has {len(episode.played)}")
    before = tuple(turn for turn in episode.played if turn.act < act)
    keys = _fresh_keys(episode.key)
    branches = [(*before, replace(turn, played=True)) for turn in candidates]
    plays = [_play(episode, branch, next(keys)) for branch in branches for _ in range(continuations)]
    plays += [_play(episode, before, next(keys)) for _ in range(resamples)]
    ends = replace(rollout, plan=_PLAIN).run(plays)
    baseline = _values(ends[len(branches) * continuations :], value, act)
    found = []
    for place, turn in enumerate(candidates):
        own = _values(ends[place * continuations : (place + 1) * continuations], value, act)
        found.append(
            Lookahead(
                turn=turn,
                value=float(own.mean()),
                baseline=float(baseline.mean()),
                error=math.sqrt(own.var() / len(own) + baseline.var() / len(baseline)),
            )
        )
    return found


def agreement(credits: Sequence[Credit], lookaheads: Sequence[Lookahead]) -> Agreement:
    """Return how the estimator's advantages go with lookahead's; turns without an advantage are left out."""
    estimated = {credit.turn.id(): credit.advantage for credit in credits if credit.advantage is not None}
    both = [(estimated[item.turn.id()], item) for item in lookaheads if item.turn.id() in estimated]
    pairs = np.array([(own, item.advantage) for own, item in both], dtype=np.float64).reshape(-1, 2)
    varies = len(pairs) > 1 and bool(np.all(np.ptp(pairs, axis=0) > 0.0))
    told = pairs[pairs[:, 0] != 0.0]
    return Agreement(
        turns=len(pairs),
        states=len({(item.turn.episode, item.turn.act) for _, item in both}),
        correlation=float(np.corrcoef(pairs[:, 0], pairs[:, 1])[0, 1]) if varies else math.nan,
        same_sign=float((np.sign(told[:, 0]) == np.sign(told[:, 1])).mean()) if len(told) else math.nan,
    )


def study_estimator(
    lineup: Lineup,
    *,
    tasks: int,
    states: int,
    continuations: int,
    event: Event,
    before_batch: Callable[[], None],
) -> tuple[Agreement, list[Lookahead]]:
    """Return how the advantages of a recipe's own sampling and credit go with lookahead, on some states of its play.

    ``tasks`` validation tasks are played as a training step would play them and credited; ``states`` acts of trainable
    turns, drawn by key, are looked at with ``continuations`` plays per candidate, and as many per act times K anew. The
    value of an episode is alpha * team + the mean local part of its outcome. Raises ``TrainError`` where no play has a
    trainable turn.
    """
    recipe = lineup.recipe
    rollout = lineup.rollout(training=True, event=event, before_batch=before_batch)
    chain, num_candidates = recipe.sampling.mode == "chain", recipe.sampling.num_candidates
    plays = plays_of(
        lineup.make_env().tasks(recipe.eval.split, 0, tasks),
        seed=recipe.seed,
        purpose="play",
        step=stable_hash("lookahead") % 2**31,
        episodes_per_task=num_candidates if chain else 1,
    )
    episodes = [episode for episode in rollout.run(plays) if episode.failure is None]
    credits = assign(episodes, lineup.credit_rule(), num_candidates).credits
    acts = sorted({(number, turn.act) for number, e in enumerate(episodes) for turn in e.turns if turn.trainable})
    if not acts:
        raise TrainError(
            f"lookahead: none of {len(episodes)} plays has a turn of a policy that is trained; set policies.NAME.train"
        )
    chosen = keyed_random("lookahead", recipe.seed).sample(acts, min(states, len(acts)))
    found: list[Lookahead] = []
    for number, act in chosen:
        found += lookahead(
            rollout,
            episodes[number],
            act,
            lambda episode: episode_value(episode, recipe.credit.alpha),
            continuations=continuations,
            resamples=continuations * num_candidates,
        )
    return agreement(credits, found), found


# ---- machinery below ------------------------------------------------------------------------------------------------


def _fresh_keys(key: EpisodeKey) -> Iterator[EpisodeKey]:
    """Yield keys of the episode's task under which nothing has been drawn yet, the same at every call."""
    for index in itertools.count():
        yield replace(key, purpose="play", step=stable_hash("lookahead", key.text()) % 2**31, index=index)


def _play(episode: Episode, recorded: tuple[Turn, ...], key: EpisodeKey) -> Play:
    return Play(key=key, task=episode.task, replayed=recorded, env_key=episode.key)


def _values(episodes: Sequence[Episode], value: Value, act: int) -> np.ndarray:
    values = [value(episode) for episode in episodes if episode.outcome is not None]
    if not values:
        raise TrainError(f"lookahead of act {act}: none of {len(episodes)} plays came to its end; look at the events")
    return np.asarray(values, dtype=np.float64)
