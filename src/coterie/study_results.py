"""What came out of a study: numbers per run, per variant and per pair of variants, each with where it is from.

Numbers of a run are those of its ``summary.json``; what is computed over tasks uses its ``solved/after.jsonl``, what is
computed over steps its ``metrics.jsonl``.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.durable import atomic_write_json, atomic_write_text
from coterie.evaluate import bootstrap_ci95, difference_of
from coterie.provenance import code_version
from coterie.record import METRICS, SOLVED, read_rows
from coterie.runs import SUMMARY
from coterie.study import RUNS, Study
from coterie.study_figure import draw_study
from coterie.types import Json

RESULTS, TABLE = "results.json", "table.md"
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """A finished run: its summary, the share of solved plays by task after training, and its counts of peer sets."""

    variant: str
    seed: int
    name: str
    summary: Mapping[str, Json]
    shares: Mapping[str, float]
    peer_sets: int
    peer_sets_mixed: int

    def score(self, when: str, key: str = "success") -> float:
        """Return a number of an evaluation of the summary, NaN where it has none."""
        row = self.summary.get(when)
        value = row.get(key) if isinstance(row, Mapping) else None
        return float(value) if isinstance(value, int | float) else math.nan


def write_results(study: Study) -> dict[str, Json]:
    """Write ``results.json``, ``table.md`` and ``curves.png`` over the runs that are finished; return the numbers.

    Runs that are not are named in ``missing``; nothing stands in for them.
    """
    found = [_result(study, run.name, run.variant, run.seed) for run in study.runs]
    results = [result for result in found if result is not None]
    names = [variant.name for variant in study.file.variants]
    by_variant = {name: own for name in names if (own := [r for r in results if r.variant == name])}
    table = study.file.eval
    numbers: dict[str, Json] = {
        "study": study.name,
        "description": study.file.description,
        "recipe": study.file.recipe,
        "code": code_version(),
        "budget_tokens": study.file.budget.tokens,
        "evaluation": {
            "split": table.split,
            "tasks": table.tasks,
            "plays": table.plays,
            "temperature": table.temperature,
        },
        "compared": [list(pair) for pair in study.compared],
        "runs": [_run_row(result) for result in results],
        "missing": [run.name for run, result in zip(study.runs, found, strict=True) if result is None],
        "variants": [_variant_row(name, own) for name, own in by_variant.items()],
        "differences": [_difference_row(a, b) for a, b in itertools.permutations(by_variant.values(), 2)],
    }
    atomic_write_json(study.folder / RESULTS, numbers)
    atomic_write_text(study.folder / TABLE, study_table(numbers))
    draw_study(
        study.folder,
        {name: [study.folder / RUNS / result.name for result in own] for name, own in by_variant.items()},
        title=f"{study.name}: {study.file.budget.tokens:,} tokens each",
    )
    return numbers


def study_table(numbers: Mapping[str, Json]) -> str:
    """Return the tables of ``results.json`` in Markdown: the variants, and how they differ from the baseline."""
    evaluation = numbers["evaluation"]
    assert isinstance(evaluation, Mapping)
    how = (
        f"{evaluation['tasks']} tasks of {evaluation['split']}, {evaluation['plays']} plays each at temperature "
        f"{evaluation['temperature']:g}; {numbers['budget_tokens']:,} generated tokens of training for each run."
    )
    found = {(str(row["variant"]), str(row["against"])): row for row in _rows(numbers, "differences")}
    pairs = [(str(one), str(other)) for one, other in map(_list, _list(numbers["compared"]))]
    differences = [found[pair] for pair in pairs if pair in found]
    lines = [how, "", *_variant_lines(_rows(numbers, "variants")), ""]
    lines += ["Differences in percentage points, paired by task and seed:", ""]
    lines += _difference_lines(differences)
    missing = _list(numbers["missing"])
    if missing:
        lines += ["", f"Not finished, and in no number: {', '.join(map(str, missing))}."]
    return "\n".join([*lines, ""])


def two_way_ci95(values: Sequence[Sequence[float]], seed: int = 0) -> tuple[float, float]:
    """Return the 95% bootstrap interval of a mean over seeds (rows) and tasks (columns), both drawn anew.

    (nan, nan) for fewer than two seeds: one says nothing of how seeds differ.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 2 or len(array) < 2 or not array.shape[1]:
        return (math.nan, math.nan)
    rng, (rows, columns) = np.random.default_rng(seed), array.shape
    means = np.sort(
        [
            array[rng.integers(0, rows, rows)].mean(axis=0)[rng.integers(0, columns, columns)].mean()
            for _ in range(_RESAMPLES)
        ]
    )
    return float(means[int(0.025 * _RESAMPLES)]), float(means[int(0.975 * _RESAMPLES) - 1])


# ---- machinery below ------------------------------------------------------------------------------------------------


def _result(study: Study, name: str, variant: str, seed: int) -> RunResult | None:
    folder = study.folder / RUNS / name
    if not (folder / SUMMARY).is_file():
        return None
    rows, metrics = read_rows(folder / SOLVED / "after.jsonl"), read_rows(folder / METRICS)
    return RunResult(
        variant=variant,
        seed=seed,
        name=name,
        summary=json.loads((folder / SUMMARY).read_text(encoding="utf-8")),
        shares={str(row["task"]): _number(row, "solved") / _number(row, "plays") for row in rows},
        peer_sets=sum(int(_number(row, "peer_sets")) for row in metrics),
        peer_sets_mixed=sum(int(_number(row, "peer_sets_mixed_prompts")) for row in metrics),
    )


def _run_row(result: RunResult) -> dict[str, Json]:
    """Return a run's numbers as its summary has them."""
    after = result.summary["after"]
    assert isinstance(after, Mapping)
    return {
        "run": result.name,
        "summary": f"{RUNS}/{result.name}/{SUMMARY}",
        "variant": result.variant,
        "seed": result.seed,
        "code": result.summary.get("code"),
        "success": after["success"],
        "success_ci95": after["success_ci95"],
        **{key: value for key, value in after.items() if key.startswith("pass@")},
        "success_greedy": result.score("after_greedy"),
        "success_before": result.score("before"),
        "steps": result.summary["steps"],
        "tokens_generated": result.summary["tokens_generated"],
        "minutes": result.summary["minutes"],
        "peer_sets": result.peer_sets,
        "peer_sets_mixed_prompts": result.peer_sets_mixed,
    }


def _variant_row(name: str, results: Sequence[RunResult]) -> dict[str, Json]:
    """Return the means of a variant over its seeds. Its interval is over tasks, each with its mean over the seeds."""
    tasks = set.intersection(*(set(result.shares) for result in results))
    per_task = [statistics.fmean(result.shares[task] for result in results) for task in sorted(tasks)]
    after = results[0].summary["after"]
    assert isinstance(after, Mapping)
    sets = sum(result.peer_sets for result in results)
    return {
        "variant": name,
        "seeds": len(results),
        "runs": [result.name for result in results],
        "success": statistics.fmean(result.score("after") for result in results),
        "success_by_seed": [result.score("after") for result in results],
        "ci95_tasks": list(bootstrap_ci95(per_task)),
        **{
            key: statistics.fmean(result.score("after", key) for result in results)
            for key in after
            if key.startswith("pass@")
        },
        "success_greedy": statistics.fmean(result.score("after_greedy") for result in results),
        "success_before": statistics.fmean(result.score("before") for result in results),
        "tokens_generated": statistics.fmean(_number(result.summary, "tokens_generated") for result in results),
        "minutes": statistics.fmean(_number(result.summary, "minutes") for result in results),
        "share_mixed_prompts": sum(result.peer_sets_mixed for result in results) / sets if sets else None,
    }


def _difference_row(results: Sequence[RunResult], others: Sequence[RunResult]) -> dict[str, Json]:
    """Return how much more a variant solved than another, on the same tasks and the seeds that both have."""
    pairs = [(a, b) for a in results for b in others if a.seed == b.seed]
    tasks = sorted(set.intersection(*(set(r.shares) for pair in pairs for r in pair))) if pairs else []
    by_seed = [[a.shares[task] - b.shares[task] for task in tasks] for a, b in pairs]
    mean_a, mean_b = (
        {task: statistics.fmean(pair[side].shares[task] for pair in pairs) for task in tasks} for side in (0, 1)
    )
    found = difference_of(mean_a, mean_b)
    return {
        "variant": results[0].variant,
        "against": others[0].variant,
        "runs": [[a.name, b.name] for a, b in pairs],
        "tasks": found.tasks,
        "tasks_differing": found.differing,
        "difference": found.success,
        "ci95_tasks": list(found.ci95),
        "ci95_tasks_and_seeds": list(two_way_ci95(by_seed)),
        "difference_by_seed": [statistics.fmean(values) if values else math.nan for values in by_seed],
    }


def _variant_lines(rows: Sequence[Mapping[str, Json]]) -> list[str]:
    passes = sorted({key for row in rows for key in row if key.startswith("pass@") and key != "pass@1"}, key=_k_of)
    head = [
        "variant",
        "seeds",
        "success",
        "95% over tasks",
        "by seed",
        *passes,
        "greedy",
        "before",
        "tokens",
        "minutes",
    ]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        cells = [
            str(row["variant"]),
            str(row["seeds"]),
            _share(row["success"]),
            _interval(row["ci95_tasks"]),
            ", ".join(_share(value) for value in _list(row["success_by_seed"])),
            *[_share(row.get(key)) for key in passes],
            _share(row["success_greedy"]),
            _share(row["success_before"]),
            f"{row['tokens_generated']:,.0f}",
            f"{row['minutes']:.1f}",
        ]
        lines.append(_line(cells))
    return lines


def _difference_lines(rows: Sequence[Mapping[str, Json]]) -> list[str]:
    head = [
        "variant",
        "against",
        "difference",
        "95% over tasks",
        "95% over tasks and seeds",
        "by seed",
        "tasks that differ",
    ]
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        cells = [
            str(row["variant"]),
            str(row["against"]),
            _points(row["difference"]),
            _points_interval(row["ci95_tasks"]),
            _points_interval(row["ci95_tasks_and_seeds"]),
            ", ".join(_points(value) for value in _list(row["difference_by_seed"])),
            f"{row['tasks_differing']} of {row['tasks']}",
        ]
        lines.append(_line(cells))
    return lines


def _number(row: Mapping[str, Json], key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float), f"{key} is {value!r}"
    return float(value)


def _rows(numbers: Mapping[str, Json], key: str) -> list[dict[str, Json]]:
    return [dict(row) for row in _list(numbers[key]) if isinstance(row, Mapping)]


def _list(value: Json) -> Sequence[Json]:
    return value if isinstance(value, list | tuple) else []


def _k_of(key: str) -> int:
    return int(key.removeprefix("pass@"))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _share(value: Json) -> str:
    return f"{value:.3f}" if isinstance(value, int | float) and math.isfinite(value) else "-"


def _interval(value: Json) -> str:
    return f"[{', '.join(_share(end) for end in _list(value))}]"


def _points(value: Json) -> str:
    return f"{100.0 * value:+.1f}" if isinstance(value, int | float) and math.isfinite(value) else "-"


def _points_interval(value: Json) -> str:
    ends = [_points(end) for end in _list(value)]
    return "-" if "-" in ends else f"[{', '.join(ends)}]"
