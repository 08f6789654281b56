"""Plan-Path where the tool knows the walls and the planner the way: who sees what, and what a message is worth."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest

from coterie.engines import Request
from coterie.engines.scripted import ScriptedEngine
from coterie.env import Env, Prompt, Score, Team, make_env
from coterie.envs.halves import message_of, scripted_message, scripted_step
from coterie.envs.maze import Board
from coterie.errors import ConfigError
from coterie.rollout import Rollout, plays_of
from coterie.team import Plan
from coterie.testing import assert_env, seats_of
from coterie.types import EpisodeKey, Json, Outcome, Played, Reward, Scored, StopReason, Task, Turn
from prompts import as_text

# the agent can go right or down; down is a dead end, and nearer to the goal
FORK = ["S..", ".#.", "##G"]
KEY = EpisodeKey(seed=0, purpose="play", step=0, task_id="t", index=0)


@dataclass
class ScriptedTeam:
    """Says given texts in order; keeps what it was asked, and what the scores were."""

    texts: Sequence[str]
    roles: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    rewards: list[Reward] = field(default_factory=list)

    async def act(
        self, role: str, prompt: Prompt, *, score: Score[Any] | None = None, round: int = 0, expert: object = None
    ) -> Played[Any]:
        text = self.texts[len(self.roles)]
        self.roles.append(role)
        self.prompts.append(as_text(prompt))
        scored = None if score is None else cast(Scored[Any], score(text))
        if scored is not None:
            self.rewards.append(scored.reward)
        turn = Turn(
            episode=KEY, act=len(self.roles) - 1, candidate=0, role=role, seat=0, round=round, policy="p",
            version=0, peers="", prompt_ids=(1,), completion_ids=(1,), sampler_logprobs=(0.0,), text=text,
            stop_reason=StopReason.END, temperature=1.0, played=True, trainable=True, reward=None, error=None,
        )  # fmt: skip
        return Played(turn, None if scored is None else scored.result)


class Renderer:
    """A character is an id."""

    def render(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(map(ord, as_text(prompt)))

    def text(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def task_of(rows: list[str]) -> Task:
    return Task(id="plan_path:test:0", split="test", seed=0, data={"grid": list(rows)})


def env(**options: Json) -> Env:
    return make_env("plan_path", {"style": "compact", "size": 3, "knowledge": "halves", "max_moves": 2, **options})


def play(rows: list[str], texts: list[str], **options: Json) -> tuple[Outcome, ScriptedTeam]:
    team = ScriptedTeam(texts)
    return asyncio.run(env(**options).play(task_of(rows), cast(Team, team))), team


def test_the_tool_sees_the_walls_and_the_planner_the_way_and_the_message() -> None:
    outcome, team = play(FORK, ["RD", "RR", "D", "DD"])
    assert team.roles == ["tool", "planner"] * 2
    # the map from the agent on, closed by a row and a column of wall, without the goal; then no last answer
    assert as_text(team.prompts[0]) == "...#" + ".#.#" + "##.#" + "####" + "---"
    assert as_text(team.prompts[1]) == "+2+2" + "RD--" + "---"
    assert as_text(team.prompts[2]) == ".#.." + ".#.#" + ".###" + "####" + "RR."
    assert as_text(team.prompts[3]) == "+2+0" + "D---" + "RR."
    assert outcome.success
    assert outcome.metrics == {"rounds": 2, "moves": 4, "shortest": 4}


def test_only_the_planner_is_scored() -> None:
    _, team = play(FORK, ["RD", "RR", "D", "DD"])
    assert team.rewards == [Reward(0.5, 0.1), Reward(1.5, 0.1)]
    assert (env().scores("tool"), env().scores("planner")) == (False, True)
    shared = env(knowledge="shared")
    assert shared.scores("tool")


@pytest.mark.parametrize("style", ["compact", "plain"])
def test_nobody_sees_the_half_of_the_other(style: str) -> None:
    """Two maps that differ in the goal look the same to the tool, two that differ in walls the same to the planner."""

    def prompts(rows: list[str]) -> tuple[str, str]:
        _, team = play(rows, ["RD", "R" if style == "compact" else "Answer: R"], style=style, max_rounds=1)
        return as_text(team.prompts[0]), as_text(team.prompts[1])

    here, goal_elsewhere, walls_elsewhere = (
        prompts(FORK),
        prompts(["S.G", ".#.", "##."]),
        prompts(["S.#", ".#.", "..G"]),
    )
    assert here[0] == goal_elsewhere[0] != walls_elsewhere[0]
    assert here[1] == walls_elsewhere[1] != goal_elsewhere[1]


def test_a_planner_alone_sees_both_halves_and_is_asked_as_ever() -> None:
    _, alone = play(FORK, ["RR", "DD"], roles=["planner"])
    _, shared = play(FORK, ["RR", "DD"], roles=["planner"], knowledge="shared")
    assert alone.prompts == shared.prompts
    assert "G" in as_text(alone.prompts[0])


@pytest.mark.parametrize(
    ("text", "compact", "plain"),
    [
        ("R", "R---", "R"),
        ("LURD", "LURD", "LURD"),
        ("RR", "????", "RR"),
        ("X", "????", "X"),
        ("", "????", ""),
        ("two\n lines", "????", "two lines"),
        ("x" * 300, "????", "x" * 200),
    ],
)
def test_what_reaches_the_planner_of_an_answer(text: str, compact: str, plain: str) -> None:
    assert message_of(text, compact=True) == compact
    assert message_of(text, compact=False) == plain


def test_the_script_names_what_is_free_and_walks_where_it_is_nearer() -> None:
    board, rng = Board.of(task_of(FORK)), random.Random(0)
    assert {frozenset(scripted_message(board, rng, 0.0, True)) for _ in range(9)} == {frozenset("RD")}
    assert {scripted_step(board, ["RD--"], rng, 0.0) for _ in range(30)} == {"R", "D"}
    assert {scripted_step(board, ["L---"], rng, 0.0) for _ in range(9)} == {"L"}
    assert {scripted_step(board, ["Free next to you: R"], rng, 0.0) for _ in range(9)} == {"R"}
    assert {scripted_step(board, ["????"], rng, 0.0) for _ in range(99)} == set("UDLR")
    noisy = {scripted_message(board, rng, 1.0, True) for _ in range(300)}
    assert len({frozenset(said) for said in noisy}) > 8


def test_in_a_tree_a_message_is_worth_what_the_planner_makes_of_it() -> None:
    """The planner makes the move of the first letter: D leads into the dead end, R a quarter of the way."""
    renderer = Renderer()

    def say(request: Request) -> list[str]:
        if request.role == "tool":
            return ["D", "R"][: len(request.candidates)]
        message = renderer.text(request.prompt_ids)[len("+2+2") :]
        return [message[0]] * len(request.candidates)

    seats = {role: replace(seat, renderer=renderer) for role, seat in seats_of(("tool", "planner")).items()}
    seats["tool"] = replace(seats["tool"], lookahead=2)
    rollout = Rollout(
        make_env=lambda: env(max_rounds=1),
        seats=seats,
        plan=Plan(mode="tree", num_candidates=2),
        engine=ScriptedEngine(say),
    )
    [episode] = rollout.run(plays_of([task_of(FORK)], seed=0, purpose="train", step=0, episodes_per_task=1))
    assert [turn.reward for turn in episode.turns if turn.role == "tool"] == [Reward(0.0, 0.0), Reward(0.25, 0.0)]
    assert [turn.text for turn in episode.played] == ["R", "R"]


@pytest.mark.parametrize("options", [{}, {"style": "plain"}, {"drafters": 2}])
def test_the_contract_holds(options: dict[str, Json]) -> None:
    assert_env("plan_path", {"style": "compact", "size": 4, "knowledge": "halves", **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "plain", "tool": "python"}, "tool = 'python' with knowledge = 'halves'"),
        ({"compact_end_map": True}, "compact_end_map with knowledge = 'halves'"),
    ],
)
def test_options_of_drafts_are_refused(options: dict[str, Json], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        env(**options)
