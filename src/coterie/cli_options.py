"""What the commands of the command line have in common: arguments, options, and how failures of episodes are told."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from coterie.shipped import Source, locate

RUNS = Path("runs")
"""Where runs go that are not told where."""


class Which(StrEnum):
    """Which checkpoint of a run."""

    LAST = "last"
    BEST = "best"


RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")]
AnyArgument = Annotated[
    str, typer.Argument(metavar="RECIPE|RUN", help="A run folder, a recipe file, or the name of a shipped recipe.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, as in --set train.steps=100.")
]
Out = Annotated[Path | None, typer.Option(help="The folder to write to; new or empty.")]
Checkpoint = Annotated[Which | None, typer.Option(help="Of a RUN: which checkpoint (default: last).")]


def find(text: str) -> Source:
    """Return what RECIPE or RUN stands for; the modules beside a recipe file can then be named as its env."""
    source = locate(text)
    folder = str(source.recipe.resolve().parent)
    if source.run_dir is None and folder not in sys.path:
        sys.path.append(folder)
    return source


def tell(kind: str, fields: Mapping[str, str | int]) -> None:
    """Say what went wrong in an episode, without its traceback."""
    shown = ", ".join(f"{key}: {value}" for key, value in fields.items() if key != "traceback")
    typer.echo(f"{kind}: {shown}", err=True)
