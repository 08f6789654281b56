"""One team at play: routing, candidates, scores, the choice of what is played, and whose peer is whose."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from coterie.credit import CreditRule, assign, turn_value
from coterie.engines import Completion, Request
from coterie.env import Expert
from coterie.errors import EnvError
from coterie.models.chat import ChatRenderer
from coterie.models.tiny import tiny_tokenizer
from coterie.team import ContextOverflowError, LiveTeam, Plan
from coterie.testing import seats_of
from coterie.types import (
    Episode,
    EpisodeKey,
    Failure,
    Outcome,
    Reward,
    Scored,
    StopReason,
    Task,
    Turn,
    assistant,
    user,
)

KEY = EpisodeKey(seed=5, purpose="train", step=3, task_id="t", index=0)
TASK = Task(id="t", split="train", seed=0, data={})
RENDERER = ChatRenderer(tiny_tokenizer())
TREE = Plan(mode="tree", num_candidates=4)
CHAIN = Plan(mode="chain", num_candidates=4, group_by=("task", "role", "round"))


def completion(text: str) -> Completion:
    ids = (*RENDERER.text_ids(text), RENDERER.end_id)
    return Completion(ids=ids, logprobs=(-0.5,) * len(ids), text=text, stop_reason=StopReason.END)


def team(
    answer: Callable[[Request], Sequence[str]],
    *,
    plan: Plan = TREE,
    key: EpisodeKey = KEY,
    frozen: Sequence[str] = (),
    replayed: Sequence[Turn] = (),
    max_tokens: int = 64,
    context: int = 1000,
) -> tuple[LiveTeam, list[Failure], list[Request]]:
    """Return a team of roles a and b that answers by function, the failures it records, the requests it makes."""
    failures: list[Failure] = []
    requests: list[Request] = []

    async def draw(request: Request, expert: Expert | None) -> tuple[Completion, ...]:
        requests.append(request)
        await asyncio.sleep(0)
        return tuple(completion(text) for text in answer(request))

    seats = seats_of(("a", "b"), renderer=RENDERER, max_tokens=max_tokens, context=context)
    seats |= {role: replace(seats[role], trainable=False) for role in frozen}
    live = LiveTeam(key=key, seats=seats, plan=plan, draw=draw, record=failures.append, replayed=replayed)
    return live, failures, requests


def one_each(request: Request) -> list[str]:
    return [str(candidate) for candidate in request.candidates]


def worth(rewards: Mapping[str, float | None]) -> Callable[[str], Scored[str]]:
    return lambda text: Scored(Reward(rewards[text]), f"after {text}")


def episode(turns: Sequence[Turn], key: EpisodeKey = KEY) -> Episode:
    return Episode(
        key=key, task=TASK, turns=tuple(turns), outcome=Outcome(success=True, team=1.0), failure=None, attempts=1
    )


# ---- candidates and the choice --------------------------------------------------------------------------------------


def test_a_tree_draws_k_candidates_from_one_prompt_scores_all_and_plays_the_best() -> None:
    live, failures, requests = team(one_each)
    played = asyncio.run(live.act("a", "question", score=worth({"0": 0.1, "1": 0.9, "2": 0.3, "3": -1.0})))
    assert [turn.text for turn in live.turns] == ["0", "1", "2", "3"]
    assert [turn.reward.team for turn in live.turns if turn.reward] == [0.1, 0.9, 0.3, -1.0]
    assert [turn.played for turn in live.turns] == [False, True, False, False]
    assert (played.turn.candidate, played.text, played.result) == (1, "1", "after 1")
    assert {turn.prompt_ids for turn in live.turns} == {RENDERER.render("question")}
    assert {turn.peers for turn in live.turns} == {"train/3/t/0/0"}
    assert len(requests) == 1
    assert failures == []


def test_candidates_that_say_the_same_are_scored_once_and_all_get_the_score() -> None:
    scored: list[str] = []

    def score(text: str) -> Scored[str]:
        scored.append(text)
        return Scored(Reward({"no": 0.25, "yes": 0.75}[text]), f"after {text}")

    live, _, _ = team(lambda request: ["no", "yes", "no", "yes"])
    played = asyncio.run(live.act("a", "question", score=score))
    assert scored == ["no", "yes"]
    assert [turn.reward.team for turn in live.turns if turn.reward] == [0.25, 0.75, 0.25, 0.75]
    assert (played.result, sorted(played.others)) == ("after yes", ["after no", "after no", "after yes"])


def test_the_choice_uses_alpha_times_team_plus_local() -> None:
    rewards = {"0": Reward(1.0, 0.0), "1": Reward(0.0, 0.6)}
    for alpha, best in ((1.0, "0"), (0.5, "1")):
        live, _, _ = team(one_each, plan=Plan(mode="tree", num_candidates=2, alpha=alpha))
        played = asyncio.run(live.act("a", "q", score=lambda text: Scored(rewards[text], None)))
        assert played.text == best
    assert turn_value(live.turns[0], 0.5) == 0.5


def test_ties_for_the_best_are_broken_by_key_evenly_and_the_same_again() -> None:
    def chosen(index: int) -> int:
        live, _, _ = team(one_each, key=replace(KEY, index=index))
        return asyncio.run(live.act("a", "q", score=worth({"0": 0.0, "1": 1.0, "2": 0.5, "3": 1.0}))).turn.candidate

    choices = [chosen(index) for index in range(60)]
    assert set(choices) == {1, 3}
    assert 15 <= choices.count(1) <= 45
    assert choices == [chosen(index) for index in range(60)]


def test_select_random_ignores_rewards_and_select_sample_follows_their_softmax() -> None:
    rewards = {"0": 0.0, "1": math.log(3.0), "2": 0.0, "3": 0.0}  # softmax at temperature 1: 1/6, 1/2, 1/6, 1/6

    def counts(plan: Plan) -> Counter[int]:
        found: Counter[int] = Counter()
        for index in range(600):
            live, _, _ = team(one_each, plan=plan, key=replace(KEY, index=index))
            found[asyncio.run(live.act("a", "q", score=worth(rewards))).turn.candidate] += 1
        return found

    sampled = counts(replace(TREE, select="sample"))
    assert abs(sampled[1] / 600 - 1 / 2) < 0.07  # 3.4 standard deviations of 0.0204
    assert abs(sampled[0] / 600 - 1 / 6) < 0.06
    cold = counts(replace(TREE, select="sample", select_temperature=0.01))
    assert cold == {1: 600}
    uniform = counts(replace(TREE, select="random"))
    assert all(abs(uniform[candidate] / 600 - 1 / 4) < 0.07 for candidate in range(4))


def test_a_candidate_without_a_verdict_is_played_only_if_there_is_no_other() -> None:
    live, _, _ = team(one_each)
    rewards = {"0": None, "1": math.nan, "2": -5.0, "3": math.inf}
    assert asyncio.run(live.act("a", "q", score=worth(rewards))).text == "2"
    live, _, _ = team(one_each)
    nothing = asyncio.run(live.act("a", "q", score=worth(dict.fromkeys("0123"))))
    assert nothing.turn.played
    assert nothing.result == f"after {nothing.text}"


def test_a_frozen_role_gives_one_candidate_which_is_not_trained_and_a_chain_always_one() -> None:
    live, _, requests = team(one_each, frozen=["b"])
    asyncio.run(live.act("b", "q", score=worth({"0": 1.0})))
    assert [(turn.trainable, turn.played) for turn in live.turns] == [(False, True)]
    live, _, requests = team(one_each, plan=CHAIN)
    asyncio.run(live.act("a", "q", score=worth({"0": 1.0})))
    assert [request.candidates for request in requests] == [(0,)]
    assert live.turns[0].trainable


def test_an_act_without_a_score_has_no_reward_and_no_result() -> None:
    live, _, _ = team(one_each, plan=CHAIN)
    played = asyncio.run(live.act("a", "q"))
    assert (played.result, played.turn.reward, played.turn.error) == (None, None, None)


# ---- scorers --------------------------------------------------------------------------------------------------------


def test_async_scorers_run_side_by_side() -> None:
    running: list[int] = []

    async def score(text: str) -> Scored[str]:
        running.append(1)
        await asyncio.sleep(0.01)
        assert len(running) == 4
        return Scored(Reward(float(text)), text)

    live, failures, _ = team(one_each)
    assert asyncio.run(live.act("a", "q", score=score)).text == "3"
    assert failures == []


def test_a_scorer_that_raises_is_tried_again_then_its_candidate_is_missing() -> None:
    calls: Counter[str] = Counter()

    def score(text: str) -> Scored[str]:
        calls[text] += 1
        if text == "1" or (text == "2" and calls[text] == 1):
            raise OSError("sandbox is away")
        return Scored(Reward(float(text == "2")), text)

    live, failures, _ = team(one_each, plan=replace(TREE, scorer_retries=2))
    assert asyncio.run(live.act("a", "q", score=score)).text == "2"
    assert calls == {"0": 1, "1": 3, "2": 2, "3": 1}
    assert [turn.reward is None for turn in live.turns] == [False, True, False, False]
    assert live.turns[1].error == "OSError: sandbox is away"
    assert [failure.kind for failure in failures] == ["OSError"]
    assert "'a'" in failures[0].where
    # design, section 5: the candidate is missing, the baseline is over the rest: 0, 1, 0 has mean 1/3, std sqrt(2)/3
    report = assign([episode(live.turns)], CreditRule(), 4)
    assert [c.advantage for c in report.credits] == [
        pytest.approx(-0.707105, abs=1e-5),
        None,
        pytest.approx(1.414210, abs=1e-5),
        pytest.approx(-0.707105, abs=1e-5),
    ]
    assert (report.peer_sets_short, report.rewards_invalid) == (1, 1)


def test_if_no_candidate_can_be_scored_the_act_fails_and_says_why() -> None:
    def score(text: str) -> Scored[str]:
        raise KeyError("gold")

    live, failures, _ = team(one_each)
    with pytest.raises(EnvError, match=r"no candidate of train/3/t/0/0\.0 could be scored: KeyError: 'gold'"):
        asyncio.run(live.act("a", "q", score=score))
    assert len(failures) == 4


@pytest.mark.parametrize("wrong", [1.0, None, (Reward(1.0), "x"), Reward(1.0)])
def test_a_score_that_is_not_scored_is_refused_by_type(wrong: Any) -> None:
    live, failures, _ = team(one_each, plan=CHAIN)
    with pytest.raises(EnvError, match=r"score must return Scored\(reward, result\), got"):
        asyncio.run(live.act("a", "q", score=lambda text: wrong))
    assert len(failures) == 1


@pytest.mark.parametrize("wrong", ["1.0", [1.0], {"team": 1}])
def test_a_reward_that_is_not_a_number_is_no_verdict(wrong: Any) -> None:
    """Row 20 of the reliability list: a string reward must not reach the arithmetic of credit, not even "0.5"."""
    live, failures, _ = team(one_each)
    played = asyncio.run(live.act("a", "q", score=lambda t: Scored(Reward(wrong if t == "0" else 0.0), t)))
    assert played.text != "0"
    assert "expected a float, or None" in failures[0].message
    assert assign([episode(live.turns)], CreditRule(), 4).rewards_invalid == 1


def test_a_stop_request_inside_a_scorer_is_not_swallowed() -> None:
    def score(text: str) -> Scored[str]:
        raise SystemExit(3)

    live, failures, _ = team(one_each, plan=CHAIN)
    with pytest.raises(SystemExit):
        asyncio.run(live.act("a", "q", score=score))
    assert failures == []


# ---- roles, seats, rounds, parallel acts ----------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["c", "a[", "a[x]", "", "[1]", "a[1]b"])
def test_a_role_that_is_not_in_the_team_is_refused_by_name(role: str) -> None:
    live, _, requests = team(one_each)
    with pytest.raises(EnvError, match=r"the team has \['a', 'b'\]"):
        asyncio.run(live.act(role, "q"))
    assert requests == []


def test_rounds_are_counted_per_role_and_seat_unless_the_env_says_them() -> None:
    live, _, _ = team(one_each, plan=CHAIN)

    async def play() -> None:
        for role in ("a[0]", "a[1]", "a[0]", "b", "a[1]"):
            await live.act(role, "q")
        await live.act("b", "q", round=7)

    asyncio.run(play())
    assert [(t.role, t.seat, t.round) for t in live.turns] == [
        ("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("b", 0, 0), ("a", 1, 1), ("b", 0, 7),
    ]  # fmt: skip


def test_parallel_acts_are_numbered_in_call_order_whoever_is_answered_first() -> None:
    async def play(delays: Mapping[int, float]) -> list[tuple[int, str, int, str]]:
        async def slow(request: Request, expert: Expert | None) -> tuple[Completion, ...]:
            await asyncio.sleep(delays[request.seat])
            return (completion(f"{request.act}"),)

        live = LiveTeam(key=KEY, seats=seats_of(("a",)), plan=CHAIN, draw=slow, record=lambda failure: None)
        await asyncio.gather(*(live.act(f"a[{seat}]", f"seat {seat}") for seat in range(3)))
        return sorted((turn.act, turn.role, turn.seat, turn.text) for turn in live.turns)

    expected = [(0, "a", 0, "0"), (1, "a", 1, "1"), (2, "a", 2, "2")]
    assert asyncio.run(play({0: 0.02, 1: 0.0, 2: 0.01})) == expected
    assert asyncio.run(play({0: 0.0, 1: 0.02, 2: 0.0})) == expected


def test_the_env_random_numbers_depend_on_the_episode_key_alone() -> None:
    same = [team(one_each)[0].rng.random() for _ in range(2)]
    other = [team(one_each, key=key)[0].rng.random() for key in (replace(KEY, index=1), replace(KEY, step=4))]
    assert same[0] == same[1]
    assert len({same[0], *other}) == 3


# ---- peers ----------------------------------------------------------------------------------------------------------


def peers_of(plan: Plan, keys: Sequence[EpisodeKey], prompts: Sequence[str]) -> list[list[str]]:
    """Return the peer keys per episode of: a asks, b asks, a asks again; each episode has its own prompt."""

    async def play(key: EpisodeKey, prompt: str) -> list[str]:
        live, _, _ = team(one_each, plan=plan, key=key)
        for role in ("a", "b", "a"):
            await live.act(role, prompt, score=lambda text: Scored(Reward(0.0), None))
        return [turn.peers for turn in live.turns if turn.played]

    return [asyncio.run(play(key, prompt)) for key, prompt in zip(keys, prompts, strict=True)]


def test_in_a_tree_peers_are_the_candidates_of_one_act_of_one_episode() -> None:
    """ADV-05 and fault 5 of the reference: 3 acts x 2 episodes x 2 tasks make 12 sets of K."""
    keys = [replace(KEY, task_id=task, index=index) for task in ("t", "u") for index in (0, 1)]
    found = [peers for row in peers_of(TREE, keys, ["q"] * 4) for peers in row]
    assert len(set(found)) == 12


@pytest.mark.parametrize(
    ("group_by", "num_sets"),
    [
        (("task",), 2),  # 2 tasks
        (("task", "role"), 4),  # x 2 roles
        (("task", "role", "round"), 6),  # a in rounds 0 and 1, b in round 0
        (("task", "round"), 4),
        (("role",), 2),
        (("round",), 2),
        (("task", "role", "round", "prompt"), 9),  # task t has two prompts, u one: 3 x (2 + 1)
        (("prompt",), 3),
        ((), 1),
    ],
)
def test_in_a_chain_peers_are_what_group_by_says(group_by: tuple[str, ...], num_sets: int) -> None:
    keys = [replace(KEY, task_id=task, index=index) for task in ("t", "u") for index in (0, 1)]
    found = peers_of(replace(CHAIN, group_by=group_by), keys, ["q1", "q2", "q3", "q3"])
    assert len({peers for row in found for peers in row}) == num_sets


def test_peers_of_other_steps_and_purposes_never_meet() -> None:
    keys = [KEY, replace(KEY, step=4), replace(KEY, purpose="eval")]
    found = peers_of(replace(CHAIN, group_by=()), keys, ["q"] * 3)
    assert len({peers for row in found for peers in row}) == 3


@pytest.mark.parametrize("plan", [TREE, CHAIN])
@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_different_agents_never_share_a_baseline(plan: Plan, order: Sequence[str]) -> None:
    """TEAM-01: solver rewards 1, 0, 1, 0 give +1, -1, +1, -1; judge rewards 10, 10, 10, 10 give 0. In any order."""
    rewards = {"a": (1.0, 0.0, 1.0, 0.0), "b": (10.0, 10.0, 10.0, 10.0)}

    def play(key: EpisodeKey) -> Episode:
        live, _, _ = team(one_each, plan=plan, key=key)

        def score_of(role: str) -> Callable[[str], Scored[None]]:
            return lambda text: Scored(Reward(rewards[role][int(text) + key.index]), None)

        async def acts() -> None:
            for role in order:
                await live.act(role, role, score=score_of(role))

        asyncio.run(acts())
        return episode(live.turns, key)

    episodes = [play(replace(KEY, index=index)) for index in range(1 if plan.mode == "tree" else 4)]
    report = assign(episodes, CreditRule(by_episode=plan.mode == "chain"), 4)
    found = {role: [c.advantage for c in report.credits if c.turn.role == role] for role in ("a", "b")}
    assert found["a"] == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-5)
    assert found["b"] == [0.0, 0.0, 0.0, 0.0]


def test_two_seats_of_one_role_are_two_agents_with_two_baselines() -> None:
    """TEAM-01, 'two roles with the same name': seat 0 always gets 1, seat 1 always 0; neither is better than itself."""

    def play(key: EpisodeKey) -> Episode:
        live, _, _ = team(one_each, plan=CHAIN, key=key)

        async def acts() -> None:
            scores = (lambda text: Scored(Reward(1.0), None), lambda text: Scored(Reward(0.0), None))
            await asyncio.gather(*(live.act(f"a[{seat}]", str(seat), score=scores[seat]) for seat in (0, 1)))

        asyncio.run(acts())
        return episode(sorted(live.turns, key=lambda turn: turn.act), key)

    report = assign([play(replace(KEY, index=index)) for index in range(4)], CreditRule(by_episode=True), 4)
    assert [c.advantage for c in report.credits] == [0.0] * 8
    assert (report.peer_sets, report.peer_sets_short) == (2, 0)


# ---- ids, limits ----------------------------------------------------------------------------------------------------


def test_what_was_sampled_is_what_the_next_prompt_and_the_record_hold() -> None:
    """TOK-01: "hello" sampled as ids that encoding would never give stays those ids, in the record and in turn 2."""
    ids = (*RENDERER.text_ids("h"), *RENDERER.text_ids("e"), 0, *RENDERER.text_ids("llo"))  # with a padding id inside

    async def draw(request: Request, expert: Expert | None) -> tuple[Completion, ...]:
        return (Completion(ids=ids, logprobs=(-0.1,) * len(ids), text="hello", stop_reason=StopReason.LENGTH),)

    live = LiveTeam(key=KEY, seats=seats_of(("a",)), plan=CHAIN, draw=draw, record=lambda failure: None)

    async def play() -> None:
        first = await live.act("a", "say it")
        await live.act("a", [user("say it"), assistant(first.turn), user("again")])

    asyncio.run(play())
    first, second = live.turns
    assert first.completion_ids == ids
    assert len(first.sampler_logprobs) == len(ids)
    assert second.prompt_ids[: len(first.prompt_ids) + len(ids)] == (*first.prompt_ids, *ids)


def test_every_turn_is_trained_in_exactly_the_context_it_was_sampled_in() -> None:
    """TMPL-01: whatever a template does to history, a turn's prompt ids are those the engine was given."""
    live, _, requests = team(one_each, plan=CHAIN)

    async def play() -> None:
        first = await live.act("a", "x")
        await live.act("a", [user("x"), assistant("<think>a</think>", first.turn), user("y")])

    asyncio.run(play())
    assert [turn.prompt_ids for turn in live.turns] == [request.prompt_ids for request in requests]


def test_a_prompt_near_the_end_of_the_context_leaves_what_room_there_is() -> None:
    """ROLL-02: context 64. Prompt 60, 16 wanted: 4 allowed. Prompts of 64 and 70: refused, never cut."""
    padding = len(RENDERER.render(""))  # control tokens around the text

    def act(length: int) -> tuple[LiveTeam, list[Request]]:
        live, _, requests = team(lambda request: ["x"], plan=CHAIN, max_tokens=16, context=64)
        asyncio.run(live.act("a", "q" * (length - padding)))
        return live, requests

    _, requests = act(60)
    assert [len(request.prompt_ids) for request in requests] == [60]
    assert requests[0].sampling.max_tokens == 4
    assert act(48)[1][0].sampling.max_tokens == 16
    assert act(63)[1][0].sampling.max_tokens == 1
    for length in (64, 70):
        with pytest.raises(ContextOverflowError, match=f"the prompt has {length} tokens and .* holds 64; nothing is"):
            act(length)


def test_a_limit_that_came_from_the_context_is_called_so() -> None:
    """ROLL-02: the completion cut by the context says context, one cut by max_tokens says length; both truncated."""

    def stop_reason(context: int) -> StopReason:
        async def draw(request: Request, expert: Expert | None) -> tuple[Completion, ...]:
            count = request.sampling.max_tokens
            return (Completion(ids=(9,) * count, logprobs=(-1.0,) * count, text="", stop_reason=StopReason.LENGTH),)

        seats = seats_of(("a",), max_tokens=16, context=context)
        live = LiveTeam(key=KEY, seats=seats, plan=CHAIN, draw=draw, record=lambda failure: None)
        asyncio.run(live.act("a", "q" * 20))
        return live.turns[0].stop_reason

    assert stop_reason(30) is StopReason.CONTEXT
    assert stop_reason(300) is StopReason.LENGTH
    assert stop_reason(30).truncated
    assert stop_reason(300).truncated


# ---- replay ---------------------------------------------------------------------------------------------------------


def test_replayed_turns_are_taken_over_also_in_a_tree_and_not_trained_again() -> None:
    live, _, _ = team(one_each)
    score = worth({"0": 0.0, "1": 0.0, "2": 1.0, "3": 0.0})
    asyncio.run(live.act("a", "q", score=score))
    again, _, requests = team(one_each, replayed=live.turns)

    async def play() -> None:
        assert (await again.act("a", "q", score=score)).result == "after 2"
        await again.act("b", "q", score=score)

    asyncio.run(play())
    assert [(turn.act, turn.candidate, turn.trainable) for turn in again.turns] == [
        (0, 2, False), (1, 0, True), (1, 1, True), (1, 2, True), (1, 3, True),
    ]  # fmt: skip
    assert [request.act for request in requests] == [1]


def test_what_the_candidates_that_are_not_played_came_to_is_told_live_and_in_a_replay() -> None:
    live, _, _ = team(one_each)
    score = worth({"0": 0.0, "1": 0.0, "2": 1.0, "3": 0.0})
    assert asyncio.run(live.act("a", "q", score=score)).others == ("after 0", "after 1", "after 3")
    again, _, _ = team(one_each, replayed=live.turns)
    assert asyncio.run(again.act("a", "q", score=score)).others == ("after 0", "after 1", "after 3")


def test_plain_play_has_no_other_candidates_and_neither_have_acts_without_scores() -> None:
    alone, _, _ = team(one_each, plan=CHAIN)
    assert asyncio.run(alone.act("a", "q", score=worth({"0": 1.0}))).others == ()
    unscored, _, _ = team(one_each)
    assert asyncio.run(unscored.act("a", "q")).others == ()


@pytest.mark.parametrize(("role", "prompt"), [("b", "q"), ("a[1]", "q"), ("a", "another")])
def test_a_replay_that_asks_something_else_is_refused(role: str, prompt: str) -> None:
    live, _, _ = team(one_each, plan=CHAIN)
    asyncio.run(live.act("a", "q"))
    again, _, _ = team(one_each, plan=CHAIN, replayed=live.turns)
    with pytest.raises(EnvError, match="play\\(\\) must depend only on the task"):
        asyncio.run(again.act(role, prompt))


def test_scoring_is_announced_before_and_after_even_when_it_is_cancelled() -> None:
    changes: list[int] = []

    async def draw(request: Request, expert: Expert | None) -> tuple[Completion, ...]:
        return (completion("x"),)

    async def hang(text: str) -> Scored[str]:
        await asyncio.sleep(3600)
        return Scored(Reward(0.0), text)

    async def play() -> None:
        live = LiveTeam(
            key=KEY, seats=seats_of(("a",)), plan=CHAIN, draw=draw, record=lambda failure: None, scoring=changes.append
        )
        act: Awaitable[Any] = live.act("a", "q", score=hang)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(act, 0.02)

    asyncio.run(play())
    assert changes == [1, -1]
