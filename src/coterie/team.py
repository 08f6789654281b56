"""A team at play: routes acts to policies, draws candidates, scores them, and chooses the one that is played.

The only place that knows tree from chain sampling (design: section 5).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from coterie.credit import turn_value
from coterie.engines import Completion, Request, Sampling
from coterie.env import Expert, Prompt, Score
from coterie.errors import EnvError, guarded
from coterie.keyed import keyed_random, stable_hash
from coterie.types import Episode, EpisodeKey, Failure, Played, Reward, Scored, StopReason, Turn

_SEAT = re.compile(r"([^\[\]]+)(?:\[(\d+)\])?")


class Renderer(Protocol):
    """Turns a prompt into ids, once; the ids are the truth from then on."""

    def render(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the ids the policy answers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Seating:
    """Who plays a role, and how: its policy at one version, the renderer and context of that policy's model, limits.

    ``trainable`` roles draw the plan's K candidates; all others one, which is never trained. With ``lookahead`` n
    the team part of a candidate's reward, in a tree, is the mean of n plays that go on from it.
    """

    policy: str
    version: int
    renderer: Renderer
    context: int
    sampling: Sampling
    trainable: bool
    lookahead: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How candidates are drawn, chosen and compared. In a chain every act has one candidate."""

    mode: Literal["tree", "chain"]
    num_candidates: int
    select: Literal["best", "sample", "random"] = "best"
    select_temperature: float = 1.0
    alpha: float = 1.0
    group_by: tuple[str, ...] = ()
    scorer_retries: int = 0


Draw = Callable[[Request, Expert | None], Awaitable[tuple[Completion, ...]]]
"""Gets the completions of a request: from an engine, or from the expert when demonstrations are made."""


Ahead = Callable[[Sequence[tuple[Turn, ...]], int], Awaitable[list[Episode]]]
"""Plays each branch on so many times, one candidate per act: those of the first branch first."""


class ContextOverflowError(EnvError):
    """A prompt leaves no room for a single token; the episode ends there, its earlier turns stay."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """One candidate's score, or what went wrong with it."""

    scored: Scored[Any] | None
    failure: Failure | None


class LiveTeam:
    """The team of one episode. Implements ``coterie.env.Team``; collects every turn in ``turns``."""

    def __init__(
        self,
        *,
        key: EpisodeKey,
        seats: Mapping[str, Seating],
        plan: Plan,
        draw: Draw,
        record: Callable[[Failure], None],
        scoring: Callable[[int], None] = lambda change: None,  # noqa: ARG005
        replayed: Sequence[Turn] = (),
        env_key: EpisodeKey | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        """Seat a team for one episode; ``replayed`` turns are taken as what happened at their acts, nothing is drawn.

        Of an act's turns the played one is taken over; the others, if given, are only scored, for ``Played.others``.

        ``env_key`` left out, the env's randomness is that of ``key``.

        ``scoring`` is told +1 before the candidates of an act are scored and -1 after, whatever happens.
        """
        game = key if env_key is None else env_key
        self.rng: random.Random = keyed_random(game.seed, "env", game.purpose, game.step, game.task_id, game.index)
        self.turns: list[Turn] = []
        self._key = key
        self._seats = seats
        self._plan = plan
        self._draw = draw
        self._record = record
        self._scoring = scoring
        self._replayed = {turn.act: turn for turn in replayed if turn.played}
        self._tried = [turn for turn in replayed if not turn.played and turn.error is None]
        self._ahead = ahead
        self.ahead_tokens = 0
        self.num_acts = 0
        self._rounds: Counter[str] = Counter()

    async def act(
        self,
        role: str,
        prompt: Prompt,
        *,
        score: Score[Any] | None = None,
        round: int | None = None,
        expert: Expert | None = None,
    ) -> Played[Any]:
        """Ask a role and return the turn the episode goes on from; see ``coterie.env.Team.act``."""
        act = self.num_acts  # given in call order, before the first await
        self.num_acts += 1
        name, seat = self._seat_of(role)
        seating = self._seats[name]
        here = self._rounds[role] if round is None else round
        self._rounds[role] += 1
        request = self._request(act, name, seat, seating, seating.renderer.render(prompt))
        peers = self._peers(request, here)
        old = self._replayed.get(act)
        before = tuple(turn for turn in self.turns if turn.played)  # what the env knew when it asked
        completions = _recorded(old, request) if old is not None else await self._draw(request, expert)
        self._scoring(+1)
        try:
            verdicts = await self._judge_all(score, request, [one.text for one in completions])
            tried = [turn.text for turn in self._tried if turn.act == act] if old is not None else []
            beside = await self._judge_all(score, request, tried)
        finally:
            self._scoring(-1)
        turns = [
            replace(
                turn,
                round=here,
                peers=peers,
                reward=None if verdict.scored is None else verdict.scored.reward,
                error=None if verdict.failure is None else f"{verdict.failure.kind}: {verdict.failure.message}",
            )
            for turn, verdict in zip(_turns(request, seating, completions, old), verdicts, strict=True)
        ]
        looks = seating.lookahead if len(turns) > 1 and self._ahead is not None else 0
        if looks:
            turns, verdicts = await self._look_ahead(before, turns, verdicts, looks)
        chosen = self._choose(turns, verdicts, bool(looks) or score is not None)
        turns[chosen] = replace(turns[chosen], played=True)
        self.turns.extend(turns)
        scored = verdicts[chosen].scored
        rest = [*verdicts[:chosen], *verdicts[chosen + 1 :], *beside]
        others = tuple(verdict.scored.result for verdict in rest if verdict.scored is not None)
        return Played(turns[chosen], None if scored is None else scored.result, others)

    async def _look_ahead(
        self, before: tuple[Turn, ...], turns: Sequence[Turn], verdicts: Sequence[_Verdict], count: int
    ) -> tuple[list[Turn], list[_Verdict]]:
        """Return an act's candidates with what ``count`` plays from each came to as the team part of their reward.

        Equal completions are played on once. A candidate that the env could not score is left as it is; one whose plays
        all broke, or have no finite team reward, gets no verdict.
        """
        assert self._ahead is not None
        first = {turn.completion_ids: turn for turn in reversed(turns) if turn.error is None}
        branches = [(*before, replace(turn, played=True)) for turn in first.values()]
        ends = await self._ahead(branches, count)
        known = [{turn.act for turn in branch} for branch in branches for _ in range(count)]
        for end, acts in zip(ends, known, strict=True):
            self.ahead_tokens += end.lookahead_tokens
            self.ahead_tokens += sum(len(turn.completion_ids) for turn in end.turns if turn.act not in acts)
        means = {ids: mean_team(ends[place * count : (place + 1) * count]) for place, ids in enumerate(first)}
        new_turns, new_verdicts = [], []
        for turn, verdict in zip(turns, verdicts, strict=True):
            if turn.error is None:
                local = 0.0 if turn.reward is None else turn.reward.local
                reward = Reward(means[turn.completion_ids], local)
                result = None if verdict.scored is None else verdict.scored.result
                turn, verdict = replace(turn, reward=reward), _Verdict(Scored(reward, result), None)
            new_turns.append(turn)
            new_verdicts.append(verdict)
        return new_turns, new_verdicts

    def _seat_of(self, role: str) -> tuple[str, int]:
        """Return (role, seat) of ``"drafter[2]"``; the role must be in the team."""
        match = _SEAT.fullmatch(role)
        if match is None or match.group(1) not in self._seats:
            raise EnvError(
                f"the env asked role {role!r}, but the team has {sorted(self._seats)}; see [team] and env.roles"
            )
        return match.group(1), int(match.group(2) or 0)

    def _request(self, act: int, role: str, seat: int, seating: Seating, prompt_ids: tuple[int, ...]) -> Request:
        """Return the request of one act, its token limit cut to what the context leaves."""
        room = seating.context - len(prompt_ids)
        if room < 1:
            raise ContextOverflowError(
                f"role {role!r}, task {self._key.task_id!r}, act {act}: the prompt has {len(prompt_ids)} tokens and "
                f"the context of policy {seating.policy!r} holds {seating.context}; nothing is cut. Use a smaller "
                "task, fewer rounds or a model with a longer context"
            )
        branching = self._plan.mode == "tree" and seating.trainable
        return Request(
            episode=self._key,
            act=act,
            role=role,
            seat=seat,
            policy=seating.policy,
            version=seating.version,
            prompt_ids=prompt_ids,
            candidates=tuple(range(self._plan.num_candidates if branching else 1)),
            sampling=replace(seating.sampling, max_tokens=min(seating.sampling.max_tokens, room)),
        )

    def _peers(self, request: Request, round: int) -> str:
        """Return the stamped name of the set this act's turns are compared in."""
        key = self._key
        if self._plan.mode == "tree":
            return f"{key.text()}/{request.act}"
        parts = [key.purpose, str(key.step)]
        values = {
            "task": f"task={key.task_id}",
            # another seat of the role is another agent, with another prompt: no common baseline
            "role": f"role={request.role}[{request.seat}]",
            "round": f"round={round}",
            "prompt": f"prompt={stable_hash(*request.prompt_ids):016x}",
        }
        return "/".join(parts + [values[name] for name in self._plan.group_by])

    async def _judge_all(self, score: Score[Any] | None, request: Request, texts: Sequence[str]) -> list[_Verdict]:
        """Return the score of every text. A score is a function of state and text, so equal texts are scored once."""
        distinct = list(dict.fromkeys(texts))
        verdicts = await asyncio.gather(*(self._judge(score, request, text) for text in distinct))
        by_text = dict(zip(distinct, verdicts, strict=True))
        return [by_text[text] for text in texts]

    async def _judge(self, score: Score[Any] | None, request: Request, text: str) -> _Verdict:
        """Return one candidate's score; a scorer that raises is tried again, then recorded as a missing verdict."""
        if score is None:
            return _Verdict(None, None)
        failures: list[Failure] = []
        where = f"score of role {request.role!r}, task {self._key.task_id!r}, act {request.act}"
        for _ in range(1 + self._plan.scorer_retries):
            with guarded(where, failures.append):
                scored = score(text)
                if inspect.isawaitable(scored):
                    scored = await scored
                if not isinstance(scored, Scored):
                    raise EnvError(f"score must return Scored(reward, result), got {type(scored).__name__}")
                _check_reward(scored.reward)
                return _Verdict(scored, None)
        self._record(failures[-1])
        return _Verdict(None, failures[-1])

    def _choose(self, turns: Sequence[Turn], verdicts: Sequence[_Verdict], scored: bool) -> int:
        """Return the index of the turn to play. Only candidates with a result can be, those with a verdict first."""
        if not scored:
            return 0
        playable = [i for i, verdict in enumerate(verdicts) if verdict.scored is not None]
        if not playable:
            raise EnvError(f"no candidate of {turns[0].id()} could be scored: {turns[0].error}")
        values = {i: turn_value(turns[i], self._plan.alpha) for i in playable}
        known = {i: value for i, value in values.items() if value is not None}
        if len(playable) == 1:
            return playable[0]
        key = self._key
        rng = keyed_random(key.seed, "select", key.purpose, key.step, key.task_id, key.index, turns[0].act)
        if not known or self._plan.select == "random":
            return rng.choice(sorted(known or playable))
        best = max(known.values())
        if self._plan.select == "best":
            return rng.choice([i for i, value in known.items() if value == best])
        weights = [math.exp((value - best) / self._plan.select_temperature) for value in known.values()]
        return rng.choices(list(known), weights)[0]


def mean_team(ends: Sequence[Episode]) -> float | None:
    """Return the mean team reward of the plays that came to an end with a finite one; ``None`` where none did."""
    values = [end.outcome.team for end in ends if end.outcome is not None and end.outcome.team is not None]
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else None


def _check_reward(reward: Reward) -> None:
    """Raise ``EnvError`` unless both parts are numbers or ``None``; whether they are finite is credit's business."""
    for name, part in (("team", reward.team), ("local", reward.local)):
        if part is not None and not isinstance(part, int | float):
            raise EnvError(
                f"Reward.{name} is {part!r} ({type(part).__name__}): expected a float, or None for no verdict"
            )


def _turns(request: Request, seating: Seating, completions: Sequence[Completion], old: Turn | None) -> list[Turn]:
    """Return an act's completions as turns, before anybody has scored or chosen; ``old`` is the one taken over."""
    numbers = request.candidates if old is None else (old.candidate,)
    return [
        Turn(
            episode=request.episode,
            act=request.act,
            candidate=candidate,
            role=request.role,
            seat=request.seat,
            round=0,
            policy=seating.policy,
            version=seating.version if old is None else old.version,
            peers="",
            prompt_ids=request.prompt_ids,
            completion_ids=completion.ids,
            sampler_logprobs=completion.logprobs,
            text=completion.text,
            stop_reason=_stop_reason(completion, request, seating),
            temperature=request.sampling.temperature,
            played=False,
            trainable=seating.trainable and old is None,
            reward=None,
            error=None,
        )
        for candidate, completion in zip(numbers, completions, strict=True)
    ]


def _stop_reason(completion: Completion, request: Request, seating: Seating) -> StopReason:
    """Return the completion's stop reason; a length limit that came from the context is said to be the context's."""
    cut = request.sampling.max_tokens < seating.sampling.max_tokens
    return StopReason.CONTEXT if cut and completion.stop_reason is StopReason.LENGTH else completion.stop_reason


def _recorded(turn: Turn, request: Request) -> tuple[Completion, ...]:
    """Return a recorded turn as the only completion of its act; the env must have asked the same again."""
    same = (turn.role, turn.seat, turn.prompt_ids) == (request.role, request.seat, request.prompt_ids)
    if not same:
        raise EnvError(
            f"replay of {turn.id()}: recorded was role {turn.role!r} seat {turn.seat} with {len(turn.prompt_ids)} "
            f"prompt tokens, the env now asks role {request.role!r} seat {request.seat} with "
            f"{len(request.prompt_ids)}, or other ids. play() must depend only on the task, team.rng and "
            "the texts that act() returned"
        )
    return (
        Completion(
            ids=turn.completion_ids, logprobs=turn.sampler_logprobs, text=turn.text, stop_reason=turn.stop_reason
        ),
    )
