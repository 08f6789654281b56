"""A trained team from Python, and what ``coterie`` itself exports."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import coterie
from coterie.env import Team
from coterie.errors import CheckpointError, ConfigError, EnvError
from coterie.evaluate import evaluate
from coterie.runs import open_run, start
from coterie.types import Outcome, Task
from learning_toys import PER_ROLE, Letters, quiet, toy_recipe

NAMES = [
    "Env", "EnvOptions", "Episode", "Outcome", "Reward", "Scored", "Task", "Team", "TrainedTeam", "assistant", "load",
    "system", "user",
]  # fmt: skip


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api") / "run"
    start(toy_recipe(*PER_ROLE, "train.steps=2", "train.save_every=1", "eval.every=1"), folder, quiet())
    return folder


@pytest.fixture(scope="module")
def team(run_dir: Path) -> coterie.TrainedTeam:
    return coterie.load(run_dir)


# ---- names ----------------------------------------------------------------------------------------------------------


def test_the_package_exports_what_environments_are_written_with_and_load() -> None:
    assert sorted(coterie.__all__) == NAMES == list(coterie.__all__)
    assert [name for name in NAMES if name not in vars(coterie)] == []
    assert vars(coterie)["Task"] is Task


def test_importing_the_package_loads_no_heavy_library() -> None:
    heavy = ["matplotlib", "rich", "safetensors", "tokenizers", "torch", "transformers", "typer"]
    code = f"import sys, coterie; sys.stdout.write(','.join(name for name in {heavy} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


# ---- loading --------------------------------------------------------------------------------------------------------


def test_a_loaded_team_has_the_roles_policies_and_versions_of_its_run(run_dir: Path) -> None:
    team = coterie.load(str(run_dir))
    assert team.roles == {"first": "main", "second": "other"}
    assert {name: policy.version for name, policy in team.lineup.policies.items()} == {"main": 2, "other": 2}
    assert isinstance(team.env(), Letters)
    assert team.env() is not team.env()


def test_the_best_checkpoint_and_settings_are_taken(run_dir: Path) -> None:
    team = coterie.load(run_dir, checkpoint="best", settings=("env.rounds=1",))
    assert team.lineup.policies["main"].version == open_run(run_dir, "best").policies["main"].version
    assert len(team.play_sync({"letter": "a", "number": 0}).turns) == 2


def test_what_is_no_run_and_what_has_no_checkpoint_are_refused(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        coterie.load(tmp_path)
    (tmp_path / "recipe.json").write_bytes((run_dir / "recipe.json").read_bytes())
    with pytest.raises(CheckpointError, match="no usable last checkpoint"):
        coterie.load(tmp_path)


def test_a_team_shows_its_env_and_who_plays_what(team: coterie.TrainedTeam) -> None:
    who = "first: main (version 2), second: other (version 2)"
    assert repr(team) == f"<TrainedTeam for {team.lineup.recipe.env.name}; {who}>"


# ---- playing --------------------------------------------------------------------------------------------------------


def test_a_task_of_the_env_is_played_plainly_one_answer_per_act(team: coterie.TrainedTeam) -> None:
    (task,) = team.env().tasks("test", 3, 1)
    episode = team.play_sync(task)
    assert episode.task == task
    assert episode.outcome is not None
    assert [(turn.role, turn.policy, turn.round) for turn in episode.turns] == [
        ("first", "main", 0), ("second", "other", 0), ("first", "main", 1), ("second", "other", 1),
    ]  # fmt: skip
    assert {(turn.candidate, turn.played, turn.trainable, turn.version) for turn in episode.turns} == {
        (0, True, False, 2)
    }


def test_data_is_enough_and_makes_the_same_task_whatever_the_order_of_its_keys(team: coterie.TrainedTeam) -> None:
    one = team.play_sync({"letter": "q", "number": 5})
    other = team.play_sync({"number": 5, "letter": "q"})
    assert one == other
    assert one.task.split == "own"
    assert one.task.data == {"letter": "q", "number": 5}
    assert team.play_sync({"letter": "q", "number": 6}).task.id != one.task.id


def test_a_play_is_the_same_every_time_and_another_index_draws_others(team: coterie.TrainedTeam) -> None:
    task = {"letter": "m", "number": 1}

    def texts(index: int, temperature: float | None = None) -> list[str]:
        return [turn.text for turn in team.play_sync(task, index=index, temperature=temperature).turns]

    assert texts(0) == texts(0)
    assert texts(0) != texts(1)
    assert texts(0, 0.0) == texts(1, 0.0), "greedy draws nothing"


def test_the_temperature_is_that_of_the_runs_evaluations_unless_given(team: coterie.TrainedTeam) -> None:
    task = {"letter": "a", "number": 0}
    assert {turn.temperature for turn in team.play_sync(task).turns} == {1.0}
    assert {turn.temperature for turn in team.play_sync(task, temperature=0.5).turns} == {0.5}
    recipe = team.lineup.recipe
    cool = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"temperature": 0.7})})
    other = coterie.TrainedTeam(replace(team.lineup, recipe=cool))
    assert {turn.temperature for turn in other.play_sync(task).turns} == {0.7}


def test_several_tasks_are_played_together_as_each_is_alone(team: coterie.TrainedTeam) -> None:
    tasks = team.env().tasks("test", 0, 3)

    async def both() -> tuple[list[coterie.Episode], list[coterie.Episode]]:
        return await team.play_all(tasks, temperature=0.0), [await team.play(task, temperature=0.0) for task in tasks]

    together, alone = asyncio.run(both())
    assert [episode.task for episode in together] == tasks
    assert [[turn.text for turn in e.turns] for e in together] == [[turn.text for turn in e.turns] for e in alone]


def test_plays_that_run_at_the_same_time_do_not_disturb_each_other(team: coterie.TrainedTeam) -> None:
    tasks = team.env().tasks("test", 0, 3)

    async def gathered() -> list[coterie.Episode]:
        return list(await asyncio.gather(*(team.play(task) for task in tasks)))

    assert asyncio.run(gathered()) == [team.play_sync(task) for task in tasks]


def test_a_greedy_team_plays_as_the_evaluation_of_its_run_does(team: coterie.TrainedTeam) -> None:
    _, episodes = evaluate(
        team.lineup, split="test", tasks=3, plays=1, temperature=0.0, event=lambda *_: None, before_batch=lambda: None
    )
    own = asyncio.run(team.play_all([episode.task for episode in episodes], temperature=0.0))
    assert [e.outcome for e in own] == [e.outcome for e in episodes]


def test_a_task_that_the_env_refuses_is_not_tried_again_and_is_named(
    team: coterie.TrainedTeam, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Letters.play

    async def strict(self: Letters, task: Task, team: Team) -> Outcome:
        if "letter" not in task.data:
            raise EnvError(f"task {task.id}: no letter")
        return await play(self, task, team)

    monkeypatch.setattr(Letters, "play", strict)
    bad, fine = asyncio.run(team.play_all([{"no": "letter"}, {"letter": "a", "number": 0}]))
    assert bad.failure is not None
    assert (bad.attempts, bad.failure.message) == (1, f"task {bad.task.id}: no letter")
    assert f"play of task {bad.task.id!r}" in bad.failure.where
    assert fine.outcome is not None


def test_a_task_that_cannot_be_played_is_an_episode_with_a_failure(
    team: coterie.TrainedTeam, caplog: pytest.LogCaptureFixture
) -> None:
    good = {"letter": "a", "number": 0}
    bad, fine = asyncio.run(team.play_all([{"no": "letter"}, good]))
    assert bad.outcome is None
    assert bad.failure is not None
    assert bad.failure.kind == "KeyError"
    assert bad.attempts == 3
    assert fine.outcome is not None
    assert "episode_failed" in caplog.text
