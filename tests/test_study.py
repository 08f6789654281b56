"""Studies: what is refused, what is planned, what is made again, and every number's way back to its run."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie import study_jobs
from coterie.cli import app
from coterie.config import dump_recipe, read_recipe
from coterie.errors import ConfigError
from coterie.imitate import warm_start
from coterie.lineup import assemble, check_env_fits
from coterie.models.loading import save
from coterie.rollout import no_check, no_event
from coterie.runs import StopRequestedError, open_run, start
from coterie.shipped import shipped_recipe
from coterie.study import STARTS, PlannedRun, Study, WarmStart, read_study, start_of
from coterie.study_figure import spread
from coterie.study_jobs import Job, refuse_used_folder, run_jobs
from coterie.study_results import study_table, two_way_ci95, write_results
from learning_toys import PER_ROLE, WARM, quiet, toy_recipe, toy_table

HEAD = """
description = "Two ways to draw"
recipe = "toy.json"
seeds = [1, 2]
[budget]
tokens = 60
[eval]
tasks = 500
plays = 2
validations = 2
validation_tasks = 4
"""
VARIANTS = """
[[variants]]
name = "tree"
[[variants]]
name = "flat"
[variants.set]
sampling.mode = "chain"
credit.group_by = ["task"]
credit.return = "final"
"""
TOY = ("env.rounds=1", "sampling.max_tokens=1")
PAIRS = [setting.split("=", 1) for setting in PER_ROLE]
ROLES = "".join(f"{key} = {value if value == '0.01' else json.dumps(value)}\n" for key, value in PAIRS)
"""Settings that give the second role a policy of its own, as TOML."""
JOINED = """
[[variants]]
name = "joined"
[variants.set]
policies.main.model = "variant:tree#main"
"""
OTHER = VARIANTS + '[[variants]]\nname = "other"\nagainst = "tree"\nset = {credit.alpha = 0.5}\n'
SAME = '[[variants]]\nname = "x"\nset = {credit.alpha = 1.0}\n'
Write = Callable[..., Study]


@pytest.fixture
def written(tmp_path: Path) -> Write:
    """Return what reads a study, with a toy recipe beside it."""

    def write(text: str = HEAD + VARIANTS, *settings: str, recipe: tuple[str, ...] = ()) -> Study:
        (tmp_path / "toy.json").write_text(json.dumps(toy_table(*TOY, *recipe)))
        (tmp_path / "ways.toml").write_text(text)
        return read_study(tmp_path / "ways.toml", tmp_path / "out", settings)

    return write


def in_process(study: Study) -> None:
    """Make the runs of a study here, as the commands would: starts first, then every run in its folder."""
    for each in study.starts:
        lineup = assemble(each.recipe)
        warm_start(lineup, no_event, no_check, lambda name, step, steps, loss: None)
        for name, loaded in lineup.loaded.items():
            save(loaded, study.folder / STARTS / each.name / name)
    for run in study.runs:
        make(study, run)


def make(study: Study, run: PlannedRun) -> None:
    """Make a run, with a final evaluation of 20 tasks only."""
    study.run_dir(run).parent.mkdir(parents=True, exist_ok=True)
    table = run.recipe.eval.model_copy(update={"final_tasks": 20})
    start(run.recipe.model_copy(update={"eval": table}), study.run_dir(run), quiet())


# ---- what is refused ----


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD.replace("seeds", "seed") + VARIANTS, r"unknown key 'seed': did you mean 'seeds'"),
        (HEAD.replace("plays", "play") + VARIANTS, r"unknown key 'eval\.play': did you mean 'eval\.plays'"),
        (HEAD.replace("tasks = 500", "tasks = 499") + VARIANTS, r"eval\.tasks: .*greater than or equal to 500"),
        (HEAD.replace("[1, 2]", "[1, 1]") + VARIANTS, r"seeds: '1' is there twice"),
        (HEAD + VARIANTS + '[[variants]]\nname = "tree"\n', r"variants: 'tree' is there twice"),
        (HEAD + VARIANTS + '[[variants]]\nname = "a/b"\n', r"variants\.2\.name"),
        (HEAD + VARIANTS + '[[variants]]\nname = "too"\n', r"'tree' and 'too' are one and the same recipe"),
        ('baseline = "none"\n' + HEAD + VARIANTS, r"baseline = 'none': there is no such variant"),
        (HEAD + OTHER.replace('against = "tree"', 'against = "none"'), r"other: against = 'none': there is no"),
        (HEAD + OTHER.replace('against = "tree"', 'against = "other"'), r"'other' is compared with itself"),
        (HEAD + VARIANTS + '[[variants]]\nname = "x"\nset = {train.steps = 3}\n', r"'x' sets train\.steps, which is"),
        (HEAD + VARIANTS + '[[variants]]\nname = "x"\nset = {eval.tasks = 3}\n', r"'x' sets eval\.tasks, which is"),
        (HEAD + VARIANTS + SAME, r"'x': credit\.alpha=1\.0 does nothing"),
        (HEAD + VARIANTS + '[[variants]]\nname = "x"\nset = {credit.beta = 1.0}\n', r"'x': unknown key 'credit\.beta'"),
        (HEAD + VARIANTS + '[[variants]]\nname = "x"\nset = {env.size = "big"}\n', r"'x': env .*size"),
        (HEAD + VARIANTS + '[[variants]]\nname = "x"\nset = {imitate = "null"}\n', r"'x': .*no such key to remove"),
        ("set = {credit.alpha = 1.0}\n" + HEAD + VARIANTS, r"set: credit\.alpha=1\.0 does nothing"),
        (HEAD + VARIANTS + JOINED.replace(":tree", ":bush"), r"'joined': .*bush#main': there is no such variant"),
        (HEAD + VARIANTS + JOINED + JOINED.replace("joined", "again").replace(":tree", ":joined"),
         r"'again' begins with the policies of joined-seed1, which begins with those of another run itself"),
        ("set = {policies.main.model = 'variant:tree#main'}\n" + HEAD + VARIANTS,
         r"'tree' begins with the policies of tree-seed1, which begins with those of another run itself"),
        (HEAD.replace("toy.json", "toi") + VARIANTS, r"no recipe 'toi'"),
        (HEAD.replace("plays = 2", 'split = "validation"') + VARIANTS, r"eval\.split = 'validation' is played while"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(written: Write, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        written(text)


def test_without_validations_the_validation_split_is_one_that_nothing_was_tuned_on(written: Write) -> None:
    study = written(
        HEAD.replace("plays = 2", 'split = "validation"').replace("validations = 2", "validations = 0") + VARIANTS
    )
    assert {run.recipe.eval.final_split for run in study.runs} == {"validation"}


def test_trained_policies_do_not_learn_from_experts_again(written: Write) -> None:
    with pytest.raises(ConfigError, match=r"'variant:tree#main' is trained already; remove the warm start"):
        written(HEAD + VARIANTS + JOINED, recipe=WARM)


def test_a_folder_in_use_and_a_run_of_another_recipe_are_refused(written: Write) -> None:
    study = written()
    run_dir = study.run_dir(study.runs[0])
    run_dir.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"is not empty.*--resume"):
        refuse_used_folder(study, resume=False)
    other = study.runs[0].recipe.model_copy(update={"seed": 9})
    (run_dir / "recipe.json").write_text(json.dumps(dump_recipe(other)))
    with pytest.raises(ConfigError, match=r"tree-seed1; they differ in seed"):
        refuse_used_folder(study, resume=True)
    (run_dir / "recipe.json").write_text(json.dumps(dump_recipe(study.runs[0].recipe)))
    refuse_used_folder(study, resume=True)


# ---- what is planned ----


def test_every_variant_gets_every_seed_the_same_budget_and_the_same_evaluation(written: Write) -> None:
    study = written()
    assert [run.name for run in study.runs] == ["tree-seed1", "flat-seed1", "tree-seed2", "flat-seed2"]
    for run in study.runs:
        recipe = run.recipe
        assert (recipe.seed, recipe.train.max_generated_tokens, recipe.train.threads) == (run.seed, 60, 1)
        assert (recipe.eval.final_tasks, recipe.eval.final_plays, recipe.eval.final_split) == (500, 2, "test")
        assert (recipe.eval.every_tokens, recipe.eval.tasks, recipe.eval.plays) == (30, 4, 1)
    assert [run.recipe.sampling.mode for run in study.runs] == ["tree", "chain", "tree", "chain"]
    assert written(HEAD + VARIANTS, "budget.tokens=50").runs[0].recipe.train.max_generated_tokens == 50


def test_variants_that_begin_alike_share_one_warm_start_per_seed(written: Write) -> None:
    more = f'[[variants]]\nname = "roles"\n[variants.set]\n{ROLES}\n'
    longer = '[[variants]]\nname = "longer"\nset = {imitate.steps = 5}\n'
    study = written(HEAD + VARIANTS + more + longer, recipe=WARM)
    by_name = {run.name: run for run in study.runs}
    first = {name: by_name[f"{name}-seed1"].start for name in ("tree", "flat", "roles", "longer")}
    assert first["tree"] is not None
    assert first["tree"] == first["flat"] == first["roles"] != first["longer"]
    assert by_name["tree-seed2"].start != first["tree"]
    assert len(study.starts) == 4
    recipe = by_name["roles-seed1"].recipe
    assert recipe.imitate is None
    folder = str((study.folder / STARTS / first["tree"].name / "model0").resolve())
    assert {table.model for table in recipe.policies.values()} == {folder}


def test_a_variant_may_begin_with_the_trained_policies_of_others_with_its_seed(written: Write) -> None:
    study = written(HEAD + VARIANTS + JOINED)
    by_name = {run.name: run for run in study.runs}
    assert {name: run.needs for name, run in by_name.items() if run.needs} == {
        "joined-seed1": ("tree-seed1",),
        "joined-seed2": ("tree-seed2",),
    }
    make(study, by_name["tree-seed1"])
    begun, trained = assemble(by_name["joined-seed1"].recipe), open_run(study.run_dir(by_name["tree-seed1"]))
    fresh = assemble(by_name["flat-seed1"].recipe)
    weights = [lineup.policies["main"].weights() for lineup in (begun, trained, fresh)]
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[1])
    assert not all(weights[0][name].equal(weights[2][name]) for name in weights[2])


def test_what_needs_a_run_that_failed_is_not_begun(written: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    study = written(HEAD + VARIANTS + JOINED)
    begun: list[list[str]] = []

    def run_all(jobs: Sequence[Job], *_others: object) -> tuple[str, ...]:
        begun.append([job.name for job in jobs])
        return tuple(job.name for job in jobs if job.name == "tree-seed2")

    monkeypatch.setattr(study_jobs, "run_jobs", run_all)
    failed = study_jobs.make_study(study, 1, lambda _line: None, lambda: None)
    assert begun == [[], ["tree-seed1", "flat-seed1", "tree-seed2", "flat-seed2"], ["joined-seed1"]]
    assert failed == ("tree-seed2", "joined-seed2")


def test_what_only_changes_rewards_changes_no_warm_start() -> None:
    def begun(*settings: str) -> WarmStart | None:
        recipe = read_recipe(shipped_recipe("sudoku-tiny"), settings)
        return start_of(check_env_fits(recipe))

    assert begun() == begun("env.reward=outcome", "env.solve_bonus=0.0", "credit.alpha=2.0") is not None
    assert begun() != begun("env.max_rounds=3")


def test_a_kl_to_the_model_before_the_warm_start_keeps_the_warm_start_in_the_run() -> None:
    kl = ("policies.main.kl.coef=0.1", "policies.main.kl.reference=base")
    assert start_of(toy_recipe(*WARM, *kl)) is None
    assert start_of(toy_recipe(*WARM, kl[0])) is not None
    assert start_of(toy_recipe()) is None


def test_a_run_that_begins_with_the_shared_warm_start_is_the_run_that_makes_it_itself(
    written: Write, tmp_path: Path
) -> None:
    text = HEAD.replace("[1, 2]", "[1]") + f'[[variants]]\nname = "roles"\n[variants.set]\n{ROLES}\n'
    study = written(text, recipe=WARM)
    in_process(study)
    own, run_dir = study.runs[0].recipe, study.run_dir(study.runs[0])
    table = own.eval.model_copy(update={"final_tasks": 20})
    whole = toy_recipe(*TOY, *WARM, *PER_ROLE).model_copy(update={"seed": 1, "train": own.train, "eval": table})
    start(whole, tmp_path / "whole", quiet())
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert (tmp_path / "whole" / name).read_bytes() == (run_dir / name).read_bytes()


STUDIES = sorted((Path(__file__).parent.parent / "benchmarks" / "studies").glob("*.toml"))


@pytest.mark.parametrize("path", STUDIES, ids=[path.stem for path in STUDIES])
def test_the_studies_of_the_project_can_be_made(path: Path, tmp_path: Path) -> None:
    study = read_study(path, tmp_path)
    assert study.file.description
    fewest = 4 if path.stem == "smollm2" else 10  # two of two seeds, of more than an hour each
    assert len(study.runs) == len(study.file.seeds) * len(study.file.variants) >= fewest
    assert study.file.eval.tasks >= 500


def test_the_studies_are_there() -> None:
    wanted = {
        "main-shared",
        "main-split",
        "tuning",
        "sokoban",
        "sudoku",
        "grouping",
        "specialisation",
        "rewards",
        "scale",
        "knobs",
        "math",
        "code",
        "smollm2",
    }
    assert {path.stem for path in STUDIES} == wanted


@pytest.mark.parametrize(
    "names",
    [("main-shared", "grouping", "rewards", "knobs"), ("main-split", "specialisation")],
    ids=["shared", "split"],
)
def test_studies_of_one_game_have_their_runs_in_common(names: tuple[str, ...], tmp_path: Path) -> None:
    seen: dict[str, object] = {}
    found = [read_study(path, tmp_path) for path in STUDIES if path.stem in names]
    for run in [run for study in found for run in study.runs]:
        assert seen.setdefault(run.name, dump_recipe(run.recipe)) == dump_recipe(run.recipe)
    assert len(seen) < sum(len(study.runs) for study in found)


# ---- what comes out ----


def test_every_number_of_the_results_is_that_of_a_runs_summary(written: Write) -> None:
    study = written()
    in_process(study)
    numbers = json.loads(json.dumps(write_results(study)))
    assert numbers["missing"] == []
    by_run = {row["run"]: row for row in numbers["runs"]}
    for run in study.runs:
        row, summary = by_run[run.name], json.loads((study.folder / by_run[run.name]["summary"]).read_text())
        assert row["success"] == summary["after"]["success"]
        assert row["pass@2"] == summary["after"]["pass@2"] >= row["success"]
        assert row["tokens_generated"] == summary["tokens_generated"] >= 60
        assert row["code"]["version"] == summary["code"]["version"]
    tree, flat = numbers["variants"]
    successes = [by_run[f"tree-seed{seed}"]["success"] for seed in (1, 2)]
    assert tree["success_by_seed"] == successes
    assert tree["success"] == pytest.approx(sum(successes) / 2)
    assert tree["ci95_tasks"][0] <= tree["success"] <= tree["ci95_tasks"][1]
    assert tree["share_mixed_prompts"] == 0.0
    assert flat["share_mixed_prompts"] == 1.0  # the second role's prompt holds what the first one said
    [against] = [row for row in numbers["differences"] if row["variant"] == "flat"]
    assert against["difference"] == pytest.approx(flat["success"] - tree["success"])
    assert (study.folder / "curves.png").stat().st_size > 1000
    table = (study.folder / "table.md").read_text()
    assert table == study_table(numbers)
    assert f"| tree | 2 | {tree['success']:.3f} |" in table
    assert f"| flat | tree | {100 * against['difference']:+.1f} |" in table


def test_a_variant_names_what_it_is_compared_with(written: Write) -> None:
    study = written(HEAD + OTHER.replace('"tree"\nset', '"flat"\nset'))
    assert study.compared == (("flat", "tree"), ("other", "flat"))


def test_runs_that_are_not_finished_are_named_and_stand_for_nothing(written: Write) -> None:
    study = written(HEAD.replace("[1, 2]", "[1]") + VARIANTS)
    make(study, study.runs[0])
    numbers = write_results(study)
    assert numbers["missing"] == ["flat-seed1"]
    assert [row["variant"] for row in numbers["variants"]] == ["tree"]  # type: ignore[union-attr,index,call-overload]
    assert "Not finished, and in no number: flat-seed1." in (study.folder / "table.md").read_text()


def test_an_interval_over_seeds_and_tasks_is_wide_where_seeds_differ_and_none_for_one_seed() -> None:
    assert two_way_ci95([[1.0, 1.0], [1.0, 1.0]]) == (1.0, 1.0)
    assert two_way_ci95([[0.0, 0.0], [1.0, 1.0]]) == (0.0, 1.0)  # a quarter of the draws has one seed twice
    assert all(math.isnan(end) for end in two_way_ci95([[0.0, 1.0]]))


def test_curves_of_seeds_meet_on_a_common_grid() -> None:
    one = [(0.0, 0.0, 0.2, 0.1, 0.3), (100.0, 1.0, 0.4, 0.3, 0.5)]
    two = [(0.0, 0.0, 0.4, 0.3, 0.5), (200.0, 2.0, 0.8, 0.7, 0.9)]
    xs, mean, low, high = spread([one, two], 0)
    assert (xs[0], xs[-1]) == (0.0, 100.0)
    assert (mean[-1], low[-1], high[-1]) == pytest.approx((0.5, 0.4, 0.6))  # 0.4, and half of the way from 0.4 to 0.8
    xs, mean, low, high = spread([one], 1)
    assert np.allclose([xs, mean, low, high], [[0.0, 1.0], [0.2, 0.4], [0.1, 0.3], [0.3, 0.5]])


# ---- processes ----


def job(tmp_path: Path, name: str, code: str, done: list[str]) -> Job:
    command = (sys.executable, "-c", code)
    return Job(name=name, command=command, log=tmp_path / f"{name}.log", then=lambda: done.append(name))


def test_a_process_that_fails_is_named_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    done: list[str] = []
    told: list[str] = []
    jobs = [
        job(tmp_path, "bad", "import sys; print('first'); sys.exit('no such thing')", done),
        job(tmp_path, "good", "print('fine')", done),
    ]
    assert run_jobs(jobs, 1, told.append, lambda: None) == ("bad",)
    assert done == ["good"]
    assert "[1/2] bad failed with exit code 1" in told[0]
    assert "no such thing" in told[0]


def test_when_a_stop_is_asked_for_the_processes_are_told_and_waited_for(tmp_path: Path) -> None:
    done: list[str] = []
    code = (
        (
            "import pathlib, signal, sys, time\n"
            "def end(*_): pathlib.Path('saved').touch(); sys.exit(143)\n"
            "signal.signal(signal.SIGTERM, end); pathlib.Path('ready').touch(); time.sleep(60)"
        )
        .replace("'saved'", repr(str(tmp_path / "saved")))
        .replace("'ready'", repr(str(tmp_path / "ready")))
    )

    class AskedError(Exception):
        pass

    def check() -> None:
        if (tmp_path / "ready").exists():
            raise AskedError

    with pytest.raises(AskedError):
        run_jobs([job(tmp_path, "long", code, done), job(tmp_path, "next", "", done)], 1, lambda line: None, check)
    assert (tmp_path / "saved").exists()
    assert done == []
    assert not (tmp_path / "next.log").exists()


def test_a_plan_makes_no_run(written: Write, tmp_path: Path) -> None:
    written(recipe=WARM)
    found = CliRunner().invoke(app, ["study", str(tmp_path / "ways.toml"), "--out", str(tmp_path / "out"), "--plan"])
    assert found.exit_code == 0, found.output
    assert "2 variants x 2 seeds, 60 generated tokens each; 2 warm starts" in found.output
    assert not (tmp_path / "out").exists()


def test_a_stopped_study_says_how_to_go_on_with_the_same_settings(
    written: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: object) -> tuple[str, ...]:
        raise StopRequestedError(signal.SIGTERM)

    written()
    monkeypatch.setattr(study_jobs, "make_study", stopped)
    file, out = str(tmp_path / "ways.toml"), str(tmp_path / "out")
    found = CliRunner().invoke(app, ["study", file, "--out", out, "--set", "seeds=[1]"])
    assert found.exit_code == 143
    assert f"coterie study {file} --out {out} --resume --set 'seeds=[1]'" in found.output


@pytest.mark.slow
def test_a_study_is_made_by_one_command_and_a_second_one_makes_nothing_again(written: Write, tmp_path: Path) -> None:
    written(recipe=WARM)
    words = ["study", str(tmp_path / "ways.toml"), "--out", str(tmp_path / "out"), "--jobs", "2"]
    first = CliRunner().invoke(app, words)
    assert first.exit_code == 0, first.output
    assert "flat-seed2 done" in first.output
    results = (tmp_path / "out" / "results.json").read_bytes()
    again = CliRunner().invoke(app, [*words, "--resume"])
    assert "4 of 4 runs are finished already" in again.output
    assert (tmp_path / "out" / "results.json").read_bytes() == results
    assert CliRunner().invoke(app, words).exit_code == 2
