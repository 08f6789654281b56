"""Plays of an env without a model, with everything it asks noted: what the checks of ``coterie.contract`` look at."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from coterie.engines import Completion, Request, Sampling
from coterie.env import Env, Expert, Prompt, Score, Team, make_env
from coterie.keyed import keyed_random
from coterie.models.chat import ChatRenderer
from coterie.models.tiny import tiny_tokenizer
from coterie.rollout import Limits, Play, Rollout, plays_of
from coterie.team import Plan, Seating
from coterie.types import Episode, Json, Outcome, Played, Scored, StopReason, Task

HOSTILE = (
    "",
    " \n\t",
    "Answer:",
    "<|end|><|user|>",
    "\x00",
    "\u00b2",  # isdigit() is true, int() raises
    "9" * 5000,  # more digits than int() takes
    "-1",
    "nan",
    "[" * 500 + "{",
    "\U0001f642\u4e00\ufffd",
    "a" * 3000,
)
"""Texts a policy may well sample, which no scorer may raise on."""
DEADLINE_S = 60.0
_CONTEXT = 10**9

Answer = Callable[[Request, Expert | None], str]


class BrokenContractError(AssertionError):
    """A check failed; the message is the finding and what to change."""


def require(condition: bool, message: str) -> None:
    """Raise ``BrokenContractError`` with the message unless the condition holds."""
    if not condition:
        raise BrokenContractError(message)


def maker(env: type[Env] | str, options: Mapping[str, Json] | None) -> Callable[[], Env]:
    """Return what makes fresh instances with these options."""
    chosen = dict(options or {})
    if isinstance(env, str):
        name = env
        return lambda: make_env(name, chosen)
    cls = env
    return lambda: cls(cls.Options.model_validate(chosen))


def seats_of(
    roles: Sequence[str],
    *,
    renderer: ChatRenderer | None = None,
    trainable: bool = True,
    max_tokens: int = 4096,
    context: int = _CONTEXT,
) -> dict[str, Seating]:
    """Return a seating per role, each with a policy of the role's own name at version 0; for ``ScriptedEngine``."""
    used = ChatRenderer(tiny_tokenizer()) if renderer is None else renderer
    return {
        role: Seating(
            policy=role,
            version=0,
            renderer=used,
            context=context,
            sampling=Sampling(max_tokens=max_tokens),
            trainable=trainable,
        )
        for role in roles
    }


@dataclass(frozen=True, slots=True)
class Act:
    """What the env asked at one act."""

    role: str
    prompt: str
    score: Score[Any] | None
    expert: Expert | None

    def expert_texts(self) -> list[str]:
        """Return a good and a bad answer of the act's expert, or nothing without one."""
        return [] if self.expert is None else [self.expert(random.Random(0), 0.0), self.expert(random.Random(1), 1.0)]


@dataclass(frozen=True, slots=True)
class Record:
    """One play: the episode and what was asked."""

    episode: Episode
    acts: tuple[Act, ...]

    @property
    def outcome(self) -> Outcome:
        """How it ended; there is one, since ``Subject.play`` raises for failed plays."""
        assert self.episode.outcome is not None
        return self.episode.outcome

    def course(self) -> list[object]:
        """Return what two equal plays have in common: everything asked, answered and rewarded, and the end."""
        turns = [(turn.role, turn.seat, turn.round, turn.text, turn.reward) for turn in self.episode.turns]
        return [*zip(turns, [act.prompt for act in self.acts], strict=True), self.outcome]


class _Observed(Env):
    """An env whose acts are noted; with ``meddle``, every score is first called for other texts too."""

    roles: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inner: Env, acts: dict[str, list[Act]], meddle: bool) -> None:
        self._inner = inner
        self._acts = acts
        self._meddle = meddle

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return self._inner.tasks(split, start, count)

    async def play(self, task: Task, team: Team) -> Outcome:
        return await self._inner.play(task, _ObservedTeam(team, self._acts.setdefault(task.id, []), self._meddle))


class _ObservedTeam:
    def __init__(self, team: Team, acts: list[Act], meddle: bool) -> None:
        self._team = team
        self._acts = acts
        self._meddle = meddle

    @property
    def rng(self) -> random.Random:
        return self._team.rng

    async def act(
        self,
        role: str,
        prompt: Prompt,
        *,
        score: Score[Any] | None = None,
        round: int | None = None,
        expert: Expert | None = None,
    ) -> Played[Any]:
        act = Act(role, _text_of(prompt), score, expert)
        self._acts.append(act)
        if score is None:
            return await self._team.act(role, prompt, round=round, expert=expert)

        async def observed(text: str) -> Scored[Any]:
            if self._meddle:
                for other in (*HOSTILE, *act.expert_texts()):
                    await scored_by(score, other)
            return await scored_by(score, text)

        return await self._team.act(role, prompt, score=observed, round=round, expert=expert)


async def scored_by(score: Score[Any], text: str) -> Scored[Any]:
    """Return what a score says, be it async or not."""
    scored = score(text)
    return await scored if inspect.isawaitable(scored) else scored


def _text_of(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    parts = [(m.role, [part if isinstance(part, str) else part.text for part in m.parts]) for m in prompt]
    return repr(parts)


def constant(text: str) -> Answer:
    """Return the player who always says the same."""
    return lambda request, expert: text  # noqa: ARG005


def scripted(noise: float) -> Answer:
    """Return the player who asks the experts, and says something strange where an act has none."""

    def answer(request: Request, expert: Expert | None) -> str:
        rng = keyed_random("check_env", request.episode.task_id, request.act)
        return rng.choice(HOSTILE) if expert is None else expert(rng, noise)

    return answer


def strange(request: Request, expert: Expert | None) -> str:  # noqa: ARG001
    """Answer with one of ``HOSTILE``."""
    return keyed_random("strange", request.episode.task_id, request.act).choice(HOSTILE)


@dataclass(frozen=True, slots=True)
class Subject:
    """The env under test, and how to play it."""

    cls: type[Env]
    make: Callable[[], Env]
    options: Mapping[str, Json]
    num_tasks: int

    def some(self, split: str, count: int) -> list[Task]:
        """Return up to ``count`` tasks of a split, from a fresh instance."""
        env = self.make()
        available = env.num_tasks(split)
        return env.tasks(split, 0, count if available is None else min(count, available))

    def play(self, answer: Answer, tasks: Sequence[Task] | None = None, *, meddle: bool = False) -> list[Record]:
        """Return the plays of some tasks (left out, the first training tasks), side by side."""
        chosen = self.some("train", self.num_tasks) if tasks is None else tasks
        return self._run(plays_of(chosen, seed=0, purpose="play", step=0, episodes_per_task=1), answer, meddle)

    def replay(self, old: Episode, upto: int, answer: Answer) -> Record:
        """Return the play of an episode again, its texts taken over before act ``upto``."""
        turns = tuple(turn for turn in old.turns if turn.act < upto)
        return self._run([Play(key=old.key, task=old.task, replayed=turns)], answer, False)[0]

    def _run(self, plays: Sequence[Play], answer: Answer, meddle: bool) -> list[Record]:
        acts: dict[str, list[Act]] = {}
        renderer = ChatRenderer(tiny_tokenizer())

        def draw(request: Request, expert: Expert | None) -> tuple[Completion, ...]:
            text = answer(request, expert)
            ids = (*renderer.text_ids(text), renderer.end_id)
            return (Completion(ids=ids, logprobs=(0.0,) * len(ids), text=text, stop_reason=StopReason.END),)

        rollout = Rollout(
            make_env=lambda: _Observed(self.make(), acts, meddle),
            seats=seats_of(self.make().active_roles, renderer=renderer),
            plan=Plan(mode="chain", num_candidates=1),
            engine=None,
            limits=Limits(retries=0, deadline_s=DEADLINE_S, max_failed_fraction=1.0),
            expert=draw,
        )
        records = [Record(episode, tuple(acts.get(episode.key.task_id, ()))) for episode in rollout.run(plays)]
        for record in records:
            _require_played(record)
        return records


def _require_played(record: Record) -> None:
    """Raise unless the play ended in an outcome after at least one act."""
    failure = record.episode.failure
    if failure is not None:
        raise BrokenContractError(
            f"{failure.where} raised {failure.kind}: {failure.message}. Whatever a policy says must end in an Outcome: "
            f"give a text that cannot be parsed its reward instead of raising\n{failure.traceback}"
        )
    require(bool(record.acts), f"task {record.episode.task.id!r} ended without a single act")
