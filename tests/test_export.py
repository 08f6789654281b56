"""An exported policy is a plain model folder: plain transformers gives the run's greedy answers, prompts and ends."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from typer.testing import CliRunner, Result

from coterie.api import TrainedTeam
from coterie.cli import app
from coterie.errors import CheckpointError, ConfigError
from coterie.export import ORIGIN, check_free, export_policy
from coterie.lineup import Lineup, assemble, check_env_fits
from coterie.models.chat import ChatRenderer
from coterie.models.loading import plain_place
from coterie.models.tiny import tiny_tokenizer
from coterie.runs import open_run, start
from coterie.trained import find_policy, load_model
from learning_toys import PER_ROLE, quiet, toy_recipe

SETTINGS = (*PER_ROLE, "train.steps=3", "train.save_every=1", "eval.every=1")
MODE = "policies.other.template_options.mode=warm"
MODAL = "{{ '>' if mode == 'warm' else '<' }}{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|assistant|>"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two policies: main as it is, other with a template and an option of its own; and a best one."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "modal.jinja").write_text(MODAL)
    settings = (*SETTINGS, f"policies.other.template={folder / 'modal.jinja'}", MODE)
    start(toy_recipe(*settings), folder / "run", quiet())
    return folder / "run"


@pytest.fixture(scope="module")
def lineup(run_dir: Path) -> Lineup:
    return open_run(run_dir)


def coterie(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


def greedy_texts(lineup: Lineup, tasks: int = 4) -> list[list[str]]:
    """Return the texts of greedy plays, by task."""
    team = TrainedTeam(lineup)
    episodes = asyncio.run(team.play_all(team.env().tasks("test", 0, tasks), temperature=0.0))
    return [[turn.text for turn in episode.turns] for episode in episodes]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


# ---- export ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["main", "other"])
def test_plain_transformers_gives_the_prompts_and_greedy_answers_of_the_run(
    run_dir: Path, lineup: Lineup, name: str, tmp_path: Path
) -> None:
    export_policy(find_policy(run_dir, name, "last"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    policy = lineup.policies[name]
    role = {"main": "first", "other": "second"}[name]
    episode = TrainedTeam(lineup).play_sync(lineup.make_env().tasks("test", 1, 1)[0], temperature=0.0)
    turns = [turn for turn in episode.turns if turn.role == role]
    assert len(turns) == 2
    for turn in turns:
        ids = torch.tensor([turn.prompt_ids])
        done = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
        assert tuple(done[0, ids.shape[1] :].tolist()) == turn.completion_ids
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "abc"}], add_generation_prompt=True, return_dict=False
    )
    assert tuple(ids) == policy.renderer.render("abc")
    assert set(model.generation_config.eos_token_id) == set(policy.end_ids)


def test_what_is_exported_is_what_was_trained_to_the_bit(run_dir: Path, lineup: Lineup, tmp_path: Path) -> None:
    export_policy(find_policy(run_dir, "main", "last"), tmp_path / "out")
    exported = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    trained = weights_of(lineup.policies["main"].model)
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], trained[name]) for name in trained)
    fresh = weights_of(assemble(check_env_fits(toy_recipe(*PER_ROLE))).policies["main"].model)
    assert any(not torch.equal(exported[name], fresh[name]) for name in fresh), "training changed something"


def test_a_folder_says_where_it_comes_from(run_dir: Path, tmp_path: Path) -> None:
    export_policy(find_policy(run_dir, "other", "last"), tmp_path / "out")
    origin = json.loads((tmp_path / "out" / ORIGIN).read_text())
    assert (origin["run"], origin["policy"], origin["roles"]) == ("run", "other", ["second"])
    assert (origin["checkpoint"], origin["version"]) == ("step_00000003", 3)
    assert origin["sampling"]["max_tokens"] == 3


def test_options_of_the_template_are_defaults_that_a_caller_can_change(run_dir: Path, tmp_path: Path) -> None:
    export_policy(find_policy(run_dir, "other", "last"), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "a"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "><|user|>a<|assistant|>"
    assert tokenizer.apply_chat_template(messages, tokenize=False, mode="cold") == "<<|user|>a<|assistant|>"


@pytest.mark.parametrize("value", [True, 3, 0.5, 'it\'s "so" \\ \n \u00e9 \U0001f600'])
def test_every_kind_of_option_is_written_as_jinja_reads_it(value: bool | int | float | str) -> None:
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'yes' if given == expected else 'no' }}"
    renderer = ChatRenderer(tiny_tokenizer(), template=template, options={"given": value, "expected": value})
    standalone = ChatRenderer(tiny_tokenizer(), template=renderer.standalone_template(), options={"expected": value})
    assert standalone.render("a") == renderer.render("a")
    assert "yes" in renderer.decode(standalone.render("a"))


def test_a_frozen_policy_is_exported_as_its_model_is(run_dir: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run_dir, copied)
    recipe = json.loads((copied / "recipe.json").read_text())
    recipe["policies"]["main"]["train"] = "frozen"
    (copied / "recipe.json").write_text(json.dumps(recipe))
    found = find_policy(copied, "main", "last")
    assert found.checkpoint is None
    export_policy(found, tmp_path / "out")
    exported = weights_of(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    fresh = weights_of(assemble(check_env_fits(toy_recipe(*PER_ROLE))).policies["main"].model)
    assert all(torch.equal(exported[name], fresh[name]) for name in fresh)


@pytest.mark.parametrize("used", ["folder", "file"])
def test_a_folder_in_use_is_refused_and_left_as_it_is(run_dir: Path, used: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    kept = target / "notes" if used == "folder" else target
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    with pytest.raises(ConfigError, match=r"out (is not empty|is a file); nothing was changed"):
        check_free(target)
    with pytest.raises(ConfigError, match="nothing was changed"):
        export_policy(find_policy(run_dir, "main", "last"), target)
    assert kept.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_is_taken_and_a_missing_parent_is_made(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    export_policy(find_policy(run_dir, "main", "last"), tmp_path / "empty")
    assert (tmp_path / "empty" / "model.safetensors").is_file()
    export_policy(find_policy(run_dir, "main", "last"), tmp_path / "a" / "b")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["b"]


def test_an_export_that_breaks_leaves_nothing_behind(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("coterie.export.atomic_write_json", full)
    with pytest.raises(ConfigError, match=r"cannot be written .*No space left"):
        export_policy(find_policy(run_dir, "main", "last"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_writes_a_folder_that_a_recipe_can_name(run_dir: Path, lineup: Lineup, tmp_path: Path) -> None:
    result = coterie("export", run_dir, "--policy", "main", "--to", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f'model = "{tmp_path / "out"}"' in result.stdout.replace("\n", "")
    loaded = load_model(str(tmp_path / "out"), seed=99, dtype="float32", context=None)
    trained = weights_of(lineup.policies["main"].model)
    assert all(torch.equal(weight, trained[name]) for name, weight in loaded.model.named_parameters())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("RUN", "--policy", "mian", "--to", "OUT"), 2, "has no policy 'mian'; it has ['main', 'other']"),
        (("RUN", "--to", "OUT"), 2, "several policies, ['main', 'other']: say which one"),
        (("RUN", "--policy", "main", "--to", "RUN"), 2, "is not empty; nothing was changed"),
        (("plan_path-tiny", "--policy", "shared", "--to", "OUT"), 2, "only the policies of a run can be exported"),
        (("RUN", "--policy", "main", "--to", "OUT", "--checkpoint", "best"), 0, ""),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    run_dir: Path, arguments: tuple[str, ...], code: int, message: str, tmp_path: Path
) -> None:
    names = {"RUN": str(run_dir), "OUT": str(tmp_path / "out")}
    result = coterie("export", *(names.get(argument, argument) for argument in arguments))
    assert (result.exit_code, message in result.stderr) == (code, True), result.output
    assert (tmp_path / "out").exists() == (code == 0)


# ---- a policy of a run as the model of the next recipe --------------------------------------------------------------


def test_a_policy_of_a_run_is_a_model_with_its_weights_template_and_ends(run_dir: Path, lineup: Lineup) -> None:
    settings = (f"policies.main.model=run:{run_dir}#main", f"policies.other.model=run:{run_dir}#other")
    again = assemble(check_env_fits(toy_recipe(*PER_ROLE, *settings, "seed=9")))
    for name in ("main", "other"):
        old, new = weights_of(lineup.policies[name].model), weights_of(again.policies[name].model)
        assert all(torch.equal(old[key], new[key]) for key in old)
        assert again.policies[name].renderer.render("abc") == lineup.policies[name].renderer.render("abc")
        assert again.policies[name].end_ids == lineup.policies[name].end_ids
        assert again.policies[name].version == 0, "versions count the steps of a run"
    assert greedy_texts(again) == greedy_texts(lineup)


def test_the_best_checkpoint_and_the_only_policy_can_be_named(run_dir: Path, tmp_path: Path) -> None:
    best = load_model(f"run:{run_dir}#main@best", seed=0, dtype="float32", context=None)
    trained = weights_of(open_run(run_dir, "best").policies["main"].model)
    assert all(torch.equal(weight, trained[name]) for name, weight in best.model.named_parameters())
    start(toy_recipe("train.steps=1"), tmp_path / "one", quiet())
    only = load_model(f"run:{tmp_path / 'one'}", seed=0, dtype="float32", context=None)
    named = load_model(f"run:{tmp_path / 'one'}#main@last", seed=0, dtype="float32", context=None)
    for one, other in zip(only.model.parameters(), named.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_run_that_began_from_a_run_begins_from_its_weights_and_trains_on(run_dir: Path, tmp_path: Path) -> None:
    settings = (f"policies.main.model=run:{run_dir}#main", "train.steps=1")
    start(toy_recipe(*settings), tmp_path / "next", quiet())
    before, after = open_run(run_dir).policies["main"].model, open_run(tmp_path / "next").policies["main"].model
    changed = [not torch.equal(old, new) for old, new in zip(before.parameters(), after.parameters(), strict=True)]
    assert any(changed)
    third = load_model(f"run:{tmp_path / 'next'}#main", seed=0, dtype="float32", context=None)
    for new, again in zip(after.parameters(), third.model.parameters(), strict=True):
        assert torch.equal(new, again)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("run:no/such/folder#main", ConfigError, "no/such/folder holds no run"),
        ("run:RUN#mian", ConfigError, r"has no policy 'mian'; it has \['main', 'other'\]"),
        ("run:RUN", ConfigError, "several policies"),
    ],
)
def test_a_run_that_cannot_be_a_model_is_refused(
    run_dir: Path, source: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_model(source.replace("RUN", str(run_dir)), seed=0, dtype="float32", context=None)


def test_a_run_without_a_usable_checkpoint_is_refused(run_dir: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run_dir, copied)
    for path in copied.glob("checkpoints/*/main/weights.safetensors"):
        path.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="no usable last checkpoint"):
        load_model(f"run:{copied}#main", seed=0, dtype="float32", context=None)
    with pytest.raises(CheckpointError, match="no usable best checkpoint"):
        find_policy(copied, "main", "best")


# ---- adapters -------------------------------------------------------------------------------------------------------

LORA = (*PER_ROLE, "policies.main.train=lora", "policies.other.train=lora", "train.steps=2")
RATES = ("policies.main.optimizer.lr=0.05", "policies.other.optimizer.lr=0.05")


@pytest.fixture(scope="module", params=["warm", "fresh", "folder", "run"])
def adapters(request: pytest.FixtureRequest, run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two adapters: on a warm model, on a fresh one, on that of a folder, on another run's policy."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = [*LORA, *RATES]
    if request.param == "warm":
        settings += ["imitate.steps=3", "imitate.episodes=6"]
    elif request.param != "fresh":
        model = f"run:{run_dir}#main"
        if request.param == "folder":
            model = str(folder / "plain")
            export_policy(find_policy(run_dir, "main", "last"), folder / "plain")
        settings += [f"policies.{name}.model={model}" for name in ("main", "other")]
    start(toy_recipe(*settings), folder / "run", quiet())
    return folder / "run"


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft asks transformers by an old name
def test_an_adapter_gives_the_log_probs_and_greedy_answers_of_the_run_merged_or_not(
    adapters: Path, tmp_path: Path
) -> None:
    lineup = open_run(adapters)
    episode = TrainedTeam(lineup).play_sync(lineup.make_env().tasks("test", 1, 1)[0], temperature=0.0)
    ids = torch.arange(6, 30)[None]
    seen = {}
    for name, policy in lineup.policies.items():
        with torch.no_grad(), policy.alone():
            expected = policy.model(ids).logits
        found = find_policy(adapters, name, "last")
        base = export_policy(found, tmp_path / name)
        assert base is not None
        assert export_policy(found, tmp_path / f"{name}-merged", merge=True) is None
        beside = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / name).eval()
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}-merged").eval()
        assert not [key for key, _ in merged.named_parameters() if "lora" in key]
        again = load_model(f"run:{adapters}#{name}", seed=0, dtype="float32", context=None).model
        with torch.no_grad():
            seen[name] = beside(ids).logits
            for logits in (seen[name], merged(ids).logits, again(ids).logits):
                assert (logits - expected).abs().max() < 1e-5
        for turn in [turn for turn in episode.turns if turn.policy == name]:
            prompt = torch.tensor([turn.prompt_ids])
            ends = GenerationConfig.from_pretrained(tmp_path / name)
            for model in (beside, merged):
                done = model.generate(
                    input_ids=prompt,
                    attention_mask=torch.ones_like(prompt),
                    generation_config=ends,
                    max_new_tokens=3,
                    do_sample=False,
                )
                assert tuple(done[0, prompt.shape[1] :].tolist()) == turn.completion_ids
    assert (seen["main"] - seen["other"]).abs().max() > 1e-3, "the adapters were meant to differ"


def test_an_adapter_brings_its_base_only_where_nothing_else_has_it(adapters: Path, tmp_path: Path) -> None:
    export_policy(find_policy(adapters, "main", "last"), tmp_path / "out")
    named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    plain = adapters.parent / "plain"
    assert named == str(plain if plain.is_dir() else tmp_path / "out" / "base")
    assert (tmp_path / "out" / "base" / "model.safetensors").is_file() == (not plain.is_dir())
    assert not (tmp_path / "out" / "model.safetensors").exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "abc"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tuple(ids) == open_run(adapters).policies["main"].renderer.render("abc")


@pytest.mark.parametrize(
    ("source", "place"),
    [("tiny", None), ("tiny:width=64", None), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), ("MODEL.gguf", None)],
)
def test_plain_transformers_finds_hub_ids_and_folders(source: str, place: str | None, tmp_path: Path) -> None:
    (tmp_path / "MODEL.gguf").touch()
    assert plain_place(source.replace("MODEL", str(tmp_path / "MODEL"))) == place


def test_an_adapters_folder_alone_is_no_model_of_a_recipe(adapters: Path, tmp_path: Path) -> None:
    export_policy(find_policy(adapters, "main", "last"), tmp_path / "out")
    with pytest.raises(ConfigError, match=r"holds an adapter without its model.* export --merge"):
        load_model(str(tmp_path / "out"), seed=0, dtype="float32", context=None)


def test_the_command_says_what_it_wrote_and_merges_adapters_only(adapters: Path, run_dir: Path, tmp_path: Path) -> None:
    result = coterie("export", adapters, "--policy", "main", "--to", tmp_path / "beside")
    assert (result.exit_code, "an adapter, which peft loads beside" in result.stdout) == (0, True), result.output
    result = coterie("export", adapters, "--policy", "main", "--to", tmp_path / "whole", "--merge")
    assert (result.exit_code, 'in a recipe: model = "' in result.stdout) == (0, True), result.output
    assert (tmp_path / "whole" / "model.safetensors").is_file()
    result = coterie("export", run_dir, "--policy", "main", "--to", tmp_path / "full", "--merge")
    assert result.exit_code == 2
    assert "policy 'main' has no adapter to merge (train = \"full\")" in result.stderr
    assert not (tmp_path / "full").exists()
