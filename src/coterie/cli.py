"""The command line. Exit codes: 0 done, 1 the run failed, 2 something given cannot work, 128 + n stopped by signal n.

Modules that import torch are imported inside the commands (``cli_*.py``), so that ``coterie --help`` answers at once.
"""

from __future__ import annotations

import importlib.metadata
import os
import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from coterie.cli_data import data
from coterie.cli_look import check, check_env_contract, envs, recipes
from coterie.cli_play import evaluate_team, play
from coterie.cli_sandbox import app as sandbox
from coterie.cli_study import lookahead, study
from coterie.cli_team import doctor, export
from coterie.cli_train import demo, imitate, train
from coterie.errors import ConfigError, CoterieError


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
        except KeyboardInterrupt:
            typer.echo("stopped by SIGINT", err=True)
            raise typer.Exit(128 + signal.SIGINT) from None


app = typer.Typer(
    cls=_Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Trains teams of language-model agents with on-policy reinforcement learning (AT-GRPO).",
)


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


_COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "demo": demo,
    "imitate": imitate,
    "eval": evaluate_team,
    "play": play,
    "export": export,
    "study": study,
    "lookahead": lookahead,
    "check": check,
    "doctor": doctor,
    "recipes": recipes,
    "envs": envs,
    "check-env": check_env_contract,
}
for _name, _command in _COMMANDS.items():
    app.command(_name)(_command)
app.add_typer(data, name="data")
app.add_typer(sandbox, name="sandbox")
