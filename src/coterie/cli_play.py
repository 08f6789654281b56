"""The commands that play: ``eval`` and ``play``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from coterie.cli_options import AnyArgument, Checkpoint, Settings, Which, find, tell
from coterie.config import Recipe, read_recipe
from coterie.errors import ConfigError
from coterie.shipped import Source

if TYPE_CHECKING:
    from coterie.evaluate import Difference, Score
    from coterie.lineup import Lineup
    from coterie.types import Episode, Json


def evaluate_team(
    source: AnyArgument,
    split: Annotated[str | None, typer.Option(help="Default: the recipe's eval.final_split.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Default: the recipe's eval.final_tasks.")] = None,
    plays: Annotated[int | None, typer.Option(min=1, help="Plays of each task; default: the recipe's.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="0 is greedy; default: the recipe's.")] = None,
    swap: Annotated[
        str | None, typer.Option(metavar="ROLE=ROLE,...", help="Each role plays with the policy of the other role.")
    ] = None,
    frozen: Annotated[
        str | None,
        typer.Option(metavar="ROLE=base,...", help="Play a role by its policy's model as loaded, untrained."),
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="ROLE", help="Let this role play alone.")] = None,
    checkpoint: Checkpoint = None,
    save: Annotated[Path | None, typer.Option(help="Append the numbers as one JSON line to this file.")] = None,
    settings: Settings = None,
) -> None:
    """Evaluate by plain play: one answer per act, nothing chosen by reward. A RECIPE plays untrained."""
    from coterie.casting import cast, read_casting, with_untrained
    from coterie.dry_play import check_prompts
    from coterie.durable import json_text
    from coterie.evaluate import paired_difference

    if save is not None and not save.resolve().parent.is_dir():
        raise ConfigError(f"--save {save}: there is no folder {save.resolve().parent}")
    given = {"final_split": split, "final_tasks": tasks, "plays": plays, "temperature": temperature}
    own = [f"eval.{key}={value}" for key, value in given.items() if value is not None]
    casting = read_casting(swap, frozen, only)
    lineup = lineup_of(
        find(source), checkpoint, [*(settings or ()), *own], lambda recipe: with_untrained(recipe, casting)
    )
    console = Console()
    changed = cast(lineup, casting) if casting else lineup
    check_prompts(changed, lineup.recipe.eval.final_split)
    score, episodes = _evaluate(changed, console, casting.describe())
    row: dict[str, Json] = {"source": source, "checkpoint": checkpoint or Which.LAST, "settings": settings or []}
    row |= score.row()
    if casting:
        usual, usual_episodes = _evaluate(lineup, console, "the team as it is")
        difference = paired_difference(episodes, usual_episodes)
        console.print(Text(difference_line(difference, casting.describe())), soft_wrap=True)
        row |= casting.row() | {
            "usual_success": usual.success,
            "usual_success_ci95": list(usual.ci95),
            "difference": difference.success,
            "difference_ci95": list(difference.ci95),
            "difference_tasks": difference.tasks,
            "difference_tasks_differing": difference.differing,
        }
    if save is not None:
        try:
            with save.open("a", encoding="utf-8") as file:
                file.write(json_text(row) + "\n")
        except OSError as error:
            raise ConfigError(f"--save {save}: cannot be written ({error})") from error


def _evaluate(lineup: Lineup, console: Console, who: str) -> tuple[Score, list[Episode]]:
    """Play, and print the table; ``who`` plays is in its title."""
    from coterie.display import score_table
    from coterie.evaluate import evaluate
    from coterie.runs import StopRequestedError, stop_signals

    table = lineup.recipe.eval
    shown = f"{table.final_tasks} tasks of {table.final_split}, {table.plays} plays each"
    try:
        with console.status(shown), stop_signals() as signals:
            score, episodes = evaluate(
                lineup,
                split=table.final_split,
                tasks=table.final_tasks,
                plays=table.plays,
                temperature=table.temperature,
                event=tell,
                before_batch=signals.check,
            )
    except StopRequestedError as stop:
        typer.echo(f"stopped by {stop} before the evaluation had ended: there is no score, nothing was saved", err=True)
        raise typer.Exit(stop.exit_code) from None
    how = "greedy" if score.temperature == 0.0 else f"temperature {score.temperature:g}"
    title = f"Plain play on {score.split}, {score.plays} plays per task, {how}"
    console.print(score_table(score.row(), f"{title}: {who}" if who else title))
    reward = _mean("team reward", score.reward_team)
    if score.reward_ci95 is not None:
        reward += " [{:.3f}, {:.3f}]".format(*score.reward_ci95)
    console.print(Text(f"{reward}, {_mean('rounds', score.rounds)}, {score.failed} failed"))
    return score, episodes


def difference_line(difference: Difference, who: str) -> str:
    """Return the difference of two teams in words, in percentage points."""
    if not difference.tasks:
        return f"{who}: no task was played by both teams, so there is no difference to tell"
    if not difference.differing:
        return f"{who}: no task differed from the team as it is, over the same {difference.tasks} tasks"
    low, high = difference.ci95
    return (
        f"{who}: {100.0 * difference.success:+.1f} points against the team as it is, 95% interval "
        f"[{100.0 * low:+.1f}, {100.0 * high:+.1f}], over the same {difference.tasks} tasks"
    )


def _mean(name: str, value: float | None) -> str:
    return f"no {name}" if value is None else f"{name} {value:.3f} on average"


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
    lineup = lineup_of(find(source), checkpoint, settings)
    table = lineup.recipe.eval
    episode, drawings = play_one(
        lineup,
        split=split or table.final_split,
        index=task,
        training=training,
        temperature=table.temperature if temperature is None else temperature,
        event=tell,
    )
    Console().print(
        show_episode(
            episode,
            # With the control tokens: they are all that stands between the messages of some templates.
            decode=lambda turn: str(lineup.loaded[turn.policy].tokenizer.decode(turn.prompt_ids)),
            alpha=lineup.recipe.credit.alpha,
            drawings=drawings,
            full=full,
        )
    )


def lineup_of(
    source: Source,
    checkpoint: Which | None,
    settings: list[str] | None,
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
) -> Lineup:
    """Return the team of a run, trained, or of a recipe as its models are; ``change`` may add policies."""
    from coterie.lineup import assemble, check_env_fits
    from coterie.runs import open_run

    if source.run_dir is not None:
        return open_run(source.run_dir, "best" if checkpoint is Which.BEST else "last", settings or (), change)
    if checkpoint is not None:
        raise ConfigError(f"--checkpoint {checkpoint}: {source.recipe} is a recipe, only runs have checkpoints")
    return assemble(change(check_env_fits(read_recipe(source.recipe, settings or ()))))
