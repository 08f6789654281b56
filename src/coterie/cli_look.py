"""The commands that only look: ``check``, ``recipes``, ``envs`` and ``check-env``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.cli_options import AnyArgument, Settings, find
from coterie.config import Recipe, read_recipe
from coterie.errors import ConfigError
from coterie.shipped import description_of, paper_recipes, shipped_recipes


def check(
    recipe: AnyArgument,
    settings: Settings = None,
    offline: Annotated[
        bool,
        typer.Option("--offline", help="Load no model: count by the published dimensions of those that are known."),
    ] = False,
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Measure the peak of memory: run each phase at full size. Takes a while."),
    ] = False,
) -> None:
    """Load everything a recipe names, and print it with every default, its tokens per step and its memory."""
    from coterie.cluster.entry import check_placement
    from coterie.dry_play import check_prompts
    from coterie.estimate import load_table, memory_table, placement_table, policy_memory, recipe_table, role_loads
    from coterie.lineup import assemble, check_env_fits
    from coterie.memory import measure, peaks_table
    from coterie.trackers import check_trackers

    source = find(recipe)
    written = read_recipe(source.recipe, settings or ())
    check_trackers(written.trackers)
    if offline and memory:
        raise ConfigError("--memory runs the models, and --offline loads none; give one of the two")
    if offline:
        _check_offline(written, str(source.recipe))
        return
    resolved = check_env_fits(written)
    lineup = assemble(resolved)
    check_prompts(lineup, "train", resolved.eval.final_split)
    loads = role_loads(lineup)
    places = check_placement(lineup)
    console = Console()
    for table in (
        recipe_table(written, resolved),
        load_table(loads, resolved),
        memory_table([policy_memory(lineup, name) for name in resolved.policies]),
        *([placement_table(places)] if places else []),
    ):
        console.print(table, crop=False)  # what is too wide for the terminal is wrapped by it, and not lost
    if memory:
        console.print(peaks_table(measure(lineup, lambda phase: console.print(f"measuring: {phase}"))), crop=False)
    what = "trained" if resolved.trained_policies else "played; none of its policies is trained"
    console.print(Text(f"{source.recipe} is a recipe that can be {what}"), soft_wrap=True)


def _check_offline(written: Recipe, source: str) -> None:
    from coterie.estimate import recipe_table
    from coterie.lineup import check_env_fits
    from coterie.published import NOT_VERIFIED, offline_tables, without_data

    made, data = without_data(written)
    resolved = check_env_fits(made)
    shown = resolved.env.model_copy(update=written.env.options) if data else resolved.env
    console = Console()
    for table in (recipe_table(written, resolved.model_copy(update={"env": shown})), *offline_tables(resolved)):
        console.print(table, crop=False)
    console.print(Text("Not verified:"))
    unread = [f"the data of {', '.join(data)}: nothing was read, prompts are those of made problems"] if data else []
    for line in (*NOT_VERIFIED, *unread):
        console.print(Text(f"- {line}"), soft_wrap=True)
    console.print(Text(f"{source} is a recipe; whether it can be trained is not known"), soft_wrap=True)


def recipes() -> None:
    """List the shipped recipes."""
    table = Table("recipe", "what it trains", box=None, pad_edge=False)
    for name, path in (shipped_recipes() | paper_recipes()).items():
        table.add_row(name, Text(description_of(path)))
    Console().print(table)


def envs() -> None:
    """List the environments that come with Coterie: their roles, and their options with defaults."""
    from coterie.display import titled
    from coterie.env import BUILT_IN, env_class

    console = Console()
    for name in BUILT_IN:
        cls = env_class(name)
        table = Table("option", "default", "meaning")
        for option, field in cls.Options.model_fields.items():
            default = "(none)" if field.default is None else str(field.default)
            table.add_row(option, default, Text((field.description or "").replace("``", "").replace("\n", " ")))
        console.print(titled(f"{name}, played by {', '.join(cls.roles)}", table))


def check_env_contract(
    env: Annotated[str, typer.Argument(metavar="NAME|MODULE:CLASS", help="The environment to test.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Set an option of it, as in --set size=5.")
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, help="How many training tasks to test with.")] = 3,
) -> None:
    """Test an environment against the contract; exit code 1 where a check fails."""
    from coterie.config import override
    from coterie.testing import check_env

    results = check_env(env, override({}, settings or ()), tasks=tasks)
    for result in results:
        typer.echo(f"{'ok  ' if result.passed else 'FAIL'}  {result.name}: {result.message}")
    if not all(result.passed for result in results):
        raise typer.Exit(1)
