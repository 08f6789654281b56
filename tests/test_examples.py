"""The loop in one file: it runs on the library's parts, and learns what the demo learns."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

LOOP = Path(__file__).parent.parent / "examples" / "loop.py"
SHORT = (
    "imitate.steps=2",
    "imitate.episodes=4",
    "train.steps=2",
    "train.tasks_per_step=2",
    "sampling.num_candidates=4",
    "eval.final_tasks=4",
    "train.threads=1",
)


def test_the_loop_is_short_and_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) <= 150
    success = runpy.run_path(str(LOOP))["main"](SHORT)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("warm start: ")
    assert [line.partition(":")[0] for line in said[1:3]] == ["step 1/2", "step 2/2"]
    assert said[3].startswith(f"success {success:.3f} [")
    assert said[3].endswith("on 4 unseen tasks")


@pytest.mark.slow
def test_the_loop_reaches_085_with_the_budget_of_the_demo() -> None:
    assert runpy.run_path(str(LOOP))["main"](["train.threads=1"]) >= 0.85
