"""The command line. Exit codes: 0 done, 1 the run failed, 2 something given cannot work, 128 + n stopped by signal n.

Modules that import torch are imported inside the commands, so that ``coterie --help`` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from coterie.config import Recipe, read_recipe
from coterie.errors import ConfigError, CoterieError
from coterie.shipped import Source, description_of, locate, shipped_recipes

if TYPE_CHECKING:
    from coterie.lineup import Lineup
    from coterie.train import Listener
    from coterie.types import Json

_RUNS = Path("runs")


class _Commands(TyperGroup):
    """Turns Coterie's own errors into a message and an exit code; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error
        except CoterieError as error:
            typer.echo(f"{type(error).__name__}: {error}", err=True)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Trains teams of language-model agents with on-policy reinforcement learning (AT-GRPO).",
)


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


def main() -> None:
    """Run the command line; modules of the current folder can be named as envs."""
    sys.path.append(os.getcwd())
    app()


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"coterie {importlib.metadata.version('coterie')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,  # noqa: ARG001
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


# ---- training -----------------------------------------------------------------------------------------------------


@app.command()
def train(
    recipe: AnyArgument,
    settings: Settings = None,
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out (or in RUN).")] = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="With --resume: go on although the recipe differs.")
    ] = False,
) -> None:
    """Train a recipe into a new folder, or go on with a run."""
    source = locate(recipe)
    if not resume:
        if accept_changes:
            raise ConfigError("--accept-changes goes with --resume")
        if source.run_dir is not None and out is None:
            raise ConfigError(f"{source.run_dir} is a run already: add --resume to go on, or --out to start anew")
        _train(read_recipe(source.recipe, settings or ()), out or _RUNS / source.name)
        return
    run_dir = out or source.run_dir or _RUNS / source.name
    is_own = source.run_dir is not None and source.run_dir.resolve() == run_dir.resolve()
    compared = None if is_own and not settings else read_recipe(source.recipe, settings or ())
    _resume(run_dir, compared, accept_changes)


@app.command()
def demo(
    seed: Annotated[int, typer.Option(min=0, help="Another seed: other maps, other random choices.")] = 0,
    out: Out = None,
    settings: Settings = None,
) -> None:
    """Train a small team from nothing in minutes, on this machine's CPU, and show what it learned."""
    recipe = read_recipe(locate("plan_path-tiny").recipe, [f"seed={seed}", *(settings or ())])
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
        run_dir = _RUNS / ("demo" if number == 1 else f"demo-{number}")
        unfinished = (run_dir / "recipe.json").is_file() and not (run_dir / "summary.json").exists()
        if unfinished or not run_dir.exists() or not any(run_dir.iterdir()):
            return run_dir
        number += 1


def _train(recipe: Recipe, run_dir: Path) -> None:
    """Train from the beginning; what cannot work is refused before anything is shown."""
    from coterie.lineup import check_env_fits
    from coterie.runs import refuse_used, start

    refuse_used(run_dir)
    check_env_fits(recipe)
    _watch(recipe, run_dir, False, lambda listener: start(recipe, run_dir, listener))


def _resume(run_dir: Path, compared: Recipe | None, accept_changes: bool) -> None:
    """Go on with a run."""
    from coterie.runs import RECIPE, resume

    if not (run_dir / RECIPE).is_file():
        raise ConfigError(f"{run_dir} holds no run ({RECIPE} is missing); leave --resume out to start one")
    recipe = compared or read_recipe(run_dir / RECIPE)
    _watch(recipe, run_dir, True, lambda listener: resume(run_dir, compared, listener, accept_changes))


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


@app.command()
def imitate(recipe: RecipeArgument, settings: Settings = None, out: Out = None) -> None:
    """Make the supervised warm start only, and write the policies as folders that a recipe can name as models."""
    from coterie.display import RunDisplay
    from coterie.durable import check_writable
    from coterie.imitate import warm_start
    from coterie.lineup import assemble, check_env_fits
    from coterie.models.loading import save
    from coterie.runs import refuse_used

    source = locate(recipe)
    folder = out or _RUNS / f"{source.name}-imitated"
    refuse_used(folder)
    lineup = assemble(check_env_fits(read_recipe(source.recipe, settings or ())))
    if lineup.recipe.imitate is None:
        raise ConfigError(f"{source.recipe} has no [imitate] table; add one, or --set imitate.steps=300")
    check_writable(folder)
    console = Console()
    with RunDisplay(console, lineup.recipe) as display:
        losses = warm_start(lineup, _tell, lambda: None, display.imitate)
    for name, loss in losses.items():
        save(lineup.loaded[name], folder / name)
        console.print(Text(f'{name}: loss {loss:.3f}; in a recipe: model = "{folder / name}"'), soft_wrap=True)


# ---- playing ------------------------------------------------------------------------------------------------------


@app.command("eval")
def evaluate_team(
    source: AnyArgument,
    split: Annotated[str | None, typer.Option(help="Default: the recipe's eval.final_split.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Default: the recipe's eval.final_tasks.")] = None,
    plays: Annotated[int | None, typer.Option(min=1, help="Plays of each task; default: the recipe's.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; default: the recipe's.")] = None,
    checkpoint: Checkpoint = None,
    save: Annotated[Path | None, typer.Option(help="Append the numbers as one JSON line to this file.")] = None,
    settings: Settings = None,
) -> None:
    """Evaluate by plain play: one answer per act, nothing chosen by reward. A RECIPE plays untrained."""
    from coterie.display import score_table
    from coterie.durable import json_text
    from coterie.evaluate import evaluate

    if save is not None and not save.resolve().parent.is_dir():
        raise ConfigError(f"--save {save}: there is no folder {save.resolve().parent}")
    given = {"final_split": split, "final_tasks": tasks, "plays": plays, "temperature": temperature}
    own = [f"eval.{key}={value}" for key, value in given.items() if value is not None]
    lineup = _lineup(locate(source), checkpoint, [*(settings or ()), *own])
    table, console = lineup.recipe.eval, Console()
    with console.status(f"{table.final_tasks} tasks of {table.final_split}, {table.plays} plays each"):
        score, _ = evaluate(
            lineup,
            split=table.final_split,
            tasks=table.final_tasks,
            plays=table.plays,
            temperature=table.temperature,
            event=_tell,
            before_batch=lambda: None,
        )
    how = "greedy" if score.temperature == 0.0 else f"temperature {score.temperature:g}"
    title = f"Plain play on {score.split}, {score.plays} plays per task, {how}"
    console.print(score_table(score.row(), title))
    console.print(
        Text(f"{_mean('team reward', score.reward_team)}, {_mean('rounds', score.rounds)}, {score.failed} failed")
    )
    if save is not None:
        row = {"source": source, "checkpoint": checkpoint or Which.LAST, "settings": settings or [], **score.row()}
        try:
            with save.open("a", encoding="utf-8") as file:
                file.write(json_text(row) + "\n")
        except OSError as error:
            raise ConfigError(f"--save {save}: cannot be written ({error})") from error


def _mean(name: str, value: float | None) -> str:
    return f"no {name}" if value is None else f"{name} {value:.3f} on average"


@app.command()
def play(
    source: AnyArgument,
    task: Annotated[int, typer.Option(min=0, help="Number of the task in its split.")] = 0,
    split: Annotated[str | None, typer.Option(help="Default: the recipe's eval.final_split.")] = None,
    training: Annotated[
        bool, typer.Option("--training/--plain", help="As in training, all candidates; or one answer per act.")
    ] = True,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="With --plain; 0 is greedy.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Whole prompts and answers.")] = False,
    checkpoint: Checkpoint = None,
    settings: Settings = None,
) -> None:
    """Play one task and show it: the task, every act, all candidates with their rewards, the outcome."""
    from coterie.show import play_one, show_episode

    if training and temperature is not None:
        raise ConfigError("--temperature goes with --plain: training samples at the recipe's temperature")
    lineup = _lineup(locate(source), checkpoint, settings)
    table = lineup.recipe.eval
    episode, drawings = play_one(
        lineup,
        split=split or table.final_split,
        index=task,
        training=training,
        temperature=table.temperature if temperature is None else temperature,
        event=_tell,
    )
    Console().print(
        show_episode(
            episode,
            decode=lambda turn: lineup.policies[turn.policy].renderer.decode(turn.prompt_ids),
            alpha=lineup.recipe.credit.alpha,
            drawings=drawings,
            full=full,
        )
    )


def _lineup(source: Source, checkpoint: Which | None, settings: list[str] | None) -> Lineup:
    """Return the team of a run, trained, or of a recipe as its models are."""
    from coterie.lineup import assemble, check_env_fits
    from coterie.runs import open_run

    if source.run_dir is not None:
        return open_run(source.run_dir, "best" if checkpoint is Which.BEST else "last", settings or ())
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint}: {source.recipe} is a recipe, only runs have checkpoints")
    return assemble(check_env_fits(read_recipe(source.recipe, settings or ())))


def _tell(kind: str, fields: Mapping[str, str | int]) -> None:
    """Say what went wrong in an episode, without its traceback."""
    shown = ", ".join(f"{key}: {value}" for key, value in fields.items() if key != "traceback")
    typer.echo(f"{kind}: {shown}", err=True)


# ---- looking ------------------------------------------------------------------------------------------------------


@app.command()
def check(recipe: AnyArgument, settings: Settings = None) -> None:
    """Load everything a recipe names, and print it with every default, its tokens per step and its memory."""
    from coterie.estimate import load_table, memory_table, policy_memory, recipe_table, role_loads
    from coterie.lineup import assemble, check_env_fits

    source = locate(recipe)
    written = read_recipe(source.recipe, settings or ())
    resolved = check_env_fits(written)
    lineup = assemble(resolved)
    loads = role_loads(lineup)
    console = Console()
    console.print(recipe_table(written, resolved))
    console.print(load_table(loads, resolved))
    console.print(memory_table([policy_memory(lineup, name) for name in resolved.policies]))
    console.print(Text(f"{source.recipe} is a recipe that can be trained"), soft_wrap=True)


@app.command()
def recipes() -> None:
    """List the shipped recipes."""
    table = Table("recipe", "what it trains", box=None, pad_edge=False)
    for name, path in shipped_recipes().items():
        table.add_row(name, Text(description_of(path)))
    Console().print(table)


@app.command()
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


@app.command("check-env")
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
