"""The Sokoban env: rewards worked out by hand, prompts, tasks, the scripted player."""

from __future__ import annotations

import asyncio
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from coterie.env import Prompt, Team, make_env
from coterie.envs import sokoban_script
from coterie.envs.sokoban_rules import Position, canonical, parse
from coterie.envs.sokoban_script import Attempt, execute, plan
from coterie.envs.sokoban_solver import Search
from coterie.errors import ConfigError, EnvError
from coterie.keyed import keyed_random
from coterie.types import EpisodeKey, Json, Outcome, Played, Reward, Scored, StopReason, Task, Turn
from prompts import as_text

ONE_PUSH = "#####\n#@$.#\n#####"
FOUR_PUSHES = "########\n#@$   .#\n########"
ROOM = "#########\n#       #\n#@ $   .#\n#       #\n#########"  # 4 pushes, 5 moves
KEY = EpisodeKey(seed=0, purpose="play", step=0, task_id="t", index=0)


@dataclass
class ScriptedTeam:
    """Plays given texts in order, or the experts where there are none; keeps what it was asked."""

    texts: Sequence[str] | None = None
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    roles: list[str] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    scored: list[Scored[Attempt]] = field(default_factory=list)

    async def act(
        self, role: str, prompt: Prompt, *, score: object = None, round: int | None = None, expert: object = None
    ) -> Played[Attempt]:
        assert callable(score)
        assert callable(expert)
        text = expert(self.rng, self.noise) if self.texts is None else self.texts[len(self.roles)]
        self.roles.append(role)
        self.prompts.append(prompt)
        self.answers.append(text)
        self.scored.append(score(text))
        assert score(text) == self.scored[-1], "score is not pure"
        turn = Turn(
            episode=KEY, act=len(self.roles) - 1, candidate=0, role=role, seat=0, round=round or 0, policy="p",
            version=0, peers="", prompt_ids=(1,), completion_ids=(1,), sampler_logprobs=(0.0,), text=text,
            stop_reason=StopReason.END, temperature=1.0, played=True, trainable=True,
            reward=self.scored[-1].reward, error=None,
        )  # fmt: skip
        return Played(turn, self.scored[-1].result)

    @property
    def rewards(self) -> list[Reward]:
        return [scored.reward for scored in self.scored]


def task_of(text: str) -> Task:
    return Task(id="sokoban:test:0", split="test", seed=0, data={"xsb": text})


def play(
    text: str, texts: Sequence[str] | None, noise: float = 0.0, /, **options: Json
) -> tuple[Outcome, ScriptedTeam]:
    team = ScriptedTeam(texts, noise)
    env = make_env("sokoban", {"size": 9, "style": "compact", **options})
    return asyncio.run(env.play(task_of(text), cast(Team, team))), team


def alone(**options: Json) -> dict[str, Json]:
    return {"roles": ["planner"], **options}


# ---- rules and rewards ----


def test_the_planner_moves_and_the_draft_does_not() -> None:
    outcome, team = play(FOUR_PUSHES, ["RRRR", "R", "RR", "RRR"])
    assert team.roles == ["tool", "planner", "tool", "planner"]
    assert team.rewards == [Reward(2.0, 0.1), Reward(0.25, 0.1), Reward(0.5, 0.1), Reward(1.75, 0.1)]
    assert outcome == Outcome(
        success=True,
        team=2.0,
        metrics={"rounds": 2.0, "moves": 4.0, "stuck": 0.0},
        labels={"boxes": "1"},
    )


def test_solving_and_running_out_of_rounds_are_told_apart() -> None:
    """ENV-03: the bonus is for solving; the limit alone pays nothing."""
    solved, team = play(ONE_PUSH, ["R"], **alone(max_rounds=1, max_moves=1))
    assert (solved.success, solved.truncated, solved.team) == (True, False, 2.0)
    assert team.rewards == [Reward(2.0, 0.1)]
    lost, team = play(ONE_PUSH, ["L"], **alone(max_rounds=1, max_moves=1))
    assert (lost.success, lost.truncated, lost.team) == (False, True, 0.0)
    assert team.rewards == [Reward(0.0, 0.1)]


def test_moves_after_the_solving_one_do_not_exist() -> None:
    """ENV-07: ten moves, the third solves: reward of three, success once, nobody is asked again."""
    outcome, team = play("#######\n#@$  .#\n#######", ["R", "RRRLLLLLLL"], max_moves=10)
    assert team.roles == ["tool", "planner"]
    assert (team.scored[1].result.made, team.scored[1].result.mark) == (3, "*")
    assert team.rewards[1] == Reward(2.0, 0.1)
    assert outcome.metrics["moves"] == 3.0
    assert outcome.metrics["rounds"] == 1.0


def test_an_answer_stops_at_its_first_illegal_move() -> None:
    _, team = play(FOUR_PUSHES, ["RURRR"], **alone(max_rounds=1))
    assert team.rewards == [Reward(0.25, 0.1)]
    result = team.scored[0].result
    assert (result.moves, result.made, result.mark) == ("RURRR", 1, "!")


def test_pushing_to_and_fro_pays_nothing() -> None:
    outcome, team = play(ROOM, ["RR", "URRDL"], **alone(max_rounds=2))
    assert [reward.team for reward in team.rewards] == [0.25, -0.25]
    assert outcome.team == 0.0


def test_a_box_stuck_for_good_loses_what_was_gained() -> None:
    outcome, team = play(ROOM, ["RR", "DRU", "L"], **alone(max_rounds=3))
    assert [reward.team for reward in team.rewards] == [0.25, -0.25, 0.0]
    assert [scored.result.mark for scored in team.scored] == [".", "x", "x"]
    assert outcome.metrics["stuck"] == 1.0
    assert outcome.truncated


def test_outcome_reward_is_one_for_solving_and_nothing_else() -> None:
    outcome, team = play(FOUR_PUSHES, ["RRRR", "RRR", "R", "R"], reward="outcome")
    assert [reward.team for reward in team.rewards] == [1.0, 0.0, 1.0, 1.0]
    assert outcome.team == 1.0
    failed, _ = play(FOUR_PUSHES, ["RRR"], **alone(reward="outcome", max_rounds=1))
    assert failed.team == 0.0


def test_turn_rewards_of_the_planner_sum_to_the_outcome() -> None:
    for noise in (0.0, 0.6, 1.0):
        outcome, team = play(ROOM, None, noise, **alone())
        assert sum(reward.team or 0.0 for reward in team.rewards) == outcome.team


@pytest.mark.parametrize("text", ["", " ", "-", "r", "RX", "R R", "RRRRRR", "Answer: R", "R\n"])
def test_an_answer_that_is_not_the_compact_format_moves_nothing(text: str) -> None:
    _, team = play(FOUR_PUSHES, [text], **alone(max_rounds=1))
    assert team.rewards == [Reward(0.0, 0.0)]
    assert team.scored[0].result.mark == "?"


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("Answer: R R", "RR"),
        ("Let me think.\nAnswer: L\nNo.\nAnswer: R,R,R", "RRR"),
        ("Answer: RR\nDone.", "RR"),
        ("R R", ""),
        ("Answer:", ""),
        ("Answer: R R\nAnswer: nothing", ""),
        ("Answer: R R R R R R", ""),
        ("The Answer: R", ""),
    ],
)
def test_the_last_answer_line_of_plain_text_counts(text: str, moves: str) -> None:
    _, team = play(FOUR_PUSHES, [text], **alone(style="plain", max_rounds=1))
    assert team.scored[0].result.moves == moves
    assert team.rewards[0].local == (0.1 if moves else 0.0)


def test_bonus_and_format_reward_are_options() -> None:
    _, team = play(ONE_PUSH, ["R"], **alone(solve_bonus=0.5, format_reward=0.25))
    assert team.rewards == [Reward(1.5, 0.25)]


# ---- prompts ----


def test_the_compact_prompt_starts_at_the_agent_and_holds_draft_and_result() -> None:
    _, team = play(FOUR_PUSHES, ["RRU", "R", "RRRR", "RRR"], size=8)
    walls = "########" * 7
    first, drafted, second, _ = team.prompts
    assert first == "-$---.##" + walls + "+0+1+0+4" + "------"
    assert drafted == "-$---.##" + walls + "+0+1+0+4" + "RRU--!2" + "+0+1+0+2"
    assert second == "-$--.##-" + walls + "+0+1+0+3" + "R----."


def test_boxes_and_agents_on_goals_are_seen_from_the_agent() -> None:
    _, team = play("######\n#+$* #\n#    #\n######", ["L"], **alone(size=6, max_rounds=1))
    assert team.prompts[0] == ".$*-##" + "----##" + "######" * 4 + "+0+1+0-1" + "------"


@pytest.mark.parametrize("options", [{}, {"compact_end_map": True}, {"max_moves": 12}, {"boxes": 2, "size": 7}])
def test_every_compact_prompt_of_a_role_has_one_length(options: dict[str, Json]) -> None:
    lengths: dict[str, set[int]] = {"tool": set(), "planner": set()}
    env = make_env("sokoban", {"style": "compact", **options})
    for task in env.tasks("train", 0, 10):
        team = ScriptedTeam(noise=0.9)
        asyncio.run(make_env("sokoban", {"style": "compact", **options}).play(task, cast(Team, team)))
        for role, prompt in zip(team.roles, team.prompts, strict=True):
            assert isinstance(prompt, str)
            assert prompt.isascii()
            assert prompt.isprintable()
            lengths[role].add(len(prompt))
    assert {role: len(found) for role, found in lengths.items()} == {"tool": 1, "planner": 1}


def test_the_plain_prompt_shows_the_current_map_what_was_tried_and_the_draft() -> None:
    _, team = play(FOUR_PUSHES, ["Answer: R R U", "Answer: R", "", "Answer: R"], style="plain", max_rounds=2)
    tool, planner, second, last = [as_text(prompt) for prompt in team.prompts]
    assert "#@$   .#" in tool
    assert "draft, simulated" not in tool
    assert "R R U: move 3 (U) runs into a wall" in planner
    assert "#  @$ .#" in planner
    assert "# @$  .#" in second
    assert "You are at row 1 column 2. Boxes at: row 1 column 3. Goals at: row 1 column 6." in second
    assert "Executed last round: R: all moves are legal and end with 0 of 1 boxes on goals." in second
    assert "simulated from here: no well-formed answer" in last


def test_a_planner_alone_never_hears_of_a_colleague() -> None:
    _, team = play(FOUR_PUSHES, ["Answer: R", "Answer: X"], **alone(style="plain", max_rounds=2))
    assert team.roles == ["planner", "planner"]
    for prompt in team.prompts:
        for word in ("tool", "draft", "team", "colleague"):
            assert word not in as_text(prompt).lower()


def test_the_example_in_the_rules_is_a_well_formed_answer() -> None:
    for max_moves in (1, 5, 9):
        _, team = play(FOUR_PUSHES, ["Answer: R"], **alone(style="plain", max_rounds=1, max_moves=max_moves))
        example = as_text(team.prompts[0]).split("exactly this form:\n")[1].split("\n")[0]
        _, again = play(FOUR_PUSHES, [example], **alone(style="plain", max_rounds=1, max_moves=max_moves))
        assert again.rewards[0].local == 0.1


# ---- tasks ----


def test_tasks_depend_on_split_and_index_alone_and_survive_json() -> None:
    """ENV-06: the same in any order of calls, and after others."""
    env = make_env("sokoban", {})
    first = env.tasks("train", 42, 1)
    env.tasks("train", 7, 3)
    env.tasks("test", 42, 1)
    assert env.tasks("train", 42, 1) == first == make_env("sokoban", {}).tasks("train", 40, 3)[2:]
    assert json.loads(json.dumps(first[0].data)) == first[0].data
    assert first[0].id == "sokoban:train:42"
    assert env.num_tasks("train") is None


def test_tasks_are_the_same_in_processes_with_other_hash_seeds() -> None:
    """ENV-06: a set or dict order that leaks into a level would show here."""
    program = (
        "from coterie.env import make_env\n"
        "import sys\n"
        "sys.stdout.write(repr(make_env('sokoban', {'boxes': 2}).tasks('train', 0, 5)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert outputs == {repr(make_env("sokoban", {"boxes": 2}).tasks("train", 0, 5))}


def test_no_level_is_in_two_splits() -> None:
    env = make_env("sokoban", {"size": 5})
    forms = [
        {canonical(parse(str(task.data["xsb"]))) for task in env.tasks(split, 0, 100)}
        for split in ("train", "validation", "test")
    ]
    assert all(forms)
    assert forms[0].isdisjoint(forms[1] | forms[2])
    assert forms[1].isdisjoint(forms[2])


@pytest.mark.parametrize(
    "text", ["", "#####\n#@ $.\n#####", "#####\n#@*##\n#####", "#" * 10 + "\n#@$.    #\n" + "#" * 10]
)
def test_a_task_that_is_no_level_of_this_env_is_an_env_error(text: str) -> None:
    with pytest.raises(EnvError, match="sokoban:test:0"):
        play(text, ["R"])


# ---- options ----


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"roles": ["tool"]}, "'planner' must play"),
        ({"boxes": 5}, "at most 4"),
        ({"size": 4}, "env.size"),
        ({"max_rounds": 0}, "env.max_rounds"),
        ({"style": "short"}, "env.style"),
        ({"box": 1}, "did you mean 'boxes'"),
        ({"levels": "x.txt", "size": 7}, "would be ignored"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Json], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make_env("sokoban", options)


def test_resolved_options_with_a_level_file_can_be_read_back(tmp_path: pathlib.Path) -> None:
    """A recipe's resolved copy writes out size, boxes and walls too; it must not be refused for that."""
    file = tmp_path / "levels.txt"
    file.write_text(ROOM + "\n")
    resolved = make_env("sokoban", {"levels": str(file)}).options.model_dump(mode="json")
    assert make_env("sokoban", resolved).options.model_dump(mode="json") == resolved


# ---- the scripted player ----


@pytest.mark.parametrize("style", ["plain", "compact"])
@pytest.mark.parametrize(
    "options", [{}, {"boxes": 2}, {"size": 9, "boxes": 3, "max_rounds": 12}, {"roles": ["planner"]}]
)
def test_the_scripted_player_solves_every_level_in_as_few_rounds_as_it_takes(
    style: str, options: dict[str, Json]
) -> None:
    env = make_env("sokoban", {"style": style, **options})
    for task in env.tasks("test", 0, 15):
        team = ScriptedTeam()
        outcome = asyncio.run(env.play(task, cast(Team, team)))
        assert outcome.success
        assert outcome.metrics["moves"] == outcome.metrics["shortest"]
        assert outcome.metrics["rounds"] == -(-outcome.metrics["shortest"] // 5)
        assert {reward.local for reward in team.rewards} == {0.1}


def test_mistakes_are_well_formed_and_make_most_plays_fail() -> None:
    env = make_env("sokoban", {"style": "compact"})
    wins = 0
    for task in env.tasks("train", 0, 100):
        team = ScriptedTeam(noise=1.0, rng=keyed_random(task.id))
        wins += asyncio.run(env.play(task, cast(Team, team))).success
        assert {reward.local for reward in team.rewards} == {0.1}
    assert wins <= 10  # every move strays, every answer stops after it


def test_the_scripted_player_is_a_function_of_its_generator() -> None:
    answers = [play(ROOM, None, 0.7)[1].answers for _ in range(2)]
    assert answers[0] == answers[1]


def test_off_its_way_the_scripted_player_finds_a_new_one_or_knows_that_there_is_none() -> None:
    start = parse(ROOM)
    aside = execute(start, "UR").position
    found = plan(start, aside)
    assert found is not None
    assert execute(aside, found).mark == "*"
    assert plan(start, execute(start, "RRDRU").position) is None


def test_a_level_without_a_solution_and_one_that_is_too_hard_are_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EnvError, match="has no solution"):
        play("######\n#.$$.#\n#@   #\n######", None)

    def gives_up(position: Position) -> Search:
        return Search("unknown")

    monkeypatch.setattr(sokoban_script, "solution", gives_up)
    with pytest.raises(EnvError, match="gives up"):
        play("#######\n#@ $  #\n#  .  #\n#     #\n#######", None)


def test_two_instances_share_no_state() -> None:
    first, second = (make_env("sokoban", {}) for _ in range(2))
    task = first.tasks("train", 0, 1)[0]
    outcomes = [asyncio.run(env.play(task, cast(Team, ScriptedTeam(noise=0.5)))) for env in (first, second, first)]
    assert outcomes[0] == outcomes[1] == outcomes[2]
