"""Candidates that are worth what plays from them come to: values by hand, what is counted, what is refused."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.config import read_recipe
from coterie.engines import Completion, Request
from coterie.engines.scripted import ScriptedEngine
from coterie.env import Env, Team
from coterie.errors import ConfigError
from coterie.lineup import assemble
from coterie.rollout import Limits, Rollout, plays_of
from coterie.runs import start
from coterie.shipped import shipped_recipe
from coterie.team import Plan
from coterie.testing import seats_of
from coterie.train import num_tokens
from coterie.types import Episode, Outcome, Reward, Scored, Task
from learning_toys import quiet, toy_recipe

WORTH = {"LL": 1.0, "LR": 0.0, "RL": 0.0, "RR": 0.8}
Answer = Callable[[Request], list[str]]


class Steps(Env):
    """A first and a second say L or R, and are worth ``WORTH`` together. The score of a turn prefers L."""

    roles = scored_roles = ("first", "second")
    scores_first = True

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return [Task(id=f"{split}-{i}", split=split, seed=i, data={}) for i in range(start, start + count)]

    async def play(self, task: Task, team: Team) -> Outcome:
        card = team.rng.randrange(10**6)

        def score(text: str) -> Scored[str]:
            return Scored(Reward(float(text == "L"), 0.1), text)

        first = await team.act("first", f"{card}", score=score if self.scores_first else None)
        second = await team.act("second", f"{card}{first.text}", score=score)
        worth = self.worth(first.text + second.text)
        return Outcome(success=worth == 1.0, team=worth)

    def worth(self, said: str) -> float:
        return WORTH[said]


class Unscored(Steps):
    """The env has no score for the first role."""

    scored_roles = ("second",)
    scores_first = False


class Breaking(Steps):
    """Whatever follows an L breaks, and half of what follows an R."""

    def worth(self, said: str) -> float:
        if said in ("LL", "LR", "RL"):
            raise ValueError(f"nothing can be said of {said}")
        return 0.8


def answer(request: Request) -> list[str]:
    """In training one L and one R; in the four plays from a candidate the second says L once and R three times."""
    if len(request.candidates) == 2:
        return ["L", "R"]
    return ["L" if request.episode.index == 0 else "R"]


def rollout(env: type[Env], ahead: int = 4, say: Answer = answer, **changes: object) -> Rollout:
    seats = seats_of(env.roles)
    seats = {role: replace(seat, lookahead=ahead if role == "first" else 0) for role, seat in seats.items()}
    base = Rollout(
        make_env=env,
        seats=seats,
        plan=Plan(mode="tree", num_candidates=2),
        engine=ScriptedEngine(say),
        limits=Limits(retries=0, max_failed_fraction=0.0),
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def played(rollout: Rollout, count: int = 1) -> list[Episode]:
    tasks = Steps().tasks("train", 0, count)
    return rollout.run(plays_of(tasks, seed=5, purpose="train", step=0, episodes_per_task=1))


def rewards(episode: Episode, act: int) -> list[tuple[float | None, float | None]]:
    turns = [turn for turn in episode.turns if turn.act == act]
    return [(turn.reward.team, turn.reward.local) for turn in turns if turn.reward is not None]


def test_a_candidate_is_worth_what_the_plays_from_it_come_to() -> None:
    """From L: 1/4 * 1 + 3/4 * 0. From R: 1/4 * 0 + 3/4 * 0.8. The env's own score, 1 for L, would have played L."""
    [episode] = played(rollout(Steps))
    assert rewards(episode, 0) == [(pytest.approx(0.25), 0.1), (pytest.approx(0.6), 0.1)]
    assert rewards(episode, 1) == [(1.0, 0.1), (0.0, 0.1)]  # as the env scores it
    assert [turn.text for turn in episode.played] == ["R", "L"]
    [scored] = played(rollout(Steps, ahead=0))
    assert [turn.text for turn in scored.played] == ["L", "L"]


def test_the_tokens_of_the_plays_are_counted_and_nothing_else_of_them_is_kept() -> None:
    [episode], [without] = played(rollout(Steps)), played(rollout(Steps, ahead=0))
    each = len(episode.turns[0].completion_ids)
    assert episode.lookahead_tokens == 2 * 4 * each
    assert without.lookahead_tokens == 0
    assert len(episode.turns) == len(without.turns) == 4
    assert num_tokens([episode]) == num_tokens([without]) + 8 * each == 12 * each


def test_equal_candidates_are_played_on_once() -> None:
    def same(request: Request) -> list[str]:
        return ["R"] * len(request.candidates) if request.act == 0 else answer(request)

    [episode] = played(rollout(Steps, say=same))
    assert rewards(episode, 0) == [(pytest.approx(0.6), 0.1)] * 2
    assert episode.lookahead_tokens == 4 * len(episode.turns[0].completion_ids)


def test_a_role_that_the_env_does_not_score_is_scored_by_what_follows() -> None:
    [episode] = played(rollout(Unscored))
    assert rewards(episode, 0) == [(pytest.approx(0.25), 0.0), (pytest.approx(0.6), 0.0)]
    assert [turn.text for turn in episode.played] == ["R", "L"]


def test_plays_that_break_are_left_out_and_a_candidate_without_any_has_no_verdict() -> None:
    """From L all four break; from R one of four. The episode itself goes on from R."""
    told: list[str] = []

    def say(request: Request) -> list[str]:
        return ["R"] * 2 if request.act == 1 and len(request.candidates) == 2 else answer(request)

    [episode] = played(rollout(Breaking, say=say, event=lambda kind, fields: told.append(kind)))
    assert rewards(episode, 0) == [(None, 0.1), (pytest.approx(0.8), 0.1)]
    assert [turn.text for turn in episode.played] == ["R", "R"]
    assert told == ["episode_failed"] * 5


def test_what_is_asked_at_once_does_not_know_of_each_other() -> None:
    """Two first turns at once: in the plays from a candidate of one the other is drawn anew."""
    seen: list[tuple[int, int]] = []

    class AtOnce(Env):
        roles = scored_roles = ("first", "second")

        def tasks(self, split: str, start: int, count: int) -> list[Task]:
            return Steps().tasks(split, start, count)

        async def play(self, task: Task, team: Team) -> Outcome:
            one, two = await asyncio.gather(team.act("first[0]", "go"), team.act("first[1]", "go"))
            return Outcome(success=True, team=float(one.text == two.text))

    def say(request: Request) -> list[str]:
        if request.episode.purpose == "play":
            seen.append((request.act, request.episode.index))
        return ["L", "R"][: len(request.candidates)]

    [episode] = played(rollout(AtOnce, say=say))
    assert rewards(episode, 0) == rewards(episode, 1) == [(1.0, 0.0), (0.0, 0.0)]
    assert sorted(seen) == sorted([(act, index) for act in (0, 1) for index in range(4) for _ in range(2)])


def test_nobody_looks_ahead_of_what_experts_show() -> None:
    def show(request: Request, expert: object) -> tuple[Completion, ...]:
        return ScriptedEngine(answer).generate([request])[0]

    [episode] = played(rollout(Steps, engine=None, expert=show))
    assert episode.lookahead_tokens == 0
    assert rewards(episode, 0) == [(1.0, 0.1), (0.0, 0.1)]


def test_many_episodes_wait_for_their_plays_and_a_repeat_draws_the_same() -> None:
    first, again = played(rollout(Steps), 30), played(rollout(Steps), 30)
    assert first == again
    assert all(rewards(episode, 0)[1] == (pytest.approx(0.6), 0.1) for episode in first)


def test_the_deadline_stands_still_while_others_play_on() -> None:
    class Slow(ScriptedEngine):
        def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
            time.sleep(0.15)
            return super().generate(requests)

    limits = Limits(retries=0, max_failed_fraction=0.0, deadline_s=0.1)
    [episode] = played(rollout(Steps, engine=Slow(answer), limits=limits))
    assert episode.failure is None


def test_an_episode_that_breaks_takes_the_plays_from_its_candidates_with_it() -> None:
    """One act is looked ahead from while the other one's answer breaks the episode: no second batch runs."""

    class Torn(Steps):
        async def play(self, task: Task, team: Team) -> Outcome:
            async def broken() -> None:
                await team.act("second", "go")
                raise ValueError("torn")

            await asyncio.gather(team.act("first", "go"), broken())
            raise AssertionError("it breaks before")

    batches = 0

    def count() -> None:
        nonlocal batches
        batches += 1

    limits = Limits(retries=0, max_failed_fraction=1.0)
    [episode] = played(rollout(Torn, limits=limits, before_batch=count))
    assert episode.failure is not None
    assert episode.failure.message == "torn"
    assert batches == 1


def test_what_stops_a_rollout_stops_the_plays_too() -> None:
    count = 0

    def stop() -> None:
        nonlocal count
        count += 1
        if count == 2:  # the first batch draws the candidates, the second plays on from them
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        played(rollout(Steps, before_batch=stop), 3)
    assert count == 2


def test_a_run_counts_them_and_is_the_same_again(tmp_path: Path) -> None:
    rows = []
    for name in ("one", "two"):
        start(toy_recipe("sampling.roles.second.lookahead=3", "train.steps=2"), tmp_path / name, quiet())
        rows.append((tmp_path / name / "metrics.jsonl").read_bytes())
    assert rows[0] == rows[1]
    start(toy_recipe("train.steps=2"), tmp_path / "without", quiet())
    more, fewer = (
        json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]) for name in ("one", "without")
    )
    assert more["tokens_generated"] > fewer["tokens_generated"]
    assert more["tokens_trained"] <= fewer["tokens_generated"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("sampling.mode=chain",), r"sampling\.roles\.tool\.lookahead: .*in a chain there is one"),
        (("policies.tool.train=frozen",), r"sampling\.roles\.tool\.lookahead: policy 'tool' is frozen"),
    ],
)
def test_lookahead_that_nothing_would_read_is_refused(settings: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_recipe(shipped_recipe("plan_path-tiny-roles"), ["sampling.roles.tool.lookahead=2", *settings])


def test_seats_of_training_have_it_and_those_of_evaluation_do_not() -> None:
    settings = ["sampling.roles.tool.lookahead=2", "policies.shared.model=tiny:width=16,layers=1,positions=64"]
    recipe = read_recipe(shipped_recipe("plan_path-tiny"), settings)
    lineup = assemble(recipe)
    assert {role: seat.lookahead for role, seat in lineup.seats().items()} == {"tool": 2, "planner": 0}
    assert {seat.lookahead for seat in lineup.seats(temperature=1.0).values()} == {0}
