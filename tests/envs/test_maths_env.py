"""Mathematics: who sees what, what answers are worth, when it ends; on made problems and on files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coterie.env import make_env
from coterie.errors import ConfigError
from coterie.testing import assert_env, play_once
from coterie.types import Episode, Json, Task

COMPACT: dict[str, Json] = {"tool": "none", "style": "compact", "max_rounds": 2}


def task_of(**options: Json) -> tuple[Task, str]:
    """Return the first training task and its answer."""
    env = make_env("math", options)
    task = env.tasks("train", 0, 1)[0]
    sign = "+" if "+" in str(task.data["asks"]) else "-"
    left, right = map(int, str(task.data["asks"]).removesuffix("=").split(sign))
    return task, str(left + right if sign == "+" else left - right)


def rewards(episode: Episode) -> list[tuple[float | None, float | None]]:
    return [(turn.reward.team, turn.reward.local) for turn in episode.turns if turn.reward]


@pytest.mark.parametrize("options", [{"tool": "none"}, COMPACT, {"roles": ["reasoner"]}])
def test_the_contract_holds(options: dict[str, Json]) -> None:
    assert_env("math", options, tasks=2)


def test_the_contract_holds_with_programs_that_run() -> None:
    assert_env("math", {"tool": "python", "max_rounds": 2}, tasks=1)


def test_a_right_draft_that_the_reasoner_repeats_ends_it_solved() -> None:
    _, answer = task_of(**COMPACT)
    episode = play_once("math", [answer, answer], options=COMPACT)
    assert rewards(episode) == [(1.0, 0.1), (1.0, 0.1)]
    assert episode.outcome is not None
    assert (episode.outcome.success, episode.outcome.team, episode.outcome.truncated) == (True, 1.0, False)


def test_without_agreement_the_next_round_starts_from_the_answer_that_stands() -> None:
    _, answer = task_of(**COMPACT)
    # right answer, then the draft repeats it (nothing gained), then the reasoner changes it for a wrong one
    episode = play_once("math", ["1000", answer, answer, "1000"], options=COMPACT)
    assert rewards(episode) == [(0.0, 0.1), (1.0, 0.1), (0.0, 0.1), (-1.0, 0.1)]
    assert episode.outcome is not None
    assert (episode.outcome.success, episode.outcome.team, episode.outcome.truncated) == (False, 0.0, True)
    assert sum(team or 0.0 for (team, _) in rewards(episode)[1::2]) == episode.outcome.team


def test_an_answer_that_cannot_be_read_changes_nothing() -> None:
    _, answer = task_of(**COMPACT)
    episode = play_once("math", ["", answer, "", "x"], options=COMPACT)
    assert rewards(episode) == [(0.0, 0.0), (1.0, 0.1), (0.0, 0.0), (0.0, 0.0)]
    assert episode.outcome is not None
    assert episode.outcome.success, "the last answer that can be read is right"


def test_both_wrong_and_agreed_is_an_end_and_no_success() -> None:
    episode = play_once("math", ["1000", "1000"], options=COMPACT)
    assert len(episode.turns) == 2
    assert episode.outcome is not None
    assert (episode.outcome.success, episode.outcome.metrics["agreed"]) == (False, 1.0)


def test_the_box_of_the_answer_counts_and_never_that_of_the_prompt() -> None:
    options: dict[str, Json] = {"roles": ["reasoner"], "max_rounds": 1}
    _, answer = task_of(**options)
    prompts: list[str] = []

    def say(role: str, prompt: str) -> str:
        prompts.append(prompt)
        return f"It is \\boxed{{{answer}}}." if len(prompts) == 1 else "I do not know."

    assert rewards(play_once("math", say, options=options)) == [(1.0, 0.1)]
    assert rewards(play_once("math", say, options=options)) == [(0.0, 0.0)]
    assert "\\boxed" in prompts[0]
    assert "tool" not in prompts[0].lower()


def test_a_program_of_the_tool_runs_and_the_reasoner_sees_what_it_printed() -> None:
    _, answer = task_of()
    prompts: list[str] = []

    def say(role: str, prompt: str) -> str:
        prompts.append(prompt)
        number = sum(f"<|{role}|>" in each for each in prompts)
        if role == "tool":
            return f"```python\nprint('working')\nprint({answer} + 1)\n```" if number < 2 else "no program"
        return f"\\boxed{{{answer}}}"

    episode = play_once("math", say, options={"max_rounds": 1})
    assert rewards(episode) == [(0.0, 0.1), (1.0, 0.1)]
    assert f"working\n{int(answer) + 1}" in prompts[1]
    broken = play_once("math", ["```python\n1/0\n```", f"\\boxed{{{answer}}}"], options={"max_rounds": 1})
    assert rewards(broken)[0] == (0.0, 0.0)
    assert broken.outcome is not None
    assert broken.outcome.success


def write(path: Path, count: int, offset: int = 0) -> str:
    path.write_text(
        "\n".join(
            json.dumps({"problem": f"What is {n} plus one thousand?", "answer": str(n + 1000)})
            for n in range(offset, offset + count)
        )
    )
    return str(path)


def test_files_are_split_once_and_evaluation_problems_are_left_out_of_training(tmp_path: Path) -> None:
    data, held = write(tmp_path / "a.jsonl", 60), write(tmp_path / "b.jsonl", 10)
    env = make_env("math", {"data": [data]})
    sizes = {split: env.num_tasks(split) for split in ("train", "validation", "test", "all")}
    assert sizes["all"] == 60
    assert sum(size or 0 for size in sizes.values()) == 120
    both = make_env("math", {"data": [data], "test_data": [held]})
    assert both.num_tasks("test") == 10
    assert (both.num_tasks("train") or 0) + (both.num_tasks("validation") or 0) == 50
    asked = {
        split: {task.data["asks"] for task in both.tasks(split, 0, 99)} for split in ("train", "validation", "test")
    }
    assert not asked["test"] & (asked["train"] | asked["validation"])
    (task,) = both.tasks("test", 0, 1)
    assert "1000" not in json.dumps(dict(task.data)), "the answer is not in the task"
    episode = play_once(
        "math", ["\\boxed{1000}"], options={"data": [data], "test_data": [held], "roles": ["reasoner"]}, task=task
    )
    assert episode.outcome is not None
    assert episode.outcome.success


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "compact"}, "compact"),
        ({"style": "compact", "tool": "none", "level": 5}, "level 1 to 4"),
        ({"roles": ["tool"]}, "'reasoner' must play"),
        ({"test_data": ["x"]}, "test_data without data"),
        ({"data": ["no-such-file.jsonl"]}, "no file, folder or data set"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Json], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_env("math", options)
