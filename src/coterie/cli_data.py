"""The commands about data: ``data check``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from coterie.data.check import DataReport, Pair, Spread

data = typer.Typer(help="Look at data sets of problems.", no_args_is_help=True)
_SHOWN = 20


@data.command("check")
def check_data(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Files, folders, or OWNER/NAME of the Hugging Face hub.")
    ],
    against: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE", help="An evaluation set that must not be in them.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Count tokens as this model does; its weights are loaded too.")
    ] = None,
    references: Annotated[
        bool, typer.Option("--references", help="Run the reference solutions against their own tests.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="List every finding, not the first 20 of a kind.")] = False,
) -> None:
    """Count what is in data sets and list what is wrong with them; exit code 1 where something is."""
    from coterie.data.check import check_sources

    report = check_sources(sources, against or (), None if tokenizer is None else _counter(tokenizer))
    console = Console()
    console.print(_numbers(report, tokenizer is not None), crop=False)
    most = None if everything else _SHOWN
    bad = [f"{row.place}: {row.why}" for source in report.sources for row in source.bad]
    _list(console, "rows cannot be used", bad, most)
    _list(console, "problems repeat the question of another", _pairs(report.duplicates), most)
    if against:
        _list(console, "problems are in an evaluation set too", _pairs(report.overlap), most)
    failed = _references(console, report, most) if references else 0
    faults = report.num_faults + failed
    console.print(Text(f"{faults} faults" if faults else "no faults"))
    if faults:
        raise typer.Exit(1)


def _counter(model: str) -> Callable[[str], int]:
    from coterie.models.loading import load

    tokenizer = load(model, seed=0).tokenizer
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


def _numbers(report: DataReport, with_tokens: bool) -> Table:
    tokens = ("tokens",) if with_tokens else ()
    table = Table(
        "source", "layout", "problems", "repeats", "bad", "characters", *tokens, "tests", box=None, pad_edge=False
    )
    for source in report.sources:
        table.add_row(
            source.source,
            ", ".join(source.layouts),
            str(len(source.problems)),
            str(source.repeats),
            str(len(source.bad)),
            _spread(source.chars),
            *((_spread(source.tokens),) if with_tokens else ()),
            _spread(source.tests),
        )
    return table


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.least} / {spread.middle:g} / {spread.most}"


def _pairs(pairs: Sequence[Pair]) -> list[str]:
    return [
        f"{pair.place} = {pair.earlier}"
        + (" (almost the same words)" if pair.near else "")
        + (", with another answer" if pair.clash else "")
        for pair in pairs
    ]


def _list(console: Console, what: str, lines: Sequence[str], most: int | None) -> None:
    if lines:
        console.print(Text(f"{len(lines)} {what}:"))
        for line in lines[:most]:
            console.print(Text(f"  {line}"), soft_wrap=True)
        if most is not None and len(lines) > most:
            console.print(Text(f"  and {len(lines) - most} more; --all lists them"))


def _references(console: Console, report: DataReport, most: int | None) -> int:
    """Run references, list those that fail a test of their own, and return how many do."""
    from coterie.data.references import failing_references
    from coterie.problems import CodeProblem
    from coterie.sandbox.shared import shared_pool

    problems = [p for source in report.sources for p in source.problems if isinstance(p, CodeProblem) and p.reference]
    failed = failing_references(problems, shared_pool()) if problems else {}
    console.print(Text(f"{len(problems) - len(failed)} of {len(problems)} reference solutions pass their own tests"))
    _list(console, "reference solutions fail", [f"{id}: {why}" for id, why in failed.items()], most)
    return len(failed)
