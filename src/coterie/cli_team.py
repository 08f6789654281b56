"""The commands about a team as it is: ``export`` and ``doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from coterie.cli_options import AnyArgument, Checkpoint, Settings, Which, find
from coterie.cli_play import lineup_of
from coterie.errors import ConfigError


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder.")],
    to: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to; new or empty.")],
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Which policy; default: the only one.")] = None,
    checkpoint: Checkpoint = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of a LoRA policy: one whole model instead of the adapter.")
    ] = False,
) -> None:
    """Write a trained policy as a folder for plain transformers, or peft where it is an adapter."""
    from coterie.export import check_free, export_policy
    from coterie.trained import find_policy

    source = find(run)
    if source.run_dir is None:
        raise ConfigError(f"{run} is a recipe: only the policies of a run can be exported")
    check_free(to)
    found = find_policy(source.run_dir, policy, "best" if checkpoint is Which.BEST else "last")
    with Console().status(f"writing {found.name} to {to}"):
        base = export_policy(found, to, merge=merge)
    use = f'in a recipe: model = "{to}"' if base is None else f"an adapter, which peft loads beside {base}"
    Console().print(Text(f"{found.name} is in {to}; {use}"), soft_wrap=True)


def doctor(source: AnyArgument, checkpoint: Checkpoint = None, settings: Settings = None) -> None:
    """Prove on a recipe's own models that what is sampled is what is trained; exit code 1 where a check fails."""
    from coterie.doctor import Verdict, examine
    from coterie.machine import available_memory

    console = Console()
    with console.status("loading the models, playing two tasks, taking a step and taking it back"):
        lineup = lineup_of(find(source), checkpoint, settings)
        findings = examine(lineup, available_memory())
    marks = {Verdict.OK: "ok  ", Verdict.WARNING: "warn", Verdict.FAIL: "FAIL"}
    for finding in findings:
        typer.echo(f"{marks[finding.verdict]}  {finding.check}: {finding.message}")
        if finding.remedy:
            typer.echo(f"      what to do: {finding.remedy}")
    failed = {finding.check for finding in findings if finding.verdict is Verdict.FAIL}
    if failed:
        raise typer.Exit(1)
