"""Where recipes are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.config import read_recipe
from coterie.errors import ConfigError
from coterie.lineup import check_env_fits
from coterie.shipped import description_of, locate, shipped_recipe, shipped_recipes

ROOT = Path(__file__).parent.parent


def test_every_recipe_of_the_source_tree_is_shipped_under_its_file_name() -> None:
    assert set(shipped_recipes()) == {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    assert "plan_path-tiny" in shipped_recipes()


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_every_shipped_recipe_is_valid_short_and_says_what_it_is(name: str) -> None:
    path = shipped_recipe(name)
    recipe = check_env_fits(read_recipe(path))
    assert recipe.description == description_of(path) != ""
    assert path.read_text(encoding="utf-8").count("\n") <= 45


def test_an_unknown_name_names_the_near_ones() -> None:
    with pytest.raises(ConfigError, match=r"no recipe 'plan_path-tinny'.*did you mean 'plan_path-tiny'"):
        shipped_recipe("plan_path-tinny")


def test_a_name_like_no_other_lists_what_is_shipped() -> None:
    with pytest.raises(ConfigError, match=r"shipped are \[.*'plan_path-tiny'"):
        shipped_recipe("zzz")


def test_a_run_folder_a_file_and_a_shipped_name_are_told_apart(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.json").write_text("{}")
    file = tmp_path / "mine.toml"
    file.write_text("")
    assert (locate(str(run)).run_dir, locate(str(run)).name) == (run, "run")
    assert (locate(str(file)).run_dir, locate(str(file)).recipe, locate(str(file)).name) == (None, file, "mine")
    assert locate(str(run / "recipe.json")).name == "run"
    assert locate("plan_path-tiny").recipe == shipped_recipe("plan_path-tiny")


def test_a_folder_of_the_current_directory_does_not_hide_a_shipped_recipe_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan_path-tiny").mkdir()
    assert locate("plan_path-tiny").recipe == shipped_recipe("plan_path-tiny")


def test_a_missing_file_and_a_folder_without_a_run_say_which_it_was(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no file .*gone\.toml"):
        locate(str(tmp_path / "gone.toml"))
    with pytest.raises(ConfigError, match=r"holds no run: recipe\.json is missing"):
        locate(str(tmp_path))
