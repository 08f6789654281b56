"""Which cells are measured, and with which systems and settings each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from cells import Cell, cell


@dataclass(frozen=True, kw_only=True)
class Task:
    """A cell, and the systems that do its work; every system has a list of settings, of which the best is taken."""

    cell: Cell
    systems: tuple[str, ...]


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "coterie": [{}],
    "coterie-unshared": [{"shared": False}],
    "transformers": [{"dtype": d, "rows": r} for d, r in product(("bfloat16", "float32"), (64, 16))],
    "trl": [
        {"dtype": dtype, "bf16": bf16, "rows": rows}
        for (dtype, bf16), rows in product(
            (("float32", False), ("float32", True), ("bfloat16", False)),
            (4, 16),
        )
    ],
    "vllm": [{"dtype": "bfloat16"}, {"dtype": "float32"}],
}
"""What is tried of each system, on a part of the cell."""

PROGRAMS = {
    "coterie": "run_coterie.py",
    "coterie-unshared": "run_coterie.py",
    "transformers": "run_transformers.py",
    "trl": "run_trl.py",
    "vllm": "run_vllm.py",
}

_PEERS = {
    "check": ("coterie", "transformers", "trl", "vllm"),
    "generate": ("coterie", "transformers", "vllm"),
    "update": ("coterie", "trl", "coterie-unshared"),
    "step": ("coterie", "trl"),
}


def settings_of(system: str, asked: Cell) -> list[dict[str, Any]]:
    """Return the settings that are tried: in float32 cells only those that compute in float32."""
    every = SETTINGS[system]
    if asked.dtype == "float32":
        every = [s for s in every if s.get("dtype", "float32") == "float32" and not s.get("bf16", False)]
    return [s for s in every if asked.rows % int(s.get("rows", 1)) == 0] or every[:1]


def must_show(folder: Path, threads: int) -> Iterator[Task]:
    """Yield what a reader wants to see first."""

    def task(kind: str, prompts: int, alone: bool = False, **size: Any) -> Task:
        made = cell(kind, folder, threads=threads, prompts=prompts, **size)
        return Task(cell=made, systems=("coterie",) if alone else _PEERS[kind])

    yield task("check", 1, dtype="float32", candidates=2)
    yield task("generate", 8)
    yield task("update", 4)
    yield task("update", 1, prompt=1024, candidates=16, new=16)
    yield task("step", 4)
    for k in (4, 8, 16):  # cost against K
        yield task("update", 4, alone=True, prompt=1024, candidates=k, new=16)
        yield task("generate", 4, alone=True, prompt=1024, candidates=k, new=16)
    for policies in (1, 2):
        yield task("step", 32, alone=True, model="tiny", dtype="float32", policies=policies)
    for adapters in (1, 4):
        yield task("step", 4, alone=True, adapters=adapters)


def grid(folder: Path, threads: int) -> Iterator[Task]:
    """Yield every cell: prompts x K x new tokens, both models, both precisions; then the curves."""
    sizes = product(("generate", "update"), ("tiny", "smollm2"), ("float32", "bfloat16"), (64, 256, 1024))
    for (kind, model, dtype, prompt), k, new in product(sizes, (4, 8, 16), (16, 64)):
        made = cell(kind, folder, model=model, dtype=dtype, prompt=prompt, candidates=k, new=new, threads=threads)
        yield Task(cell=replace(made, prompts=8), systems=_PEERS[kind])
    for policies in (1, 2, 4, 8):
        made = cell("step", folder, model="tiny", dtype="float32", policies=policies, prompts=32, threads=threads)
        yield Task(cell=made, systems=("coterie",))
    for adapters in (1, 2, 4, 8):
        made = cell("step", folder, adapters=adapters, prompts=8, threads=threads)
        yield Task(cell=made, systems=("coterie",))
