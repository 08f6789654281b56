"""Plan-Path: rules, rewards, prompts, tasks and experts, with rewards worked out by hand."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest

from coterie.env import Env, Prompt, Team, make_env
from coterie.envs.grid import canonical, symmetries
from coterie.envs.maze import Attempt, Board, best_moves
from coterie.errors import ConfigError
from coterie.testing import assert_env, play_once
from coterie.types import EpisodeKey, Json, Outcome, Played, Reward, Scored, StopReason, Task, Turn
from prompts import as_text

OPEN = ["S....", ".....", ".....", ".....", "....G"]  # 8 moves
CORRIDOR = ["S...G", "#####", "#####", "#####", "#####"]  # 4 moves
KEY = EpisodeKey(seed=0, purpose="play", step=0, task_id="t", index=0)


@dataclass
class ScriptedTeam:
    """Plays given texts in order, or the experts where there are none; keeps what it was asked."""

    texts: Sequence[str] | None = None
    noise: float = 0.0
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    roles: list[str] = field(default_factory=list)
    prompts: list[str] = field(default_factory=list)
    rounds: list[int | None] = field(default_factory=list)
    scored: list[Scored[Attempt]] = field(default_factory=list)

    async def act(
        self, role: str, prompt: Prompt, *, score: object = None, round: int | None = None, expert: object = None
    ) -> Played[Attempt]:
        assert callable(score)
        assert callable(expert)
        text = expert(self.rng, self.noise) if self.texts is None else self.texts[len(self.roles)]
        self.roles.append(role)
        self.rounds.append(round)
        self.prompts.append(as_text(prompt))
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


def task_of(rows: list[str]) -> Task:
    return Task(id="plan_path:test:0", split="test", seed=0, data={"grid": list(rows)})


def env(**options: Json) -> Env:
    return make_env("plan_path", {"style": "compact", "size": 5, **options})


def run(rules: Env, task: Task, team: ScriptedTeam) -> Outcome:
    return asyncio.run(rules.play(task, cast(Team, team)))


def rows_of(task: Task) -> list[str]:
    return cast(list[str], task.data["grid"])


def play(
    rows: list[str], texts: Sequence[str] | None, *, noise: float = 0.0, **options: Json
) -> tuple[Outcome, ScriptedTeam]:
    team = ScriptedTeam(texts, noise)
    return run(env(**options), task_of(rows), team), team


# ---- rules and rewards ----


def test_the_planner_moves_and_the_draft_does_not() -> None:
    outcome, team = play(CORRIDOR, ["RRRR", "RR", "L", "RR"])
    assert team.roles == ["tool", "planner"] * 2
    assert team.rounds == [0, 0, 1, 1]
    # the draft would have solved (1 + bonus 1); the answer went half way; then L would cost a quarter; then solved
    assert team.rewards == [Reward(2.0, 0.1), Reward(0.5, 0.1), Reward(-0.25, 0.1), Reward(1.5, 0.1)]
    assert outcome == Outcome(
        success=True,
        team=2.0,
        truncated=False,
        metrics={"rounds": 2, "moves": 4, "shortest": 4},
        labels={"path": "direct", "length": "01-04"},
    )


def test_an_episode_that_uses_up_its_rounds_is_truncated_and_not_a_success() -> None:
    outcome, team = play(CORRIDOR, ["R"] * 6, max_rounds=3)
    assert (len(team.roles), outcome.success, outcome.truncated, outcome.team) == (6, False, True, 0.75)


def test_solving_in_the_last_round_is_a_success_and_not_truncated() -> None:
    outcome, _ = play(CORRIDOR, ["RRRR"] * 2, max_rounds=1)
    assert (outcome.success, outcome.truncated) == (True, False)


def test_outcome_reward_is_one_for_reaching_the_goal_and_zero_for_coming_near() -> None:
    outcome, team = play(CORRIDOR, ["RRRR", "RRR", "L", "R"], reward="outcome")
    assert [reward.team for reward in team.rewards] == [1.0, 0.0, 0.0, 1.0]
    assert outcome.team == 1.0
    outcome, _ = play(CORRIDOR, ["RRR"] * 2, reward="outcome", max_rounds=1)
    assert outcome.team == 0.0


def test_the_rewards_of_single_turns_are_kept_and_sum_to_the_outcome() -> None:
    # ENV-09: 0.25 + 0.25 + 1.0 = 1.5 over three turns
    outcome, team = play(CORRIDOR, ["R", "R", "RR"], roles=["planner"], solve_bonus=0.5)
    assert [reward.team for reward in team.rewards] == [0.25, 0.25, 1.0]
    assert outcome.team == 1.5


def test_everything_after_the_goal_is_ignored_and_nobody_acts_any_more() -> None:
    # ENV-07: ten moves of which the third solves; the rounds left are not played
    outcome, team = play(["S..G.", *CORRIDOR[1:]], ["RRRRLLRRRR"] * 2, max_moves=10, max_rounds=5, solve_bonus=0.25)
    assert team.rewards[1] == Reward(1.25, 0.1)
    assert (len(team.roles), outcome.success, outcome.metrics["moves"]) == (2, True, 3)


def test_an_illegal_move_ends_the_answer_and_the_legal_ones_before_it_count() -> None:
    outcome, team = play(CORRIDOR, ["RDRR"] * 2, max_rounds=1)
    assert team.rewards == [Reward(0.25, 0.1)] * 2
    assert outcome.metrics["moves"] == 1


@pytest.mark.parametrize("text", ["", "RRRRR", "rr", "R R", "RX", "RR\n", " R", "R-", "-", "Answer: R"])
def test_a_compact_answer_that_is_not_one_to_four_letters_moves_nothing(text: str) -> None:
    outcome, team = play(CORRIDOR, [text] * 2, max_rounds=1)
    assert team.rewards == [Reward(0.0, 0.0)] * 2
    assert outcome.metrics["moves"] == 0


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("Answer: R R", 2),
        ("I go right.\nAnswer: R, R, R", 3),
        ("Answer:RR", 2),
        ("  Answer: R  \n", 1),
        ("Answer: R R R\nNo, better:\nAnswer: R", 1),
        ("Answer: R\nThat is it.", 1),
        ("Answer: R R R R R", None),
        ("Answer:", None),
        ("Answer:\nR R", None),
        ("Answer: R\nAnswer:", None),
        ("Answer: r r", None),
        ("Answer: right", None),
        ("My Answer: R", None),
        ("R R", None),
        ("", None),
    ],
)
def test_a_plain_answer_is_the_last_line_that_starts_with_answer(text: str, made: int | None) -> None:
    outcome, team = play(CORRIDOR, [text] * 2, max_rounds=1, style="plain")
    assert outcome.metrics["moves"] == (made or 0)
    assert team.rewards[1].local == (0.0 if made is None else 0.1)


def test_format_reward_is_the_local_part_only() -> None:
    _, team = play(CORRIDOR, ["L", "RR"], max_rounds=1, format_reward=0.5)
    assert team.rewards == [Reward(0.0, 0.5), Reward(0.5, 0.5)]


@pytest.mark.parametrize("rows", [CORRIDOR, [".S.G.", *CORRIDOR[1:]], ["S.#.G", "..#..", ".....", "..#..", "#...."]])
def test_pacing_back_and_forth_earns_exactly_nothing(rows: list[str]) -> None:
    # reference.md 4.11: 200 moves of pacing, in answers of two and of one
    texts = ["R", "L", "RL", "RL", "RLRL"] * 20
    outcome, team = play(rows, texts, roles=["planner"], max_rounds=100)
    assert outcome.metrics["moves"] == 200
    assert sum(reward.team or 0.0 for reward in team.rewards) == 0.0
    assert outcome.team == 0.0


def test_no_closed_walk_earns_anything_and_the_best_path_earns_most() -> None:
    # reference.md 4.11 found pacing better than the best path on 169 of 200 maps
    rng = random.Random(5)
    for task in env(size=10).tasks("train", 0, 200):
        rows = rows_of(task)
        start = Board.of(task)
        walk, now = "", start
        for _ in range(6):
            walk += (move := rng.choice([move for move in "UDLR" if now.after(move)]))
            now = now.after(move) or now
            if now.solved:
                break
        back = "".join({"U": "D", "D": "U", "L": "R", "R": "L"}[move] for move in reversed(walk))
        pacing, team = play(rows, [*walk, *back], roles=["planner"], max_rounds=min(100, 2 * len(walk)), size=10)
        if not pacing.success:
            assert sum(reward.team or 0.0 for reward in team.rewards) == 0.0
        best, _ = play(rows, [best_moves(start, rng, 200)], roles=["planner"], max_moves=200, max_rounds=1, size=10)
        assert best.team == 2.0


# ---- roles ----


def test_the_planner_alone_plays_without_a_word_about_anyone_else() -> None:
    outcome, team = play(CORRIDOR, ["Answer: R"] * 3, roles=["planner"], max_rounds=3, style="plain")
    assert team.roles == ["planner"] * 3
    assert not any(word in prompt.lower() for prompt in team.prompts for word in ("tool", "draft", "team", "colleague"))
    assert "planner" in team.prompts[0]
    assert outcome.metrics["moves"] == 3


def test_a_tool_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="'planner' must play"):
        env(roles=["tool"])


@pytest.mark.parametrize(
    "options",
    [
        {"size": 2}, {"size": 31}, {"walls": -0.1}, {"walls": 0.9}, {"max_moves": 0}, {"max_rounds": 0},
        {"train_detours": 1.5}, {"train_detours": 0.5, "walls": 0.0}, {"style": "fancy"}, {"reward": "sparse"},
        {"format_reward": -1.0},
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(options: dict[str, Json]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        env(**options)


# ---- prompts ----


def test_the_planner_sees_the_draft_of_its_own_round_and_what_became_of_it() -> None:
    # reference.md 4.1: roles of one round never saw each other
    for style, drafts in (("compact", ("RRRR", "D")), ("plain", ("Answer: R R R R", "Answer: D"))):
        seen = {draft: play(CORRIDOR, [draft, ""], max_rounds=1, style=style)[1].prompts for draft in drafts}
        assert seen[drafts[0]][0] == seen[drafts[1]][0]
        assert seen[drafts[0]][1] != seen[drafts[1]][1]
    assert "The tool's draft, simulated from here: D: move 1 (D) runs into a wall" in seen["Answer: D"][1]


def test_the_next_round_starts_where_the_played_answer_ended() -> None:
    # reference.md 4.3: from round two on the played branch was frozen
    _, team = play(CORRIDOR, ["Answer: R", "Answer: R R"] * 2, max_rounds=2, style="plain")
    assert "You are at row 0, column 0. The goal is at row 0, column 4." in team.prompts[1]
    assert "A...G" in team.prompts[0]
    assert "You are at row 0, column 2." in team.prompts[2]
    assert "..A.G" in team.prompts[2]
    assert "You are at row 0, column 2." in team.prompts[3]
    assert "..A.G" in team.prompts[3]
    assert "Executed last round: R R: all moves are legal and end at row 0, column 2" in team.prompts[2]


def test_a_compact_tool_prompt_is_map_and_last_answer() -> None:
    _, team = play(CORRIDOR, ["L", "RR", "RR", "", "RR", "RR"])
    assert team.prompts[0] == "....G#" + "######" * 5 + "+0+4" + "----" + "-"
    assert team.prompts[2] == "..G#.." + "######" * 5 + "+0+2" + "RR--" + "."
    assert team.prompts[4] == "..G#.." + "######" * 5 + "+0+2" + "----" + "?"


@pytest.mark.parametrize(
    ("draft", "tail"),
    [
        ("RRRR", "RRRR*4+0+0"),
        ("L", "L---!0+0+4"),
        ("RRD", "RRD-!2+0+2"),
        ("R", "R---.1+0+3"),
        ("x", "----?0+0+4"),
        ("RLRL", "RLRL.4+0+4"),
    ],
)
def test_a_compact_planner_prompt_is_map_draft_mark_and_legal_moves(draft: str, tail: str) -> None:
    _, team = play(CORRIDOR, [draft, "R"], max_rounds=1)
    assert team.prompts[1] == "....G#" + "######" * 5 + "+0+4" + tail


def test_the_end_map_shows_the_board_as_the_draft_would_leave_it() -> None:
    _, team = play(CORRIDOR, ["RRR", "R"], max_rounds=1, compact_end_map=True)
    assert team.prompts[1] == "....G#" + "######" * 5 + "+0+4" + "RRR-.3+0+1" + ".G#..." + "######" * 5


@pytest.mark.parametrize(
    "options",
    [{}, {"roles": ["planner"]}, {"compact_end_map": True}, {"max_moves": 12}, {"size": 10}],
    ids=lambda options: str(options),
)
def test_compact_prompts_of_a_role_have_one_length_and_printable_characters(options: dict[str, Json]) -> None:
    lengths: dict[str, set[int]] = {}
    for index, task in enumerate(env(**options).tasks("train", 0, 30)):
        team = ScriptedTeam(None, 0.9, random.Random(index))
        run(env(**options), task, team)
        for role, prompt in zip(team.roles, team.prompts, strict=True):
            lengths.setdefault(role, set()).add(len(prompt))
            assert all(" " <= char <= "~" for char in prompt)
    assert all(len(found) == 1 for found in lengths.values()), lengths
    noisy = play(OPEN, ["", "QQ", "UUUU", "RDLR"], max_rounds=2)[1]
    assert (
        len({len(noisy.prompts[0]), len(noisy.prompts[2])}) == len({len(noisy.prompts[1]), len(noisy.prompts[3])}) == 1
    )


# ---- tasks ----


def test_tasks_are_the_same_whatever_was_asked_before() -> None:
    # ENV-06
    one = env()
    first = one.tasks("train", 0, 20)
    one.tasks("validation", 7, 3)
    assert one.tasks("train", 0, 20) == first == env().tasks("train", 0, 20)
    assert env().tasks("train", 13, 1) == first[13:14]
    assert env(max_rounds=2, style="plain", reward="outcome").tasks("train", 0, 20) == first
    assert [task.id for task in first[:2]] == ["plan_path:train:0", "plan_path:train:1"]
    assert len({task.seed for task in first}) == 20


def test_tasks_are_the_same_in_processes_with_different_hash_seeds() -> None:
    # ENV-06; the expert's play is compared too
    code = (
        "import random; from coterie.env import make_env; from coterie.envs.maze import *;"
        "tasks = make_env('plan_path', {}).tasks('train', 0, 5);"
        "print([(t.seed, t.data, best_moves(Board.of(t), random.Random(1), 9)) for t in tasks])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert str(make_env("plan_path", {}).tasks("train", 0, 1)[0].seed) in outputs.pop()


def test_a_task_written_to_disk_reads_back_equal() -> None:
    task = env().tasks("test", 4, 1)[0]
    assert json.loads(json.dumps(task.data)) == task.data


def test_other_sizes_and_walls_make_other_tasks() -> None:
    made = [env(**more).tasks("train", 0, 3) for more in ({}, {"walls": 0.3}, {"size": 6}, {"train_detours": 0.5})]
    seeds = [task.seed for tasks in made for task in tasks]
    assert len(set(seeds)) == len(seeds)


def test_no_map_is_in_two_splits_not_even_turned_or_mirrored() -> None:
    # 3x3 maps are so few that a split by anything but the canonical form would collide at once
    grids = {
        split: {tuple(rows_of(task)) for task in env(size=3, walls=0.3).tasks(split, 0, 200)}
        for split in ("train", "validation", "test")
    }
    turned = {split: {form for grid in found for form in symmetries(grid)} for split, found in grids.items()}
    for a, b in itertools.combinations(grids, 2):
        assert not turned[a] & turned[b]
        assert grids[a]
    assert len({canonical(grid) for grid in grids["train"]}) < len(grids["train"]), "too few maps to have collided"


def test_maps_are_what_the_reference_says() -> None:
    # reference.md 3: at 10x10 with walls 0.22 the shortest path is 7.5 moves on average
    boards = [Board.of(task) for task in make_env("plan_path", {}).tasks("train", 0, 500)]
    assert sum(board.shortest for board in boards) / 500 == pytest.approx(7.5, abs=0.5)
    assert min(board.shortest for board in boards) == 1
    walls = sum(row.count("#") for board in boards for row in board.grid) / 50_000
    assert walls == pytest.approx(0.2, abs=0.02)  # a little under 0.22: maps that cannot be crossed are redrawn
    assert all(len(board.grid) == 10 and {len(row) for row in board.grid} == {10} for board in boards)


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 0), (0.5, 70, 130), (1.0, 200, 200)])
def test_train_detours_sets_the_share_of_detours(share: float, least: int, most: int) -> None:
    tasks = env(train_detours=share).tasks("train", 0, 200)
    assert least <= sum(Board.of(task).detour for task in tasks) <= most


def test_train_detours_leave_the_other_splits_alone() -> None:
    for split in ("validation", "test"):
        assert env(train_detours=1.0).tasks(split, 0, 20) == env().tasks(split, 0, 20)


def test_labels_say_whether_the_path_is_a_detour_and_how_long_it_is() -> None:
    bend = ["S#G..", ".#...", ".....", ".....", "....."]  # 6 moves, 2 straight
    assert play(bend, ["R"] * 2, max_rounds=1)[0].labels == {"path": "detour", "length": "05-08"}
    assert play(OPEN, ["R"] * 2, max_rounds=1)[0].labels == {"path": "direct", "length": "05-08"}
    winding = ["S....", "####.", "#....", "#.###", "#...G"]  # 14 moves around two walls, 8 straight
    assert play(winding, ["R"] * 2, max_rounds=1)[0].labels == {"path": "detour", "length": "13-16"}


# ---- experts ----


@pytest.mark.parametrize("style", ["plain", "compact"])
@pytest.mark.parametrize("roles", [["tool", "planner"], ["planner"]])
def test_experts_without_noise_solve_every_task_on_a_shortest_path(style: str, roles: list[str]) -> None:
    options: dict[str, Json] = {"style": style, "roles": roles, "size": 10, "max_rounds": 10}
    for index, task in enumerate(env(**options).tasks("test", 0, 40)):
        outcome = run(env(**options), task, ScriptedTeam(rng=random.Random(index)))
        assert outcome.success
        assert outcome.metrics["moves"] == outcome.metrics["shortest"]


def test_noise_makes_experts_worse_but_their_answers_stay_well_formed() -> None:
    rates = []
    for noise in (0.0, 0.5, 1.0):
        wins = 0
        for index, task in enumerate(env(size=10).tasks("train", 0, 150)):
            team = ScriptedTeam(None, noise, random.Random(index))
            wins += run(env(size=10), task, team).success
            assert all(reward.local == 0.1 for reward in team.rewards)
        rates.append(wins / 150)
    assert rates[0] > 0.95
    assert rates[0] > rates[1] > rates[2]
    assert rates[2] < 0.1  # every move strays, every answer stops after it


def test_answers_are_graded_against_their_own_map() -> None:
    # ENV-11: eight puzzles in any order, each answered with its own solution; two answers swapped fail, only those
    options: dict[str, Json] = {"size": 10, "max_moves": 40, "max_rounds": 1, "roles": ["planner"]}
    tasks = env(**options).tasks("test", 0, 8)
    random.Random(1).shuffle(tasks)
    answers = [best_moves(Board.of(task), random.Random(0), 40) for task in tasks]

    def solved(texts: Sequence[str]) -> list[bool]:
        plays = zip(tasks, texts, strict=True)
        return [run(env(**options), task, ScriptedTeam([text])).success for task, text in plays]

    assert solved(answers) == [True] * 8
    answers[2], answers[5] = answers[5], answers[2]
    assert solved(answers) == [index not in (2, 5) for index in range(8)]


def test_a_program_of_the_tool_runs_and_the_last_line_it_prints_is_its_draft() -> None:
    options: dict[str, Json] = {"tool": "python", "size": 5, "max_rounds": 1}
    task = task_of(["S..G", "....", "....", "...."])
    program = "```python\nprint('searching')\nprint(' '.join('R' * 3))\n```"
    prompts: list[str] = []

    def say(role: str, prompt: str) -> str:
        prompts.append(prompt)
        return program if role == "tool" else "Answer: R R R"

    episode = play_once("plan_path", say, options=options, task=task)
    assert [turn.reward for turn in episode.turns] == [Reward(2.0, 0.1), Reward(2.0, 0.1)]
    assert "reaches the goal with move 3" in prompts[1]
    assert "```python" in prompts[0]
    assert "```python" not in prompts[1], "the planner still answers with moves"
    for text in ("Answer: R R R", "```python\nprint('RRR or so')\n```", "```python\n1/0\n```"):
        broken = play_once("plan_path", [text, "Answer: R R R"], options=options, task=task)
        assert broken.turns[0].reward == Reward(0.0, 0.0), text


def test_the_contract_holds_with_a_tool_that_programs() -> None:
    assert_env("plan_path", {"tool": "python", "size": 4, "max_rounds": 1}, tasks=1)
    with pytest.raises(ConfigError, match="compact"):
        make_env("plan_path", {"tool": "python", "style": "compact"})
