"""The command line from outside: what is typed, what is printed, which exit code, what lies in the folders."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import coterie_command
from coterie import faults
from coterie.cli import app
from coterie.config import read_recipe
from coterie.lineup import assemble, check_env_fits
from coterie.runs import open_run
from coterie.tensors import load_tensors

MINUTE = """
description = "One minute is more than it takes"
trackers = []
[env]
name = "plan_path"
size = 3
max_rounds = 2
max_moves = 2
style = "compact"
[policies.shared]
model = "tiny:width=16,layers=1,heads=2,positions=64"
optimizer = {lr = 1e-3}
[team]
tool = "shared"
planner = "shared"
[sampling]
num_candidates = 4
max_tokens = 3
[train]
steps = 2
tasks_per_step = 4
save_every = 1
threads = 1
[eval]
tasks = 4
final_tasks = 6
[imitate]
steps = 40
episodes = 12
batch_acts = 8
lr = 3e-2
warmup_steps = 2
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command did: exit code, and what it printed (``output`` is both streams)."""

    exit_code: int
    output: str
    stdout: str
    stderr: str


def coterie(*arguments: object) -> Ran:
    """Return what a command did; an exception that is no exit is a fault of the command line."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.output, result.stdout, result.stderr)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipes") / "minute.toml"
    path.write_text(MINUTE)
    return path


@pytest.fixture(scope="module")
def trained(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the minute recipe; read it, copy it to change it."""
    run = tmp_path_factory.mktemp("trained") / "run"
    result = coterie("train", recipe, "--out", run)
    assert result.exit_code == 0, result.output
    return run


# ---- starting -----------------------------------------------------------------------------------------------------


def test_help_needs_no_torch_so_it_answers_at_once() -> None:
    code = "import sys, coterie.cli; sys.exit(bool({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_a_command_the_help_is_printed_and_version_prints_it() -> None:
    assert "check-env" in coterie().output
    assert re.fullmatch(r"coterie \d+\.\d+\.\d+\S*\n", coterie("--version").output)


def test_every_command_explains_itself() -> None:
    for name in ("train", "demo", "imitate", "eval", "play", "check", "recipes", "envs", "check-env"):
        result = coterie(name, "--help")
        assert (result.exit_code, name in result.output) == (0, True)


def test_an_interrupt_while_the_package_is_imported_or_a_command_runs_is_one_line_and_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("coterie.cli_look.shipped_recipes", interrupted)
    result = coterie("recipes")
    assert (result.exit_code, result.stderr) == (130, "stopped by SIGINT\n")
    monkeypatch.setattr("coterie.cli.main", interrupted)
    with pytest.raises(SystemExit) as left:
        coterie_command.main()
    assert (left.value.code, capsys.readouterr().err) == (130, "stopped by SIGINT\n")


# ---- train --------------------------------------------------------------------------------------------------------


def test_train_leaves_a_whole_run_and_says_what_came_of_it(recipe: Path, tmp_path: Path) -> None:
    result = coterie("train", recipe, "--out", tmp_path / "run", "--set", "train.steps=1")
    assert result.exit_code == 0, result.output
    assert {"recipe.json", "summary.json", "metrics.jsonl", "eval.jsonl", "curves.png"} <= set(
        contents(tmp_path / "run")
    )
    assert len(jsonl(tmp_path / "run/metrics.jsonl")) == 1
    for text in ("warm start of shared 40/40", "training 1/1", "path=direct", "greedy", "coterie play"):
        assert text in result.output


def test_the_default_folder_is_named_after_the_recipe(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert coterie("train", recipe, "--set", "train.steps=1").exit_code == 0
    assert (tmp_path / "runs/minute/summary.json").is_file()


def test_a_folder_in_use_is_refused_and_not_touched(recipe: Path, trained: Path) -> None:
    before = contents(trained)
    result = coterie("train", recipe, "--out", trained)
    assert (result.exit_code, "is not empty; nothing was changed" in result.stderr) == (2, True)
    assert contents(trained) == before
    assert result.stdout == ""


def test_a_run_is_not_started_over_by_naming_it(trained: Path) -> None:
    result = coterie("train", trained)
    assert (result.exit_code, "add --resume" in result.stderr) == (2, True)


@pytest.mark.parametrize("form", ["DIR --resume", "RECIPE --out DIR --resume"])
def test_a_stopped_run_ends_with_143_and_goes_on_as_if_it_had_not_been(
    form: str, recipe: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPT-01, from the command line: SIGTERM in step 1; the resumed run writes the same bytes."""
    run = tmp_path / "run"
    monkeypatch.setenv("COTERIE_FAULT", "update:1:term")
    stopped = coterie("train", recipe, "--out", run)
    assert stopped.exit_code == 143
    assert f"coterie train {run} --resume" in stopped.stderr
    assert not (run / "summary.json").exists()
    monkeypatch.delenv("COTERIE_FAULT")
    resumed = (
        coterie("train", run, "--resume")
        if form.startswith("DIR")
        else coterie("train", recipe, "--out", run, "--resume")
    )
    assert resumed.exit_code == 0, resumed.output
    assert (run / "metrics.jsonl").read_bytes() == (trained / "metrics.jsonl").read_bytes()
    assert (run / "eval.jsonl").read_bytes() == (trained / "eval.jsonl").read_bytes()


def test_other_keys_than_the_runs_need_accept_changes_and_some_are_refused(trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    more = ("train", run, "--resume", "--set", "train.steps=3")
    asked = coterie(*more)
    assert (asked.exit_code, "train.steps: 2 -> 3" in asked.stderr) == (2, True)
    assert len(jsonl(run / "metrics.jsonl")) == 2
    assert coterie(*more, "--accept-changes").exit_code == 0
    assert [row["step"] for row in jsonl(run / "metrics.jsonl")] == [0, 1, 2]
    refused = coterie("train", run, "--resume", "--accept-changes", "--set", "loss.clip_low=0.1")
    assert (refused.exit_code, "loss.clip_low" in refused.stderr) == (2, True)


def test_resuming_a_finished_run_says_so_and_touches_nothing(recipe: Path, trained: Path) -> None:
    before = contents(trained)
    for arguments in ((trained, "--resume"), (recipe, "--out", trained, "--resume")):
        result = coterie("train", *arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        assert f"{trained} is finished, all 2 steps are made; nothing was changed" in result.stdout
        assert f"{trained}/summary.json" in result.stdout
        assert f"coterie train {trained} --resume --accept-changes --set train.steps=4" in result.stdout
    assert contents(trained) == before


def test_resuming_what_is_no_run_and_accepting_changes_of_nothing_are_refused(recipe: Path, tmp_path: Path) -> None:
    absent = coterie("train", recipe, "--out", tmp_path / "none", "--resume")
    assert (absent.exit_code, "holds no run" in absent.stderr) == (2, True)
    assert not (tmp_path / "none").exists()
    loose = coterie("train", recipe, "--out", tmp_path / "none", "--accept-changes")
    assert (loose.exit_code, "--resume" in loose.stderr) == (2, True)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.stepz=3", "did you mean 'train.steps'"),
        ("sampling.num_candidate=3", "did you mean 'sampling.num_candidates'"),
        ("env.sise=3", "did you mean 'size'"),
        ("train.steps=many", "train.steps"),
        ("train.steps", "expected key=value"),
        ("team.tool=sharde", "did you mean 'shared'"),
        ("policies.shared.model=no/such/folder", "there is no such folder"),
        ("sampling.num_candidates=1", "at least 2 candidates"),
    ],
)
def test_what_cannot_work_ends_with_2_before_anything_is_written(
    setting: str, message: str, recipe: Path, tmp_path: Path
) -> None:
    result = coterie("train", recipe, "--out", tmp_path / "run", "--set", setting)
    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails_ends_with_1_and_a_message(recipe: Path, trained: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for path in run.glob("checkpoints/step_*/shared/weights.safetensors"):
        path.write_bytes(b"damaged")
    (run / "summary.json").unlink()
    result = coterie("train", run, "--resume")
    assert (result.exit_code, "CheckpointError" in result.stderr, "Traceback" in result.output) == (1, True, False)


def test_ctrl_c_ends_with_130_and_leaves_a_run_that_goes_on(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    many = ["--set", "imitate.steps=1", "--set", "train.steps=100000", "--set", "train.save_every=100000"]
    command = [sys.executable, "-c", "from coterie.cli import main; main()", "train", str(recipe), "--out", str(run)]
    process = subprocess.Popen([*command, *many], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240.0
    while not (run / "metrics.jsonl").exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60.0)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert f"coterie train {run} --resume" in errors
    done = len(jsonl(run / "metrics.jsonl"))
    assert (run / f"checkpoints/step_{done:08d}").is_dir()


def test_a_module_beside_the_recipe_can_be_its_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_env.py").write_text(
        "from coterie.envs.plan_path import PlanPath\n\nclass Beside(PlanPath):\n    pass\n"
    )
    path = tmp_path / "beside.toml"
    path.write_text(MINUTE.replace('"plan_path"', '"beside_env:Beside"'))
    result = coterie("check", path)
    assert (result.exit_code, "is a recipe that can be trained" in result.stdout) == (0, True), result.output


# ---- demo ---------------------------------------------------------------------------------------------------------


def test_the_demo_trains_explains_itself_and_never_overwrites_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["policies.shared.model=tiny:width=16,layers=1,heads=2,positions=64", "train.steps=1", "train.threads=1"]
    small += ["train.tasks_per_step=2", "eval.tasks=2", "eval.final_tasks=2", "imitate.steps=2", "imitate.episodes=4"]
    arguments = [part for setting in small for part in ("--set", setting)]
    first = coterie("demo", *arguments)
    assert first.exit_code == 0, first.output
    assert "coterie play runs/demo " in first.output
    kept = contents(tmp_path / "runs/demo")
    monkeypatch.setenv("COTERIE_FAULT", "update:0:term")
    assert coterie("demo", "--seed", 5, *arguments).exit_code == 143
    monkeypatch.delenv("COTERIE_FAULT")
    assert coterie("demo", "--seed", 5, *arguments).exit_code == 0  # the one that was stopped goes on
    assert sorted(os.listdir(tmp_path / "runs")) == ["demo", "demo-2"]
    assert json.loads((tmp_path / "runs/demo-2/recipe.json").read_text())["seed"] == 5
    assert contents(tmp_path / "runs/demo") == kept


# ---- eval ---------------------------------------------------------------------------------------------------------


def test_eval_of_a_run_gives_the_numbers_training_ended_with_and_writes_nothing(trained: Path, tmp_path: Path) -> None:
    before, saved = contents(trained), tmp_path / "rows.jsonl"
    result = coterie("eval", trained, "--save", saved)
    assert result.exit_code == 0, result.output
    (row,) = jsonl(saved)
    after = json.loads((trained / "summary.json").read_text())["after"]
    assert {key: row[key] for key in after if key in row} == {
        k: v for k, v in after.items() if k not in ("step", "name")
    }
    assert contents(trained) == before


def test_eval_options_do_what_they_say(trained: Path, tmp_path: Path) -> None:
    saved = tmp_path / "rows.jsonl"
    options = ("--split", "validation", "--tasks", 3, "--plays", 2, "--temperature", 0)
    result = coterie("eval", trained, *options, "--save", saved)
    assert "Plain play on validation, 2 plays per task, greedy" in result.output
    assert "pass@2" in result.output
    (row,) = jsonl(saved)
    assert (row["split"], row["tasks"], row["plays"], row["temperature"]) == ("validation", 3, 2, 0.0)


def test_a_signal_ends_an_evaluation_with_a_line_and_without_a_score(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = faults.fault_point

    def signalled(name: str, step: int) -> None:
        if name == "rollout-batch":
            os.kill(os.getpid(), signal.SIGTERM)
        fault(name, step)

    monkeypatch.setattr("coterie.batcher.fault_point", signalled)
    result = coterie("eval", trained, "--save", tmp_path / "rows.jsonl")
    assert result.exit_code == 143
    assert "stopped by SIGTERM before the evaluation had ended" in result.stderr
    assert not (tmp_path / "rows.jsonl").exists()


def test_eval_of_a_recipe_plays_the_untrained_policies(recipe: Path, trained: Path, tmp_path: Path) -> None:
    """The minute recipe without its warm start: what a fresh tiny model does."""
    saved = tmp_path / "rows.jsonl"
    assert coterie("eval", recipe, "--save", saved).exit_code == 0
    assert coterie("eval", trained, "--save", saved).exit_code == 0
    fresh, learned = jsonl(saved)
    assert fresh["tasks"] == learned["tasks"] == 6
    assert fresh["metric/moves"] < learned["metric/moves"]  # the warm start has taught it to write moves at all


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("RECIPE", "--checkpoint", "best"), 2, "only runs have checkpoints"),
        (
            ("RUN", "--checkpoint", "best"),
            1,
            "(eval.every or eval.every_tokens above 0), and none has been made; checkpoints that are there: ['step_0",
        ),
        (("RUN", "--split", "tset"), 2, "no split 'tset'"),
        (("RUN", "--save", "/no/such/folder/x"), 2, "there is no folder"),
        (("RUN", "--set", "policies.shared.model=tiny:width=32,layers=1,heads=2,positions=64"), 1, "do not fit"),
        (("nothing-of-the-kind",), 2, "no shipped recipe"),
    ],
)
def test_eval_refuses_what_it_cannot_do(
    arguments: tuple[str, ...], code: int, message: str, recipe: Path, trained: Path
) -> None:
    names = {"RECIPE": str(recipe), "RUN": str(trained)}
    result = coterie("eval", *(names.get(argument, argument) for argument in arguments))
    assert (result.exit_code, message in result.stderr) == (code, True), result.output


# ---- opening a run ------------------------------------------------------------------------------------------------


def test_an_opened_run_has_the_trained_weights_and_their_version(trained: Path) -> None:
    lineup = open_run(trained)
    saved = load_tensors(trained / "checkpoints/step_00000002/shared/weights.safetensors")
    weights = dict(lineup.policies["shared"].model.named_parameters())
    assert all(bool((weights[name] == tensor).all()) for name, tensor in saved.items())
    assert lineup.policies["shared"].version == 2
    untrained = assemble(check_env_fits(read_recipe(trained / "recipe.json"))).policies["shared"].model
    assert any(bool((weights[name] != weight).any()) for name, weight in untrained.named_parameters())


def test_a_damaged_newest_checkpoint_is_passed_over_and_left_where_it_is(trained: Path, tmp_path: Path) -> None:
    """CKPT-06, read only: another process may be training in that folder."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    newest = run / "checkpoints/step_00000002/shared/weights.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    before = contents(run)
    assert open_run(run).policies["shared"].version == 1
    assert contents(run) == before


def test_weights_are_loaded_into_frozen_policies_too(trained: Path) -> None:
    """``--set ...train=frozen`` on a run must not quietly play with untrained weights."""
    assert open_run(trained, settings=["policies.shared.train=frozen"]).policies["shared"].version == 2


# ---- play ---------------------------------------------------------------------------------------------------------


def test_play_shows_the_task_all_candidates_with_rewards_and_the_one_that_was_played(trained: Path) -> None:
    result = coterie("play", trained, "--task", 2)
    assert result.exit_code == 0, result.output
    assert "task plan_path:test:2 (test)" in result.output
    acts = result.output.split("round ")[1:]
    assert acts
    for act in acts:
        candidates = re.findall(r"^(played|      )  \d  +-?\d\.\d{3}", act, flags=re.MULTILINE)
        assert len(candidates) == 4
        assert candidates.count("played") == 1
    assert "policy shared, v2" in result.output
    assert "outcome" in result.output


def test_plain_play_draws_one_candidate_per_act(trained: Path) -> None:
    result = coterie("play", trained, "--plain", "--temperature", 0, "--split", "train")
    assert "(train)" in result.output
    rows = re.findall(r"^(played|      )  (\d)  ", result.output, flags=re.MULTILINE)
    assert {number for _, number in rows} == {"0"}
    assert {mark for mark, _ in rows} == {"played"}


def test_play_is_the_same_every_time_and_of_a_recipe_too(recipe: Path) -> None:
    first = coterie("play", recipe)
    assert first.exit_code == 0
    assert first.output == coterie("play", recipe).output


def test_a_temperature_in_training_play_is_refused_instead_of_ignored(recipe: Path) -> None:
    result = coterie("play", recipe, "--temperature", 0.5)
    assert (result.exit_code, "goes with --plain" in result.stderr) == (2, True)


# ---- imitate ------------------------------------------------------------------------------------------------------


def test_a_warm_started_folder_is_the_model_of_another_recipe(recipe: Path, tmp_path: Path) -> None:
    result = coterie("imitate", recipe, "--out", tmp_path / "warm")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "warm/shared"
    assert f'model = "{folder}"' in result.output
    lineup = assemble(check_env_fits(read_recipe(recipe, [f"policies.shared.model={folder}"])))
    saved, fresh = lineup.policies["shared"], assemble(check_env_fits(read_recipe(recipe))).policies["shared"]
    assert saved.context == fresh.context == 64
    assert saved.renderer.render("S.G") == fresh.renderer.render("S.G")
    trained = coterie("train", recipe, "--out", tmp_path / "run", "--set", f"policies.shared.model={folder}")
    assert trained.exit_code == 0, trained.output
    again = coterie("imitate", recipe, "--out", tmp_path / "warm")
    assert (again.exit_code, "is not empty" in again.stderr) == (2, True)


def test_imitate_writes_a_model_that_adapters_share_once_and_adapters_start_on_it(recipe: Path, tmp_path: Path) -> None:
    adapters = ["--set", "policies.shared.train=lora", "--set", "policies.other.train=lora"]
    adapters += ["--set", "policies.other.model=tiny:width=16,layers=1,heads=2,positions=64"]
    result = coterie("imitate", recipe, "--out", tmp_path / "warm", *adapters, "--set", "team.tool=other")
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "warm").iterdir()] == ["shared"]
    assert result.output.count(f'model = "{tmp_path / "warm" / "shared"}"') == 2
    warm = ["--set", f"policies.shared.model={tmp_path / 'warm' / 'shared'}"]
    evaluated = coterie("eval", recipe, "--tasks", 2, "--set", "policies.shared.train=lora", *warm)
    assert evaluated.exit_code == 0, evaluated.output


def test_check_counts_a_model_that_adapters_share_once(recipe: Path) -> None:
    """Width 16, 1 layer, rank 8: 8 * ((16 + 48) + (16 + 16) + (16 + 64) + (64 + 16)) values of the second adapter."""
    adapters = ["--set", "policies.shared.train=lora", "--set", "policies.other.train=lora"]
    adapters += ["--set", "policies.other.model=tiny:width=16,layers=1,heads=2,positions=64"]
    result = coterie("check", recipe, *adapters, "--set", "team.tool=other")
    assert result.exit_code == 0, result.output
    [row] = [line for line in result.output.splitlines() if "parameters" in line]
    first, second, together = (int(cell.replace(",", "")) for cell in row.split("│")[2:5])
    assert second == 8 * (64 + 32 + 80 + 80)
    assert together == first + second


def test_imitate_needs_its_table(tmp_path: Path) -> None:
    path = tmp_path / "plain.toml"
    path.write_text(MINUTE.split("[imitate]")[0])
    result = coterie("imitate", path, "--out", tmp_path / "warm")
    assert (result.exit_code, "--set imitate.steps=300" in result.stderr) == (2, True)
    assert not (tmp_path / "warm").exists()


# ---- looking ------------------------------------------------------------------------------------------------------


def test_check_prints_every_key_marks_defaults_and_counts_tokens(recipe: Path) -> None:
    result = coterie("check", recipe, "--set", "loss.clip_low=0.1")
    assert result.exit_code == 0, result.output
    lines = {cells[1].strip(): cells for line in result.output.splitlines() if len(cells := line.split("│")) > 3}
    assert lines["loss.clip_high"][2:4] == [lines["loss.clip_high"][2], " default "]
    assert lines["loss.clip_low"][2].strip() == "0.1"
    assert lines["loss.clip_low"][3].strip() == ""
    assert lines["env.walls"][2].strip() == "0.22"
    # 4 tasks, 2 roles, 2 rounds, 4 candidates of at most 3 tokens: 4 * 2 * 2 * 4 * 3
    assert "at most 192 tokens" in result.output


def test_check_ends_with_2_where_train_would(recipe: Path) -> None:
    result = coterie("check", recipe, "--set", "sampling.max_tokens=64")
    assert (result.exit_code, "leaves no room for a prompt" in result.stderr) == (2, True)


def test_check_says_of_a_recipe_without_a_trained_policy_that_it_can_be_played(recipe: Path) -> None:
    result = coterie("check", recipe, "--set", "policies.shared.train=frozen", "--set", "imitate=null")
    assert result.exit_code == 0, result.output
    assert "is a recipe that can be played; none of its policies is trained" in " ".join(result.stdout.split())


def test_check_finds_prompts_that_are_longer_than_the_context(recipe: Path) -> None:
    result = coterie("check", recipe, "--set", "env.size=8")
    assert (result.exit_code, "context of policy 'shared' holds 64" in result.stderr) == (2, True)


def test_train_and_eval_refuse_such_prompts_at_once(recipe: Path, tmp_path: Path) -> None:
    for command in (("train", recipe, "--out", tmp_path / "run"), ("eval", recipe)):
        result = coterie(*command, "--set", "env.size=8")
        assert (result.exit_code, "context of policy 'shared' holds 64" in result.stderr) == (2, True), result.output
    assert not (tmp_path / "run").exists()


def test_recipes_and_envs_are_listed_with_what_they_are() -> None:
    assert re.search(r"plan_path-tiny\s+Demo:", coterie("recipes").output)
    listed = coterie("envs").output
    assert "plan_path, played by tool, planner" in listed
    assert re.search(r"max_rounds\s+│\s+4\s+│\s+Rounds after which", listed)


def test_check_env_tells_a_sound_env_from_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sound = coterie("check-env", "plan_path", "--set", "size=3", "--set", "style=compact", "--tasks", 1)
    assert (sound.exit_code, "FAIL" in sound.output) == (0, False), sound.output
    (tmp_path / "stuck.py").write_text(
        "from coterie.envs.plan_path import PlanPath\n"
        "class Stuck(PlanPath):\n"
        "    async def play(self, task, team):\n"
        "        raise ZeroDivisionError\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    broken = coterie("check-env", "stuck:Stuck", "--tasks", 1)
    assert (broken.exit_code, "FAIL" in broken.output) == (1, True)
    unknown = coterie("check-env", "plan_pth")
    assert (unknown.exit_code, "did you mean 'plan_path'" in unknown.stderr) == (2, True)
