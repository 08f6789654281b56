"""The checks of the env contract: sound envs pass, and every way of breaking the contract is found by its check."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from coterie import contract
from coterie.contract import CHECKS
from coterie.engines import Request, Sampling
from coterie.engines.scripted import ScriptedEngine
from coterie.env import Env, EnvOptions, Expert, Team, env_class
from coterie.errors import ConfigError, EngineError, TrainError
from coterie.observed import BrokenContractError, Subject, maker
from coterie.testing import CheckResult, assert_env, check_env, play_once
from coterie.types import EpisodeKey, Outcome, Reward, Scored, StopReason, Task


class Counting(Env):
    """A sound env: say the next number, twice. Subclasses break it in one place."""

    roles: ClassVar[tuple[str, ...]] = ("counter",)
    scored_roles: ClassVar[tuple[str, ...]] = ("counter",)

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return [self.task(split, index) for index in range(start, start + count)]

    def task(self, split: str, index: int) -> Task:
        first = 10 * index + ("train", "validation", "test").index(split)
        return Task(id=f"{split}:{index}", split=split, seed=index, data={"first": first})

    async def play(self, task: Task, team: Team) -> Outcome:
        number = int(str(task.data["first"]))
        for _ in range(2):
            played = await team.act("counter", f"after {number}?", score=self.score(number), expert=self.expert(number))
            if not played.result:
                return self.outcome(False)
            number += 1
        return self.outcome(True)

    def score(self, number: int) -> Callable[[str], Scored[bool]]:
        def score(text: str) -> Scored[bool]:
            right = text == str(number + 1)
            return Scored(Reward(float(right), 0.1 if text.isdecimal() else 0.0), right)

        return score

    def expert(self, number: int) -> Expert | None:
        return lambda rng, noise: str(number + (2 if rng.random() < noise else 1))

    def outcome(self, success: bool) -> Outcome:
        return Outcome(success=success, team=float(success))


class CountingDraws(Counting):
    """Also sound: the env's own randomness comes from the team."""

    async def play(self, task: Task, team: Team) -> Outcome:
        number = team.rng.randrange(100)
        played = await team.act("counter", f"{number}", score=self.score(number), expert=self.expert(number))
        return self.outcome(played.result)


def local(env: type[Env]) -> type[Env]:
    """Return the env as a class no other process can import: this module is slow to import, so it is not tried."""

    class Local(env):  # type: ignore[valid-type, misc]
        pass

    return Local


def failed(env: type[Env], **options: Any) -> dict[str, str]:
    return {result.name: result.message for result in check_env(env, options) if not result.passed}


def finding(env: type[Env], check: str) -> str:
    """Return what one check finds."""
    subject = Subject(cls=env, make=maker(env, {}), options={}, num_tasks=3)
    with pytest.raises(BrokenContractError) as found:
        CHECKS[check](subject)
    return str(found.value)


@pytest.mark.parametrize("env", [Counting, CountingDraws])
def test_a_sound_env_passes_every_check_and_each_says_what_it_saw(env: type[Env]) -> None:
    results = check_env(local(env))
    assert [result for result in results if not result.passed] == []
    assert all(result.message for result in results)
    assert len(results) == 12
    assert_env(local(env))


@pytest.mark.parametrize("env", ["plan_path", "sokoban", "sudoku"])
def test_the_built_in_envs_pass(env: str) -> None:
    assert [result for result in check_env(env, tasks=1) if not result.passed] == []


def test_options_reach_the_env_and_wrong_ones_are_refused() -> None:
    assert all(result.passed for result in check_env("plan_path", {"size": 4, "walls": 0.0}, tasks=1))
    with pytest.raises(ConfigError, match="did you mean 'size'"):
        check_env("plan_path", {"siez": 4})
    with pytest.raises(ConfigError, match="did you mean 'plan_path'"):
        check_env("plan_pth")


# ---- every way to break it ------------------------------------------------------------------------------------------

_calls = itertools.count()
_shared: dict[str, int] = {"plays": 0}


class TasksByCall(Counting):
    """ENV-06: a task that depends on how many were made before."""

    def task(self, split: str, index: int) -> Task:
        return Task(id=f"{split}:{index}", split=split, seed=0, data={"first": next(_calls)})


class TasksByPlace(Counting):
    """The chunk's own position leaks in: tasks(2, 2) is not the second half of tasks(0, 4)."""

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return [
            Task(id=f"{split}:{start + i}", split=split, seed=0, data={"first": 3 * i + len(split)})
            for i in range(count)
        ]


class TupleData(Counting):
    def task(self, split: str, index: int) -> Task:
        return Task(id=f"{split}:{index}", split=split, seed=0, data={"first": index, "cell": (1, split)})


class ObjectData(Counting):
    def task(self, split: str, index: int) -> Task:
        data: dict[str, Any] = {"first": index, "split": split, "object": {1, 2}}
        return Task(id=f"{split}:{index}", split=split, seed=0, data=data)


class SameIds(Counting):
    def task(self, split: str, index: int) -> Task:
        sound = super().task(split, index)
        return Task(id=f"task {index}", split=split, seed=0, data=sound.data)


class Leaking(Counting):
    """Fault 12 of the reference: training and validation share instances."""

    def task(self, split: str, index: int) -> Task:
        return Task(id=f"{split}:{index}", split=split, seed=0, data={"first": index})


class WrongSplit(Counting):
    def task(self, split: str, index: int) -> Task:
        sound = super().task(split, index)
        return Task(id=sound.id, split="train", seed=0, data=sound.data)


class UnscoredRole(Counting):
    async def play(self, task: Task, team: Team) -> Outcome:
        await team.act("counter", "q", expert=lambda rng, noise: "x")
        return self.outcome(True)


class UndeclaredScored(Counting):
    scored_roles: ClassVar[tuple[str, ...]] = ("counter", "adder")


class StrangerActs(Counting):
    async def play(self, task: Task, team: Team) -> Outcome:
        await team.act("somebody", "q")
        return self.outcome(True)


class RaisesOnOddText(Counting):
    """A parse failure must be a reward: int("\u00b2") raises though isdigit() is true."""

    def score(self, number: int) -> Callable[[str], Scored[bool]]:
        def score(text: str) -> Scored[bool]:
            right = text.isdigit() and int(text) == number + 1
            return Scored(Reward(float(right)), right)

        return score


class PlayRaisesOnEmpty(Counting):
    async def play(self, task: Task, team: Team) -> Outcome:
        played = await team.act("counter", "q", score=self.score(1), expert=self.expert(1))
        return self.outcome(played.text[0] == "2")


class EmptyWins(Counting):
    async def play(self, task: Task, team: Team) -> Outcome:
        await team.act("counter", "q", score=self.score(1), expert=self.expert(1))
        return self.outcome(True)


class EmptyIsWellFormed(Counting):
    def score(self, number: int) -> Callable[[str], Scored[bool]]:
        return lambda text: Scored(Reward(float(text == str(number + 1)), 0.1), text == str(number + 1))


class NeverWins(Counting):
    def outcome(self, success: bool) -> Outcome:
        return Outcome(success=False, team=0.0)


class NaNReward(Counting):
    def score(self, number: int) -> Callable[[str], Scored[bool]]:
        return lambda text: Scored(Reward(float("nan")), text == str(number + 1))


class InfiniteOutcome(Counting):
    def outcome(self, success: bool) -> Outcome:
        return Outcome(success=success, team=float("inf"))


class NumericSuccess(Counting):
    def outcome(self, success: bool) -> Outcome:
        return Outcome(success=0.5 if success else 0.0, team=0.0)  # type: ignore[arg-type]


class StrangerRewarded(Counting):
    def outcome(self, success: bool) -> Outcome:
        return Outcome(success=success, team=0.0, local={"adder": 1.0})


class ScoreCounts(Counting):
    """An impure score: the second call gives less."""

    def score(self, number: int) -> Callable[[str], Scored[bool]]:
        seen: list[str] = []

        def score(text: str) -> Scored[bool]:
            seen.append(text)
            right = text == str(number + 1)
            return Scored(Reward(float(right) / len(seen)), right)

        return score


class ScoreMoves(Counting):
    """Fault 3 of the reference, the kind: scoring a candidate moves the state that the play goes on from."""

    async def play(self, task: Task, team: Team) -> Outcome:
        said: list[str] = []

        def score(text: str) -> Scored[bool]:
            said.append(text)
            return Scored(Reward(float(text == "2"), 0.1 if text.isdecimal() else 0.0), text == "2")

        first = await team.act("counter", "q", score=score, expert=self.expert(1))
        await team.act("counter", f"said were {len(said)}", score=self.score(1), expert=self.expert(1))
        return self.outcome(first.result)


class OwnRandomness(Counting):
    async def play(self, task: Task, team: Team) -> Outcome:
        number = random.randrange(10**9)
        played = await team.act("counter", f"{number}", score=self.score(number), expert=self.expert(number))
        return self.outcome(played.result)


class SharedState(Counting):
    """Instances that share a counter: the second play is another one."""

    async def play(self, task: Task, team: Team) -> Outcome:
        _shared["plays"] += 1
        number = _shared["plays"]
        played = await team.act("counter", f"{number}", score=self.score(number), expert=self.expert(number))
        return self.outcome(played.result)


class ChangesItsTask(Counting):
    async def play(self, task: Task, team: Team) -> Outcome:
        first: Any = task.data
        first["first"] += 1
        return await super().play(task, team)


class NoAct(Counting):
    async def play(self, task: Task, team: Team) -> Outcome:
        return self.outcome(False)


@dataclass(frozen=True)
class Case:
    env: type[Env]
    check: str
    says: str


CASES = [
    Case(TasksByCall, "tasks are the same at every call", "differs at the second call"),
    Case(TasksByPlace, "tasks are the same at every call", "is not tasks(0, 2) + tasks(2, ...)"),
    Case(WrongSplit, "tasks are the same at every call", "of another split"),
    Case(TupleData, "task data is JSON", "use lists, not tuples"),
    Case(ObjectData, "task data is JSON", "is not JSON"),
    Case(SameIds, "splits are disjoint", "task ids occur twice"),
    Case(Leaking, "splits are disjoint", "tested on what it was trained on"),
    Case(UnscoredRole, "roles are as declared", "asked without a score"),
    Case(UndeclaredScored, "roles are as declared", "['adder']"),
    Case(StrangerActs, "roles are as declared", "the env asked role 'somebody'"),
    Case(RaisesOnOddText, "any answer ends in an outcome", "invalid literal for int()"),
    Case(PlayRaisesOnEmpty, "any answer ends in an outcome", "must end in an Outcome"),
    Case(NoAct, "any answer ends in an outcome", "without a single act"),
    Case(EmptyWins, "empty answers lose", "are won by empty answers"),
    Case(EmptyIsWellFormed, "empty answers lose", "an empty answer is never well-formed"),
    Case(NeverWins, "the experts win", "won none of 3 tasks"),
    Case(NaNReward, "rewards are finite", "Reward.team is nan"),
    Case(InfiniteOutcome, "rewards are finite", "{'team': inf}"),
    Case(NumericSuccess, "rewards are finite", "expected True or False"),
    Case(StrangerRewarded, "rewards are finite", "local rewards for ['adder']"),
    Case(ScoreCounts, "scores are pure", "for the text"),
    Case(ScoreMoves, "scores are pure", "when its scores are called for other texts before"),
    Case(OwnRandomness, "plays are deterministic", "random numbers must come from team.rng"),
    Case(OwnRandomness, "plays can be replayed", "differs when replayed to act 0"),
    Case(SharedState, "plays are deterministic", "differs"),
    Case(ChangesItsTask, "plays are deterministic", "changed the data of its task"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.env.__name__}, {case.check}")
def test_a_broken_contract_is_found_and_the_finding_says_what_to_change(case: Case) -> None:
    assert case.says in finding(case.env, case.check)


def test_all_findings_are_reported_together() -> None:
    found = failed(local(NaNReward))
    assert {"rewards are finite", "scores are pure"} <= set(found)
    with pytest.raises(AssertionError, match=r"rewards are finite: .*Reward\.team is nan(.|\n)*scores are pure: "):
        assert_env(local(NaNReward))


HASHED = """
from coterie import contract
from coterie.env import Env
from coterie.types import Outcome, Task

class Hashed(Env):
    roles = ("a",)
    def tasks(self, split, start, count):
        return [Task(id=f"{i}", split=split, seed=0, data={"n": KEY((split, i))}) for i in range(start, start + count)]
    async def play(self, task, team):
        return Outcome(success=False, team=0.0)
"""


@pytest.mark.parametrize(("key", "passes"), [("hash", False), ("str", True)])
def test_tasks_that_differ_between_processes_are_found(
    key: str, passes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ENV-06: Python's own hash of a string differs between processes."""
    (tmp_path / f"hashed_{key}.py").write_text(HASHED.replace("KEY", key), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = failed(env_class(f"hashed_{key}:Hashed"))
    assert ("tasks are the same in every process" not in found) == passes
    if not passes:
        assert "not hash()" in found["tasks are the same in every process"]


def test_an_env_without_experts_is_not_blamed_for_never_winning() -> None:
    class Bare(Counting):
        def expert(self, number: int) -> Expert | None:
            return None

    results = {result.name: result for result in check_env(Bare)}
    assert results["the experts win"] == CheckResult(
        "the experts win", True, "not checked: roles ['counter'] have no expert, so nobody knows how to win"
    )
    assert all(result.passed for result in results.values())


def test_a_check_that_crashes_is_a_failed_check_with_its_traceback() -> None:
    class Crashes(Counting):
        def tasks(self, split: str, start: int, count: int) -> list[Task]:
            raise OSError("data set is not there")

    found = failed(Crashes)
    assert "OSError: data set is not there\nTraceback" in found["tasks are the same at every call"]


def test_async_scores_options_of_a_class_and_finite_splits_are_checked_too() -> None:
    class Some(EnvOptions):
        first: int = 1

    class Finite(Counting):
        Options: ClassVar[type[EnvOptions]] = Some
        options: Some

        def num_tasks(self, split: str) -> int | None:
            return 1

        async def play(self, task: Task, team: Team) -> Outcome:
            async def score(text: str) -> Scored[bool]:
                await asyncio.sleep(0)
                return Scored(Reward(float(text == str(self.options.first))), text == str(self.options.first))

            played = await team.act("counter", "q", score=score, expert=lambda rng, noise: str(self.options.first))
            return self.outcome(played.result)

    assert failed(Finite, first=7) == {}


# ---- scripted plays -------------------------------------------------------------------------------------------------


def test_play_once_plays_given_texts_in_the_order_of_acts() -> None:
    episode = play_once(Counting, ["1", "2"])
    assert [turn.reward for turn in episode.played] == [Reward(1.0, 0.1)] * 2
    assert episode.outcome == Outcome(success=True, team=1.0)
    assert play_once(Counting, ["5"]).outcome == Outcome(success=False, team=0.0)


def test_play_once_asks_a_function_with_role_and_prompt() -> None:
    task = Counting().task("test", 4)  # first number 42
    episode = play_once(Counting, lambda role, prompt: {"after 42?": "43", "after 43?": "44"}[prompt], task=task)
    assert episode.task == task
    assert episode.outcome == Outcome(success=True, team=1.0)


def test_play_once_says_where_the_answers_ended() -> None:
    with pytest.raises(TrainError, match="act 1 asks role 'counter', but only 1 answers were given"):
        play_once(Counting, ["1"])


def request(
    role: str = "a", *, candidates: tuple[int, ...] = (0, 1, 2), max_tokens: int = 8, version: int = 0
) -> Request:
    key = EpisodeKey(seed=0, purpose="play", step=0, task_id="t", index=0)
    return Request(
        episode=key, act=0, role=role, seat=0, policy="main", version=version, prompt_ids=(7, 8),
        candidates=candidates, sampling=Sampling(max_tokens=max_tokens),
    )  # fmt: skip


def test_a_scripted_engine_gives_texts_their_end_token_and_takes_ids_as_they_are() -> None:
    engine = ScriptedEngine({"a": ["ab", (20, 21), ""]}, logprob=-0.25)
    ((text, ids, empty),) = engine.generate([request()])
    end = engine.renderer.end_id
    assert text.ids == (*engine.renderer.text_ids("ab"), end)
    assert (text.text, text.stop_reason, text.logprobs) == ("ab", StopReason.END, (-0.25,) * 3)
    assert (ids.ids, ids.stop_reason) == ((20, 21), StopReason.LENGTH)
    assert ids.text == engine.renderer.decode((20, 21))
    assert (empty.ids, empty.text) == ((end,), "")


def test_a_scripted_engine_cuts_at_the_limit_and_the_text_follows_the_ids() -> None:
    ((cut,),) = ScriptedEngine({"a": ["abcdef"]}).generate([request(candidates=(0,), max_tokens=3)])
    assert (cut.text, len(cut.ids), cut.stop_reason) == ("abc", 3, StopReason.LENGTH)


def test_a_scripted_engine_goes_round_its_answers_and_remembers_batches() -> None:
    engine = ScriptedEngine({"a": ["x", "y"]})
    ((first, second, third),) = engine.generate([request()])
    engine.generate([request(candidates=(1,)), request(candidates=(0,))])
    assert [first.text, second.text, third.text] == ["x", "y", "x"]
    assert [len(batch) for batch in engine.batches] == [1, 2]
    assert [seen.candidates for seen in engine.requests] == [(0, 1, 2), (1,), (0,)]


def test_a_scripted_engine_serves_only_its_version_and_only_scripted_roles() -> None:
    engine = ScriptedEngine({"a": ["x"]}, versions={"main": 3})
    assert engine.version("main") == 3
    engine.generate([request(version=3)])
    with pytest.raises(EngineError, match="is at version 3, the request is for version 0"):
        engine.generate([request()])
    with pytest.raises(EngineError, match=r"no answers for role 'b'; the script has \['a'\]"):
        engine.generate([request("b", version=3)])


def test_a_module_that_checks_itself_when_imported_is_told_so_and_starts_no_more_processes(tmp_path: Path) -> None:
    source = (Path(__file__).parent.parent / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "relay_unguarded.py").write_text(
        source.replace('if __name__ == "__main__":\n    assert_env', "assert_env")
    )
    run = subprocess.run(
        [sys.executable, "-c", "import relay_unguarded"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parent.parent / 'src'}"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode != 0
    assert "assert_env was called while its module was imported" in run.stderr


def runs(pid: int) -> bool:
    """Return whether a process is there, and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_process_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child starts a grandchild that holds the pipes too, writes its id, and both sleep."""
    monkeypatch.setattr(contract, "_PROCESS_DEADLINE_S", 3.0)
    grandchild = "import time; time.sleep(600)"
    started = "import pathlib, subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', sys.argv[2]]); "
    hang = started + "pathlib.Path(sys.argv[1]).write_text(str(p.pid)); time.sleep(600)"
    with pytest.raises(AssertionError, match="did not make the tasks within 3 s"):
        contract._run([sys.executable, "-c", hang, str(tmp_path / "pid"), grandchild], os.environ)
    # A killed process ends when it next gets a core, which a busy machine gives it later.
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 30.0
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(pid)
