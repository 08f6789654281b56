"""The Sudoku environment: rewards by hand, prompts, answers, tasks and whole plays with a scripted team."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest

from coterie.env import Expert, Prompt, make_env
from coterie.envs.sudoku import Board, Sudoku, SudokuOptions, slipped_grid
from coterie.envs.sudoku_rules import BLANK, canonical, rows_of
from coterie.errors import ConfigError, EnvError
from coterie.types import EpisodeKey, Json, Message, Outcome, Played, Reward, Scored, StopReason, Task, Turn

# 8 blanks, one solution; EXCHANGED has 2 and 3 of row 1 exchanged (6 of 8 right, clues kept), BROKEN changes a clue.
CLUES = "1..43..2..43..21"
SOLVED = "1234341221434321"
EXCHANGED = "1324341221434321"
BROKEN = "2234341221434321"
TASK = Task(id="sudoku:train:0", split="train", seed=0, data={"clues": CLUES, "solution": SOLVED})
BOARD = Board.of(TASK)

Answer = Callable[[str, str, Expert], str]


def text_of(prompt: Prompt) -> str:
    if isinstance(prompt, str):
        return prompt
    parts: list[str] = []
    for message in prompt:
        assert isinstance(message, Message)
        parts += [part for part in message.parts if isinstance(part, str)]
    return "\n".join(parts)


class FakeTeam:
    """Plays what ``answer(role, prompt, expert)`` says, and keeps what it saw."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.rng = random.Random(0)
        self.acts: list[tuple[str, int | None]] = []
        self.prompts: dict[str, list[str]] = {"tool": [], "planner": []}
        self.rewards: list[Reward] = []

    async def act(self, role, prompt, *, score=None, round=None, expert=None):  # type: ignore[no-untyped-def]
        text = self.answer(role, text_of(prompt), expert)
        scored = score(text)
        assert score(text) == scored, "score must be pure"
        self.acts.append((role, round))
        self.prompts[role].append(text_of(prompt))
        self.rewards.append(scored.reward)
        key = EpisodeKey(seed=0, purpose="play", step=0, task_id="t", index=0)
        turn = Turn(
            episode=key,
            act=len(self.acts) - 1,
            candidate=0,
            role=role,
            seat=0,
            round=round,
            policy="main",
            version=0,
            peers="",
            prompt_ids=(1,),
            completion_ids=(1,),
            sampler_logprobs=(-1.0,),
            text=text,
            stop_reason=StopReason.END,
            temperature=1.0,
            played=True,
            trainable=True,
            reward=scored.reward,
            error=None,
        )
        return Played(turn, scored.result)


def env(**options: Json) -> Sudoku:
    made = make_env("sudoku", {"style": "compact", **options})
    assert isinstance(made, Sudoku)
    return made


def play(sudoku: Sudoku, answer: Answer, task: Task = TASK) -> tuple[Outcome, FakeTeam]:
    team = FakeTeam(answer)
    return asyncio.run(sudoku.play(task, team)), team  # type: ignore[arg-type]


def by_turns(**texts: Sequence[str]) -> Answer:
    left = {role: list(answers) for role, answers in texts.items()}
    return lambda role, prompt, expert: left[role].pop(0)


def scored(sudoku: Sudoku, board: Board, text: str) -> Scored[object]:
    return sudoku._score(board)(text)  # type: ignore[return-value]


def plain(grid: str) -> str:
    return "Answer:\n" + "\n".join(rows_of(grid))


# ---- rewards ----------------------------------------------------------------------------------------------------


def test_phi_is_the_share_of_blanks_that_are_right_and_0_where_a_clue_is_changed() -> None:
    assert BOARD.phi == 0.0
    assert BOARD.after(EXCHANGED).phi == 0.75
    assert BOARD.after(SOLVED).phi == 1.0
    assert BOARD.after(BROKEN).phi == 0.0


@pytest.mark.parametrize(
    ("before", "text", "team", "local"),
    [
        ("", EXCHANGED, 0.75, 0.1),
        ("", SOLVED, 2.0, 0.1),
        (EXCHANGED, SOLVED, 1.25, 0.1),
        (EXCHANGED, EXCHANGED, 0.0, 0.1),
        (EXCHANGED, BROKEN, -0.75, 0.1),
        (EXCHANGED, "", 0.0, 0.0),
        (EXCHANGED, "123", 0.0, 0.0),
        ("", "5" * 16, 0.0, 0.0),
    ],
)
def test_a_grid_earns_the_difference_of_phi_and_the_bonus_once_it_solves(
    before: str, text: str, team: float, local: float
) -> None:
    assert scored(env(), BOARD.after(before), text).reward == Reward(team, local)


def test_outcome_rewards_are_1_for_a_solving_grid_and_0_for_all_else() -> None:
    outcome = env(reward="outcome")
    assert [scored(outcome, BOARD, text).reward.team for text in (SOLVED, EXCHANGED, "")] == [1.0, 0.0, 0.0]


def test_bonus_and_format_reward_are_options() -> None:
    assert scored(env(solve_bonus=0.5, format_reward=0.0), BOARD, SOLVED).reward == Reward(1.5, 0.0)


def test_going_round_in_circles_sums_to_exactly_0() -> None:
    three = Board("12..34122143432.", SOLVED)  # three blanks: thirds are not exact in binary
    right_1, right_2 = "1231341221434322", "1234341221434322"
    board, total = three.after(right_1), 0.0
    for grid in (right_2, right_1, right_2, right_1):
        reward = scored(env(), board, grid).reward
        assert reward.team is not None
        total += reward.team
        board = board.after(grid)
    assert total == 0.0
    assert three.after(right_2).phi == pytest.approx(2 / 3, abs=1e-12)


def test_one_constant_grid_does_not_solve_every_puzzle() -> None:
    """Reference.md section 4 fault 12: a grid counts only if it keeps the clues; one that does not is worth 0."""
    boards = [Board.of(task) for task in env().tasks("train", 0, 50)]
    kept = [all(c in (BLANK, s) for c, s in zip(board.clues, SOLVED, strict=True)) for board in boards]
    assert [board.after(SOLVED).solved for board in boards] == kept
    assert sum(kept) <= 1
    changed = [board for board, keeps in zip(boards, kept, strict=True) if not keeps]
    assert {scored(env(), board, SOLVED).reward.team for board in changed} == {0.0}


def test_an_empty_or_malformed_answer_is_never_well_formed_and_places_nothing() -> None:
    for text in ("", " ", "\n", "1234", SOLVED + "1", SOLVED + "\n", "0" + SOLVED[1:], "١" + SOLVED[1:], CLUES):
        result = scored(env(), BOARD, text)
        assert result.reward == Reward(0.0, 0.0), text
        assert result.result.board == BOARD  # type: ignore[attr-defined]


def test_after_the_end_nothing_moves_and_nothing_is_paid() -> None:
    """ENV-07: state frozen, no reward change, success counted once."""
    done = BOARD.after(SOLVED)
    assert done.after(EXCHANGED) is done
    for mode in ("dense", "outcome"):
        for text in (SOLVED, EXCHANGED, BROKEN):
            assert scored(env(reward=mode), done, text).reward.team == 0.0


# ---- plays ------------------------------------------------------------------------------------------------------


def test_the_first_solving_answer_ends_the_episode_and_later_members_are_not_asked() -> None:
    """ENV-07."""
    outcome, team = play(env(), by_turns(tool=[EXCHANGED, SOLVED], planner=[EXCHANGED, SOLVED]))
    assert team.acts == [("tool", 0), ("planner", 0), ("tool", 1), ("planner", 1)]
    assert [reward.team for reward in team.rewards] == [0.75, 0.75, 1.25, 1.25]
    assert (outcome.success, outcome.truncated, outcome.team) == (True, False, 2.0)
    assert outcome.metrics == {"rounds": 2, "blanks": 8, "right": 1.0, "conflicts": 0, "clues_changed": 0.0}
    assert outcome.labels == {"size": "4x4", "blanks": "08"}


def test_a_solving_draft_changes_nothing_until_the_planner_gives_it() -> None:
    outcome, team = play(env(max_rounds=1), by_turns(tool=[SOLVED], planner=[BROKEN]))
    assert [reward.team for reward in team.rewards] == [2.0, 0.0]
    assert (outcome.success, outcome.truncated, outcome.team) == (False, True, 0.0)
    assert outcome.metrics["clues_changed"] == 1.0


def test_rounds_used_up_is_a_truncation_not_a_success_and_pays_no_bonus() -> None:
    outcome, team = play(env(max_rounds=2), by_turns(tool=["", ""], planner=[EXCHANGED, ""]))
    assert len(team.acts) == 4
    assert (outcome.success, outcome.truncated, outcome.team) == (False, True, 0.75)
    assert outcome.metrics["conflicts"] == 6


def test_the_outcome_is_the_sum_of_the_planners_rewards() -> None:
    answers = [EXCHANGED, BROKEN, "", SOLVED]
    outcome, team = play(env(roles=["planner"]), by_turns(planner=answers))
    assert [reward.team for reward in team.rewards] == [0.75, -0.75, 0.0, 2.0]
    assert outcome.team == 2.0


def test_in_outcome_mode_the_outcome_is_1_or_0() -> None:
    won, _ = play(env(reward="outcome", roles=["planner"]), by_turns(planner=[SOLVED]))
    lost, _ = play(env(reward="outcome", roles=["planner"], max_rounds=1), by_turns(planner=[EXCHANGED]))
    assert (won.team, lost.team) == (1.0, 0.0)


def test_eight_shuffled_puzzles_are_each_judged_by_their_own_solution() -> None:
    """ENV-11: an oracle wins all 8; with two answers swapped exactly those two fail."""
    tasks = env().tasks("train", 0, 8)
    random.Random(3).shuffle(tasks)
    answers = [str(task.data["solution"]) for task in tasks]
    assert len(set(answers)) >= 2
    sudoku = {"roles": ["planner"], "max_rounds": 1}

    def won(texts: list[str]) -> list[bool]:
        return [
            play(env(**sudoku), by_turns(planner=[text]), task)[0].success  # type: ignore[arg-type]
            for text, task in zip(texts, tasks, strict=True)
        ]

    assert won(answers) == [True] * 8
    other = next(index for index in range(8) if answers[index] != answers[0])
    answers[0], answers[other] = answers[other], answers[0]
    assert [index for index, success in enumerate(won(answers)) if not success] == sorted([0, other])


@pytest.mark.parametrize("options", [{}, {"size": 9}, {"style": "plain"}, {"roles": ["planner"]}])
def test_a_team_of_experts_without_noise_solves_every_task_in_one_round(options: dict[str, Json]) -> None:
    sudoku = env(**options)
    for task in sudoku.tasks("train", 0, 3):
        outcome, _ = play(env(**options), lambda role, prompt, expert: expert(random.Random(1), 0.0), task)
        assert outcome.success
        assert outcome.metrics["rounds"] == 1


def test_a_task_that_is_no_puzzle_is_an_env_error() -> None:
    for data in ({}, {"clues": CLUES}, {"clues": SOLVED, "solution": SOLVED}, {"clues": CLUES, "solution": EXCHANGED}):
        with pytest.raises(EnvError, match="sudoku:train:0"):
            Board.of(dataclasses.replace(TASK, data=data))


# ---- experts ----------------------------------------------------------------------------------------------------


def test_noise_is_the_probability_of_at_least_one_wrong_blank() -> None:
    rng = random.Random(0)
    right = sum(slipped_grid(BOARD, rng, 0.7) == SOLVED for _ in range(4000))
    assert right / 4000 == pytest.approx(0.3, abs=0.03)
    assert {slipped_grid(BOARD, rng, 0.0) for _ in range(50)} == {SOLVED}


def test_with_noise_1_every_blank_is_wrong_and_every_clue_is_kept() -> None:
    grid = slipped_grid(BOARD, random.Random(0), 1.0)
    same = [cell for cell in range(16) if grid[cell] == SOLVED[cell]]
    assert same == [cell for cell in range(16) if CLUES[cell] != BLANK]
    assert set(grid) <= set("1234")


def test_a_noisy_planner_sometimes_trusts_a_wrong_draft_and_a_perfect_one_never() -> None:
    sudoku = env()
    draft = scored(sudoku, BOARD, EXCHANGED).result
    expert = sudoku._expert(BOARD, draft)  # type: ignore[arg-type]
    assert {expert(random.Random(seed), 0.0) for seed in range(40)} == {SOLVED}
    trusted = sum(expert(random.Random(seed), 1.0) == EXCHANGED for seed in range(400))
    assert 150 < trusted < 250


# ---- prompts ----------------------------------------------------------------------------------------------------


def test_the_compact_prompt_holds_per_cell_the_clue_the_digit_and_its_mark() -> None:
    _, team = play(env(max_rounds=2), by_turns(tool=[EXCHANGED, "?"], planner=[EXCHANGED, EXCHANGED]))
    marked = "11-.3x.2x44-" + "33x.4-.1-22x" + ".2-.1-44-33-" + ".4-.3x22x11-"
    empty = "".join(f"{clue}--" for clue in CLUES)
    assert team.prompts["tool"] == ["T" + empty, "T" + marked]
    assert team.prompts["planner"] == ["P" + marked, "P" + empty]


@pytest.mark.parametrize(("size", "length"), [(4, 49), (9, 244)])
@pytest.mark.parametrize("roles", [["tool", "planner"], ["planner"]])
def test_compact_prompts_have_one_length_and_plain_characters(size: int, length: int, roles: list[str]) -> None:
    rng = random.Random(5)
    texts = ("", "nonsense", "1" * size * size)

    def answer(role: str, prompt: str, expert: Expert) -> str:
        return rng.choice((*texts, expert(rng, 0.9), expert(rng, 1.0)))

    seen: list[str] = []
    for task in env(size=size).tasks("train", 0, 4):
        _, team = play(env(size=size, roles=roles), answer, task)  # type: ignore[arg-type]
        seen += team.prompts["tool"] + team.prompts["planner"]
    assert {len(prompt) for prompt in seen} == {length}
    assert set("".join(seen)) <= set("TP.-x123456789"[: 5 + size])


@pytest.mark.parametrize("style", ["plain", "compact"])
def test_no_prompt_depends_on_the_solution(style: str) -> None:
    clues, first, second = "1.....12.1..4321", "1234341221434321", "1243341221344321"
    write = plain if style == "plain" else str
    wrong = "1234341234124321"
    prompts = []
    for solution in (first, second):
        task = dataclasses.replace(TASK, data={"clues": clues, "solution": solution})
        answers = {"tool": [write(wrong), "", write(wrong)], "planner": [write(wrong), write(EXCHANGED), ""]}
        _, team = play(env(style=style, max_rounds=3), by_turns(**answers), task)
        prompts.append(team.prompts)
    assert prompts[0] == prompts[1]
    assert len(prompts[0]["tool"]) == 3


def test_plain_prompts_show_puzzle_draft_and_broken_rules_in_words() -> None:
    answers = {"tool": [plain(EXCHANGED), "no idea"], "planner": [plain(BROKEN), plain(SOLVED)]}
    _, team = play(env(style="plain"), by_turns(**answers))
    drawn = "1..4\n3..2\n..43\n..21"
    assert all(drawn in prompt for prompts in team.prompts.values() for prompt in prompts)
    planner = team.prompts["planner"]
    assert "1324\n3412\n2143\n4321" in planner[0]
    assert "A digit stands twice in: column 2, column 3, box 1, box 2." in planner[0]
    assert "Clues were changed at: row 1, column 1 (the clue is 1)." in team.prompts["tool"][1]
    assert "draft was not well-formed" in planner[1]
    assert "Round 2." in planner[1]


def test_plain_prompts_say_when_the_last_answer_could_not_be_read() -> None:
    _, team = play(env(style="plain", max_rounds=2, roles=["planner"]), by_turns(planner=["hm", "hm"]))
    first, second = team.prompts["planner"]
    assert "not well-formed" not in first
    assert "Your last answer was not well-formed, so nothing was placed." in second


def test_a_planner_alone_never_reads_of_a_tool_a_draft_or_a_colleague() -> None:
    answers = [plain(EXCHANGED), "?", plain(BROKEN), plain(SOLVED)]
    _, team = play(env(style="plain", roles=["planner"]), by_turns(planner=answers))
    words = ("tool", "draft", "colleague", "team")
    assert len(team.prompts["planner"]) == 4
    assert [word for prompt in team.prompts["planner"] for word in words if word in prompt.lower()] == []


@pytest.mark.parametrize("size", [4, 9])
def test_the_example_in_the_plain_prompt_is_well_formed_and_a_valid_grid(size: int) -> None:
    sudoku = env(style="plain", size=size)
    task = sudoku.tasks("train", 0, 1)[0]
    _, team = play(env(style="plain", size=size, max_rounds=1), lambda *_: "", task)
    rules_text = team.prompts["tool"][0].split("\nRound 1.")[0]
    assert sudoku._parse(rules_text) != ""


# ---- answers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Answer:\n1234\n3412\n2143\n4321",
        "I think.\nAnswer:\n1111\n\nNo.\nAnswer:\n1234\n3412\n2143\n4321\n",
        "Answer: 1234\n3412\n2143\n4321\nThat is all 4 rows.",
        "Answer:\n```text\n1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1\n```",
        "Answer:\n|1 2|3 4|\n|3,4|1,2|\n+---+---+\n|2 1|4 3|\n|4 3|2 1|",
        "  Answer:\r\n1234\r\n3412\r\n2143\r\n4321\r\n",
    ],
)
def test_plain_answers_are_read_after_the_last_tag(text: str) -> None:
    assert env(style="plain")._parse(text) == SOLVED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Answer:",
        "1234\n3412\n2143\n4321",
        "The Answer: 1234\n3412\n2143\n4321",
        "Answer:\n1234\n3412\n2143",
        "Answer:\n1234\n3412\n2143\n4321\n1234",
        "Answer:\n1234341221434321",
        "Answer:\n1234\n3412\n2143\n432.",
        "Answer:\n1234\n3412\n2143\n4325",
        "Answer:\n1234\n3412\nso\n2143\n4321",
        "Answer:\n1234\n3412\n2143\n4321\nAnswer: done",
        "Answer:\n12345\n341\n2143\n4321",
    ],
)
def test_other_plain_answers_are_not_well_formed(text: str) -> None:
    assert env(style="plain")._parse(text) == ""


# ---- tasks ------------------------------------------------------------------------------------------------------


def test_tasks_depend_on_split_and_index_alone_not_on_what_was_made_before() -> None:
    """ENV-06."""
    a = env().tasks("test", 5, 3)
    env().tasks("train", 0, 4)
    sudoku = env()
    sudoku.tasks("test", 0, 2)
    c = sudoku.tasks("test", 5, 3)
    assert a == c
    assert [task.id for task in a] == ["sudoku:test:5", "sudoku:test:6", "sudoku:test:7"]
    assert sudoku.tasks("test", 6, 1) == a[1:2]


def test_tasks_are_the_same_in_processes_with_other_hash_seeds() -> None:
    """ENV-06."""
    code = (
        "import sys; from coterie.envs.sudoku import Sudoku, SudokuOptions\n"
        "tasks = Sudoku().tasks('train', 0, 4) + Sudoku(SudokuOptions(size=9)).tasks('test', 0, 1)\n"
        "sys.stdout.write(repr([(t.id, t.seed, dict(t.data)) for t in tasks]))"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "77")
    ]
    here = Sudoku().tasks("train", 0, 4) + Sudoku(SudokuOptions(size=9)).tasks("test", 0, 1)
    assert texts == [repr([(task.id, task.seed, dict(task.data)) for task in here])] * 2


def test_no_two_splits_share_a_puzzle_in_any_form() -> None:
    """Reference.md section 4 fault 12: training and validation shared puzzles."""
    forms = [
        {canonical(str(task.data["clues"])) for task in env().tasks(split, 0, 80)}
        for split in ("train", "validation", "test")
    ]
    assert all(len(form) > 30 for form in forms)
    assert forms[0].isdisjoint(forms[1] | forms[2])
    assert forms[1].isdisjoint(forms[2])


def test_task_data_is_json_and_options_that_change_puzzles_change_tasks() -> None:
    task = env().tasks("train", 0, 1)[0]
    assert json.loads(json.dumps(task.data)) == task.data
    assert env(blanks=10).tasks("train", 0, 1)[0].seed != task.seed
    assert str(env(blanks=10).tasks("train", 0, 1)[0].data["clues"]).count(BLANK) == 10
    assert env(max_rounds=2, reward="outcome").tasks("train", 0, 1) == [task]
    assert env(blanks=8).tasks("train", 0, 1) == [task]


def test_made_puzzles_have_no_end_and_unknown_splits_are_refused() -> None:
    assert env().num_tasks("train") is None
    for split in ("all", "dev"):
        with pytest.raises(ConfigError, match=split):
            env().num_tasks(split)
        with pytest.raises(ConfigError, match=split):
            env().tasks(split, 0, 1)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"roles": ["tool"]}, "planner"),
        ({"size": 5}, "size"),
        ({"blanks": 1}, "2 to 12"),
        ({"blanks": 13}, "2 to 12"),
        ({"size": 9, "blanks": 57}, "2 to 56"),
        ({"max_rounds": 0}, "max_rounds"),
        ({"blank": 8}, "did you mean 'blanks'"),
        ({"puzzles": "x.txt", "blanks": 8}, "both set"),
        ({"drop_ambiguous": True}, "without puzzles"),
        ({"puzzles": "no/such/file.txt"}, "cannot be read"),
        ({"reward": "sparse"}, "reward"),
        ({"style": "terse"}, "style"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(options: dict[str, Json], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        env(**options)


def test_experts_success_falls_with_noise_over_whole_plays() -> None:
    def rate(noise: float) -> float:
        rng = random.Random(9)
        tasks = env().tasks("train", 0, 60)
        plays = [play(env(), lambda role, prompt, expert: expert(rng, noise), task)[0].success for task in tasks]
        return sum(plays) / len(plays)

    assert rate(0.0) == 1.0
    assert 0.15 < rate(0.9) < 0.6
    assert rate(1.0) == 0.0


def test_a_list_may_be_given_as_a_path_object(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text(CLUES + "\n")
    assert Sudoku(SudokuOptions(puzzles=path)).num_tasks("all") == 1
