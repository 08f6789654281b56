"""Makes the runs of a study: each a process of its own, some at once, whatever is finished is left alone."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coterie.config import dump_recipe, flat, read_recipe
from coterie.durable import atomic_write_json
from coterie.errors import ConfigError
from coterie.runs import RECIPE, is_finished
from coterie.study import LOGS, RECIPES, STARTS, PlannedRun, Study, WarmStart

Tell = Callable[[str], None]
_POLL_S = 0.1
_COTERIE = (sys.executable, "-c", "from coterie.cli import main; main()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A process to be run: its name, its command, where its output goes, and what to do once it has succeeded."""

    name: str
    command: tuple[str, ...]
    log: Path
    then: Callable[[], None]


def refuse_used_folder(study: Study, resume: bool) -> None:
    """Raise ``ConfigError`` for a folder in use unless resuming, and for runs in it that another study made."""
    if study.folder.exists() and any(study.folder.iterdir()) and not resume:
        raise ConfigError(
            f"{study.folder} is not empty; nothing was changed. Go on with its study: --resume, or give another --out"
        )
    for run in study.runs:
        path = study.run_dir(run) / RECIPE
        if not path.is_file():
            continue
        before, after = flat(dump_recipe(read_recipe(path))), flat(dump_recipe(run.recipe))
        changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
        if changed:
            raise ConfigError(
                f"{study.run_dir(run)} is a run of another recipe than the study's {run.name}; they differ in "
                f"{', '.join(changed)}. Give another --out, or remove that run"
            )


def make_study(study: Study, at_once: int, tell: Tell, check_stop: Callable[[], None]) -> tuple[str, ...]:
    """Make the warm starts and the runs that are missing; return the names of what failed.

    ``check_stop`` is called all the time; when it raises, the processes are told to stop, and save, first.
    """
    for name in (RECIPES, LOGS, STARTS):
        (study.folder / name).mkdir(parents=True, exist_ok=True)
    starts = [start for start in study.starts if not (study.folder / STARTS / start.name).is_dir()]
    failed = run_jobs([_start_job(study, start) for start in starts], at_once, tell, check_stop)
    runs = [run for run in study.runs if not _finished(study, run)]
    if len(runs) < len(study.runs):
        tell(f"{len(study.runs) - len(runs)} of {len(study.runs)} runs are finished already")
    # Those that begin with the policies of others come after them.
    for some in ([run for run in runs if not run.needs], [run for run in runs if run.needs]):
        ready = [run for run in some if not {*run.needs, *([run.start.name] if run.start else [])} & {*failed}]
        kept_out = [run.name for run in some if run not in ready]
        failed = (*failed, *kept_out, *run_jobs([_run_job(study, run) for run in ready], at_once, tell, check_stop))
    return failed


def run_jobs(jobs: Sequence[Job], at_once: int, tell: Tell, check_stop: Callable[[], None]) -> tuple[str, ...]:
    """Run processes, so many at once, in order; return the names of those that failed."""
    waiting, failed, done = list(jobs), [], 0
    running: dict[str, tuple[Job, subprocess.Popen[bytes], float]] = {}
    with _stopped_at_the_end(running):
        while waiting or running:
            check_stop()
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                running[job.name] = (job, _begin(job), time.monotonic())
            for job, process, began in list(running.values()):
                code = process.poll()
                if code is None:
                    continue
                del running[job.name]
                done += 1
                took = f"{(time.monotonic() - began) / 60.0:.1f} min"
                if code:
                    failed.append(job.name)
                    what = f"failed with exit code {code} after {took}: {_last_line(job.log)}"
                else:
                    job.then()
                    what = f"done in {took}"
                tell(f"[{done}/{len(jobs)}] {job.name} {what}")
            time.sleep(_POLL_S)
    return tuple(failed)


# ---- machinery below ------------------------------------------------------------------------------------------------


def _start_job(study: Study, start: WarmStart) -> Job:
    recipe = study.folder / RECIPES / f"{start.name}.json"
    atomic_write_json(recipe, dump_recipe(start.recipe))
    final = study.folder / STARTS / start.name
    part = final.with_name(f".tmp-{start.name}")
    if part.is_dir():  # of a start that was stopped; nothing in it can be gone on with
        shutil.rmtree(part)
    return Job(
        name=start.name,
        command=(*_COTERIE, "imitate", str(recipe), "--out", str(part)),
        log=study.folder / LOGS / f"{start.name}.log",
        then=lambda: os.replace(part, final),
    )


def _run_job(study: Study, run: PlannedRun) -> Job:
    recipe, folder = study.folder / RECIPES / f"{run.name}.json", study.run_dir(run)
    atomic_write_json(recipe, dump_recipe(run.recipe))
    begun = (folder / RECIPE).is_file()
    words = ("train", str(folder), "--resume") if begun else ("train", str(recipe), "--out", str(folder))
    return Job(
        name=run.name, command=(*_COTERIE, *words), log=study.folder / LOGS / f"{run.name}.log", then=lambda: None
    )


def _finished(study: Study, run: PlannedRun) -> bool:
    folder = study.run_dir(run)
    return (folder / RECIPE).is_file() and is_finished(folder, None)


def _begin(job: Job) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own: an interrupt from the keyboard reaches it through us, and once."""
    with job.log.open("ab") as log:
        return subprocess.Popen(
            job.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(os.environ),
        )


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with our own module path in it: a study's modules may lie beside its file."""
    path = os.pathsep.join(dict.fromkeys([*filter(None, sys.path), *filter(None, [own.get("PYTHONPATH")])]))
    return {**own, "PYTHONPATH": path}


@contextmanager
def _stopped_at_the_end(running: Mapping[str, tuple[Job, subprocess.Popen[bytes], float]]) -> Iterator[None]:
    """Whatever ends the block, tell the processes that are left to stop, and wait until they have saved."""
    try:
        yield
    finally:
        for _, process, _ in running.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for _, process, _ in running.values():
            process.wait()


def _last_line(log: Path) -> str:
    """Return the last line that a process printed."""
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'it printed nothing'} ({log})"
