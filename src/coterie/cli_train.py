"""The commands that train: ``train``, ``demo`` and ``imitate``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from coterie.cli_options import RUNS, AnyArgument, Out, RecipeArgument, Settings, find, tell
from coterie.config import Recipe, read_recipe
from coterie.errors import ConfigError

if TYPE_CHECKING:
    from coterie.train import Listener
    from coterie.types import Json


def train(
    recipe: AnyArgument,
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out (or in RUN).")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="With --resume: go on although the recipe differs.")
    ] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Show where the time went; profile.json has it.")] = False,
) -> None:
    """Train a recipe into a new folder, or go on with a run."""
    source = find(recipe)
    if not resume:
        if accept_changes:
            raise ConfigError("--accept-changes goes with --resume")
        if source.run_dir is not None and out is None:
            raise ConfigError(f"{source.run_dir} is a run already: add --resume to go on, or --out to start anew")
        _train(read_recipe(source.recipe, settings or ()), out or RUNS / source.name, profile)
        return
    run_dir = out or source.run_dir or RUNS / source.name
    is_own = source.run_dir is not None and source.run_dir.resolve() == run_dir.resolve()
    compared = None if is_own and not settings else read_recipe(source.recipe, settings or ())
    _resume(run_dir, compared, accept_changes, profile)


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Another seed: other maps, other random choices.")] = 0,
    out: Out = None,
    settings: Settings = None,
) -> None:
    """Train a small team from nothing in minutes, on this machine's CPU, and show what it learned."""
    recipe = read_recipe(find("plan_path-tiny").recipe, [f"seed={seed}", *(settings or ())])
    run_dir = out or _free_demo()
    console = Console()
    console.print(
        Text(
            "A team of two learns to find paths: a tool drafts moves, a planner sees where they lead and decides.\n"
            f"{recipe.description}. Everything is written to {run_dir}.\n"
        )
    )
    if out is None and (run_dir / "recipe.json").is_file():
        console.print(Text(f"{run_dir} was stopped before its end: going on with it.\n"))
        _resume(run_dir, recipe, accept_changes=False)
    else:
        _train(recipe, run_dir)


def _free_demo() -> Path:
    """Return the first of runs/demo, runs/demo-2, ... that does not hold a finished run or other files."""
    number = 1
    while True:
        run_dir = RUNS / ("demo" if number == 1 else f"demo-{number}")
        unfinished = (run_dir / "recipe.json").is_file() and not (run_dir / "summary.json").exists()
        if unfinished or not run_dir.exists() or not any(run_dir.iterdir()):
            return run_dir
        number += 1


def _train(recipe: Recipe, run_dir: Path, profile: bool = False) -> None:
    """Train from the beginning; what cannot work is refused before anything is shown."""
    from coterie.lineup import check_env_fits
    from coterie.runs import refuse_begun, start

    refuse_begun(run_dir)
    check_env_fits(recipe)
    _profiled(run_dir, profile, lambda: _watch(recipe, run_dir, False, lambda told: start(recipe, run_dir, told)))


def _resume(run_dir: Path, compared: Recipe | None, accept_changes: bool, profile: bool = False) -> None:
    """Go on with a run."""
    from coterie.runs import RECIPE, is_finished, resume

    if not (run_dir / RECIPE).is_file():
        raise ConfigError(f"{run_dir} holds no run ({RECIPE} is missing); leave --resume out to start one")
    recipe = compared or read_recipe(run_dir / RECIPE)
    if is_finished(run_dir, compared):
        steps = recipe.train.steps
        for line in (
            f"{run_dir} is finished, all {steps} steps are made; nothing was changed",
            f"results:      {run_dir / 'summary.json'}, {run_dir / 'curves.png'}",
            f"to train on:  coterie train {run_dir} --resume --accept-changes --set train.steps={2 * steps}",
        ):
            Console().print(Text(line), soft_wrap=True)
        return
    _profiled(
        run_dir,
        profile,
        lambda: _watch(recipe, run_dir, True, lambda told: resume(run_dir, compared, told, accept_changes)),
    )


def _profiled(run_dir: Path, profile: bool, go: Callable[[], None]) -> None:
    """Run a training; with ``profile`` show where its time went and write it into the run's folder."""
    if not profile:
        go()
        return
    from coterie.display import spent_table
    from coterie.durable import atomic_write_json
    from coterie.spent import profiling

    with profiling() as spent:
        go()
    atomic_write_json(run_dir / "profile.json", {"seconds": dict(spent.seconds)})
    Console().print(spent_table(spent.seconds))


def _watch(recipe: Recipe, run_dir: Path, resumed: bool, go: Callable[[Listener], Mapping[str, Json]]) -> None:
    """Run a training with its progress shown, then its result and where things are."""
    from coterie.display import RunDisplay, before_after
    from coterie.runs import StopRequestedError
    from coterie.train import Listener

    console = Console()
    display = RunDisplay(console, recipe, resumed=resumed)
    try:
        with display:
            summary = go(Listener(step=display.step, score=display.score, imitate=display.imitate, stop=display.stop))
    except StopRequestedError as stop:
        typer.echo(f"stopped by {stop}; to go on: coterie train {run_dir} --resume", err=True)
        raise typer.Exit(stop.exit_code) from None
    console.print(before_after(summary))
    lines = [
        f"{summary['steps']} steps, {summary['minutes']} minutes of training; everything is in {run_dir}",
        f"curves:              {run_dir / 'curves.png'}",
        f"see an episode:      coterie play {run_dir} --task 0",
        f"evaluate once more:  coterie eval {run_dir}",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def imitate(recipe: RecipeArgument, settings: Settings = None, out: Out = None) -> None:
    """Make the supervised warm start only, and write the policies as folders that a recipe can name as models."""
    from coterie.display import RunDisplay
    from coterie.durable import check_writable
    from coterie.imitate import warm_start
    from coterie.lineup import assemble, check_env_fits
    from coterie.models.loading import save
    from coterie.runs import refuse_used

    source = find(recipe)
    folder = out or RUNS / f"{source.name}-imitated"
    refuse_used(folder)
    lineup = assemble(check_env_fits(read_recipe(source.recipe, settings or ())))
    if lineup.recipe.imitate is None:
        raise ConfigError(f"{source.recipe} has no [imitate] table; add one, or --set imitate.steps=300")
    check_writable(folder)
    console = Console()
    with RunDisplay(console, lineup.recipe) as display:
        losses = warm_start(lineup, tell, lambda: None, display.imitate)
    written: dict[int, Path] = {}
    for name, loss in losses.items():
        model = lineup.policies[name].model
        if id(model) not in written:
            written[id(model)] = folder / name
            save(lineup.loaded[name], folder / name, weights=lineup.policies[name].model_weights())
        console.print(Text(f'{name}: loss {loss:.3f}; in a recipe: model = "{written[id(model)]}"'), soft_wrap=True)
