"""Golden runs: three steps whose numbers are written down, so that no change of them goes unnoticed.

After a change that is meant to change them: ``COTERIE_UPDATE_GOLDEN=1 python -m pytest tests/test_golden.py``, and say
in the commit why the numbers changed. Compared to 1e-6, since processors differ in the last bits; but the share of
weights that a step changed is a count of last bits itself, and is compared to 5e-4.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from coterie.durable import atomic_write_json
from coterie.record import read_rows
from coterie.runs import start
from learning_toys import PER_ROLE, WARM, quiet, toy_recipe

FOLDER = Path(__file__).parent / "golden"
RUNS = {
    "tree-shared": ("train.steps=3", "eval.every=2", "loss.entropy_coef=0.01", *WARM),
    "tree-per-role": ("train.steps=3", *PER_ROLE, "policies.main.kl.coef=0.05", "train.steps_per_batch=2"),
    "chain-flat": ("train.steps=3", "sampling.mode=chain", 'credit.group_by=["task"]', "credit.return=final"),
}


def numbers(run_dir: Path) -> dict[str, Any]:
    """Return what is compared: metrics, evaluations, and the texts of the first episode of each step."""
    return {
        "metrics": read_rows(run_dir / "metrics.jsonl"),
        "evals": read_rows(run_dir / "eval.jsonl"),
        "texts": [
            [turn["text"] for turn in read_rows(run_dir / "episodes" / f"step-{step}.jsonl")[0]["turns"]]
            for step in range(3)
        ],
    }


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Return the leaves of nested lists and tables by their place."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        return {place: value}
    return {key: leaf for name, inner in items for key, leaf in flat(inner, f"{place}/{name}").items()}


@pytest.mark.parametrize("name", RUNS)
def test_three_steps_give_the_numbers_that_are_written_down(name: str, tmp_path: Path) -> None:
    start(toy_recipe(*RUNS[name]), tmp_path / "run", quiet())
    found, path = numbers(tmp_path / "run"), FOLDER / f"{name}.json"
    if os.environ.get("COTERIE_UPDATE_GOLDEN") == "1":
        atomic_write_json(path, found)
    expected, seen = flat(json.loads(path.read_text())), flat(found)
    assert seen.keys() == expected.keys()
    far = {place: (value, seen[place]) for place, value in expected.items() if seen[place] != close(place, value)}
    assert far == {}


def close(place: str, value: Any) -> Any:
    """Return what a number may be: the one that is written down, as far as processors agree on it."""
    if not isinstance(value, float):
        return value
    return pytest.approx(value, rel=1e-6, abs=5e-4 if place.endswith("/changed") else 1e-6)


def test_every_golden_file_belongs_to_a_run() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*")) == sorted(RUNS)
