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
from coterie.config import parse_recipe
from coterie.errors import ConfigError
from coterie.lineup import assemble, check_env_fits
from coterie.machine import resident_memory
from coterie.memory import measure

RECIPE = """
[env]
name = "plan_path"
size = 4
style = "compact"

[policies.shared]
model = "tiny:layers=4,width=256"
optimizer = { lr = 1e-3 }

[team]
tool = "shared"
planner = "shared"

[sampling]
num_candidates = 16
max_tokens = 4

[train]
steps = 3
tasks_per_step = 64
threads = 1

[eval]
final_tasks = 64

[imitate]
steps = 6
episodes = 50
"""

needs_proc = pytest.mark.skipif(resident_memory() is None, reason="the system does not say what a process takes")


def run(*arguments: str) -> str:
    command = [sys.executable, "-c", "from coterie_command import main; main()", *arguments]
    environment = {**os.environ, "COLUMNS": "120"}
    return subprocess.run(command, check=True, env=environment, capture_output=True, text=True).stdout


@needs_proc
def test_the_peak_that_check_measures_is_that_of_the_run_within_a_tenth_and_a_half(tmp_path: Path) -> None:
    """0.85 to 1.15, both in processes of their own; the update is what takes most here."""
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE, encoding="utf-8")
    printed = run("check", str(recipe), "--memory")
    number, unit = re.findall(r"^Memory, measured: ([\d.]+) (MiB|GiB)", printed, flags=re.MULTILINE)[0]
    before = float(number) * (1024 if unit == "GiB" else 1)
    run("train", str(recipe), "--out", str(tmp_path / "run"))
    after = json.loads((tmp_path / "run/summary.json").read_text(encoding="utf-8"))["peak_memory_mb"]
    assert 0.85 <= before / after <= 1.15


def test_memory_is_not_measured_where_other_processes_do_the_work() -> None:
    table = {
        "env": {"name": "plan_path", "style": "compact"},
        "policies": {"shared": {"model": "tiny", "optimizer": {"lr": 1e-3}}},
        "team": {"tool": "shared", "planner": "shared"},
        "sampling": {"max_tokens": 4},
        "train": {"steps": 1},
        "hardware": {"backend": "ray"},
    }
    lineup = assemble(check_env_fits(parse_recipe(table, "a test")))
    with pytest.raises(ConfigError, match=r'hardware\.backend = "ray": its workers are other processes'):
        measure(lineup, lambda _phase: None)


def test_memory_cannot_be_measured_without_loading_a_model() -> None:
    found = CliRunner().invoke(app, ["check", "paper/sudoku-8b-roles", "--offline", "--memory"])
    assert found.exit_code != 0
    assert "give one of the two" in " ".join(found.output.split())
