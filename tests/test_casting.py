"""Roles that swap policies, play untrained or alone; the command line of it; and the difference that it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from typer.testing import CliRunner, Result

from coterie.casting import Casting, cast, read_casting, with_untrained
from coterie.cli import app
from coterie.cli_play import difference_line
from coterie.env import Team
from coterie.errors import ConfigError
from coterie.evaluate import paired_difference
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.rollout import plays_of
from coterie.runs import open_run, start
from coterie.types import Outcome, Task
from learning_toys import PER_ROLE, Letters, quiet, toy_recipe
from test_evaluate import episode

SWAP = Casting(swap={"first": "second", "second": "first"})


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two policies."""
    folder = tmp_path_factory.mktemp("casting") / "run"
    start(toy_recipe(*PER_ROLE, "train.steps=2", "seed=3"), folder, quiet())
    return folder


def opened(run_dir: Path, casting: Casting, *settings: str) -> Lineup:
    return open_run(run_dir, "last", settings, lambda recipe: with_untrained(recipe, casting))


def coterie(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "160"})


def who_played(lineup: Lineup) -> dict[str, set[tuple[str, int]]]:
    """Return role -> (policy, version) of a plain play."""
    rollout = lineup.rollout(training=False, temperature=1.0, event=lambda *_: None, before_batch=lambda: None)
    tasks = lineup.make_env().tasks("test", 0, 1)
    (played,) = rollout.run(plays_of(tasks, seed=0, purpose="play", step=0, episodes_per_task=1))
    found: dict[str, set[tuple[str, int]]] = {}
    for turn in played.turns:
        found.setdefault(turn.role, set()).add((turn.policy, turn.version))
    return found


# ---- reading --------------------------------------------------------------------------------------------------------


def test_pairs_are_read_and_nothing_is_no_casting() -> None:
    casting = read_casting("tool=planner, planner=tool", "tool=base", "tool")
    assert casting == Casting(swap={"tool": "planner", "planner": "tool"}, frozen=("tool",), only="tool")
    assert bool(casting)
    assert not read_casting(None, None, None)
    assert casting.describe() == (
        "tool by the policy of planner, planner by the policy of tool, tool by an untrained policy, tool alone"
    )


@pytest.mark.parametrize(
    ("swap", "frozen", "message"),
    [
        ("tool", None, r"--swap tool: expected role=role"),
        ("tool=", None, r"--swap tool=: expected role=role"),
        ("a=b,a=c", None, "each role once"),
        (None, "tool", "--frozen tool: expected role=base"),
        (None, "tool=start", "'start' is not known; expected role=base"),
    ],
)
def test_what_is_no_pair_is_refused(swap: str | None, frozen: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_casting(swap, frozen, None)


@pytest.mark.parametrize(
    ("casting", "message"),
    [
        (Casting(swap={"thrid": "first"}), r"--swap: the team has no role 'thrid'; it has \['first', 'second'\]"),
        (Casting(swap={"first": "thrid"}), r"--swap: the team has no role 'thrid'"),
        (Casting(frozen=("thrid",)), r"--frozen: the team has no role 'thrid'; it has \['first', 'second'\]"),
        (Casting(only="thrid"), r"--only: the team has no role 'thrid'"),
        (Casting(only="first", frozen=("second",)), "role 'second' does not play then"),
    ],
)
def test_unknown_and_idle_roles_are_named_with_the_known_ones(casting: Casting, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_untrained(check_env_fits(toy_recipe(*PER_ROLE)), casting)


def test_swapping_roles_of_one_policy_is_refused_because_it_changes_nothing() -> None:
    with pytest.raises(ConfigError, match="share the policy 'main'; a swap changes nothing"):
        with_untrained(check_env_fits(toy_recipe()), SWAP)


# ---- who plays ------------------------------------------------------------------------------------------------------


def test_swapped_roles_play_with_each_others_policy(run_dir: Path) -> None:
    lineup = opened(run_dir, SWAP)
    assert who_played(lineup) == {"first": {("main", 2)}, "second": {("other", 2)}}
    assert who_played(cast(lineup, SWAP)) == {"first": {("other", 2)}, "second": {("main", 2)}}


def test_one_sided_swaps_let_one_policy_play_both(run_dir: Path) -> None:
    casting = Casting(swap={"first": "second"})
    assert who_played(cast(opened(run_dir, casting), casting)) == {"first": {("other", 2)}, "second": {("other", 2)}}


def test_a_frozen_role_plays_with_the_model_as_loaded_and_nobody_else_does(run_dir: Path) -> None:
    casting = Casting(frozen=("second",))
    lineup = opened(run_dir, casting)
    assert who_played(cast(lineup, casting)) == {"first": {("main", 2)}, "second": {("other@base", 0)}}
    fresh = assemble(check_env_fits(toy_recipe(*PER_ROLE, "seed=3"))).policies["other"].model
    for untrained, trained, new in zip(
        lineup.policies["other@base"].model.parameters(),
        lineup.policies["other"].model.parameters(),
        fresh.parameters(),
        strict=True,
    ):
        assert torch.equal(untrained, new)
        assert untrained is not trained
    assert any(
        not torch.equal(a, b)
        for a, b in zip(lineup.policies["other"].model.parameters(), fresh.parameters(), strict=True)
    )


def test_a_frozen_role_after_a_swap_is_the_other_policy_untrained(run_dir: Path) -> None:
    casting = Casting(swap=SWAP.swap, frozen=("first",))
    assert who_played(cast(opened(run_dir, casting), casting)) == {
        "first": {("other@base", 0)},
        "second": {("main", 2)},
    }


def test_turns_of_the_untrained_copy_enter_other_prompts_as_their_ids(run_dir: Path) -> None:
    """They mean the same ids, so no prompt is rendered in another way than in training."""
    lineup = opened(run_dir, Casting(frozen=("second",)))
    assert {"main", "other", "other@base"} <= set(lineup.policies)
    for name in ("main", "other", "other@base"):
        assert vars(lineup.policies[name].renderer)["_policies"] == {"main", "other", "other@base"}


def test_one_role_plays_alone_by_the_envs_own_option(run_dir: Path) -> None:
    casting = Casting(only="second")
    alone = cast(opened(run_dir, casting), casting)
    assert who_played(alone) == {"second": {("other", 2)}}
    assert alone.make_env().active_roles == ("second",)


class Stubborn(Letters):
    """Asks both roles, whatever its options say."""

    roles: ClassVar[tuple[str, ...]] = ("first", "second")

    async def play(self, task: Task, team: Team) -> Outcome:
        await team.act("first", "a", score=self._score)
        await team.act("second", "a", score=self._score)
        return Outcome(success=True, team=1.0)


def test_an_env_that_cannot_be_played_by_one_role_is_refused() -> None:
    casting = Casting(only="second")
    recipe = check_env_fits(toy_recipe(*PER_ROLE, "env.name=test_casting:Stubborn"))
    lineup = assemble(with_untrained(recipe, casting))
    with pytest.raises(ConfigError, match=r"--only second: env 'test_casting:Stubborn' cannot be played by this role"):
        cast(lineup, casting)


def test_a_role_whose_answers_do_not_fit_its_new_policy_is_refused() -> None:
    """Answers of 20 tokens fit a context of 32 and not one of 16."""
    settings = (
        "policies.other.model=tiny:width=16,layers=1,heads=2,positions=16",
        "sampling.roles.first.max_tokens=20",
    )
    lineup = assemble(check_env_fits(toy_recipe(*PER_ROLE, *settings)))
    with pytest.raises(ConfigError, match=r"role 'first': max_tokens = 20 leaves no room .* of policy 'other'"):
        cast(lineup, SWAP)


# ---- the difference -------------------------------------------------------------------------------------------------


def test_the_difference_is_paired_by_task() -> None:
    """a: 1 - 0.5, b: 0 - 1; c and d were played by one team only: (0.5 - 1) / 2 = -0.25."""
    here = [episode("a", 0, True), episode("a", 1, True), episode("b", 0, False), episode("c", 0, True)]
    there = [episode("a", 0, True), episode("a", 1, False), episode("b", 0, True), episode("d", 0, True)]
    difference = paired_difference(here, there)
    assert (difference.tasks, difference.differing, difference.success) == (2, 2, -0.25)
    assert difference.ci95 == (-1.0, 0.5)


def test_a_constant_difference_has_no_width_however_hard_the_tasks_are() -> None:
    """Each task is solved in one half more of its plays: what is common to both teams cancels."""
    here = [episode(f"{task}", index, index < 1 + task % 2) for task in range(10) for index in (0, 1)]
    there = [episode(f"{task}", index, index < task % 2) for task in range(10) for index in (0, 1)]
    assert paired_difference(here, there).ci95 == (0.5, 0.5)


def test_teams_that_solve_the_same_tasks_differ_in_none_and_the_line_says_so() -> None:
    plays = [episode("a", 0, True), episode("b", 0, False)]
    difference = paired_difference(plays, plays)
    assert (difference.tasks, difference.differing, difference.success) == (2, 0, 0.0)
    assert difference_line(difference, "swapped") == (
        "swapped: no task differed from the team as it is, over the same 2 tasks"
    )


def test_the_line_of_a_difference_gives_points_and_the_interval() -> None:
    plays = [episode("a", 0, True), episode("b", 0, True)]
    others = [episode("a", 0, False), episode("b", 0, False)]
    assert difference_line(paired_difference(plays, others), "swapped") == (
        "swapped: +100.0 points against the team as it is, 95% interval [+100.0, +100.0], over the same 2 tasks"
    )


def test_failed_plays_and_no_common_task_make_no_difference() -> None:
    assert paired_difference([episode("a", 0, None)], [episode("a", 0, True)]).tasks == 0
    assert paired_difference([episode("a", 0, True)], [episode("b", 0, True)]).tasks == 0


# ---- the command ----------------------------------------------------------------------------------------------------


def test_eval_prints_both_tables_and_the_difference_and_saves_them(run_dir: Path, tmp_path: Path) -> None:
    saved = tmp_path / "rows.jsonl"
    result = coterie("eval", run_dir, "--swap", "first=second,second=first", "--tasks", 5, "--save", saved)
    assert result.exit_code == 0, result.output
    who = "first by the policy of second, second by the policy of first"
    assert f"greedy: {who}" not in result.output
    assert f"temperature 1: {who}" in result.output
    assert "temperature 1: the team as it is" in result.output
    assert "over the same 5 tasks" in result.output
    row = json.loads(saved.read_text())
    assert (row["tasks"], row["difference_tasks"], row["swap"]["first"]) == (5, 5, "second")
    assert row["difference"] == pytest.approx(row["success"] - row["usual_success"])
    usual = coterie("eval", run_dir, "--tasks", 5, "--save", saved)
    assert "points against" not in usual.output
    assert json.loads(saved.read_text().splitlines()[1])["success"] == row["usual_success"]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (("--frozen", "second=base"), "second by an untrained policy: "),
        (("--only", "second"), "second alone: "),
    ],
)
def test_eval_of_other_castings_tells_the_difference(run_dir: Path, options: tuple[str, ...], shown: str) -> None:
    result = coterie("eval", run_dir, "--tasks", 3, *options)
    assert result.exit_code == 0, result.output
    assert shown in result.output
    assert "over the same 3 tasks" in result.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--swap", "first=thrid"), "the team has no role 'thrid'; it has ['first', 'second']"),
        (("--frozen", "first=start"), "expected role=base"),
        (("--only", "thrid"), "the team has no role 'thrid'"),
    ],
)
def test_eval_refuses_roles_that_do_not_exist(run_dir: Path, options: tuple[str, ...], message: str) -> None:
    result = coterie("eval", run_dir, *options)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output


def test_only_the_planner_of_a_built_in_env_can_play_alone() -> None:
    result = coterie("eval", "plan_path-tiny", "--only", "tool", "--tasks", 1)
    assert (result.exit_code, "'planner' must play" in result.stderr) == (2, True), result.output
