"""Prompts that do not fit are found before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from coterie.dry_play import check_prompts
from coterie.env import Team
from coterie.errors import ConfigError
from coterie.evaluate import evaluate
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.runs import start
from coterie.types import Outcome, Task
from learning_toys import PER_ROLE, Letters, quiet, toy_recipe


class Talkative(Letters):
    """``Letters`` whose prompts are long: of the first role, of the second, from the second round on, of one task."""

    async def play(self, task: Task, team: Team) -> Outcome:
        mood, number = task.split, int(str(task.data["number"]))
        for round in range(2):
            for role in self.active_roles:
                long = mood == role or (mood == "late" and round == 1) or (mood == "some" and number == 0)
                await team.act(role, "a" * (60 if long else 1), score=self._score)
        if mood == "broken":
            raise ValueError("an empty answer is not expected here")
        return Outcome(success=False, team=0.0)


def lineup_of(*settings: str) -> Lineup:
    return assemble(check_env_fits(toy_recipe(*PER_ROLE, "env.name=test_dry_play:Talkative", *settings)))


@pytest.mark.parametrize(("split", "policy"), [("first", "main"), ("second", "other")])
def test_a_role_whose_first_prompt_does_not_fit_is_named_with_lengths_and_remedy(split: str, policy: str) -> None:
    """60 letters and three control tokens; the toy context is 32."""
    message = (
        rf"role '{split}', task '{split}-0', act .: the prompt has 63 tokens .*'{policy}' holds 32; .*smaller task"
    )
    with pytest.raises(ConfigError, match=message):
        check_prompts(lineup_of(), "train", split)


@pytest.mark.parametrize("split", ["train", "late", "broken"])
def test_what_a_run_can_bear_is_no_reason_to_refuse_it(split: str) -> None:
    check_prompts(lineup_of(), split)


@pytest.mark.parametrize(("allowed", "refused"), [(0.4, True), (0.5, False)])
def test_as_many_tasks_may_be_too_long_as_may_fail(allowed: float, refused: bool) -> None:
    """One of two."""
    lineup = lineup_of(f"train.max_failed_fraction={allowed}")
    if not refused:
        check_prompts(lineup, "some")
        return
    with pytest.raises(ConfigError, match="task 'some-0'"):
        check_prompts(lineup, "some")


@pytest.mark.parametrize("settings", [["eval.final_split=first"], ["eval.split=first", "eval.every=1"]])
def test_a_run_is_refused_before_its_folder_is_made(settings: Sequence[str], tmp_path: Path) -> None:
    recipe = toy_recipe(*PER_ROLE, "env.name=test_dry_play:Talkative", *settings)
    with pytest.raises(ConfigError, match="the prompt has 63 tokens"):
        start(recipe, tmp_path / "run", quiet())
    assert not (tmp_path / "run").exists()


def test_what_was_played_dry_changes_no_later_play() -> None:
    scores = []
    for dry in (True, False):
        lineup = assemble(check_env_fits(toy_recipe()))
        if dry:
            check_prompts(lineup, "test")
        score, episodes = evaluate(
            lineup,
            split="test",
            tasks=2,
            plays=1,
            temperature=1.0,
            event=lambda kind, fields: None,
            before_batch=lambda: None,
        )
        scores.append((score, [turn.completion_ids for episode in episodes for turn in episode.turns]))
    assert scores[0] == scores[1]
