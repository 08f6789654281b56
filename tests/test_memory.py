"""What ``coterie check --memory`` measures before a run is what the run takes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.errors import ConfigError
from coterie.lineup import assemble
from coterie.machine import resident_memory
from coterie.memory import measure
from learning_toys import toy_recipe

SHORT = (
    "imitate.steps=6",
    "imitate.episodes=50",
    "train.steps=3",
    "train.threads=1",
    "eval.final_tasks=64",
    "eval.every=0",
)
"""The demo with few steps."""

needs_proc = pytest.mark.skipif(resident_memory() is None, reason="the system does not say what a process takes")


def run(*arguments: str) -> str:
    command = [sys.executable, "-c", "from coterie_command import main; main()", *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout


@needs_proc
def test_the_peak_that_check_measures_is_that_of_the_run_within_a_tenth_and_a_half(tmp_path: Path) -> None:
    """0.85 to 1.15, both in processes of their own."""
    settings = [word for setting in SHORT for word in ("--set", setting)]
    printed = run("check", "plan_path-tiny", "--memory", *settings)
    number, unit = re.findall(r"^Memory, measured: ([\d.]+) (MiB|GiB)", printed, flags=re.MULTILINE)[0]
    before = float(number) * (1024 if unit == "GiB" else 1)
    run("train", "plan_path-tiny", "--out", str(tmp_path / "run"), *settings)
    after = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))["peak_memory_mb"]
    assert 0.85 <= before / after <= 1.15


def test_memory_is_not_measured_where_other_processes_do_the_work() -> None:
    lineup = assemble(toy_recipe("hardware.backend=ray"))
    with pytest.raises(ConfigError, match=r'hardware\.backend = "ray": its workers are other processes'):
        measure(lineup, lambda _phase: None)


def test_memory_cannot_be_measured_without_loading_a_model() -> None:
    found = CliRunner().invoke(app, ["check", "paper/sudoku-8b-roles", "--offline", "--memory"])
    assert found.exit_code != 0
    assert "give one of the two" in " ".join(found.output.split())
