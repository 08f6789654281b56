"""Credit: every number here was worked out by hand; entry ids are those of the list of known faults."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from coterie.credit import CreditReport, CreditRule, assign
from coterie.errors import ConfigError, TrainError
from coterie.types import Episode, EpisodeKey, Failure, Outcome, Reward, StopReason, Task, Turn

Number = float | None
PLAIN = CreditRule(scale="none")
FINAL = CreditRule(scale="none", returns="final", by_episode=True)


def a_key(index: int = 0, task: str = "t") -> EpisodeKey:
    return EpisodeKey(seed=0, purpose="train", step=3, task_id=task, index=index)


def a_turn(
    key: EpisodeKey,
    reward: Reward | Number,
    *,
    act: int = 0,
    candidate: int = 0,
    role: str = "a",
    peers: str = "set",
    played: bool = True,
    trainable: bool = True,
    error: str | None = None,
    prompt: tuple[int, ...] = (1, 2),
    completion: tuple[int, ...] = (7, 2),
) -> Turn:
    return Turn(
        episode=key,
        act=act,
        candidate=candidate,
        role=role,
        seat=0,
        round=0,
        policy="main",
        version=3,
        peers=peers,
        prompt_ids=prompt,
        completion_ids=completion,
        sampler_logprobs=(-0.5,) * len(completion),
        text="x",
        stop_reason=StopReason.END,
        temperature=1.0,
        played=played,
        trainable=trainable,
        reward=reward if isinstance(reward, Reward) or reward is None else Reward(reward),
        error=error,
    )


def an_episode(
    key: EpisodeKey, turns: Sequence[Turn], team: Number = 0.0, local: Mapping[str, float] | None = None
) -> Episode:
    return Episode(
        key=key,
        task=Task(id=key.task_id, split="train", seed=0, data={}),
        turns=tuple(turns),
        outcome=Outcome(success=False, team=team, local=local or {}),
        failure=None,
    )


def a_failed_episode(key: EpisodeKey) -> Episode:
    failure = Failure(where="play", kind="EnvError", message="broke", traceback="")
    return Episode(
        key=key, task=Task(id=key.task_id, split="train", seed=0, data={}), turns=(), outcome=None, failure=failure
    )


def candidates(rewards: Sequence[Reward | Number], *, act: int = 0, role: str = "a", index: int = 0) -> list[Turn]:
    """One act of a tree; the last candidate is the one played."""
    key = a_key(index)
    last = len(rewards) - 1
    return [
        a_turn(key, r, act=act, candidate=c, role=role, peers=f"{key.text()}/{act}", played=c == last)
        for c, r in enumerate(rewards)
    ]


def tree(rewards: Sequence[Reward | Number], rule: CreditRule = PLAIN, set_size: int | None = None) -> CreditReport:
    return assign([an_episode(a_key(), candidates(rewards))], rule, set_size)


def chain(rewards: Sequence[Number], num_turns: Sequence[int]) -> list[Episode]:
    """One task's episodes under flat grouping: the outcome is the reward, every turn in the one set."""
    return [
        an_episode(a_key(i), [a_turn(a_key(i), None, act=act) for act in range(count)], team=reward)
        for i, (reward, count) in enumerate(zip(rewards, num_turns, strict=True))
    ]


def advantages(report: CreditReport) -> list[Number]:
    return [credit.advantage for credit in report.credits]


# ---- baseline and scale -------------------------------------------------------------------------------------------


def test_the_worked_example_of_the_design_has_its_numbers() -> None:
    assert advantages(tree([1, 0, 0, 1], CreditRule())) == pytest.approx(
        [0.999998, -0.999998, -0.999998, 0.999998], abs=1e-9
    )
    assert advantages(tree([1, 0, 0, 1])) == [0.5, -0.5, -0.5, 0.5]


@pytest.mark.parametrize("scale", ["std", "none"])
def test_a_set_of_equal_rewards_gets_exactly_zero_and_is_counted_whatever_the_scale(scale: str) -> None:
    # ADV-01: population std, so the second set is +-1; one set of two is flat
    rule = CreditRule(scale="std" if scale == "std" else "none")
    turns = candidates([1, 1, 1, 1]) + candidates([1, 0, 1, 0], act=1)
    report = assign([an_episode(a_key(), turns)], rule, set_size=4)
    size = 1.0 if scale == "std" else 0.5
    assert advantages(report)[:4] == [0.0] * 4
    assert advantages(report)[4:] == pytest.approx([size, -size, size, -size], abs=1e-5)
    assert report.peer_sets_zero_variance / report.peer_sets == 0.5


@pytest.mark.parametrize("rewards", [[0.1 + 0.2, 0.3, 0.3, 0.3], [1e15 + 0.125, 1e15, 1e15], [0.35] * 7, [-0.1] * 3])
def test_rounding_residue_is_not_variance(rewards: list[float]) -> None:
    # ADV-03 (1): a naive z-score of the first gives -1.15
    report = tree(rewards, CreditRule())
    assert advantages(report) == [0.0] * len(rewards)
    assert report.peer_sets_zero_variance == 1


def test_one_odd_reward_among_equal_ones_has_its_population_score() -> None:
    # ADV-03 (3): std = 0.6 * sqrt(7) / 8; ADV-03 (2): the distance to the mean, not to the others, is bounded
    assert advantages(tree([0.35] + [0.95] * 7, CreditRule())) == pytest.approx([-2.6458] + [0.37796] * 7, abs=1e-4)
    assert advantages(tree([0.35] + [0.95] * 7)) == pytest.approx([-0.525] + [0.075] * 7, abs=1e-15)


def test_no_scaled_advantage_exceeds_what_the_set_size_allows() -> None:
    # ADV-03: the kind of fault; a population score is at most sqrt(n - 1) however close the rewards are
    rng = random.Random(3)
    for _ in range(300):
        size = rng.randint(2, 9)
        base, spread = rng.choice([0.0, 0.95, -7.3, 1e6]), 10.0 ** rng.randint(-16, 3)
        found = advantages(tree([base + spread * rng.random() for _ in range(size)], CreditRule()))
        assert all(a is not None and abs(a) <= math.sqrt(size - 1) + 1e-9 for a in found)


@pytest.mark.parametrize("rule", [CreditRule(), PLAIN])
def test_a_set_of_one_gets_exactly_zero(rule: CreditRule) -> None:
    # ADV-04: K = 1, and K = 4 of which three were lost
    alone = tree([0.7], rule)
    assert advantages(alone) == [0.0]
    left = tree([None, math.nan, None, 0.7], rule, set_size=4)
    assert advantages(left) == [None, None, None, 0.0]
    assert (left.peer_sets_short, left.peer_sets_zero_variance, left.short) == (1, 1, ("train/3/t/0/0",))


def test_advantages_do_not_depend_on_the_order_of_episodes() -> None:
    # ADV-05: P1 = [1,0,0,0], P2 = [5,5,5,9], each candidate in an episode of its own
    rewards = {"P1": [1.0, 0.0, 0.0, 0.0], "P2": [5.0, 5.0, 5.0, 9.0]}
    episodes = [
        an_episode(a_key(i, task), [a_turn(a_key(i, task), r, peers=task)])
        for task, values in rewards.items()
        for i, r in enumerate(values)
    ]
    expected = {turn.id(): a for turn, a in _by_turn(assign(episodes, CreditRule()))}
    assert list(expected.values()) == pytest.approx([3**0.5, *[-(3**-0.5)] * 3, *[-(3**-0.5)] * 3, 3**0.5], abs=1e-5)
    rng = random.Random(5)
    for _ in range(20):
        rng.shuffle(episodes)
        for turn, advantage in _by_turn(assign(episodes, CreditRule())):
            assert advantage == pytest.approx(expected[turn.id()], abs=1e-12)


def _by_turn(report: CreditReport) -> list[tuple[Turn, float]]:
    return [(credit.turn, credit.advantage) for credit in report.credits if credit.advantage is not None]


def test_random_sets_sum_to_zero_and_do_not_depend_on_order() -> None:
    rng = random.Random(11)
    for _ in range(100):
        rewards = [rng.choice([rng.gauss(0, 10.0 ** rng.randint(-3, 3)), 1.0]) for _ in range(rng.randint(2, 16))]
        found = advantages(tree(rewards, CreditRule()))
        assert sum(a for a in found if a is not None) == pytest.approx(0.0, abs=1e-6)
        order = list(range(len(rewards)))
        rng.shuffle(order)
        moved = advantages(tree([rewards[i] for i in order], CreditRule()))
        assert moved == pytest.approx([found[i] for i in order], abs=1e-12)


# ---- who is compared with whom ------------------------------------------------------------------------------------


def test_episodes_of_one_task_are_compared_with_each_other() -> None:
    # ADV-07: unique episode ids, one key
    report = assign(chain([1, 0, 1, 0], [1, 1, 1, 1]), FINAL, set_size=4)
    assert advantages(report) == [0.5, -0.5, 0.5, -0.5]
    assert (report.peer_sets, report.peer_sets_short) == (1, 0)


def test_sets_of_the_wrong_size_are_counted_and_named() -> None:
    # ADV-07: every episode in a set of its own is visible, not a raw reward
    episodes = [an_episode(a_key(i), [a_turn(a_key(i), r, peers=f"own/{i}")]) for i, r in enumerate([1, 0, 1, 0])]
    report = assign(episodes, CreditRule(), set_size=4)
    assert advantages(report) == [0.0] * 4
    assert (report.peer_sets, report.peer_sets_short) == (4, 4)
    assert report.short == ("own/0", "own/1", "own/2", "own/3")


def test_a_long_episode_weighs_no_more_than_a_short_one() -> None:
    # ADV-08: baseline 0.75 over episodes, not 5/6 over turns; std sqrt(0.1875) over episodes too
    report = assign(chain([1, 0, 1, 1], [2, 1, 2, 1]), FINAL, set_size=4)
    assert advantages(report) == pytest.approx([0.25, 0.25, -0.75, 0.25, 0.25, 0.25], abs=1e-15)
    scaled = assign(chain([1, 0, 1, 1], [2, 1, 2, 1]), replace(FINAL, scale="std"))
    assert advantages(scaled)[:3] == pytest.approx([0.5773503, 0.5773503, -1.7320508], abs=5e-6)
    assert report.peer_sets_short == 0


def test_splitting_an_episode_into_more_turns_changes_no_advantage() -> None:
    # ADV-08: the kind of fault
    rng = random.Random(8)
    for scale in ("std", "none"):
        rule = replace(FINAL, scale="std" if scale == "std" else "none")
        rewards = [rng.random() for _ in range(5)]
        per_episode = []
        for counts in ([1] * 5, [1, 7, 1, 1, 1], [3, 1, 4, 1, 5]):
            report = assign(chain(rewards, counts), rule)
            per_episode.append({credit.turn.episode.index: credit.advantage for credit in report.credits})
        assert per_episode[1] == pytest.approx(per_episode[0], abs=1e-12)
        assert per_episode[2] == pytest.approx(per_episode[0], abs=1e-12)


def test_by_episode_weighs_each_turn_by_its_share_of_the_episode() -> None:
    # two episodes: rewards (0, 1) and (2): means 0.5 and 2, baseline 1.25; variance (1.5625/2 + 0.0625/2 + 0.5625)/2
    episodes = [
        an_episode(a_key(0), [a_turn(a_key(0), 0.0), a_turn(a_key(0), 1.0, act=1)]),
        an_episode(a_key(1), [a_turn(a_key(1), 2.0)]),
    ]
    assert advantages(assign(episodes, replace(PLAIN, by_episode=True))) == [-1.25, -0.25, 0.75]
    scaled = advantages(assign(episodes, CreditRule(by_episode=True)))
    assert scaled == pytest.approx([-1.25 / 0.8291562, -0.25 / 0.8291562, 0.75 / 0.8291562], abs=1e-5)
    assert advantages(assign(episodes, PLAIN)) == [-1.0, 0.0, 1.0]


def test_an_episode_alone_gets_zero_however_many_turns_it_has() -> None:
    # ADV-04 for sets over episodes: its own turns are no baseline for it
    episodes = [an_episode(a_key(0), [a_turn(a_key(0), 0.0), a_turn(a_key(0), 1.0, act=1)])]
    report = assign(episodes, CreditRule(by_episode=True), set_size=2)
    assert advantages(report) == [0.0, 0.0]
    assert (report.peer_sets_zero_variance, report.peer_sets_short) == (1, 1)


def test_length_and_padding_of_completions_cannot_reach_the_statistics() -> None:
    # ADV-10: values 1, 1, -1 -> mean 1/3, std 0.942809; the lengths differ by a factor of 40
    key = a_key()
    rows = [(1.0, 1), (1.0, 40), (-1.0, 3)]
    turns = [a_turn(key, r, candidate=c, played=c == 0, completion=(7,) * length) for c, (r, length) in enumerate(rows)]
    assert advantages(assign([an_episode(key, turns)], CreditRule())) == pytest.approx(
        [0.70711, 0.70711, -1.41421], abs=1e-5
    )
    assert advantages(assign([an_episode(key, turns[:1])], CreditRule())) == [0.0]
    assert assign([an_episode(key, [])], CreditRule()).credits == ()
    assert assign([], CreditRule()) == assign([an_episode(key, [])], CreditRule())


def test_turns_that_answer_different_prompts_are_not_compared() -> None:
    # ADV-13: four episodes, at the second turn only two share the state; the sampler stamped the prompt into the key
    rewards = [1.0, 0.0, 0.7, 0.9]
    episodes = [
        an_episode(a_key(i), [a_turn(a_key(i), r, peers=f"t/1/{state}")])
        for i, (r, state) in enumerate(zip(rewards, ["s", "s", "u", "v"], strict=True))
    ]
    report = assign(episodes, PLAIN, set_size=4)
    assert advantages(report) == [0.5, -0.5, 0.0, 0.0]
    assert [credit.turn.peers for credit in report.credits] == ["t/1/s", "t/1/s", "t/1/u", "t/1/v"]


@pytest.mark.parametrize("order", [("solver", "judge"), ("judge", "solver")])
def test_roles_have_baselines_of_their_own(order: tuple[str, str]) -> None:
    # TEAM-01: pooled, the judge would get +0.997 and nobody of the solvers anything
    rewards = {"solver": [1, 0, 1, 0], "judge": [10, 10, 10, 10]}
    turns = [turn for act, role in enumerate(order) for turn in candidates(rewards[role], act=act, role=role)]
    report = assign([an_episode(a_key(), turns)], CreditRule())
    found = {role: [c.advantage for c in report.credits if c.turn.role == role] for role in order}
    assert found["solver"] == pytest.approx([1, -1, 1, -1], abs=1e-5)
    assert found["judge"] == [0.0] * 4


def test_two_acts_of_the_same_role_are_two_sets_in_a_tree() -> None:
    # TEAM-01: two roles with the same name
    turns = candidates([1, 0]) + candidates([10, 10], act=1)
    assert advantages(assign([an_episode(a_key(), turns)], PLAIN)) == [0.5, -0.5, 0.0, 0.0]


def test_a_frozen_role_gets_no_advantage_and_is_in_no_baseline() -> None:
    key = a_key()
    turns = [a_turn(key, 1.0), a_turn(key, 9.0, act=1, trainable=False)]
    other = [a_turn(a_key(1), 0.0), a_turn(a_key(1), None, act=1, trainable=False)]
    report = assign([an_episode(key, turns), an_episode(a_key(1), other)], PLAIN, set_size=2)
    assert advantages(report) == [0.5, None, -0.5, None]
    assert [credit.value for credit in report.credits] == [1.0, 9.0, 0.0, None]
    assert (report.peer_sets, report.rewards_invalid) == (1, 0)


# ---- missing verdicts and failures --------------------------------------------------------------------------------


def test_a_missing_reward_leaves_the_baseline_to_the_others() -> None:
    # ADV-11
    report = tree([1, None, 0, 1], set_size=4)
    assert advantages(report) == [pytest.approx(1 / 3), None, pytest.approx(-2 / 3), pytest.approx(1 / 3)]
    assert report.credits[1].value is None
    assert (report.rewards_invalid, report.invalid, report.peer_sets_short) == (1, ("train/3/t/0/0.1",), 1)


def test_a_set_without_any_verdict_is_skipped_and_counted_never_zero() -> None:
    # ADV-11
    report = tree([None, None, None, None], set_size=4)
    assert advantages(report) == [None] * 4
    assert [credit.value for credit in report.credits] == [None] * 4
    assert (report.peer_sets, report.peer_sets_empty, report.peer_sets_zero_variance) == (1, 1, 0)
    assert (report.rewards_invalid, report.peer_sets_short) == (4, 1)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 1e300])
@pytest.mark.parametrize("part", ["team", "local"])
def test_a_reward_that_is_no_number_is_rejected_with_the_id_of_its_turn(bad: float, part: str) -> None:
    # ADV-11
    reward = Reward(bad, 0.0) if part == "team" else Reward(0.0, bad)
    report = tree([Reward(0.0, 1.0), reward, Reward(0.0, 0.0)])
    assert advantages(report) == [0.5, None, -0.5]
    assert report.invalid == ("train/3/t/0/0.1",)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_alpha_zero_does_not_hide_a_reward_that_is_no_number(bad: float) -> None:
    report = tree([Reward(0.0, 1.0), Reward(bad, 0.0), Reward(3.0, 0.0)], CreditRule(alpha=0.0, scale="none"))
    assert advantages(report) == [0.5, None, -0.5]


def test_a_missing_part_is_no_verdict() -> None:
    report = tree([Reward(None, 1.0), Reward(1.0, None), Reward(1.0), Reward(0.0)])
    assert advantages(report) == [None, None, 0.5, -0.5]
    assert report.rewards_invalid == 2


def test_failed_episodes_enter_no_baseline() -> None:
    # ROLL-01: 3 of 8 broke, the others have [1,0,1,0,1]: baseline 0.6 over five; a genuine failure stays 0.0
    rewards = [1.0, 0.0, 1.0, 0.0, 1.0]
    episodes = [*chain(rewards, [1] * 5), *(a_failed_episode(a_key(i)) for i in (5, 6, 7))]
    report = assign(episodes, FINAL, set_size=8)
    assert advantages(report) == pytest.approx([0.4, -0.6, 0.4, -0.6, 0.4])
    assert [credit.value for credit in report.credits] == rewards
    assert (len(report.credits), report.peer_sets_short) == (5, 1)


def test_turns_left_on_a_failed_episode_contribute_nothing() -> None:
    broken = replace(a_failed_episode(a_key(1)), turns=(a_turn(a_key(1), 0.0),))
    report = assign([an_episode(a_key(), [a_turn(a_key(), 1.0)]), broken], PLAIN, set_size=2)
    assert advantages(report) == [0.0]
    assert report.peer_sets_short == 1


def test_an_answer_of_one_token_is_an_answer_and_one_of_none_is_left_out() -> None:
    # TOK-10: rewards [1,1,1,0]; the last answer is just the end token, then nothing at all
    one = [replace(turn, completion_ids=(2,), sampler_logprobs=(-0.5,)) for turn in candidates([1, 1, 1, 0])]
    assert advantages(assign([an_episode(a_key(), one)], PLAIN)) == [0.25, 0.25, 0.25, -0.75]
    none = [*one[:3], replace(one[3], completion_ids=(), sampler_logprobs=())]
    report = assign([an_episode(a_key(), none)], PLAIN, set_size=4)
    assert advantages(report) == [0.0, 0.0, 0.0, None]
    assert (report.rewards_invalid, report.peer_sets_short) == (1, 1)


def test_reports_name_a_few_and_count_all() -> None:
    report = tree([None] * 9)
    assert (report.rewards_invalid, len(report.invalid)) == (9, 5)


# ---- values -------------------------------------------------------------------------------------------------------


def test_alpha_weighs_the_team_part() -> None:
    report = tree([Reward(1.0, 0.5), Reward(0.0, 0.25)], CreditRule(alpha=2.0, scale="none"))
    assert [credit.value for credit in report.credits] == [2.5, 0.25]


def _discounted(rewards: Sequence[Reward | Number], gamma: float, errors: Sequence[int] = ()) -> list[Number]:
    turns = [a_turn(a_key(), r, act=act, error="broke" if act in errors else None) for act, r in enumerate(rewards)]
    report = assign([an_episode(a_key(), turns)], CreditRule(returns="discounted", gamma=gamma))
    return [credit.value for credit in report.credits]


def test_discounted_values_sum_later_rewards_per_act() -> None:
    # LOSS-12: what the env says between acts is no act, so nothing is discounted across it
    assert _discounted([0, 0, 2], 0.5) == [0.5, 1.0, 2.0]
    assert _discounted([1, 2, 4], 1.0) == [7.0, 6.0, 4.0]
    assert _discounted([1, 2, 4], 0.1) == pytest.approx([1.24, 2.4, 4.0])


def test_an_act_nobody_scored_adds_nothing_but_a_lost_verdict_is_unknown() -> None:
    assert _discounted([1, None, 4], 0.5) == [2.0, 2.0, 4.0]
    assert _discounted([1, None, 4], 0.5, errors=[1]) == [None, None, 4.0]
    assert _discounted([1, math.nan, 4], 0.5) == [None, None, 4.0]
    assert _discounted([1, None], 0.5) == [1.0, None]  # nothing scored from there on is no 0


def test_discounting_counts_acts_not_turns() -> None:
    turns = [a_turn(a_key(), r, act=act) for act, r in ((0, 0.0), (3, 8.0))]
    report = assign([an_episode(a_key(), turns)], CreditRule(returns="discounted", gamma=0.5))
    assert [credit.value for credit in report.credits] == [1.0, 8.0]


def test_discounted_values_do_not_cross_episodes() -> None:
    episodes = [an_episode(a_key(i), [a_turn(a_key(i), r)]) for i, r in enumerate([1.0, 0.0])]
    assert [c.value for c in assign(episodes, CreditRule(returns="discounted")).credits] == [1.0, 0.0]


def test_the_final_value_is_one_per_episode_or_one_per_role() -> None:
    key = a_key()
    turns = [a_turn(key, 5.0, role="a", peers="a"), a_turn(key, 7.0, act=1, role="b", peers="b")]
    episode = an_episode(key, turns, team=1.0, local={"a": 0.5})
    flat = assign([episode], CreditRule(alpha=2.0, returns="final", by_episode=True))
    assert [credit.value for credit in flat.credits] == [2.25, 2.25]
    roles = assign([episode], CreditRule(alpha=2.0, returns="final", by_role=True))
    assert [credit.value for credit in roles.credits] == [2.5, 2.0]


def test_a_role_that_was_given_a_local_part_without_acting_is_in_the_mean() -> None:
    episode = an_episode(a_key(), [a_turn(a_key(), None)], team=1.0, local={"b": 0.5})
    assert assign([episode], FINAL).credits[0].value == 1.25


def test_an_outcome_without_a_verdict_leaves_the_whole_episode_out() -> None:
    report = assign(chain([1, None, 0, math.inf], [1, 2, 1, 1]), FINAL, set_size=4)
    assert advantages(report) == [0.5, None, None, -0.5, None]
    assert report.rewards_invalid == 3


def test_every_turn_comes_back_once_in_order() -> None:
    turns = [*candidates([1, None, 0]), a_turn(a_key(), None, act=1, trainable=False, peers="frozen")]
    assert [c.turn for c in assign([an_episode(a_key(), turns)], PLAIN).credits] == turns


# ---- stamps that contradict the turns -----------------------------------------------------------------------------


def test_an_episode_handed_over_twice_is_refused() -> None:
    episode = an_episode(a_key(), candidates([1, 0]))
    with pytest.raises(TrainError, match="train/3/t/0 was handed to credit twice"):
        assign([episode, episode], PLAIN)


def test_a_turn_that_occurs_twice_or_belongs_elsewhere_is_refused() -> None:
    turns = candidates([1, 0])
    with pytest.raises(TrainError, match="each once"):
        assign([an_episode(a_key(), [*turns, turns[0]])], PLAIN)
    with pytest.raises(TrainError, match="turns of its own"):
        assign([an_episode(a_key(1), turns)], PLAIN)


@pytest.mark.parametrize(
    "change", [{"prompt_ids": (9,)}, {"role": "b"}, {"policy": "other"}, {"version": 4}, {"peers": "elsewhere"}]
)
def test_candidates_of_one_act_must_share_their_stamp(change: dict[str, object]) -> None:
    turns = candidates([1, 0])
    with pytest.raises(TrainError, match="differ in prompt ids"):
        assign([an_episode(a_key(), [turns[0], replace(turns[1], **change)])], PLAIN)  # type: ignore[arg-type]


def test_a_tree_key_shared_by_two_acts_is_refused() -> None:
    # TEAM-01, ADV-05: the kind of fault, a key that forgets the role or the act
    turns = [replace(turn, peers="pool") for turn in candidates([1, 0]) + candidates([9, 9], act=1, role="b")]
    with pytest.raises(TrainError, match="'pool' mixes 2 acts"):
        assign([an_episode(a_key(), turns)], PLAIN)


@pytest.mark.parametrize(
    "rule", [CreditRule(returns="final"), CreditRule(returns="discounted"), CreditRule(by_episode=True)]
)
def test_rules_of_whole_episodes_are_refused_for_a_tree(rule: CreditRule) -> None:
    with pytest.raises(TrainError, match="not played"):
        tree([1, 0], rule)


def test_sets_that_mix_roles_are_refused_where_the_rule_is_by_role() -> None:
    key = a_key()
    turns = [a_turn(key, 1.0), a_turn(key, 1.0, act=1, role="b")]
    with pytest.raises(TrainError, match=r"mixes roles \['a', 'b'\]"):
        assign([an_episode(key, turns)], CreditRule(returns="final", by_role=True))


@pytest.mark.parametrize("options", [{"alpha": math.nan}, {"alpha": math.inf}, {"gamma": 0.0}, {"gamma": 1.01}])
def test_a_rule_that_cannot_work_is_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"credit.{next(iter(options))} = "):
        CreditRule(**options)  # type: ignore[arg-type]
