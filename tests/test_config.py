"""Recipes: what cannot work is refused before anything starts, with the key, the reason and the remedy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import coterie.config as config
from coterie.config import Recipe, Table, dump_recipe, override, parse_recipe, read_recipe
from coterie.errors import ConfigError
from coterie.lineup import check_env_fits

ROOT = Path(__file__).parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
MINIMAL: dict[str, Any] = {
    "env": {"name": "plan_path"},
    "policies": {"main": {"model": "tiny"}},
    "team": {"tool": "main", "planner": "main"},
    "train": {"steps": 1},
}


def parsed(*settings: str) -> Recipe:
    return parse_recipe(override(MINIMAL, settings), "test recipe")


# ---- unknown keys -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("sed", "seed"),
        ("polices.main.model", "policies"),
        ("policies.main.modle", "policies.main.model"),
        ("policies.main.optimizer.learning_rate", None),
        ("policies.main.optimizer.betta", "policies.main.optimizer.betas"),
        ("policies.main.kl.coeff", "policies.main.kl.coef"),
        ("policies.main.lora.rnk", "policies.main.lora.rank"),
        ("policies.main.update_evry", "policies.main.update_every"),
        ("sampling.num_candidate", "sampling.num_candidates"),
        ("sampling.roles.tool.temprature", "sampling.roles.tool.temperature"),
        ("credit.returns", "credit.return"),
        ("credit.groupby", "credit.group_by"),
        ("loss.clip_hi", "loss.clip_high"),
        ("train.step", "train.steps"),
        ("eval.task", "eval.tasks"),
        ("imitate.episode", "imitate.episodes"),
    ],
)
def test_an_unknown_key_is_refused_with_its_place_and_the_nearest_known_one(key: str, near: str | None) -> None:
    shown = key if near is not None and near.count(".") == key.count(".") else key.split(".", maxsplit=1)[0]
    expected = f"did you mean {near!r}" if near is not None else "policies.main.optimizer.learning_rate"
    with pytest.raises(ConfigError, match="unknown key") as caught:
        parsed(f"{key}=1")
    assert expected in str(caught.value)
    assert shown in str(caught.value)
    assert "Known here: " in str(caught.value)


@pytest.mark.parametrize(("key", "near"), [("env.wals", "walls"), ("env.max_round", "max_rounds")])
def test_an_unknown_option_of_the_env_is_refused_with_the_nearest_one(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        check_env_fits(parsed(f"{key}=1"))


def test_an_unknown_env_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'plan_path'"):
        check_env_fits(parsed("env.name=planpath"))


# ---- values and combinations ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "place", "message"),
    [
        (["train.steps=0"], "train.steps", r"got 0"),
        (["train.steps=many"], "train.steps", r"got 'many'"),
        (["policies.main.optimizer.lr=0"], "policies.main.optimizer.lr", "greater than 0"),
        (["policies.main.optimizer.lr=nan"], "policies.main.optimizer.lr", "finite"),
        (["policies.main.optimizer.betas=[0.9, 1.0]"], "policies.main.optimizer.betas", "less than 1"),
        (["policies.main.dtype=float16"], "policies.main.dtype", "got 'float16'"),
        (["policies.main.train=half"], "policies.main.train", "got 'half'"),
        (["policies.main.train=lora", "policies.main.lora.rank=0"], "policies.main.lora.rank", "got 0"),
        (["policies.main.train=lora", "policies.main.lora.alpha=0"], "policies.main.lora.alpha", "greater than 0"),
        (["policies.main.train=lora", "policies.main.lora.target_modules=[]"], "target_modules", "at least 1"),
        (["policies.main.train=lora", "policies.main.lora.target_modules=all"], "target_modules", "got 'all'"),
        (["policies.main.update_every=0"], "policies.main.update_every", "got 0"),
        (["policies.main.train_until=-1"], "policies.main.train_until", "greater than or equal to 0"),
        (["policies.main.kl.coef=-1"], "policies.main.kl.coef", "greater than or equal to 0"),
        (["sampling.temperature=0"], "sampling.temperature", "greater than 0"),
        (["sampling.temperature=inf"], "sampling.temperature", "finite"),
        (["sampling.max_tokens=0"], "sampling.max_tokens", "got 0"),
        (["sampling.mode=forest"], "sampling.mode", "got 'forest'"),
        (["credit.scale=max"], "credit.scale", "got 'max'"),
        (["loss.clip_low=1"], "loss.clip_low", "less than 1"),
        (["eval.temperature=-0.1"], "eval.temperature", "greater than or equal to 0"),
        (["trackers=['excel']"], "trackers", "got 'excel'"),
        (["deterministic=false"], "deterministic", "got False"),
        (["seed=-1"], "seed", "greater than or equal to 0"),
        (["seed=9223372036854775808"], "seed", "less than 9223372036854775808"),
        (["sampling.stop=['']"], "sampling.stop.0", "at least 1 character"),  # it would end every answer at once
        (["sampling.roles.tool.stop=['x', '']"], "sampling.roles.tool.stop.1", "at least 1 character"),
        (["sampling.mode=chain", "credit.return=discounted", "credit.gamma=0"], "credit.gamma", "greater than 0"),
    ],
)
def test_a_value_out_of_range_is_refused_with_its_key(settings: list[str], place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^test recipe: .*{re.escape(place)}.*{message}"):
        parsed(*settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["team.tool=mian"], r"team.tool = 'mian': there is no such policy; known are \['main'\]; did you mean 'main'"),
        (
            ["policies.spare.model=tiny"],
            "no role uses this policy; name it in .* or remove it: --set policies.spare=null",
        ),
        (["sampling.roles.coder.max_tokens=3"], r"sampling.roles.coder: no such role in \[team\]"),
        (["sampling.num_candidates=1"], "a baseline needs at least 2 candidates.*Set it to 2 or more"),
        (["loss.aggregation=constant"], "loss.constant goes with loss.aggregation"),
        (["loss.constant=64"], "loss.constant goes with loss.aggregation"),
        (["credit.gamma=0.9"], 'only with credit.return = "discounted"; remove it or change return'),
        (["credit.return=final"], 'needs sampling.mode = "chain".*Use credit.return = "turn" or change the mode'),
        (["credit.return=discounted"], 'needs sampling.mode = "chain"'),
        (["credit.group_by=['task']"], 'group_by is read only with sampling.mode = "chain".*Remove it'),
        (["sampling.mode=chain", "sampling.select=best"], 'sampling.select is read only with sampling.mode = "tree"'),
        (["sampling.mode=chain", "sampling.select_temperature=2.0"], 'read only with sampling.mode = "tree"'),
        (["sampling.select_temperature=2.0"], 'read only with sampling.select = "sample"'),
        (["policies={}"], "policies: .*at least 1"),
        (
            ["policies.main.train=lora", "policies.main.lora.dropout=0.1"],
            "policies.main.lora: lora.dropout = 0.1: only 0 is possible, because what is sampled",
        ),
        (
            ["policies.main.lora.rank=4"],
            'policies.main: lora is read only with train = "lora", not "full"; change train',
        ),
        (
            ["policies.main.train=frozen", "policies.main.lora={}"],
            'lora is read only with train = "lora", not "frozen"',
        ),
        (["policies.main.train=frozen", "policies.main.update_every=2"], "update_every is not read with train"),
        (
            ["policies.main.train=frozen", "policies.main.gradient_checkpointing=true"],
            'gradient_checkpointing is not read with train = "frozen"; remove it or change train',
        ),
        (
            ["train.steps=3", "policies.main.update_every=4"],
            "policies.main would never be trained: its first update is in step 4 .*update_every, .*its last step is 3 ",
        ),
        (["train.steps=3", "policies.main.train_until=0"], "would never be trained.*its last step is 0.*set train ="),
        (["train.steps=9", "policies.main.train_until=2", "policies.main.update_every=3"], "would never be trained"),
        (["policies.main.update_every=2", "policies.main.update_offset=2"], "update_offset = 2 .*: expected 0 to 1"),
        (["policies.main.update_offset=1"], "update_offset = 1 .*update_every = 1: expected 0 to 0"),
        (["policies.main.train=frozen", "policies.main.update_offset=0"], "update_offset is not read with train"),
        (["train.steps=3", "policies.main.train_until=2"], "no policy would be trained in step 3 of 3: .*train_until"),
        (["train.steps=2", "policies.main.update_every=2"], "no policy would be trained in step 1 of 2"),
        (["team={}"], "team: .*at least 1"),
    ],
)
def test_options_that_cannot_go_together_are_refused_with_the_remedy(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)^test recipe: .*{message}"):
        parsed(*settings)


def test_a_run_of_any_length_is_read_at_once_and_its_turns_are_counted() -> None:
    turns = [
        f"policies.{name}={{model='tiny', update_every=2, update_offset={offset}, train_until={until}}}"
        for name, offset, until in (("main", 0, 10**12), ("tool", 1, 10**12), ("rest", 0, 10**13))
    ]
    with pytest.raises(ConfigError, match=f"no policy would be trained in step {10**12 + 2} of {2 * 10**12}"):
        parsed(f"train.steps={2 * 10**12}", *turns, "team={tool='tool', planner='main', third='rest'}")
    recipe = parsed(f"train.steps={10**12}", "policies.main.update_every=1")
    assert recipe.num_updates("main") == 10**12
    assert recipe.policies["main"].model_copy(update={"update_every": 3, "update_offset": 1}).num_updates(5) == 2


@pytest.mark.parametrize("missing", ["env", "policies", "team", "train"])
def test_a_missing_table_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=f"{missing}: Field required"):
        parse_recipe({key: value for key, value in MINIMAL.items() if key != missing}, "test recipe")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["team.coder=main"], r"team.coder: env 'plan_path' asks the roles \['tool', 'planner'\]"),
        (['env.roles=["planner"]'], r"team.tool: env 'plan_path' asks the roles \['planner'\]; no such role"),
        (["eval.split=dev"], "no split 'dev': expected one of"),
        (["eval.final_split=dev"], "no split 'dev': expected one of"),
    ],
)
def test_what_does_not_fit_the_env_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_env_fits(parsed(*settings))


def test_a_role_of_the_env_without_a_policy_is_refused() -> None:
    raw = {**MINIMAL, "team": {"tool": "main"}}
    with pytest.raises(ConfigError, match=r"role 'planner' of env 'plan_path' has no policy; add planner = "):
        check_env_fits(parse_recipe(raw, "test recipe"))


def test_one_candidate_is_fine_where_nobody_learns() -> None:
    assert parsed("sampling.num_candidates=1", "policies.main.train=frozen").trained_policies == ()


# ---- overriding -------------------------------------------------------------------------------------------------


def test_settings_are_toml_values_or_else_plain_strings() -> None:
    recipe = parsed(
        "train.steps=7", "policies.main.optimizer.lr=2e-5", "sampling.stop=['</a>', 'x=y']", "description=a b",
        "policies.main.template=plain", "trackers=[]", "sampling.roles.tool.max_tokens=9",
    )  # fmt: skip
    assert (recipe.train.steps, recipe.policies["main"].optimizer.lr) == (7, 2e-5)
    assert (recipe.sampling.stop, recipe.description, recipe.trackers) == (("</a>", "x=y"), "a b", ())
    assert recipe.policies["main"].template == "plain"
    assert recipe.sampling.roles["tool"].max_tokens == 9


def test_null_removes_a_key_or_a_table_and_there_must_be_one() -> None:
    raw = {"policies": {"old": {"model": "tiny"}}, "imitate": {"steps": 3, "lr": 0.1}}
    settings = ["policies.new.model=tiny", "policies.old=null", "imitate.lr=null"]
    assert override(raw, settings) == {"policies": {"new": {"model": "tiny"}}, "imitate": {"steps": 3}}
    assert override(raw, ["imitate=null"]) == {"policies": {"old": {"model": "tiny"}}}
    with pytest.raises(ConfigError, match=r"policies.odl=null'*: there is no such key to remove; here are \['old'\]"):
        override(raw, ["policies.odl=null"])


def test_overriding_changes_nothing_but_its_copy() -> None:
    before = json.dumps(MINIMAL)
    override(MINIMAL, ["train.steps=9", "policies.main.optimizer.lr=1"])
    assert json.dumps(MINIMAL) == before


@pytest.mark.parametrize("setting", ["train.steps", "=3", "train..steps=3", ".=3"])
def test_a_setting_that_is_no_setting_is_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"expected key=value, for example train\.steps=100"):
        override(MINIMAL, [setting])


def test_a_setting_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'steps' is a value, not a table"):
        override(MINIMAL, ["train.steps.more=1"])


# ---- files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_parses_is_short_and_reads_back_equal(path: Path, tmp_path: Path) -> None:
    recipe = read_recipe(path)
    assert len([line for line in path.read_text().splitlines() if line.strip()]) <= 40
    assert recipe.description
    resolved = tmp_path / "recipe.json"
    resolved.write_text(json.dumps(dump_recipe(recipe)))
    again = read_recipe(resolved)
    assert dump_recipe(again) == dump_recipe(recipe)
    assert again.model_dump() == recipe.model_dump()


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_fits_its_env_and_resolves_to_itself(path: Path) -> None:
    resolved = check_env_fits(read_recipe(path))
    assert dump_recipe(check_env_fits(parse_recipe(dump_recipe(resolved), "resolved"))) == dump_recipe(resolved)


def test_there_are_shipped_recipes() -> None:
    assert RECIPES != []


@pytest.mark.parametrize(
    "settings",
    [
        ["sampling.mode=chain", "credit.group_by=['task']", "credit.return=final"],
        ["sampling.mode=chain", "credit.return=discounted", "credit.gamma=0.9"],
        ["sampling.select=sample", "sampling.select_temperature=0.5"],
        ["loss.aggregation=constant", "loss.constant=64", "loss.importance_cap=2.0"],
        ["policies.main.train=lora", "policies.main.lora.target_modules=['c_fc']", "policies.main.train_until=99"],
        ["imitate.steps=3", "policies.main.kl.coef=0.1", "train.threads=1", "sampling.roles.tool.stop=['.']"],
    ],
)
def test_a_resolved_recipe_shows_every_default_and_reads_back_equal(settings: list[str]) -> None:
    recipe = parsed(*settings)
    resolved = json.loads(json.dumps(dump_recipe(recipe)))
    assert parse_recipe(resolved, "resolved").model_dump() == recipe.model_dump()
    assert resolved["policies"]["main"]["optimizer"]["eps"] == 1e-8
    assert resolved["credit"]["return"] == recipe.credit.returns
    assert resolved["eval"]["final_tasks"] == 1000


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "train = ", "is not valid TOML"),
        ("a.json", "{", "is not valid JSON"),
        ("a.json", "[1]", "expected a table at the top, got list"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_its_path(name: str, text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"{name}.*{message}"):
        read_recipe(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read recipe"):
        read_recipe(tmp_path / "absent.toml")


def test_an_adapter_has_its_defaults_written_out_and_other_policies_have_none() -> None:
    resolved = dump_recipe(parsed("policies.main.train=lora", "policies.other.model=tiny", "team.tool=other"))
    expected = {"rank": 8, "alpha": 16.0, "target_modules": "all-linear", "dropout": 0.0}
    assert resolved["policies"]["main"]["lora"] == expected
    assert resolved["policies"]["other"]["lora"] is None


# ---- every key is read ------------------------------------------------------------------------------------------


def fields() -> Iterator[tuple[str, str]]:
    """Yield (table, field) of every table of the recipe."""
    for table in vars(config).values():
        if isinstance(table, type) and issubclass(table, BaseModel) and table not in (BaseModel, Table):
            for name in table.model_fields:
                yield table.__name__, name


UNREAD = {
    ("Recipe", "deterministic"): "has one legal value; it says what is promised",
}


@pytest.mark.parametrize(("table", "name"), sorted(fields()))
def test_every_key_of_every_table_is_read_by_someone(table: str, name: str) -> None:
    """Invariant 10: an attribute access of that name outside config.py."""
    if (table, name) in UNREAD:
        assert "Literal[True]" in str(Recipe.model_fields[name].annotation).replace("typing.", "")
        return
    sources = [path for path in (ROOT / "src" / "coterie").rglob("*.py") if path.name != "config.py"]
    assert any(re.search(rf"\.{name}\b", path.read_text(encoding="utf-8")) for path in sources), f"{table}.{name}"
