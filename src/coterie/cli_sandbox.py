"""The commands about running model-written programs: ``sandbox check``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

app = typer.Typer(help="The walls around model-written programs.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keep ``check`` a command of its own, though it is the only one."""


@app.command()
def check(
    seconds: Annotated[float, typer.Option(min=0.1, help="How long each of the two speeds is measured.")] = 2.0,
) -> None:
    """Try to break out of the sandbox of this machine, say what it is made of, and measure it."""
    from coterie.sandbox.pool import SandboxPool, measure

    with SandboxPool(1) as pool:
        rate, bare = measure(pool, seconds)
        tier, layers = pool.tier, pool.layers
    for line in (
        f"tier {tier}: {', '.join(layers)}",
        "no attempt to break out got through",
        f"{rate:.0f} trivial programs a second in one slot, {rate / bare:.1f} times as many as python -I -c",
    ):
        Console().print(Text(line), soft_wrap=True)
