"""Many episodes at once: batches, failures and retries, deadlines, full contexts, replay. No test may hang."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pytest

from coterie.credit import CreditRule, assign
from coterie.engines import Completion, Engine, Request
from coterie.engines.scripted import ScriptedEngine
from coterie.env import Env, Team
from coterie.errors import TrainError
from coterie.rollout import Limits, Play, Rollout, plays_of, replay
from coterie.team import Plan
from coterie.testing import seats_of
from coterie.types import Episode, Outcome, Reward, Scored, StopReason, Task

pytestmark = pytest.mark.timeout(30)
CHAIN = Plan(mode="chain", num_candidates=1, group_by=("task",))
ONE_TRY = Limits(retries=0, max_failed_fraction=1.0)


class Scene(Env):
    """An env whose play is a function; ``scene(task, team)``."""

    roles: ClassVar[tuple[str, ...]] = ("a", "b")

    def __init__(self, scene: Callable[[Task, Team], Any]) -> None:
        super().__init__()
        self.scene = scene

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return tasks(count)

    async def play(self, task: Task, team: Team) -> Outcome:
        outcome: Outcome = await self.scene(task, team)
        return outcome


def tasks(count: int) -> list[Task]:
    return [Task(id=f"t{index}", split="train", seed=index, data={"n": index}) for index in range(count)]


def plays(count: int, *, step: int = 0) -> list[Play]:
    return plays_of(tasks(count), seed=0, purpose="train", step=step, episodes_per_task=1)


def right(text: str) -> Scored[str]:
    return Scored(Reward(float(text == "1")), text)


WON = Outcome(success=True, team=1.0)


@dataclass
class Told:
    """What a rollout said while it ran."""

    events: list[tuple[str, Mapping[str, str | int]]] = field(default_factory=list)

    def __call__(self, kind: str, fields: Mapping[str, str | int]) -> None:
        self.events.append((kind, fields))

    def kinds(self) -> Counter[str]:
        return Counter(kind for kind, _ in self.events)


def number(request: Request) -> list[str]:
    return [str(candidate) for candidate in request.candidates]


def rollout(scene: Callable[[Task, Team], Any], engine: Engine | None = None, **changes: Any) -> Rollout:
    base = Rollout(
        make_env=lambda: Scene(scene),
        seats=seats_of(("a", "b")),
        plan=CHAIN,
        engine=ScriptedEngine(number) if engine is None else engine,
        limits=ONE_TRY,
    )
    return replace(base, **changes)


# ---- batches --------------------------------------------------------------------------------------------------------


def test_episodes_come_back_in_the_order_of_the_plays_with_their_turns_in_the_order_of_acts() -> None:
    async def scene(task: Task, team: Team) -> Outcome:
        for _ in range(1 + task.seed % 3):
            await team.act("a", task.id)
        await asyncio.gather(*(team.act(f"b[{seat}]", task.id) for seat in range(2)))
        return WON

    episodes = rollout(scene).run(plays(7))
    assert [episode.key.task_id for episode in episodes] == [f"t{index}" for index in range(7)]
    for index, episode in enumerate(episodes):
        assert [turn.act for turn in episode.turns] == list(range(3 + index % 3))
        assert {turn.episode for turn in episode.turns} == {episode.key}


def batches(jitter: int) -> list[list[tuple[str, int]]]:
    """Return the keys of every batch of six episodes with async scorers and parallel acts, under some delays."""
    rng = random.Random(jitter)

    async def slow(text: str) -> Scored[str]:
        await asyncio.sleep(rng.random() * 0.01)
        for _ in range(rng.randrange(30)):
            await asyncio.sleep(0)
        return right(text)

    async def scene(task: Task, team: Team) -> Outcome:
        for _ in range(1 + task.seed % 2):
            await team.act("a", task.id, score=slow)
            await asyncio.gather(*(team.act(f"b[{seat}]", task.id, score=slow) for seat in range(task.seed % 3)))
        return WON

    engine = ScriptedEngine(number)
    rollout(scene, engine).run(plays(6))
    return [[request.key() for request in batch] for batch in engine.batches]


def test_a_batch_depends_on_the_episodes_and_not_on_how_long_scorers_take() -> None:
    expected = batches(0)
    assert all(batches(jitter) == expected for jitter in range(1, 5))
    assert all(batch == sorted(batch) for batch in expected)
    assert len(expected[0]) == 6


def test_a_batch_waits_for_the_slowest_episode_even_if_it_awaits_something_of_its_own() -> None:
    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "first")
        await asyncio.sleep(0.02 * task.seed)
        await team.act("a", "second")
        return WON

    engine = ScriptedEngine(number)
    rollout(scene, engine).run(plays(3))
    assert [len(batch) for batch in engine.batches] == [3, 3]


class Remembering(ScriptedEngine):
    """Makes an engine per rollout."""

    def __init__(self) -> None:
        super().__init__(number)
        self.made: list[ScriptedEngine] = []

    def remembering(self) -> ScriptedEngine:
        self.made.append(ScriptedEngine(number))
        return self.made[-1]


def test_every_rollout_has_an_engine_of_its_own() -> None:
    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "first")
        await team.act("b", "second")
        return WON

    engine = Remembering()
    whole = rollout(scene, engine)
    whole.run(plays(2))
    whole.run(plays(2, step=1))
    assert [[len(batch) for batch in made.batches] for made in engine.made] == [[2, 2], [2, 2]]
    assert not engine.batches


def test_one_branch_may_wait_for_the_engine_while_another_is_scored() -> None:
    """The batcher must hear that a scorer ended also when its branch asks nothing more."""

    async def slow(text: str) -> Scored[str]:
        await asyncio.sleep(0.02)
        return right(text)

    async def twice(team: Team) -> None:
        await team.act("a", "1")
        await team.act("a", "2")

    async def scene(task: Task, team: Team) -> Outcome:
        await asyncio.gather(twice(team), team.act("b", "scored slowly", score=slow))
        return WON

    (episode,) = rollout(scene).run(plays(1))
    assert len(episode.turns) == 3


def test_fan_out_in_later_acts_answers_its_own_history() -> None:
    """TEAM-06: an engine that repeats the last word of the prompt: red, blue, green stay apart for K = 1, 2, 3."""
    colours = ("red", "blue", "green")

    async def scene(task: Task, team: Team) -> Outcome:
        first = await team.act("a", f"say {colours[task.seed]}")
        if task.seed == 2:
            return Outcome(success=True, team=1.0, labels={"said": first.text})  # this one ends earlier
        second = await team.act("b", f"he said {first.text}")
        return Outcome(success=True, team=1.0, labels={"said": second.text})

    def echo(request: Request) -> list[str]:
        return [engine.prompt(request).split()[-1]] * len(request.candidates)

    engine = ScriptedEngine(echo)
    for k in (1, 2, 3):
        episodes = rollout(scene, engine, plan=Plan(mode="tree", num_candidates=k)).run(plays(3))
        assert [episode.outcome.labels["said"] for episode in episodes if episode.outcome] == list(colours)
        assert [len(episode.turns) for episode in episodes] == [2 * k, 2 * k, k]


def test_every_episode_sees_its_own_task() -> None:
    """ROLL-08: 'say N' with another N each; every turn's prompt ids hold its own N."""

    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", f"say {task.seed}")
        return WON

    engine = ScriptedEngine(number)
    for index, episode in enumerate(rollout(scene, engine).run(plays(12))):
        assert episode.turns[0].prompt_ids == engine.renderer.render(f"say {index}")


def test_equal_keys_are_refused_because_they_would_draw_equal_tokens() -> None:
    """ROLL-07: nothing is played twice under one key, so nothing can arrive twice."""

    async def scene(task: Task, team: Team) -> Outcome:
        return WON

    with pytest.raises(TrainError, match="8 plays have only 7 distinct keys"):
        rollout(scene).run([*plays(7), plays(7)[3]])


def test_a_task_that_recurs_gets_other_indices() -> None:
    keys = [play.key for play in plays_of([*tasks(1), *tasks(1)], seed=0, purpose="train", step=0, episodes_per_task=2)]
    assert [key.index for key in keys] == [0, 1, 2, 3]


# ---- the engine fails -----------------------------------------------------------------------------------------------


def test_an_engine_failure_is_retried_with_the_same_requests_and_nothing_of_it_is_kept() -> None:
    """Fault 10 of the reference: a failed generation is an error, never a turn."""
    calls: list[int] = []

    def script(request: Request) -> list[str]:
        calls.append(request.act)
        if len(calls) == 3:
            raise ConnectionError("server went away")
        return number(request)

    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "1")
        await team.act("b", "2")
        return WON

    told = Told()
    engine = ScriptedEngine(script)
    episodes = rollout(scene, engine, limits=Limits(retries=1), event=told).run(plays(2))
    assert [episode.attempts for episode in episodes] == [2, 2]  # the batch of both failed
    assert [[turn.act for turn in episode.turns] for episode in episodes] == [[0, 1], [0, 1]]
    assert told.kinds() == {"episode_failed": 2}
    assert "EngineError: ConnectionError: server went away" in str(told.events[0][1]["error"])
    assert [request.key() for request in engine.batches[0]] == [request.key() for request in engine.batches[2]]


def broken(ids: Sequence[int], logprobs: Sequence[float]) -> Completion:
    return Completion(ids=tuple(ids), logprobs=tuple(logprobs), text="", stop_reason=StopReason.END)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([], "asked for 1 candidates, got 0"),
        ([broken([5], [-1.0])] * 2, "asked for 1 candidates, got 2"),
        ([broken([], [])], "0 ids and 0 log-probs"),
        ([broken([5, 6], [-1.0])], "2 ids and 1 log-probs"),
        ([broken([5], [math.nan])], "must be finite and <= 0"),
        ([broken([5], [-math.inf])], "must be finite and <= 0"),
        ([broken([5], [0.1])], "must be finite and <= 0"),
        ([broken([5] * 5000, [-1.0] * 5000)], "5000 tokens came, 4096 were allowed"),
    ],
)
def test_broken_completions_are_errors_on_the_episode_and_never_turns(answers: list[Completion], message: str) -> None:
    """Invariants 1 and 2; TOK-10: a truly empty list of ids is no turn."""

    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "q")
        return WON

    (episode,) = rollout(scene, ScriptedEngine(lambda request: answers)).run(plays(1))
    assert episode.failure is not None
    assert episode.failure.kind == "EngineError"
    assert message in episode.failure.message
    assert (episode.turns, episode.outcome) == ((), None)


def test_an_answer_that_is_only_the_end_token_is_a_turn_like_any_other() -> None:
    """TOK-10: rewards 1, 1, 1, 0 where the last is only the end token: it is trained, with advantage -sqrt(3)."""
    engine = ScriptedEngine(lambda request: ["x", "y", "z", ""])

    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "q", score=lambda text: Scored(Reward(float(text != "")), None))
        return WON

    episodes = rollout(scene, engine, plan=Plan(mode="tree", num_candidates=4)).run(plays(1))
    assert episodes[0].turns[3].completion_ids == (engine.renderer.end_id,)
    report = assign(episodes, CreditRule(), 4)
    assert report.credits[3].advantage == pytest.approx(-math.sqrt(3.0), abs=1e-5)
    assert report.credits[0].advantage == pytest.approx(1 / math.sqrt(3.0), abs=1e-5)


# ---- the env fails --------------------------------------------------------------------------------------------------


def test_failed_episodes_have_no_turns_and_do_not_enter_the_baseline() -> None:
    """ROLL-01: 3 of 8 raise, the others get 1, 0, 1, 0, 1: baseline 0.6 over five; the genuine 0 stays 0.0."""
    rewards = {0: 1.0, 2: 0.0, 3: 1.0, 5: 0.0, 6: 1.0}

    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "q", score=lambda text: Scored(Reward(rewards[index_of[team]]), None))
        return WON

    index_of: dict[Team, int] = {}

    async def numbered(task: Task, team: Team) -> Outcome:
        index_of[team] = len(index_of)
        if index_of[team] not in rewards:
            raise RuntimeError("session reset failed")
        return await scene(task, team)

    eight = plays_of(tasks(1), seed=0, purpose="train", step=0, episodes_per_task=8)
    episodes = rollout(numbered).run(eight)
    assert [episode.failure is not None for episode in episodes] == [
        False,
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]
    assert sum(episode.failure is not None for episode in episodes) / 8 == 0.375
    report = assign(episodes, CreditRule(scale="none"), 8)
    assert [c.value for c in report.credits] == [1.0, 0.0, 1.0, 0.0, 1.0]
    assert [c.advantage for c in report.credits] == pytest.approx([0.4, -0.6, 0.4, -0.6, 0.4])
    assert report.peer_sets_short == 1
    index_of.clear()
    with pytest.raises(TrainError, match=r"3 of 8 episodes failed, allowed is a share of 0\.2(.|\n)*session reset"):
        rollout(numbered, limits=Limits(retries=0, max_failed_fraction=0.2)).run(eight)


def test_a_retry_starts_over_with_a_fresh_env_and_the_same_random_numbers() -> None:
    """ROLL-05: attempt 1 fails after turn 2; the rows are those of attempt 2 only, the env's counter starts again."""
    made: list[Scene] = []
    draws: list[float] = []

    def make() -> Env:
        count = 0

        async def scene(task: Task, team: Team) -> Outcome:
            nonlocal count
            draws.append(team.rng.random())
            for _ in range(3):
                count += 1
                if len(made) == 1 and count == 3:
                    raise ConnectionError("transport")
                await team.act("a", f"count {count}", score=right)
            return Outcome(success=True, team=float(count))

        made.append(Scene(scene))
        return made[-1]

    engine = ScriptedEngine(lambda request: [f"{request.act}"])
    told = Told()
    (episode,) = rollout(lambda t, m: None, engine, make_env=make, limits=Limits(retries=2), event=told).run(plays(1))
    assert (len(made), episode.attempts) == (2, 2)
    assert [turn.act for turn in episode.turns] == [0, 1, 2]
    assert [turn.prompt_ids for turn in episode.turns] == [engine.renderer.render(f"count {n}") for n in (1, 2, 3)]
    assert episode.outcome == Outcome(success=True, team=3.0)
    assert draws[0] == draws[1]
    assert told.kinds() == {"episode_failed": 1}
    assert [request.act for request in engine.requests] == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("wrong", [None, 1.0, True, {"success": True}])
def test_a_play_that_returns_no_outcome_fails_by_type(wrong: Any) -> None:
    """Row 19 of the reliability list."""

    async def scene(task: Task, team: Team) -> Any:
        await team.act("a", "q")
        return wrong

    (episode,) = rollout(scene).run(plays(1))
    assert episode.failure is not None
    assert episode.failure.message == f"play() must return an Outcome, got {type(wrong).__name__}"
    assert "'t0'" in episode.failure.where


def test_a_role_nobody_plays_fails_the_episode_with_the_task_named() -> None:
    """Row 19 of the reliability list: a wrong agent id."""

    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("c", "q")
        return WON

    (episode,) = rollout(scene).run(plays(1))
    assert episode.failure is not None
    assert "the env asked role 'c', but the team has ['a', 'b']" in episode.failure.message


def test_an_env_that_cannot_be_made_is_a_failure_and_no_hang() -> None:
    def make() -> Env:
        raise FileNotFoundError("levels.txt")

    (first, second) = rollout(lambda t, m: None, make_env=make).run(plays(2))
    assert first.failure is not None
    assert (first.failure.kind, first.failure.message) == ("FileNotFoundError", "levels.txt")
    assert second.failure is not None


def test_an_env_that_lets_a_cancellation_escape_fails_alone() -> None:
    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "q")
        if task.seed == 0:
            sleeper = asyncio.create_task(asyncio.sleep(3600))
            sleeper.cancel()
            await sleeper
        return WON

    first, second = rollout(scene).run(plays(2))
    assert first.failure is not None
    assert "CancelledError" in first.failure.message
    assert second.outcome == WON


def test_an_act_that_raises_inside_gather_ends_the_episode_and_nobody_waits() -> None:
    async def fail(team: Team) -> None:
        await team.act("a", "q")
        raise ValueError("cannot go on")

    async def scene(task: Task, team: Team) -> Outcome:
        async def patient() -> None:
            for _ in range(5):
                await team.act("b", "q")

        if task.seed == 0:
            await asyncio.gather(fail(team), patient())
        else:
            await patient()
        return WON

    first, second = rollout(scene).run(plays(2))
    assert first.failure is not None
    assert first.failure.message == "cannot go on"
    assert len(second.turns) == 5


def test_an_act_the_env_gave_up_on_does_not_disturb_the_batch() -> None:
    """An env may put its own time limit on an act; what comes for it later belongs to nobody."""

    async def scene(task: Task, team: Team) -> Outcome:
        if task.seed == 0:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(team.act("a", "given up"), 0.02)
        else:
            await asyncio.sleep(0.05)
        await team.act("a", "kept")
        return WON

    engine = ScriptedEngine(number)
    episodes = rollout(scene, engine).run(plays(2))
    assert [len(episode.turns) for episode in episodes] == [1, 1]
    assert [engine.prompt(request) for request in engine.requests] == ["kept", "kept"]


@pytest.mark.parametrize("failed", [0, 1, 2, 3])
def test_the_run_stops_above_the_allowed_share_of_failures_and_not_at_it(failed: int) -> None:
    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "q")
        if task.seed < failed:
            raise ValueError("broken task")
        return WON

    played = rollout(scene, limits=Limits(retries=0, max_failed_fraction=0.2))
    if failed > 2:
        with pytest.raises(TrainError, match="3 of 10 episodes failed"):
            played.run(plays(10))
    else:
        assert sum(episode.failure is not None for episode in played.run(plays(10))) == failed


# ---- time -----------------------------------------------------------------------------------------------------------


async def forever(text: str) -> Scored[str]:
    await asyncio.sleep(3600)
    return right(text)


async def hang_in_play(team: Team) -> None:
    await team.act("a", "q")
    await asyncio.sleep(3600)


async def hang_in_score(team: Team) -> None:
    await team.act("a", "q", score=forever)


async def hang_before_the_first_act(team: Team) -> None:
    await asyncio.sleep(3600)


async def hang_in_one_branch_while_another_waits(team: Team) -> None:
    async def twice() -> None:
        await team.act("a", "1", score=right)
        await team.act("a", "2", score=right)

    await asyncio.gather(twice(), team.act("b", "q", score=forever))


@pytest.mark.parametrize(
    "hang", [hang_in_play, hang_in_score, hang_before_the_first_act, hang_in_one_branch_while_another_waits]
)
def test_an_episode_that_hangs_is_ended_by_its_deadline_and_the_others_go_on(hang: Callable[[Team], Any]) -> None:
    """Row 18 of the reliability list, for what awaits: wherever it hangs, the run does not.

    The second episode waits through both attempts, twice its own deadline: waiting for others does not count.
    """

    async def scene(task: Task, team: Team) -> Outcome:
        if task.seed == 0:
            await hang(team)
        await team.act("a", "q")
        return WON

    told = Told()
    played = rollout(scene, limits=Limits(retries=1, deadline_s=0.1, max_failed_fraction=1.0), event=told)
    first, second = played.run(plays(2))
    assert first.failure is not None
    assert "nothing came from the env or its scorers for 0.1 s" in first.failure.message
    assert "train.episode_deadline_s" in first.failure.message
    assert (first.attempts, first.turns) == (2, ())
    assert second.outcome == WON
    assert told.kinds()["episode_failed"] == 2


# ---- contexts -------------------------------------------------------------------------------------------------------


def test_a_full_context_ends_one_episode_and_its_earlier_turns_stay_trainable() -> None:
    """ROLL-02 and row 24: the prompt of episode 0 outgrows 64 tokens at act 2; seven others are not touched."""

    async def scene(task: Task, team: Team) -> Outcome:
        for count in range(3):
            await team.act("a", "q" * (30 * count if task.seed == 0 else 5), score=right)
        return WON

    told = Told()
    seats = seats_of(("a", "b"), context=60, max_tokens=8)
    plan = Plan(mode="tree", num_candidates=2)
    episodes = rollout(scene, plan=plan, seats=seats, event=told).run(plays(8))
    first = episodes[0]
    assert first.failure is None
    assert first.outcome is not None
    assert (first.outcome.success, first.outcome.team, first.outcome.truncated) == (False, None, True)
    assert [turn.act for turn in first.turns] == [0, 0, 1, 1]
    assert all(len(episode.turns) == 6 for episode in episodes[1:])
    assert told.kinds() == {"context_overflow": 1}
    trained = [c for c in assign(episodes, CreditRule(), 2).credits if c.turn.episode == first.key]
    assert [c.advantage for c in trained] == pytest.approx([-1.0, 1.0, -1.0, 1.0], abs=1e-5)


def test_a_first_prompt_that_does_not_fit_fails_its_episode_with_the_numbers() -> None:
    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "q" * (100 if task.seed == 0 else 5))
        return WON

    first, second = rollout(scene, seats=seats_of(("a", "b"), context=64, max_tokens=8)).run(plays(2))
    assert first.failure is not None
    assert "103 tokens" in first.failure.message
    assert "holds 64" in first.failure.message
    assert second.outcome == WON


def test_the_rewards_of_truncated_answers_count() -> None:
    """ROLL-04: K = 4 of 10, 20, 30 and 64 tokens, the last cut: it is trained, its reward is in the baseline."""
    lengths = (9, 19, 29, 80)  # plus the end token, where it fits

    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "q", score=lambda text: Scored(Reward(float(len(text) < 40)), None))
        return WON

    engine = ScriptedEngine(lambda request: ["x" * length for length in lengths])
    plan, seats = Plan(mode="tree", num_candidates=4), seats_of(("a", "b"), max_tokens=64)
    episodes = rollout(scene, engine, plan=plan, seats=seats).run(plays(1))
    assert [len(turn.completion_ids) for turn in episodes[0].turns] == [10, 20, 30, 64]
    assert [turn.stop_reason.truncated for turn in episodes[0].turns] == [False, False, False, True]
    credits = assign(episodes, CreditRule(scale="none"), 4).credits
    assert [c.advantage for c in credits] == pytest.approx([0.25, 0.25, 0.25, -0.75])


# ---- stopping, experts, replay --------------------------------------------------------------------------------------


class StopNow(BaseException):
    """As raised for SIGINT: not an Exception."""


def test_a_stop_between_batches_leaves_nothing_behind() -> None:
    """Pending tasks or exceptions nobody read would be warnings, and warnings are errors here."""
    asked = 0
    cleaned: list[str] = []

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise StopNow

    async def scene(task: Task, team: Team) -> Outcome:
        try:
            for _ in range(10):
                await asyncio.gather(*(team.act(f"a[{seat}]", "q") for seat in range(2)))
        finally:
            cleaned.append(task.id)
        return WON

    engine = ScriptedEngine(number)
    with pytest.raises(StopNow):
        rollout(scene, engine, before_batch=check).run(plays(4))
    assert len(engine.batches) == 2
    assert sorted(cleaned) == ["t0", "t1", "t2", "t3"]


def test_experts_answer_instead_of_an_engine() -> None:
    async def scene(task: Task, team: Team) -> Outcome:
        await team.act("a", "q", score=right, expert=lambda rng, noise: "1" if noise < 0.5 else "0")
        return WON

    def expert(request: Request, given: Any) -> tuple[Completion, ...]:
        text = given(random.Random(0), 0.0)
        return tuple(replace(broken([7], [0.0]), text=text) for _ in request.candidates)

    plan = Plan(mode="tree", num_candidates=3, select="random")
    (episode,) = replace(rollout(scene, plan=plan), engine=None, expert=expert).run(plays(1))
    assert [turn.reward for turn in episode.turns] == [Reward(1.0)] * 3


async def story(task: Task, team: Team) -> Outcome:
    """Three acts whose prompts hold everything said so far, and the env's own random number."""
    said = [f"{team.rng.random():.3f}"]
    for role in ("a", "b", "a"):
        played = await team.act(role, " ".join(said), score=lambda text: Scored(Reward(float(len(text))), text))
        said.append(played.result)
    return Outcome(success=True, team=1.0, labels={"said": " ".join(said)})


def told_by(word: str) -> ScriptedEngine:
    return ScriptedEngine(lambda request: [f"{word}{request.act}{c}" * (1 + c) for c in request.candidates])


def test_an_episode_is_replayed_to_any_act_and_goes_on_with_another_team() -> None:
    plan = Plan(mode="tree", num_candidates=2)
    (old,) = rollout(story, told_by("x"), plan=plan).run(plays(1))
    assert replay(rollout(story, told_by("x"), plan=plan), old, 0) == old
    for upto in range(4):
        engine = told_by("y")
        new = replay(rollout(story, engine, plan=plan), old, upto)
        assert [turn.text for turn in new.played[:upto]] == [turn.text for turn in old.played[:upto]]
        assert all(turn.text.startswith("y") for turn in new.turns if turn.act >= upto)
        assert [turn.trainable for turn in new.turns] == [False] * upto + [True] * 2 * (3 - upto)
        assert [request.act for request in engine.requests] == list(range(upto, 3))
    assert replay(rollout(story, told_by("y"), plan=plan), old, 3).outcome == old.outcome


def test_a_replay_beyond_the_end_or_of_an_env_that_forgot_is_refused() -> None:
    (old,) = rollout(story, told_by("x")).run(plays(1))
    with pytest.raises(TrainError, match="it has acts 0 to 2"):
        replay(rollout(story, told_by("x")), old, 4)

    async def other(task: Task, team: Team) -> Outcome:
        await team.act("a", "not what was asked before")
        return WON

    strict = rollout(other, told_by("x"), limits=Limits(retries=0))
    with pytest.raises(TrainError, match=r"must depend only on the task, team\.rng"):
        replay(strict, old, 2)


def test_played_is_one_turn_per_act() -> None:
    (episode,) = rollout(story, told_by("x"), plan=Plan(mode="tree", num_candidates=5)).run(plays(1))
    assert isinstance(episode, Episode)
    assert [turn.act for turn in episode.played] == [0, 1, 2]
    assert [turn.candidate for turn in episode.played] == [4, 4, 4]  # the longest text is worth most
