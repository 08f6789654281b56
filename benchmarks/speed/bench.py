"""Speed against ``transformers.generate``, vLLM and TRL, on the same work: make bench, make bench-vllm.

    python benchmarks/speed/bench.py [--all] [--only SUBSTRING ...] [--repeats 3] [--threads 2]
        [--vllm-python .venv-vllm/bin/python] [--out benchmarks/results/speed]

Every system runs in a process of its own. Repeats are interleaved (A B A B), so that a machine that slows down slows
all. A cell is written as soon as it is measured, and a cell that has its file is not measured again for the systems
that are in it, so the study can be stopped and continued. ``table.md`` is over all files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import MODELS, Cell
from plan import PROGRAMS, Task, grid, must_show, settings_of
from table import write_table

HERE = Path(__file__).parent
TUNED_ROWS = {"generate": 64, "update": 16, "step": 16}
"""Settings of a system are compared on so many samples of a cell, or on one prompt's."""
NEAR = 1.3
"""Settings that took so many times the fastest one's first run are not run again."""


class Process:
    """A running system."""

    def __init__(self, python: str, system: str, asked: Cell, settings: Mapping[str, Any], log: Path) -> None:
        order = json.dumps({"cell": {**asked.row(), "folder": asked.folder}, "settings": settings})
        threads = str(asked.threads)
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                [python, str(HERE / PROGRAMS[system]), order],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"},
            )
        self.log = log
        self.hello = self._answer()

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(self.process.args[:2])} ended ({self.process.wait()}); see {self.log}")  # type: ignore[index]
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)


def tuned(python: str, system: str, asked: Cell, log: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the settings with which a system is fastest on a part of the cell, and what every one took.

    Each runs once, and once more where that was near the fastest: the first run warms up.
    """
    if asked.kind == "check":
        return settings_of(system, asked)[0], []
    prompts = max(1, TUNED_ROWS[asked.kind] // asked.candidates) * asked.policies
    part = replace(asked, prompts=min(asked.prompts, prompts))
    choices = settings_of(system, part)
    if len(choices) == 1:
        return choices[0], []
    tried: list[dict[str, Any]] = []
    for settings in choices:
        process = Process(python, system, part, settings, log)
        seconds = process.ask("run")["seconds"]
        if seconds <= NEAR * min((one["seconds"] for one in tried), default=seconds):
            seconds = min(seconds, process.ask("run")["seconds"])
        process.end()
        tried.append({"settings": settings, "seconds": seconds})
        print(f"    {system} {settings}: {seconds:.1f} s on {part.prompts} prompts", flush=True)
    return dict(min(tried, key=lambda one: one["seconds"])["settings"]), tried


def known_settings(system: str, asked: Cell, out: Path) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Return what was found best for updates of a whole step's size, where that was measured: it is most of a step."""
    update = out / f"{replace(asked, kind='update').name}.json"
    if asked.kind != "step" or not update.exists():
        return None
    row = json.loads(update.read_text())["systems"].get(system)
    return None if row is None else (row["settings"], row["tried"])


def measure(task: Task, pythons: Mapping[str, str], repeats: int, out: Path) -> None:
    """Measure the systems that a cell's file lacks, together with Coterie, and write the file."""
    path, log = out / f"{task.cell.name}.json", out / "log.txt"
    known = json.loads(path.read_text())["systems"] if path.exists() else {}
    wanted = [name for name in task.systems if name in pythons and name not in known]
    if not wanted:
        return
    print(task.cell.name, flush=True)
    # Coterie is in every comparison, so that each is interleaved with it.
    wanted = [name for name in task.systems if name in wanted or (name == "coterie" and len(task.systems) > 1)]
    rows: dict[str, dict[str, Any]] = {}
    processes: dict[str, Process] = {}
    for name in wanted:
        if name in known:
            settings, tried = known[name]["settings"], known[name]["tried"]
        else:
            found = known_settings(name, task.cell, out)
            settings, tried = found or tuned(pythons[name], name, task.cell, log)
        processes[name] = Process(pythons[name], name, task.cell, settings, log)
        rows[name] = {"settings": settings, "tried": tried, **processes[name].hello, "runs": [], "gemm_flops": []}
    if task.cell.kind == "check":
        for name, process in processes.items():
            rows[name]["logprobs"] = process.ask("logprobs")["logprobs"]
        _agree(rows)
    else:
        for repeat in range(repeats + 1):
            for name, process in processes.items():
                run = process.ask("run")
                if repeat:  # the first is a warm-up
                    rows[name]["runs"].append(run)
                print(f"    {name}: {run['seconds']:.2f} s, {run['tokens'] / run['seconds']:.1f} tokens/s", flush=True)
            if repeat and "coterie" in processes:
                rows["coterie"]["gemm_flops"].append(processes["coterie"].ask("gemm")["flops"])
        counts = {run["tokens"] for row in rows.values() for run in row["runs"]}
        assert counts == {task.cell.rows * task.cell.new}, f"not the same work: {counts} tokens"
    for process in processes.values():
        process.end()
    rows = {**known, **{name: row for name, row in rows.items() if name not in known}, "coterie": rows["coterie"]}
    if known and "coterie" in known and task.cell.kind != "check":
        rows["coterie"]["runs"] = known["coterie"]["runs"] + rows["coterie"]["runs"]
    whole = {"cell": task.cell.row(), "machine": machine(), "systems": rows}
    path.write_text(json.dumps(whole, indent=1) + "\n")
    write_table(out)


def _agree(rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to compare systems that compute different numbers."""
    ours = rows["coterie"]["logprobs"]
    for name, row in rows.items():
        far = max(abs(a - b) for a, b in zip(ours, row["logprobs"], strict=True))
        print(f"    {name}: log-probs within {far:.1e} of Coterie's", flush=True)
        assert far <= 1e-3, f"{name} does other work: a log-prob differs by {far}"


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = {line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")}
    return {
        "cpu": ", ".join(sorted(names)) or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": list(os.getloadavg()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "time": time.strftime("%Y-%m-%d"),
    }


def export_models(python: str, folder: Path, names: Iterable[str]) -> None:
    """Write the models as folders that every system reads."""
    for name in names:
        if (folder / name / "config.json").exists():
            continue
        (folder / name).mkdir(parents=True, exist_ok=True)
        code = (
            "import pathlib, sys\nfrom coterie.models.loading import load, save\n"
            "save(load(sys.argv[1], seed=0), pathlib.Path(sys.argv[2]))"
        )
        subprocess.run([python, "-c", code, MODELS[name].source, str(folder / name)], check=True)


def chosen(tasks: Iterable[Task], only: Sequence[str]) -> list[Task]:
    """Return the tasks whose cell's name holds one of these strings; all without any."""
    return [task for task in tasks if not only or any(part in task.cell.name for part in only)]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--all", action="store_true", help="the whole grid, not just what must be shown")
    parser.add_argument("--only", nargs="+", default=[], help="cells whose name holds one of these")
    parser.add_argument("--systems", nargs="+", default=list(PROGRAMS), help="Coterie is always one of them")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    parser.add_argument("--models", type=Path, default=Path("build/speed-models"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/speed"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    pythons = {name: options.python for name in ("coterie", *options.systems) if name != "vllm"}
    if "vllm" in options.systems and options.vllm_python.exists():
        pythons["vllm"] = str(options.vllm_python.absolute())
    folder = options.models.resolve()
    tasks = [*must_show(folder, options.threads)]
    if options.all:
        tasks += grid(folder, options.threads)
    tasks = chosen(tasks, options.only)
    export_models(options.python, folder, sorted({task.cell.model for task in tasks}))
    print(json.dumps(machine()), flush=True)
    print(f"statistics over {options.repeats} repeats; without: {sorted(set(PROGRAMS) - set(pythons)) or 'nothing'}")
    for task in tasks:
        measure(task, pythons, options.repeats, options.out)
    write_table(options.out)
    print((options.out / "table.md").read_text())


if __name__ == "__main__":
    main()
