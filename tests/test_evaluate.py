"""Plain play: success over tasks, its interval, pass@k, labels; nothing chosen by reward."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import combinations

import pytest

from coterie.evaluate import bootstrap_ci95, evaluate, pass_at_k, score_episodes, wilson_ci95
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.types import Episode, EpisodeKey, Failure, Outcome, StopReason, Task, Turn
from learning_toys import PER_ROLE, toy_recipe


def turn(key: EpisodeKey, act: int, round: int) -> Turn:
    return Turn(
        episode=key, act=act, candidate=0, role="r", seat=0, round=round, policy="p", version=0, peers="x",
        prompt_ids=(1,), completion_ids=(2,), sampler_logprobs=(0.0,), text="", stop_reason=StopReason.END,
        temperature=1.0, played=True, trainable=False, reward=None, error=None,
    )  # fmt: skip


def episode(
    task: str, index: int, success: bool | None, *, rounds: int = 1, team: float | None = 0.0, size: str = "5"
) -> Episode:
    """Return a play of a task; ``success`` None is a failed one."""
    key = EpisodeKey(seed=0, purpose="eval", step=0, task_id=task, index=index)
    failure = Failure(where="play", kind="ValueError", message="no", traceback="") if success is None else None
    outcome = None
    if success is not None:
        outcome = Outcome(success=success, team=team, metrics={"moves": 2.0 * rounds}, labels={"size": size})
    return Episode(
        key=key,
        task=Task(id=task, split="test", seed=0, data={}),
        turns=tuple(turn(key, act, act) for act in range(rounds)) if outcome else (),
        outcome=outcome,
        failure=failure,
    )


def test_success_is_over_plays_and_tasks_whatever_the_number_of_turns() -> None:
    """OBS-04: 2 tasks, 2 plays of 1, 3, 2 and 1 rounds with success 1, 0, 0, 0: 0.25, pass@2 0.5, 1.75 rounds."""
    plays = [
        episode("a", 0, True, rounds=1, team=1.0),
        episode("a", 1, False, rounds=3),
        episode("b", 0, False, rounds=2),
        episode("b", 1, False, rounds=1),
    ]
    score = score_episodes(plays, split="test", plays=2, temperature=0.6)
    assert (score.success, score.pass_at_k, score.rounds, score.reward_team) == (0.25, {1: 0.25, 2: 0.5}, 1.75, 0.25)
    assert (score.tasks, score.plays, score.failed, score.temperature) == (2, 2, 0, 0.6)
    assert score.metrics == {"moves": 3.5}
    row = score.row()
    assert row["pass@2"] == 0.5
    assert row["success"] == 0.25
    assert row["success_ci95"] == list(score.ci95)


def test_tasks_count_alike_where_one_was_played_more_often() -> None:
    plays = [episode("a", 0, True), episode("b", 0, False), episode("b", 1, False), episode("b", 2, False)]
    assert score_episodes(plays, split="test", plays=3, temperature=1.0).success == 0.5


def test_failed_plays_are_counted_and_are_not_unsolved_ones() -> None:
    plays = [episode("a", 0, True), episode("a", 1, None), episode("b", 0, None), episode("b", 1, None)]
    score = score_episodes(plays, split="test", plays=2, temperature=1.0)
    assert (score.success, score.failed, score.tasks) == (1.0, 3, 1)
    assert score.pass_at_k == {}, "no task has all of its plays"


def test_without_any_play_success_is_not_a_number() -> None:
    score = score_episodes([episode("a", 0, None)], split="test", plays=1, temperature=1.0)
    assert math.isnan(score.success)
    assert all(math.isnan(end) for end in score.ci95)


def test_missing_rewards_are_left_out_of_the_mean() -> None:
    plays = [episode("a", 0, True, team=0.5), episode("b", 0, True, team=None), episode("c", 0, True, team=0.7)]
    assert score_episodes(plays, split="test", plays=1, temperature=1.0).reward_team == pytest.approx(0.6)


def test_success_is_reported_by_label_with_the_number_of_tasks() -> None:
    plays = [episode("a", 0, True, size="5"), episode("b", 0, False, size="5"), episode("c", 0, True, size="6")]
    row = score_episodes(plays, split="test", plays=1, temperature=1.0).row()
    assert (row["by/size=5/success"], row["by/size=5/tasks"]) == (0.5, 2)
    assert (row["by/size=6/success"], row["by/size=6/tasks"]) == (1.0, 1)


@pytest.mark.parametrize(("solved", "plays"), [(0, 4), (1, 4), (2, 5), (3, 6), (6, 6)])
def test_pass_at_k_is_the_share_of_choices_of_k_plays_with_a_solved_one(solved: int, plays: int) -> None:
    outcomes = [True] * solved + [False] * (plays - solved)
    for k in range(1, plays + 1):
        chosen = list(combinations(outcomes, k))
        assert pass_at_k(solved, plays, k) == pytest.approx(sum(map(any, chosen)) / len(chosen))


@pytest.mark.parametrize("numbers", [(3, 2, 1), (-1, 2, 1), (1, 2, 3), (1, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(numbers: Sequence[int]) -> None:
    with pytest.raises(ValueError, match="expected solved <= plays and 1 <= k <= plays"):
        pass_at_k(*numbers)


def test_the_interval_covers_the_normal_one_and_shrinks_with_the_number_of_tasks() -> None:
    """200 tasks, half of them solved: 0.5 +- 1.96 * 0.5 / sqrt(200) = 0.5 +- 0.0693."""
    low, high = bootstrap_ci95([1.0, 0.0] * 100)
    assert low == pytest.approx(0.5 - 0.0693, abs=0.01)
    assert high == pytest.approx(0.5 + 0.0693, abs=0.01)
    assert bootstrap_ci95([1.0] * 20) == (1.0, 1.0)
    assert bootstrap_ci95([1.0, 0.0] * 100) == (low, high)


def test_none_or_all_of_a_few_tasks_leave_room_for_doubt_in_wilsons_interval() -> None:
    """z^2 = 3.8415. 0 of 10: up to z^2 / (10 + z^2) = 0.2775. 1 of 4: (0.25 + 0.4802 +- 0.6360) / 1.9604."""
    assert wilson_ci95(0, 10) == (0.0, pytest.approx(0.2775, abs=1e-4))
    assert wilson_ci95(10, 10) == (pytest.approx(0.7225, abs=1e-4), 1.0)
    assert wilson_ci95(1, 4) == (pytest.approx(0.0456, abs=1e-4), pytest.approx(0.6994, abs=1e-4))


def test_one_play_per_task_has_wilsons_interval_and_several_have_the_bootstrap() -> None:
    once = [episode("a", 0, False, size="5"), episode("b", 0, False, size="6")]
    score = score_episodes(once, split="test", plays=1, temperature=1.0)
    assert score.ci95 == wilson_ci95(0, 2)
    assert score.label_ci95["size=6"] == wilson_ci95(0, 1)
    twice = [episode("a", 0, True), episode("a", 1, False), episode("b", 0, True), episode("b", 1, True)]
    assert score_episodes(twice, split="test", plays=2, temperature=1.0).ci95 == bootstrap_ci95([0.5, 1.0])


def test_the_interval_of_the_team_reward_is_a_bootstrap_over_tasks() -> None:
    plays = [episode("a", 0, True), episode("a", 1, False), episode("b", 0, True), episode("b", 1, True)]
    rewards = [plays[0].outcome, plays[1].outcome]
    assert all(outcome is not None for outcome in rewards)
    score = score_episodes(plays, split="test", plays=2, temperature=1.0)
    of_a = sum(outcome.team or 0.0 for outcome in rewards if outcome is not None) / 2
    of_b = plays[2].outcome.team if plays[2].outcome is not None else None
    assert of_b is not None
    assert score.reward_ci95 == bootstrap_ci95([of_a, of_b])
    assert score.row()["reward/team_ci95"] == list(bootstrap_ci95([of_a, of_b]))
    assert score_episodes([], split="test", plays=1, temperature=1.0).row()["reward/team_ci95"] is None


def by_wilson(solved: Sequence[float]) -> tuple[float, float]:
    return wilson_ci95(round(sum(solved)), len(solved))


def test_the_interval_covers_the_truth_about_95_times_in_100() -> None:
    rng, inside = random.Random(0), {bootstrap_ci95: 0, by_wilson: 0}
    for _ in range(40):
        solved = [float(rng.random() < 0.3) for _ in range(60)]
        for interval in inside:
            low, high = interval(solved)
            inside[interval] += low <= 0.3 <= high
    assert all(33 <= count <= 40 for count in inside.values())


# ---- playing ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lineup() -> Lineup:
    return assemble(check_env_fits(toy_recipe(*PER_ROLE)))


def test_an_evaluation_draws_one_candidate_per_act_and_trains_nobody(lineup: Lineup) -> None:
    score, episodes = evaluate(
        lineup, split="test", tasks=3, plays=2, temperature=1.0, event=lambda *_: None, before_batch=lambda: None
    )
    assert [e.key.task_id for e in episodes] == ["test-0", "test-0", "test-1", "test-1", "test-2", "test-2"]
    assert [e.key.index for e in episodes] == [0, 1] * 3
    turns = [turn for e in episodes for turn in e.turns]
    assert len(turns) == 6 * 4
    assert {(turn.candidate, turn.played, turn.trainable) for turn in turns} == {(0, True, False)}
    assert score.success == sum(e.outcome.success for e in episodes if e.outcome) / 6


def test_an_evaluation_of_equal_policies_is_equal_and_plays_differ(lineup: Lineup) -> None:
    def texts(temperature: float) -> list[list[str]]:
        _, episodes = evaluate(
            lineup, split="test", tasks=2, plays=2, temperature=temperature, event=lambda *_: None,
            before_batch=lambda: None,
        )  # fmt: skip
        return [[turn.text for turn in e.turns] for e in episodes]

    assert texts(1.0) == texts(1.0)
    assert texts(1.0)[0] != texts(1.0)[1]
    greedy = texts(0.0)
    assert greedy[0] == greedy[1]
