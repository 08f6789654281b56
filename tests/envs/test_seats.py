"""Who drafts, who sees the map: the options that the games of a tool and a planner share. And replays of them all."""

from __future__ import annotations

import random
from typing import Any

import pytest

from coterie.engines import Request
from coterie.engines.scripted import ScriptedEngine
from coterie.env import make_env
from coterie.envs.maze import Board, blind_moves, execute, nearest_end
from coterie.errors import ConfigError
from coterie.keyed import keyed_random
from coterie.models.chat import ChatRenderer
from coterie.models.tiny import tiny_tokenizer
from coterie.rollout import Rollout, plays_of, replay
from coterie.team import Plan
from coterie.testing import assert_env, play_once, seats_of
from coterie.types import Episode, Task

CORRIDOR = Task(id="corridor", split="train", seed=0, data={"grid": ["S..G", "####", "####", "####"]})
COMPACT = {"size": 4, "style": "compact", "max_moves": 2, "max_rounds": 2}
RENDERER = ChatRenderer(tiny_tokenizer())
GAMES: dict[str, dict[str, Any]] = {
    "plan_path": {"size": 5, "style": "compact", "max_moves": 2},
    "sokoban": {"style": "compact", "max_moves": 3, "max_rounds": 3},
    "sudoku": {"style": "compact", "max_rounds": 2},
}


def prompts(episode: Episode) -> list[str]:
    return [RENDERER.decode(turn.prompt_ids) for turn in episode.played]


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize(
    "more",
    [{"knowledge": "split"}, {"roles": ["planner"], "rehearse": True}, {"knowledge": "split", "style": "plain"}],
    ids=["split", "rehearse", "split-plain"],
)
def test_the_games_keep_the_contract_with_these_options(name: str, more: dict[str, Any]) -> None:
    assert_env(name, {**GAMES[name], **more}, tasks=2)


def test_several_drafters_keep_the_contract() -> None:
    assert_env("plan_path", {**GAMES["plan_path"], "drafters": 3}, tasks=2)


def test_a_split_planner_is_shown_the_drafts_and_not_the_map() -> None:
    shared = play_once("plan_path", ["RR", "RR", "R", "R"], options=COMPACT, task=CORRIDOR)
    split = play_once("plan_path", ["RR", "RR", "R", "R"], options={**COMPACT, "knowledge": "split"}, task=CORRIDOR)
    # the way to the goal (0 rows, 3 columns), the draft, its mark, 2 legal moves, the way from its end
    tail = "+0+3RR.2+0+1"
    assert prompts(split)[1] == tail
    assert prompts(shared)[1] == Board.of(CORRIDOR).rolled() + tail
    assert prompts(split)[0] == prompts(shared)[0]
    assert split.outcome is not None
    assert split.outcome.success


def test_alone_a_planner_sees_what_both_would_and_rehearsed_answers_come_from_another_seat() -> None:
    options = {**COMPACT, "roles": ["planner"], "knowledge": "split", "rehearse": True}
    episode = play_once("plan_path", ["RU", "RR", "R", "R"], options=options, task=CORRIDOR)
    assert [(turn.role, turn.seat) for turn in episode.played] == [("planner", 1), ("planner", 0)] * 2
    assert prompts(episode)[1] == Board.of(CORRIDOR).rolled() + "+0+3RU!1+0+2"
    assert episode.outcome is not None
    assert episode.outcome.success


def test_every_draft_is_in_the_planners_prompt_in_the_order_of_seats() -> None:
    options = {**COMPACT, "drafters": 2, "knowledge": "split"}
    episode = play_once("plan_path", ["R", "RR", "RR", "R", "R", "R"], options=options, task=CORRIDOR)
    assert [(turn.role, turn.seat) for turn in episode.played][:3] == [("tool", 0), ("tool", 1), ("planner", 0)]
    assert prompts(episode)[2] == "+0+3" + "R-.1+0+2" + "RR.2+0+1"


def test_options_that_nobody_would_read_are_refused() -> None:
    with pytest.raises(ConfigError, match="rehearse is for a planner that plays alone"):
        make_env("sudoku", {"rehearse": True})
    with pytest.raises(ConfigError, match="drafters = 2, but the tool does not play"):
        make_env("plan_path", {"drafters": 2, "roles": ["planner"]})


def test_a_blind_script_takes_the_legal_part_of_the_draft_that_looks_nearest() -> None:
    board, rng = Board.of(CORRIDOR), random.Random(0)
    near, far, stuck = execute(board, "RRU"), execute(board, "R"), execute(board, "U")
    assert blind_moves(board, [far, near, stuck], rng, 0.0) == "RR"
    assert blind_moves(board, [stuck], rng, 0.0) == "R"
    assert nearest_end([stuck, near, far]) is near


def test_a_blind_sudoku_planner_sees_conflicts_but_no_clues() -> None:
    options = {"style": "compact", "blanks": 8, "knowledge": "split", "max_rounds": 1}
    episode = play_once("sudoku", ["1" * 16, "2" * 16], options=options)
    # every cell: the clue is hidden, the digit is the draft's, and four 1s in a row conflict
    assert prompts(episode)[1] == "P" + "-1x" * 16


def random_episodes(name: str, options: dict[str, Any], count: int) -> tuple[Rollout, list[Episode]]:
    """Return chain episodes of answers that are sometimes right, sometimes legal and sometimes nonsense."""

    def script(request: Request) -> list[str]:
        rng = keyed_random("answers", request.episode.task_id, request.episode.index, request.act)
        if name == "sudoku":
            return ["".join(rng.choice("1234") for _ in range(rng.choice([16, 16, 3])))]
        return ["".join(rng.choice("UDLRx" if rng.random() < 0.1 else "UDLR") for _ in range(rng.randint(0, 3)))]

    env = make_env(name, options)
    rollout = Rollout(
        make_env=lambda: make_env(name, options),
        seats=seats_of(env.active_roles),
        plan=Plan(mode="chain", num_candidates=1),
        engine=ScriptedEngine(script),
    )
    plays = plays_of(env.tasks("train", 0, count), seed=3, purpose="play", step=0, episodes_per_task=1)
    return rollout, rollout.run(plays)


@pytest.mark.parametrize("name", GAMES)
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_replayed_episodes_are_the_recorded_ones(name: str, count: int) -> None:
    rollout, episodes = random_episodes(name, GAMES[name], count)
    assert len({turn.text for episode in episodes for turn in episode.turns}) > 20
    for episode in episodes:
        again = replay(rollout, episode, len(episode.played))
        assert again.outcome == episode.outcome
        assert [(t.act, t.role, t.seat, t.round, t.prompt_ids, t.text, t.reward) for t in again.turns] == [
            (t.act, t.role, t.seat, t.round, t.prompt_ids, t.text, t.reward) for t in episode.turns
        ]
