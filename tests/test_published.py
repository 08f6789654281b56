"""The paper's recipes, and what they cost by published dimensions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.config import read_recipe
from coterie.errors import ConfigError
from coterie.estimate import PolicyMemory, policy_memory, role_loads
from coterie.lineup import check_env_fits
from coterie.published import PublishedModel, per_gpu, published_lineup, read_published, without_data
from coterie.run_tables import EnvTable
from coterie.shipped import description_of, paper_recipes, published_files, shipped_recipe
from learning_toys import toy_recipe

TASKS = ("plan_path", "sokoban", "sudoku", "math", "code")


def test_every_kind_of_task_is_there_for_both_models_shared_and_per_role() -> None:
    wanted = {f"paper/{task}-{size}-{how}" for task in TASKS for size in ("1.7b", "8b") for how in ("shared", "roles")}
    assert wanted <= set(paper_recipes())


@pytest.mark.parametrize("name", sorted(paper_recipes()))
def test_a_recipe_of_the_paper_has_its_settings_and_says_that_it_was_not_run(name: str) -> None:
    path = shipped_recipe(name)
    made, _ = without_data(read_recipe(path))
    recipe = check_env_fits(made)
    assert recipe.description == description_of(path)
    assert recipe.description.endswith("; not run")
    assert path.read_text(encoding="utf-8").startswith("# Not run:")
    assert (recipe.train.steps, recipe.train.tasks_per_step, recipe.sampling.num_candidates) == (200, 32, 8)
    assert (recipe.sampling.max_tokens, recipe.sampling.temperature, recipe.eval.every) == (2048, 1.0, 10)
    assert (recipe.loss.clip_low, recipe.loss.clip_high, recipe.loss.entropy_coef) == (0.2, 0.2, 0.0)
    assert (recipe.credit.alpha, recipe.credit.scale, recipe.sampling.select) == (1.0, "std", "best")
    for table in recipe.policies.values():
        assert (table.optimizer.lr, table.optimizer.warmup_steps, table.kl.coef) == (5e-6, 10, 0.0)
        assert table.context == 4096 + 2048
    assert len(recipe.policies) == (1 if name.endswith("shared") else 2)


@pytest.mark.parametrize("path", published_files(), ids=lambda path: path.stem)
def test_published_dimensions_make_the_published_number_of_parameters(path: Path) -> None:
    model = read_published(path)
    assert sum(weight.numel() for weight in model.empty().parameters()) == model.parameters


def test_parameters_and_cache_of_the_smaller_model_by_hand() -> None:
    """Per layer: q and o 2 * 2048 * 2048, k and v 2 * 2048 * 1024, mlp 3 * 2048 * 6144, norms 2 * 2048 + 2 * 128."""
    [path] = [path for path in published_files() if path.stem == "Qwen3-1.7B"]
    model = read_published(path)
    layer = 2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128
    assert model.parameters == 28 * layer + 151936 * 2048 + 2048
    assert model.cache_bytes("bfloat16") == 2 * 28 * 8 * 128 * 2


def test_a_wrong_dimension_does_not_go_unnoticed(tmp_path: Path) -> None:
    raw = json.loads(published_files()[0].read_text())
    model = PublishedModel(model="x", parameters=raw["parameters"], config={**raw["config"], "num_hidden_layers": 1})
    with pytest.raises(ConfigError, match="published are 1,720,574,976"):
        model.empty()
    (tmp_path / "x.json").write_text(json.dumps({"model": "x"}))
    with pytest.raises(ConfigError, match=r"expected the keys .*got \['model'\]"):
        read_published(tmp_path / "x.json")


def test_the_cost_of_a_paper_recipe_by_hand() -> None:
    """4 rounds, 8 candidates an act; 2 bytes of weight and of gradient, 16 of AdamW and float32 copy, a parameter."""
    recipe = check_env_fits(read_recipe(shipped_recipe("paper/plan_path-1.7b-shared")))
    lineup, _ = published_lineup(recipe)
    loads = {load.role: load for load in role_loads(lineup)}
    assert {role: (load.acts, load.candidates, load.tokens) for role, load in loads.items()} == {
        "tool": (4, 32, 32 * 2048),
        "planner": (4, 32, 32 * 2048),
    }
    memory = policy_memory(lineup, "shared")
    assert memory.parameters == 1_720_574_976
    assert (memory.weights, memory.gradients, memory.optimizer) == tuple(1_720_574_976 * count for count in (2, 2, 16))
    assert memory.activations == 8192 * ((28 + 16) * 2048 * 2 + 151936 * 3 * 4)


def test_on_several_gpus_everything_but_activations_is_spread() -> None:
    memory = PolicyMemory(
        policy="p", parameters=1, weights=80, gradients=80, optimizer=640, references=0, activations=50
    )
    assert (per_gpu(memory, 1), per_gpu(memory, 8)) == (850, 150)


def test_models_that_are_not_published_here_and_adapters_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"dimensions of 'tiny.*Leave --offline out"):
        published_lineup(toy_recipe())
    with pytest.raises(ConfigError, match="--offline counts whole models"):
        published_lineup(toy_recipe("policies.main.model=Qwen/Qwen3-8B", "policies.main.train=lora"))


def test_check_offline_prints_the_cost_and_what_it_could_not_verify() -> None:
    found = CliRunner().invoke(app, ["check", "paper/sudoku-8b-roles", "--offline"])
    assert found.exit_code == 0, found.output
    for text in ("16,381,470,720", "on each of 8", "Not verified:", "the tokenizer is not here", "prompt characters"):
        assert text in found.output


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("paper/math-1.7b-roles", "agentica-org/DeepScaleR-Preview-Dataset, Maxwell-Jia/AIME_2024"),
        ("paper/code-8b-shared", "codeparrot/apps:train.jsonl, codeparrot/apps:test.jsonl"),
    ],
)
def test_check_offline_reads_no_data_and_says_so(name: str, data: str) -> None:
    found = CliRunner().invoke(app, ["check", name, "--offline"], env={"COLUMNS": "120"})
    assert found.exit_code == 0, found.output
    assert f"the data of {data}: nothing was read, prompts are those of made problems" in found.output.replace(
        "\n", " "
    )
    assert f'"{data.split(", ")[1]}"' in found.output  # in the table of keys too


def test_the_data_of_a_mixtures_parts_is_left_out_too() -> None:
    parts = [{"name": "math", "data": ["a/b"], "test_data": ["c.jsonl"], "level": 2}, {"name": "sudoku", "size": 4}]
    recipe = toy_recipe()
    mixed = recipe.model_copy(update={"env": EnvTable.model_validate({"name": "mixed", "envs": parts})})
    made, data = without_data(mixed)
    assert data == ("a/b", "c.jsonl")
    assert made.env.options == {"envs": [{"name": "math", "level": 2}, {"name": "sudoku", "size": 4}]}
