"""Credit: rewards -> advantages over peers. Plain numbers, so no padding or batching can reach the statistics.

A turn's *value* is what it is credited with, its *advantage* is that value minus the mean of its peers, scaled. Who is
whose peer was stamped on the turn by the sampler (``turn.peers``); nothing is regrouped here. See design.md section 5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from coterie.errors import ConfigError, TrainError
from coterie.types import Credit, Episode, EpisodeKey, Outcome, Turn

Scale: TypeAlias = Literal["std", "none"]
Returns: TypeAlias = Literal["turn", "discounted", "final"]

STD_EPS = 1e-6
"""Added to the standard deviation; bounds what a set of nearly equal rewards can be blown up to."""
FLAT = 1e-9
"""A set is flat when its spread is at most this much of max(1, largest |value|): 0.1 + 0.2 and 0.3 count as equal."""
LARGEST = 1e100
"""A value beyond this is no verdict: its square would overflow. NaN and infinities fail the same comparison."""
NUM_NAMED = 5
"""How many turns or sets a report names; the counts are always complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRule:
    """How values and advantages are made.

    ``alpha`` weighs the team part of a reward against the local part. ``returns`` says what a turn is credited with:
    its own reward (``turn``), its own and later rewards of the episode (``discounted`` by ``gamma`` per act), or the
    episode's outcome (``final``). ``by_episode``: statistics weigh every episode once, however many turns it has.
    ``by_role``: peer sets hold one role each, so ``final`` adds the role's own local part; otherwise the mean of the
    local parts over the roles, which is one value per episode.
    """

    alpha: float = 1.0
    scale: Scale = "std"
    returns: Returns = "turn"
    gamma: float = 1.0
    by_episode: bool = False
    by_role: bool = False

    def __post_init__(self) -> None:
        if not math.isfinite(self.alpha):
            raise ConfigError(f"credit.alpha = {self.alpha}: expected a finite number")
        if not 0.0 < self.gamma <= 1.0:
            raise ConfigError(f"credit.gamma = {self.gamma}: expected 0 < gamma <= 1; for 0 use returns = 'turn'")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditReport:
    """All turns of all episodes that did not fail, in order, with their credit; and what was counted on the way.

    A set's size is what its statistics are over after removals: episodes where ``by_episode``, else turns.
    """

    credits: tuple[Credit, ...]
    peer_sets: int
    """Sets with at least one trainable turn; the next three counts are out of these."""
    peer_sets_zero_variance: int
    """Sets whose advantages are all exactly 0.0 (equal values, or a single member): no policy gradient."""
    peer_sets_short: int
    """Sets smaller than ``set_size``, the empty ones included; 0 where no size was given."""
    peer_sets_empty: int
    """Sets in which no turn had a verdict; they are skipped."""
    peer_sets_mixed_prompts: int
    """Sets whose trainable turns answer more than one prompt: the baseline is then over unequal questions."""
    rewards_invalid: int
    """Trainable turns that could not be valued: no verdict, a non-finite reward, or no completion ids."""
    invalid: tuple[str, ...]
    """Ids of the first few of those turns."""
    short: tuple[str, ...]
    """Keys of the first few short sets."""


def assign(episodes: Sequence[Episode], rule: CreditRule, set_size: int | None = None) -> CreditReport:
    """Return every turn with its value and advantage (arXiv 2510.11062, grouping by agent and turn; design: 5).

    A turn is compared with the trainable turns of the same ``peers`` key that have a finite value; a turn without one
    has ``advantage`` None, and so has a turn that is not trainable. ``set_size`` is K, to count short sets.
    Example: four candidates with rewards 1, 0, 0, 1 get +-0.999998, with scale ``none`` +-0.5.

    Raises ``TrainError`` where the turns contradict their stamps (see ``_check``).
    """
    _check(episodes, rule)
    valued = [pair for episode in episodes if episode.failure is None for pair in _values(episode, rule)]
    sets: dict[str, list[int]] = {}
    for row, (turn, _) in enumerate(valued):
        if turn.trainable:
            sets.setdefault(turn.peers, []).append(row)

    advantages: dict[int, float] = {}
    sizes: dict[str, int] = {}
    flat = 0
    for peers, rows in sets.items():
        members = {row: value for row in rows if (value := valued[row][1]) is not None}
        turns_of = Counter(valued[row][0].episode for row in members)
        sizes[peers] = len(turns_of) if rule.by_episode else len(members)
        weights = [1.0 / turns_of[valued[row][0].episode] if rule.by_episode else 1.0 for row in members]
        if sizes[peers] == 1:  # one episode, maybe of several turns: there is nobody to compare with
            relative = (0.0,) * len(members)
        else:
            relative = advantages_over(list(members.values()), weights, rule.scale)
        advantages.update(zip(members, relative, strict=True))
        flat += bool(members) and not any(relative)

    invalid = [turn.id() for turn, value in valued if turn.trainable and value is None]
    short = [peers for peers, size in sizes.items() if set_size is not None and size < set_size]
    return CreditReport(
        credits=tuple(
            Credit(turn=turn, value=value, advantage=advantages.get(row)) for row, (turn, value) in enumerate(valued)
        ),
        peer_sets=len(sets),
        peer_sets_zero_variance=flat,
        peer_sets_short=len(short),
        peer_sets_empty=sum(size == 0 for size in sizes.values()),
        peer_sets_mixed_prompts=sum(len({valued[row][0].prompt_ids for row in rows}) > 1 for rows in sets.values()),
        rewards_invalid=len(invalid),
        invalid=tuple(invalid[:NUM_NAMED]),
        short=tuple(short[:NUM_NAMED]),
    )


def advantages_over(values: Sequence[float], weights: Sequence[float], scale: Scale) -> tuple[float, ...]:
    """Return (value - mean) / (std + eps) with weighted mean and population std; with scale ``none`` value - mean.

    All exactly 0.0 when the values are flat: rounding residue must not be divided by itself. Deviations are summed
    directly, because E[x^2] - E[x]^2 leaves a residue that looks like variance.
    """
    if not values or max(values) - min(values) <= FLAT * max(1.0, *(abs(value) for value in values)):
        return (0.0,) * len(values)
    total = math.fsum(weights)
    mean = math.fsum(w * value for w, value in zip(weights, values, strict=True)) / total
    deviations = [value - mean for value in values]
    if scale == "none":
        return tuple(deviations)
    variance = math.fsum(w * deviation * deviation for w, deviation in zip(weights, deviations, strict=True)) / total
    return tuple(deviation / (math.sqrt(variance) + STD_EPS) for deviation in deviations)


def _values(episode: Episode, rule: CreditRule) -> Iterator[tuple[Turn, float | None]]:
    """Yield every turn with what it is credited with, or None where there is no verdict or nothing was sampled."""
    if rule.returns == "discounted":
        values = _discounted(episode.turns, rule)
    elif rule.returns == "final":
        values = [_final(turn, episode, rule) for turn in episode.turns]
    else:
        values = [turn_value(turn, rule.alpha) for turn in episode.turns]
    for turn, value in zip(episode.turns, values, strict=True):
        yield turn, value if turn.completion_ids else None


def turn_value(turn: Turn, alpha: float) -> float | None:
    """Return alpha * team + local of the turn's own reward, or None where there is no finite verdict."""
    return None if turn.reward is None else _combined(alpha, turn.reward.team, turn.reward.local)


def _combined(alpha: float, team: float | None, local: float | None) -> float | None:
    if team is None or local is None:
        return None
    value = alpha * team + local  # any non-finite part makes this non-finite, also with alpha = 0
    return value if abs(value) <= LARGEST else None


def _discounted(turns: Sequence[Turn], rule: CreditRule) -> list[float | None]:
    """Return, per turn, the sum of gamma^(acts between) * reward over this turn and the later ones of its episode.

    Acts of every role count in the exponent, frozen ones too; what the env says in between is no act. An act that no
    score was asked for adds nothing; a lost or non-finite verdict makes it and all earlier turns unknown, not 0.
    """
    values: list[float | None] = [None] * len(turns)
    total: float | None = None
    known = True
    later_act = 0
    for row in sorted(range(len(turns)), key=lambda row: turns[row].act, reverse=True):
        turn = turns[row]
        if total is not None:
            total *= rule.gamma ** (later_act - turn.act)
        own = turn_value(turn, rule.alpha)
        if own is not None:
            total = own if total is None else own + total
        elif turn.reward is not None or turn.error is not None:
            known = False
        values[row] = total if known else None
        later_act = turn.act
    return values


def _final(turn: Turn, episode: Episode, rule: CreditRule) -> float | None:
    outcome = episode.outcome
    if outcome is None:
        return None
    local = outcome.local.get(turn.role, 0.0) if rule.by_role else _mean_local(episode, outcome)
    return _combined(rule.alpha, outcome.team, local)


def episode_value(episode: Episode, alpha: float) -> float:
    """Return alpha * team + the mean local part of an episode's outcome; ``TrainError`` where it has no finite one."""
    outcome = episode.outcome
    value = None if outcome is None else _combined(alpha, outcome.team, _mean_local(episode, outcome))
    if value is None:
        raise TrainError(f"episode {episode.key.text()} has no value: expected an outcome with a finite team reward")
    return value


def _mean_local(episode: Episode, outcome: Outcome) -> float:
    """Return the mean local part over the roles that acted or were given one; a role without one has 0."""
    roles = sorted({turn.role for turn in episode.turns} | set(outcome.local))
    return sum(outcome.local.get(role, 0.0) for role in roles) / len(roles)


def _check(episodes: Sequence[Episode], rule: CreditRule) -> None:
    """Raise ``TrainError`` unless the turns agree with their stamps, so that a wrong key cannot pass as a baseline.

    Every episode and candidate occurs once; the candidates of an act share prompt, role, policy, version and peers; a
    set with a candidate that was not played comes from a tree, and then holds the candidates of one act only.
    """
    seen: set[EpisodeKey] = set()
    act_of: dict[str, set[tuple[EpisodeKey, int]]] = {}
    role_of: dict[str, set[str]] = {}
    branched: set[str] = set()
    for episode in episodes:
        if episode.failure is not None:
            continue
        if episode.key in seen:
            raise TrainError(f"episode {episode.key.text()} was handed to credit twice: expected every episode once")
        seen.add(episode.key)
        _check_acts(episode)
        for turn in episode.turns:
            act_of.setdefault(turn.peers, set()).add((turn.episode, turn.act))
            role_of.setdefault(turn.peers, set()).add(turn.role)
            if not turn.played:
                branched.add(turn.peers)
    for peers in branched:
        if len(act_of[peers]) > 1:
            raise TrainError(f"peer set {peers!r} mixes {len(act_of[peers])} acts: in a tree, peers are of one act")
    if branched and (rule.by_episode or rule.returns != "turn"):
        raise TrainError(
            f"peer set {min(branched)!r} has candidates that were not played, but the rule is {rule}: "
            "with tree sampling use returns = 'turn' and by_episode = False"
        )
    if rule.by_role:
        for peers, roles in role_of.items():
            if len(roles) > 1:
                raise TrainError(f"peer set {peers!r} mixes roles {sorted(roles)}: expected one role (by_role is set)")


def _check_acts(episode: Episode) -> None:
    first: dict[int, Turn] = {}
    seen: set[tuple[int, int]] = set()
    for turn in episode.turns:
        if turn.episode != episode.key or (turn.act, turn.candidate) in seen:
            raise TrainError(
                f"episode {episode.key.text()} holds turn {turn.id()}: expected turns of its own, each once"
            )
        seen.add((turn.act, turn.candidate))
        other = first.setdefault(turn.act, turn)
        if _stamp(turn) != _stamp(other):
            raise TrainError(
                f"candidates {other.id()} and {turn.id()} are of one act but differ in prompt ids, role, policy, "
                f"version or peers ({other.peers!r}, {turn.peers!r}): expected them equal"
            )


def _stamp(turn: Turn) -> tuple[str, str, int, str, tuple[int, ...]]:
    return (turn.role, turn.policy, turn.version, turn.peers, turn.prompt_ids)
