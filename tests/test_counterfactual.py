"""Lookahead: on a game of two steps, its values are those worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from coterie.counterfactual import Agreement, Lookahead, agreement, lookahead, study_estimator
from coterie.credit import CreditRule, assign, episode_value
from coterie.engines import Request
from coterie.engines.scripted import ScriptedEngine
from coterie.env import Env, Team
from coterie.errors import TrainError
from coterie.lineup import assemble
from coterie.rollout import Rollout, no_check, no_event, plays_of
from coterie.team import Plan
from coterie.testing import seats_of
from coterie.types import Credit, Episode, Outcome, Reward, Scored, Task
from learning_toys import toy_recipe

WORTH = {"LL": 1.0, "LR": 0.0, "RL": 0.0, "RR": 0.8}


class TwoSteps(Env):
    """Both say L or R and are worth ``WORTH`` together. The score of a turn prefers L, which is wrong."""

    roles = scored_roles = ("first", "second")

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return [Task(id=f"{split}-{i}", split=split, seed=i, data={}) for i in range(start, start + count)]

    async def play(self, task: Task, team: Team) -> Outcome:
        card = team.rng.randrange(10**6)

        def score(text: str) -> Scored[None]:
            return Scored(Reward(float(text == "L")), None)

        first = await team.act("first", f"{card}", score=score)
        second = await team.act("second", f"{card}{first.text}", score=score)
        worth = WORTH[first.text + second.text]
        return Outcome(success=worth == 1.0, team=worth)


def answer(request: Request) -> list[str]:
    """In training K = 2: one L and one R. Else, over 16 plays in a row: first L in 3 of 4, second L in 1 of 4."""
    if len(request.candidates) == 2:
        return ["L", "R"]
    index = request.episode.index
    if request.role == "first":
        return ["R" if index // 4 % 4 == 3 else "L"]
    return ["L" if index % 4 == 0 else "R"]


def game() -> tuple[Rollout, Episode]:
    rollout = Rollout(
        make_env=TwoSteps,
        seats=seats_of(TwoSteps.roles),
        plan=Plan(mode="tree", num_candidates=2),
        engine=ScriptedEngine(answer),
    )
    task = TwoSteps().tasks("train", 0, 1)[0]
    [episode] = rollout.run(plays_of([task], seed=5, purpose="train", step=0, episodes_per_task=1))
    return rollout, episode


def value(episode: Episode) -> float:
    return episode_value(episode, alpha=1.0)


def test_the_first_of_two_steps_is_worth_what_the_second_makes_of_it() -> None:
    """Q(L) = 1/4 * 1, Q(R) = 3/4 * 0.8, V = 3/4 * Q(L) + 1/4 * Q(R): the turn that scores 1 is the worse one."""
    rollout, episode = game()
    left, right = lookahead(rollout, episode, 0, value, continuations=4, resamples=16)
    assert (left.turn.text, right.turn.text) == ("L", "R")
    assert (left.value, right.value) == (pytest.approx(0.25), pytest.approx(0.6))
    assert left.baseline == right.baseline == pytest.approx(0.3375)
    assert (left.advantage, right.advantage) == (pytest.approx(-0.0875), pytest.approx(0.2625))
    # variances by hand: of L's four plays (1, 0, 0, 0) 3/16; of the 16 plays three are worth 1, three 0.8
    spread = (3 * 1.0 + 3 * 0.64) / 16 - 0.3375**2
    assert left.error == pytest.approx(math.sqrt(3 / 16 / 4 + spread / 16))


def test_the_last_step_is_worth_its_outcome_and_what_came_before_is_kept() -> None:
    """After L (the played one): Q(L) = 1, Q(R) = 0, V = 1/4."""
    rollout, episode = game()
    assert [turn.text for turn in episode.played] == ["L", "L"]
    left, right = lookahead(rollout, episode, 1, value, continuations=2, resamples=8)
    assert (left.value, right.value, left.baseline) == (1.0, 0.0, 0.25)
    assert (left.advantage, right.advantage) == (0.75, -0.25)
    assert left.error > 0.0


def test_an_estimator_that_pays_the_wrong_turn_is_told_apart_from_one_that_pays_the_right_one() -> None:
    rollout, episode = game()
    looked = lookahead(rollout, episode, 0, value, continuations=4, resamples=16)
    wrong = assign([episode], CreditRule(scale="none")).credits  # L +0.5, R -0.5
    found = agreement(wrong, looked)
    assert (found.turns, found.states, found.same_sign) == (2, 1, 0.0)
    assert found.correlation == pytest.approx(-1.0)
    right = [replace(credit, advantage=-credit.advantage) for credit in wrong if credit.advantage is not None]
    assert agreement(right, looked).correlation == pytest.approx(1.0)
    assert agreement(right, looked).same_sign == 1.0


def test_without_variation_there_is_no_correlation_and_turns_without_advantage_are_left_out() -> None:
    rollout, episode = game()
    looked = lookahead(rollout, episode, 0, value, continuations=4, resamples=16)
    credits = [Credit(turn=item.turn, value=0.5, advantage=0.0) for item in looked]
    found = agreement(credits, looked)
    assert found.row() == {"turns": 2, "states": 1, "correlation": None, "same_sign": None}
    nobody = agreement([replace(credit, advantage=None) for credit in credits], looked)
    assert nobody.turns == 0


def test_an_act_that_was_not_made_and_an_episode_without_a_value_are_refused() -> None:
    rollout, episode = game()
    with pytest.raises(TrainError, match=r"has no act 7: it has 2"):
        lookahead(rollout, episode, 7, value, continuations=1, resamples=1)
    with pytest.raises(TrainError, match="has no value"):
        episode_value(replace(episode, outcome=Outcome(success=False, team=None)), 1.0)


def test_where_nothing_is_trained_there_is_nothing_to_look_at() -> None:
    lineup = assemble(toy_recipe("policies.main.train=frozen"))
    with pytest.raises(TrainError, match="none of 2 plays has a turn of a policy that is trained"):
        study_estimator(lineup, tasks=2, states=3, continuations=3, event=no_event, before_batch=no_check)


@pytest.mark.parametrize(
    "settings", [(), ("sampling.mode=chain", 'credit.group_by=["task"]', "credit.return=final")], ids=["tree", "flat"]
)
def test_an_estimator_is_studied_on_a_recipes_own_play(settings: tuple[str, ...]) -> None:
    def once() -> tuple[Agreement, list[Lookahead]]:
        return study_estimator(
            assemble(toy_recipe(*settings)),
            tasks=2,
            states=3,
            continuations=3,
            event=no_event,
            before_batch=no_check,
        )

    found, looked = once()
    assert (found.states, found.turns) == (3, 3 if settings else 12)
    assert -1.0 <= found.correlation <= 1.0
    assert once()[1] == looked
