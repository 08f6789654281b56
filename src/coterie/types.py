"""The frozen records that move between modules. No torch, no behaviour beyond what follows from the fields.

The order in which they appear in a run::

    Task --Env.play--> Turn, Turn, ... + Outcome = Episode --credit--> Credit --batch--> Sample --> learner
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Literal, TypeAlias, TypeVar

Json: TypeAlias = bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"] | None
Purpose: TypeAlias = Literal["train", "eval", "imitate", "play"]
MessageRole: TypeAlias = Literal["system", "user", "assistant"]
R = TypeVar("R")


class StopReason(StrEnum):
    """Why a completion ended. Every completion has exactly one."""

    END = "end"
    """The policy sampled one of its end tokens; that token is the last completion id and is trained."""
    STOP = "stop"
    """A stop string appeared in the decoded text; the ids up to the one that completed it are kept and trained."""
    LENGTH = "length"
    """``max_tokens`` were sampled without an end."""
    CONTEXT = "context"
    """The model's context was full before ``max_tokens`` were sampled."""

    @property
    def truncated(self) -> bool:
        """True where a limit, not the policy, ended the completion."""
        return self in (StopReason.LENGTH, StopReason.CONTEXT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One immutable problem instance.

    ``id`` is unique within an env and its options, across splits. ``data`` is JSON, so that a task can be written
    to disk and read back equal.
    """

    id: str
    split: str
    seed: int
    data: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeKey:
    """Who an episode is. All its randomness is derived from this and nothing else.

    ``index`` tells apart the episodes of one task in one step (chain candidates, plays of an evaluation).
    """

    seed: int
    purpose: Purpose
    step: int
    task_id: str
    index: int

    def text(self) -> str:
        """Return the one string form, used in logs, peer keys and random keys."""
        return f"{self.purpose}/{self.step}/{self.task_id}/{self.index}"


@dataclass(frozen=True, slots=True)
class Reward:
    """What one candidate was given: the team's part, by the env or by lookahead, and the role's own part.

    ``None`` or a non-finite number means *no verdict*: the turn is left out of training and counted.
    """

    team: float | None
    local: float | None = 0.0


@dataclass(frozen=True, slots=True)
class Scored(Generic[R]):
    """What ``score(text)`` returns: the reward, and a result for the env itself (the state after, a parsed answer)."""

    reward: Reward
    result: R


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One sampled completion of one role, with the exact prompt ids it answers; played or not.

    ``completion_ids`` and ``sampler_logprobs`` have the same length >= 1; the log-probs (nats) are those of the
    distribution that was sampled, temperature included. ``text`` is decoded from the ids, never the reverse.
    ``peers`` names the set whose rewards share a baseline; the sampler writes it, nobody rebuilds it.

    Example: candidate 3 of the second act of an episode, not the one the episode went on from::

        Turn(episode=key, act=1, candidate=3, role="planner", seat=0, round=0, policy="main", version=17,
             peers="train/17/plan_path:91/0/1", prompt_ids=(3, 14, 15), completion_ids=(9, 2),
             sampler_logprobs=(-0.2, -0.1), text="R", stop_reason=StopReason.END, temperature=1.0,
             played=False, reward=Reward(team=0.25, local=0.1), error=None)
    """

    episode: EpisodeKey
    act: int
    candidate: int
    role: str
    seat: int
    round: int
    policy: str
    version: int
    peers: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    text: str
    stop_reason: StopReason
    temperature: float
    played: bool
    trainable: bool
    reward: Reward | None
    error: str | None

    def id(self) -> str:
        """Return the name of this turn in logs and error messages."""
        return f"{self.episode.text()}/{self.act}.{self.candidate}"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message. Its parts are text, or earlier turns whose sampled ids are reused as they are."""

    role: MessageRole
    parts: tuple[str | Turn, ...]


def system(*parts: str | Turn) -> Message:
    """Return a system message."""
    return Message("system", parts)


def user(*parts: str | Turn) -> Message:
    """Return a user message: what the env, or another role, says to the role that is asked."""
    return Message("user", parts)


def assistant(*parts: str | Turn) -> Message:
    """Return an assistant message: what the asked role itself said earlier."""
    return Message("assistant", parts)


@dataclass(frozen=True, slots=True)
class Played(Generic[R]):
    """What ``team.act`` returns: the turn the episode goes on from, and the result its score computed.

    ``others`` are the results of the candidates that are not played, in their order: what else was tried. In plain play
    there are none, so no prompt may show them.
    """

    turn: Turn
    result: R
    others: tuple[R, ...] = ()

    @property
    def text(self) -> str:
        """The text of the played turn."""
        return self.turn.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an episode ended. ``success`` means solved, which is not the same as finished.

    ``team`` is the reward of the whole episode for everybody, ``local`` what single roles get on top. Chain
    sampling with ``return = "final"`` trains on them. ``truncated`` is true where a limit (rounds, context) ended
    the play. ``metrics`` are further numbers to be averaged over episodes, ``labels`` are classes
    to report success by (``size``...).
    """

    success: bool
    team: float | None
    local: Mapping[str, float] = field(default_factory=dict)
    truncated: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that broke and was recorded instead of hidden: where, which error, and its traceback."""

    where: str
    kind: str
    message: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One play of a task by a team: all turns in the order of their acts, and the outcome or the failure.

    Exactly one of ``outcome`` and ``failure`` is set. A failed episode has no turns: nothing of it is trained.
    ``attempts`` counts the plays it took (1 = no retry). ``lookahead_tokens`` were generated by plays that went on from
    its candidates, to say what these are worth; nothing else of those plays is kept.
    """

    key: EpisodeKey
    task: Task
    turns: tuple[Turn, ...]
    outcome: Outcome | None
    failure: Failure | None
    attempts: int = 1
    lookahead_tokens: int = 0

    @property
    def played(self) -> tuple[Turn, ...]:
        """The turns of the path that happened, one per act."""
        return tuple(turn for turn in self.turns if turn.played)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """A turn with the value it is credited with and its advantage over its peers.

    ``value`` is ``None`` where there was no verdict; then ``advantage`` is ``None`` too and the turn is not trained.
    """

    turn: Turn
    value: float | None
    advantage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One flat token row for the learner: prompt ids, completion ids, and what the loss needs per row.

    Only completion tokens carry loss. With prompt (p0 p1) and completion (c0 c1)::

        ids        p0   p1   c0   c1
        loss       -    -    yes  yes
        predicted by    p1   c0        (the token before)
    """

    policy: str
    version: int
    role: str
    peers: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    advantage: float
    temperature: float
