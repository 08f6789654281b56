"""Where a recipe is found: the shipped ones by name, and what RECIPE may be on the command line."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from pathlib import Path

from coterie.errors import ConfigError

RECIPE_JSON = "recipe.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a recipe argument stands for: the file to read, the run folder if it is one's, and a name for results."""

    recipe: Path
    run_dir: Path | None
    name: str


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name: those in the wheel, else those of the source tree."""
    return {path.stem: path for path in sorted(_folder().glob("*.toml"))}


def paper_recipes() -> dict[str, Path]:
    """Return the recipes with the paper's settings, by name (``paper/...``); their models are large and not here."""
    return {f"paper/{path.stem}": path for path in sorted((_folder() / "paper").glob("*.toml"))}


def published_files() -> list[Path]:
    """Return the files with the published dimensions of models."""
    return sorted((_folder() / "paper" / "models").glob("*.json"))


def _folder() -> Path:
    here = Path(__file__).resolve().parent
    packaged, source_tree = here / "recipes", here.parent.parent / "recipes"
    return packaged if packaged.is_dir() else source_tree


def shipped_recipe(name: str) -> Path:
    """Return the file of a shipped recipe; ``ConfigError`` names the nearest ones, or all."""
    known = shipped_recipes() | paper_recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"shipped are {sorted(known)}"
        raise ConfigError(f"no recipe {name!r}: it is no file, no run folder and no shipped recipe; {hint}")
    return known[name]


def description_of(path: Path) -> str:
    """Return the description of a recipe file, "" where it has none."""
    return str(tomllib.loads(path.read_text(encoding="utf-8")).get("description", ""))


def locate(text: str) -> Source:
    """Return what RECIPE stands for: a run folder, a file, or the name of a shipped recipe, tried in this order."""
    path = Path(text).expanduser()
    if (path / RECIPE_JSON).is_file():
        return Source(recipe=path / RECIPE_JSON, run_dir=path, name=path.resolve().name)
    if path.is_file():
        return Source(
            recipe=path, run_dir=None, name=path.resolve().parent.name if path.name == RECIPE_JSON else path.stem
        )
    if path.is_dir() and text not in shipped_recipes():
        raise ConfigError(f"{path} holds no run: {RECIPE_JSON} is missing; give a recipe file or a folder of a run")
    if path.suffix in (".toml", ".json"):
        raise ConfigError(f"there is no file {path}; `coterie recipes` lists the shipped ones, which need no path")
    return Source(recipe=shipped_recipe(text), run_dir=None, name=text)
