"""What README and docs say is true: their Python runs, their recipes parse, their commands exist, their links lead.

The rules for blocks, in the order of their languages (CONTRIBUTING.md says the same)::

    python          runs, in an empty folder; the blocks of one page share their names
    py              is only shown; it must compile
    toml            is a whole recipe; or, beginning with "# part of NAME", is laid over the shipped recipe NAME
    sh              lines with coterie and make are parsed, files after python exist
    text            is free
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer._click.exceptions import UsageError

from coterie.cli import app
from coterie.config import KLTable, OptimizerTable, PolicyTable, Recipe, override, parse_recipe, read_recipe
from coterie.env import BUILT_IN, env_class
from coterie.errors import ConfigError
from coterie.hardware import HardwareTable, PolicyHardware
from coterie.lineup import check_env_fits
from coterie.run_tables import (
    CreditTable,
    EvalTable,
    ImitateTable,
    LossTable,
    RoleSampling,
    SamplingTable,
    SandboxTable,
    TrainTable,
)
from coterie.shipped import shipped_recipe, shipped_recipes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "py", "toml", "sh", "text"}
PART = re.compile(r"# part of ([\w-]+)")


def blocks(path: Path, language: str | None = None) -> list[tuple[str, str]]:
    """Return (language, text) of the fenced blocks of a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [(name, text) for name, text in found if language in (None, name)]


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def having(language: str) -> list[Path]:
    """Return the pages with a block of a language."""
    return [path for path in PAGES if blocks(path, language)]


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def part_of(text: str) -> str | None:
    """Return the recipe that a block is a part of, ``None`` for a whole one."""
    match = PART.match(text)
    return match[1] if match else None


def merged(base: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe with a part laid over it key by key.

    A [team] replaces that of the base; policies of the base that no role uses any more go.
    """

    def over(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
        both = {key: over(low[key], high[key]) for key in low.keys() & high.keys() if isinstance(high[key], dict)}
        return {**low, **high, **both}

    if "team" in part:
        base = {**base, "team": {}}
    result = over(base, part)
    used = {*result["team"].values(), *part.get("policies", {})}
    result["policies"] = {name: table for name, table in result["policies"].items() if name in used}
    return result


def recipe_of(text: str, where: str) -> Recipe:
    """Return the checked recipe of a block."""
    raw, base = tomllib.loads(text), part_of(text)
    if base is not None:
        raw = merged(tomllib.loads(shipped_recipe(base).read_text(encoding="utf-8")), raw)
    recipe = parse_recipe(raw, where)
    return check_env_fits(recipe) if recipe.env.name in BUILT_IN else recipe


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each line of a shell block; a backslash continues a line, comments are left out."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def parse_command(words: list[str]) -> None:
    """Have the command line parse ``coterie ...``; recipes it names by their shipped name must be there and take --set.

    Raises the parser's own error, ``ConfigError``, or ``KeyError`` for a command that does not exist.
    """
    group: Any = typer.main.get_command(app)
    if words[1].startswith("-"):
        group.make_context("coterie", words[1:], resilient_parsing=True)
        return
    context = group.commands[words[1]].make_context(words[1], words[2:])
    name = context.params.get("recipe") or context.params.get("source")
    settings = context.params.get("settings") or []
    if name is None or "/" in name or name.endswith((".toml", ".json")):
        override({}, settings)
    else:
        read_recipe(shipped_recipe(name), settings)


def make_targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def check_shell(text: str) -> None:
    for words in commands(text):
        if words[0] == "coterie":
            parse_command(words)
        elif words[0] == "make":
            assert set(words[1:]) <= make_targets(), f"make has no target {words[1:]}"
        elif words[0] == "python" and words[1].endswith(".py"):
            assert (ROOT / words[1]).is_file(), words


# ---- the blocks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_blocks_are_of_known_languages(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert {language for language, _ in blocks(path)} <= LANGUAGES, "a block without a language is checked by nobody"
    assert text.count("\n```") + text.startswith("```") == 2 * len(blocks(path)), "a fence is open or indented"


@pytest.mark.parametrize("path", having("python"), ids=names(having("python")))
def test_python_blocks_run_one_after_the_other(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(path, "python")
    monkeypatch.chdir(tmp_path)
    page = tmp_path / f"{path.stem}.py"
    page.write_text("\n".join(text for _, text in found), encoding="utf-8")
    assert runpy.run_path(str(page), run_name="__main__")


@pytest.mark.parametrize("path", having("py"), ids=names(having("py")))
def test_python_that_is_only_shown_compiles(path: Path) -> None:
    for _, text in blocks(path, "py"):
        assert ast.parse(text).body


@pytest.mark.parametrize("path", having("toml"), ids=names(having("toml")))
def test_toml_blocks_are_recipes_or_parts_of_shipped_ones(path: Path) -> None:
    for _, text in blocks(path, "toml"):
        assert recipe_of(text, path.name).team


@pytest.mark.parametrize("path", having("sh"), ids=names(having("sh")))
def test_shell_lines_are_understood_by_the_command_line_itself(path: Path) -> None:
    for _, text in blocks(path, "sh"):
        check_shell(text)


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_commands_within_sentences_are_understood_too(path: Path) -> None:
    for command in re.findall(r"`((?:coterie|make) [^`]+)`", prose(path)):
        # RECIPE, RUN, DIR and the like stand for something; a command named alone is only looked up
        words = shlex.split(command)
        if words[0] == "coterie" and words[1][0] != "-" and (len(words) == 2 or any(word.isupper() for word in words)):
            group: Any = typer.main.get_command(app)
            assert words[1] in group.commands, command
        else:
            check_shell(command)


# ---- links and words -------------------------------------------------------------------------------------------------


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as code hosts make them."""
    heads = re.findall(r"^#+ (.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_every_relative_link_leads_to_a_file_of_the_project(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.is_relative_to(ROOT), f"{link} leaves the project"
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


@pytest.mark.parametrize("path", PAGES, ids=names(PAGES))
def test_pages_name_no_place_outside_of_the_project(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.~])/(?:home|work|root|mnt|tmp|Users)\b", text) == []
    assert re.findall(r"(?i)\bissue #?\d+|\bTODO\b|\bFIXME\b", text) == []


def test_every_page_of_the_docs_is_in_their_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", index))


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_the_environment_of_the_readme_is_short_and_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(_, text)] = blocks(ROOT / "README.md", "python")
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 28
    assert "assert_env(" in text, "the block itself checks the contract, and it runs above"


# ---- tables of keys --------------------------------------------------------------------------------------------------

TABLES: dict[str, type[BaseModel]] = {
    "The recipe itself": Recipe,
    "[policies.NAME]": PolicyTable,
    "[policies.NAME.optimizer]": OptimizerTable,
    "[policies.NAME.kl]": KLTable,
    "[sampling]": SamplingTable,
    "[sampling.roles.ROLE]": RoleSampling,
    "[credit]": CreditTable,
    "[loss]": LossTable,
    "[train]": TrainTable,
    "[eval]": EvalTable,
    "[sandbox]": SandboxTable,
    "[imitate]": ImitateTable,
    "[hardware]": HardwareTable,
    "[hardware.policies.NAME]": PolicyHardware,
}


def section_rows(path: Path, heading: str) -> dict[str, str]:
    """Return key -> default of the table under a heading; every row has a meaning too."""
    text = path.read_text(encoding="utf-8")
    match = re.search(rf"^## `?{re.escape(heading)}`?$(.*?)(?=^## |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    assert match, f"{path.name} has no section {heading}"
    found = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.+) \|$", match[1], flags=re.MULTILINE)
    assert all(meaning.strip() for _, _, meaning in found)
    assert len({key for key, _, _ in found}) == len(found)
    return {key: default.strip("`") for key, default, _ in found}


def shown(field: FieldInfo) -> str:
    """Return a default as a recipe would write it."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True) if field.default is PydanticUndefined else field.default
    if isinstance(value, BaseModel):
        return "see below"
    return "none" if value is None else json.dumps(value, default=list)


def expected_rows(model: type[BaseModel]) -> dict[str, str]:
    return {field.alias or name: shown(field) for name, field in model.model_fields.items()}


@pytest.mark.parametrize("heading", TABLES)
def test_the_page_of_recipes_has_every_key_with_its_default_and_no_other(heading: str) -> None:
    assert section_rows(ROOT / "docs" / "recipes.md", heading) == expected_rows(TABLES[heading])


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_page_of_environments_has_every_option_with_its_default_and_no_other(name: str) -> None:
    options = {"roles": "none"} | expected_rows(env_class(name).Options)
    assert section_rows(ROOT / "docs" / "environments.md", name) == options


def test_the_page_of_runs_has_every_number_of_a_metrics_row() -> None:
    text = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    source = "".join((ROOT / "src" / "coterie" / f"{name}.py").read_text(encoding="utf-8") for name in ("train",))
    keys = set(re.findall(r'^        "([\w/]+)":', source, flags=re.MULTILINE)) | {"updates_skipped", "updates_empty"}
    policy = {"version", "loss", "grad_norm", "entropy", "clip_fraction", "mismatch", "kl", "importance_capped", "lr"}
    missing = {key for key in keys | policy | {"changed", "reward/ROLE", "tokens/ROLE"} if f"`{key}`" not in text}
    assert len(keys) > 15
    assert missing == set()


# ---- the kinds of fault these tests are for --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        "coterie trian plan_path-tiny",
        "coterie train",
        "coterie train plan_path-tiny --outt runs/x",
        "coterie train plan_path-tiny --set train.stepss=3",
        "coterie train no-such-recipe",
        "coterie eval runs/x --tasks many",
        "make everything",
        "python examples/missing.py",
    ],
)
def test_a_wrong_shell_line_would_be_found(line: str) -> None:
    kinds = (AssertionError, KeyError, ConfigError, UsageError)
    with pytest.raises(kinds):
        check_shell(line)


@pytest.mark.parametrize(
    "text",
    [
        "# part of plan_path-tiny\n[train]\nstepss = 3\n",
        "# part of no-such\n[train]\nsteps = 3\n",
        "[train]\nsteps = 3\n",
        '# part of plan_path-tiny\n[env]\nstyle = "other"\n',
        '# part of plan_path-tiny\n[policies.extra]\nmodel = "tiny"\n',
    ],
)
def test_a_wrong_recipe_block_would_be_found(text: str) -> None:
    with pytest.raises(ConfigError):
        recipe_of(text, "here")


def test_a_part_replaces_policies_that_its_team_does_not_use() -> None:
    policies = '[policies.a]\nmodel = "tiny"\n[policies.b]\nmodel = "tiny"\n'
    text = f'# part of plan_path-tiny\n{policies}[team]\ntool = "a"\nplanner = "b"\n'
    recipe = recipe_of(text, "here")
    assert sorted(recipe.policies) == ["a", "b"]
    assert recipe.train.steps == read_recipe(shipped_recipes()["plan_path-tiny"]).train.steps
