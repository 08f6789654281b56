"""The commands that compare: ``study``, a table of variants and seeds, and ``lookahead``, what turns were worth."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from coterie.cli_options import RUNS, AnyArgument, Checkpoint, Out, Settings, find, tell
from coterie.errors import TrainError


def study(
    file: Annotated[Path, typer.Argument(metavar="STUDY.toml", help="The file of a study.")],
    out: Out = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on: finished runs stay, new ones are added.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="How many runs at once; each has the study's threads.")] = 1,
    plan: Annotated[bool, typer.Option("--plan", help="Check the study and list its runs; make none.")] = False,
    settings: Settings = None,
) -> None:
    """Make every run of a study that is missing, then its results: numbers, a table and a figure."""
    from coterie.plots import CURVES
    from coterie.runs import StopRequestedError, stop_signals
    from coterie.study import LOGS, read_study
    from coterie.study_jobs import make_study, refuse_used_folder
    from coterie.study_results import RESULTS, TABLE, write_results

    beside = str(file.resolve().parent)
    if beside not in sys.path:
        sys.path.append(beside)
    folder = out or RUNS / f"study-{file.stem}"
    found = read_study(file, folder, settings or ())
    console = Console()

    def say(line: str) -> None:
        console.print(Text(line), soft_wrap=True)

    seeds, variants = len(found.file.seeds), len(found.file.variants)
    say(
        f"{file}: {variants} variants x {seeds} seeds, {found.file.budget.tokens:,} generated tokens each; "
        f"{len(found.starts)} warm starts"
    )
    if plan:
        for run in found.runs:
            say(f"  {run.name}: {run.start.name if run.start is not None else 'its own start'}")
        return
    refuse_used_folder(found, resume)
    try:
        with stop_signals() as signals:
            failed = make_study(found, jobs, say, signals.check)
    except StopRequestedError as stop:
        again = shlex.join([*("coterie", "study", str(file), "--out", str(folder), "--resume"), *_sets(settings)])
        typer.echo(f"stopped by {stop}; to go on: {again}", err=True)
        raise typer.Exit(stop.exit_code) from None
    write_results(found)
    say((folder / TABLE).read_text(encoding="utf-8"))  # as it is: drawn as a table it would be squeezed
    say(f"everything is in {folder}: {RESULTS}, {TABLE}, {CURVES}, runs/")
    if failed:
        raise TrainError(
            f"{len(failed)} of the study's runs failed: {', '.join(failed)}. What they printed is in "
            f"{folder / LOGS}. Once the cause is gone, go on with --resume"
        )


def _sets(settings: Settings) -> list[str]:
    """Return the words that give these settings again."""
    return [word for setting in settings or () for word in ("--set", setting)]


def lookahead(
    source: AnyArgument,
    states: Annotated[int, typer.Option(min=1, help="How many acts to look at.")] = 20,
    continuations: Annotated[int, typer.Option(min=1, help="Plays that go on from each candidate.")] = 16,
    tasks: Annotated[int, typer.Option(min=1, help="Validation tasks to draw the acts from.")] = 20,
    checkpoint: Checkpoint = None,
    save: Annotated[Path | None, typer.Option(help="Append the numbers as one JSON line to this file.")] = None,
    settings: Settings = None,
) -> None:
    """Compare the advantages that a recipe's sampling and credit give with what turns were worth, by brute force."""
    from coterie.cli_play import lineup_of
    from coterie.counterfactual import study_estimator
    from coterie.durable import json_text
    from coterie.rollout import no_check

    lineup = lineup_of(find(source), checkpoint, settings)
    found, looked = study_estimator(
        lineup, tasks=tasks, states=states, continuations=continuations, event=tell, before_batch=no_check
    )
    row = found.row() | {"continuations": continuations, "error": sum(item.error for item in looked) / len(looked)}
    typer.echo(
        f"{found.turns} turns of {found.states} acts, {continuations} plays from each: correlation of estimated "
        f"advantages with lookahead {found.correlation:.3f}, equal signs {found.same_sign:.3f}; mean standard error of "
        f"a lookahead {row['error']:.3f}"
    )
    if save is not None:
        with save.open("a", encoding="utf-8") as file:
            file.write(json_text({"source": source, "settings": settings or [], **row}) + "\n")
