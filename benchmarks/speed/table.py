"""``table.md`` over the measured cells: medians, the range, ratios, memory, and the share of the matrix rate."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BODY = {"smollm2": 106_203_456, "tiny": 796_416}
"""Parameters but for the embeddings and the output layer."""
WIDTH = {"smollm2": 576, "tiny": 128}


def needed_flops(cell: Mapping[str, Any]) -> float:
    """Return the floating-point operations of an update: 6 per parameter and packed token (4 with adapters), and of
    the output layer on trained tokens only. Attention is not counted.
    """
    packed = cell["prompts"] * (cell["prompt"] + cell["candidates"] * cell["new"])
    trained = cell["prompts"] * cell["candidates"] * cell["new"]
    per = 4.0 if cell["adapters"] else 6.0
    return per * (BODY[cell["model"]] * packed + WIDTH[cell["model"]] * cell["vocab"] * trained)


def write_table(out: Path) -> None:
    """Write the table of all cells in a folder."""
    lines = [
        "| cell | system | seconds: median (range) | tokens/s | Coterie faster by | GiB | of matrix rate | settings |",
        "|---|---|---|---|---|---|---|---|",
    ]
    checks = []
    for path in sorted(out.glob("*-*.json")):
        whole = json.loads(path.read_text())
        cell, systems = whole["cell"], whole["systems"]
        if cell["kind"] == "check":
            checks += _check(systems)
            continue
        ours = _median(systems["coterie"])
        for name, row in systems.items():
            lines.append(_line(path.stem, cell, name, row, ours))
    (out / "table.md").write_text("\n".join([*lines, "", *checks, ""]))


def _line(stem: str, cell: Mapping[str, Any], name: str, row: Mapping[str, Any], ours: float) -> str:
    seconds = [run["seconds"] for run in row["runs"]]
    median = _median(row)
    tokens = cell["prompts"] * cell["candidates"] * cell["new"]
    rate = ""
    if cell["kind"] == "update" and row["gemm_flops"]:
        rate = f"{needed_flops(cell) / median / statistics.median(row['gemm_flops']):.0%}"
    return (
        f"| {stem} | {name} | {median:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {tokens / median:.1f} |"
        f" {median / ours:.2f} x | {max(run['peak_bytes'] for run in row['runs']) / 2**30:.2f} | {rate} |"
        f" {json.dumps(row['settings']) if row['settings'] else ''} |"
    )


def _check(systems: Mapping[str, Any]) -> list[str]:
    ours = systems["coterie"]["logprobs"]
    return [
        f"{name}: log-probs of given tokens within "
        f"{max(abs(a - b) for a, b in zip(ours, row['logprobs'], strict=True)):.1e} of Coterie's (float32)"
        for name, row in systems.items()
        if name != "coterie"
    ]


def _median(row: Mapping[str, Any]) -> float:
    return statistics.median(run["seconds"] for run in row["runs"])
