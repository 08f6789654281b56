"""The demo over seeds, and its control: the same minutes spent on more warm start instead of reinforcement learning.

    python benchmarks/demo.py --out benchmarks/results/demo --seeds 0 1 2 [--recipe plan_path-tiny] [--threads 2]
        [--no-control] [--runs runs/study] [--set KEY=VALUE ...]

Writes one JSON file per run as soon as it exists, and ``table.md`` over all that are there. A run that has its file is
not made again, so the study can be stopped and continued.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.config import dump_recipe, override, parse_recipe, read_recipe
from coterie.evaluate import Score
from coterie.runs import start
from coterie.shipped import shipped_recipe
from coterie.train import Listener, StepReport


class Clock:
    """Notes when the warm start ended, and says how far a run is."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = 0.0
        self.steps = 0

    def imitate(self, policy: str, step: int, steps: int, loss: float) -> None:
        self.first = self.first or time.monotonic()
        self.last, self.steps = time.monotonic(), step
        if step % 100 == 0:
            print(f"  warm start {step}/{steps}: loss {loss:.3f}", flush=True)

    def step(self, report: StepReport) -> None:
        if (report.step + 1) % 20 == 0:
            print(f"  step {report.step + 1}/{report.steps}, {report.time_s / 60:.1f} min", flush=True)

    def score(self, name: str, score: Score) -> None:
        print(f"  {name}: success {score.success:.3f} [{score.ci95[0]:.3f}, {score.ci95[1]:.3f}]", flush=True)

    def stop(self) -> None:
        """Never."""

    def listener(self) -> Listener:
        return Listener(step=self.step, score=self.score, imitate=self.imitate, stop=self.stop)


def run(raw: Mapping[str, Any], name: str, out: Path, runs: Path | None) -> dict[str, Any]:
    """Train a recipe and keep its journals, and the run itself in ``runs``; return the summary and more costs."""
    temporary = Path(tempfile.mkdtemp(prefix="coterie-bench-"))
    folder = (temporary if runs is None else runs) / name
    clock = Clock()
    summary = dict(start(parse_recipe(raw, name), folder, clock.listener()))
    assert clock.first is not None
    summary["warm_start_steps"] = raw["imitate"]["steps"]
    summary["warm_start_step_s"] = (clock.last - clock.first) / max(1, clock.steps - 1)
    summary["machine"] = f"{platform.machine()}, {raw['train'].get('threads')} thread(s)"
    shutil.copy(folder / "curves.png", out / f"{name}.png")
    shutil.copy(folder / "eval.jsonl", out / f"{name}.eval.jsonl")
    shutil.copy(folder / "metrics.jsonl", out / f"{name}.metrics.jsonl")
    shutil.copy(folder / "timings.jsonl", out / f"{name}.timings.jsonl")
    shutil.rmtree(temporary)
    (out / f"{name}.json").write_text(json.dumps(summary, indent=1))
    return summary


def study(
    recipe: str, settings: list[str], seeds: list[int], threads: int, out: Path, control: bool, runs: Path | None
) -> None:
    """Make every run that is missing."""
    out.mkdir(parents=True, exist_ok=True)
    base = dump_recipe(read_recipe(shipped_recipe(recipe), settings))
    for seed in seeds:
        raw = override(base, [f"seed={seed}", f"train.threads={threads}"])
        path = out / f"{recipe}-seed{seed}.json"
        if not path.exists():
            print(path.stem, flush=True)
            run(raw, path.stem, out, runs)
        if not control:
            continue
        trained = json.loads(path.read_text())
        steps = raw["imitate"]["steps"] + round(60.0 * trained["minutes"] / trained["warm_start_step_s"])
        path = out / f"{recipe}-control-seed{seed}.json"
        if not path.exists():
            print(f"{path.stem}: {steps} warm start steps", flush=True)
            # One step with a learning rate of nothing: the run's machinery without reinforcement learning.
            run(
                override(
                    raw,
                    [
                        f"imitate.steps={steps}",
                        "train.steps=1",
                        f"policies.{next(iter(raw['policies']))}.optimizer.lr=1e-12",
                    ],
                ),
                path.stem,
                out,
                runs,
            )
    table(out)


def table(out: Path) -> None:
    """Write ``table.md`` over all runs of a folder: success with its 95% interval, and of the tasks with a detour."""
    rows = [
        "| run | before, T = 1 | before, greedy | after, T = 1 | after, greedy | detours, after | minutes |",
        "|---|---|---|---|---|---|---|",
    ]
    afters: dict[str, list[float]] = {}
    for path in sorted(out.glob("*-seed*.json")):
        summary = json.loads(path.read_text())
        scores = [summary[name] for name in ("before", "before_greedy", "after", "after_greedy")]
        detour = summary["after"].get("by/path=detour/success")
        cells = [
            path.stem,
            *[
                f"{score['success']:.3f} [{', '.join(f'{end:.3f}' for end in score['success_ci95'])}]"
                for score in scores
            ],
            "" if detour is None else f"{detour:.3f}",
            f"{summary['minutes_with_warm_start_and_evaluation']:.1f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
        afters.setdefault(path.stem.rsplit("-seed", 1)[0], []).append(summary["after"]["success"])
    rows += ["", *[f"Mean over {len(v)} seed(s), {k}: {statistics.mean(v):.3f}" for k, v in afters.items()], ""]
    (out / "table.md").write_text("\n".join(rows))


def main() -> None:
    """Parse the command line and make the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--recipe", default="plan_path-tiny")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/demo"))
    parser.add_argument("--no-control", action="store_true")
    parser.add_argument("--runs", type=Path, default=None, help="keep the run folders here")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another recipe: use another --out"
    )
    options = parser.parse_args()
    study(
        options.recipe,
        options.set,
        options.seeds,
        options.threads,
        options.out,
        not options.no_control,
        options.runs,
    )


if __name__ == "__main__":
    main()
