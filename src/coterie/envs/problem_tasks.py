"""Tasks that are problems: of files, split once by what they ask, or made on the spot without end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Generic, Literal, TypeVar

from pydantic import model_validator

from coterie.data.load import Kind, Problem, load_for_play, normalised, question_hash, question_of
from coterie.env import Env, EnvOptions
from coterie.envs.splits import SPLITS, num_listed, places, split_list, split_of
from coterie.errors import ConfigError, EnvError
from coterie.keyed import stable_hash
from coterie.types import Json, Task

_LOG = logging.getLogger(__name__)
P = TypeVar("P", bound=Problem)


class ProblemOptions(EnvOptions):
    """What environments of mathematics and of programming have in common: where their problems come from."""

    data: tuple[str, ...] = ()
    """Files, folders or `owner/name` of the Hugging Face hub; none: problems are made on the spot, see `level`."""
    test_data: tuple[str, ...] = ()
    """Evaluation sets: split `test` is all of them, and what they ask is left out of `data`."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """Rows that cannot be used: refuse the data set, or leave them out and say how many."""

    @model_validator(mode="after")
    def _tests_need_data(self) -> ProblemOptions:
        if self.test_data and not self.data:
            raise ValueError("test_data without data: made problems have a test split of their own; give data too")
        return self


class ProblemTasks(Generic[P]):
    """The tasks of one env and the problems behind them; a task's data names its problem and shows what is asked."""

    def __init__(self, kind: Kind, options: ProblemOptions, wanted: type[P], make: Callable[[str, int], P]) -> None:
        """Read the files, once a process; ``make(split, index)`` gives problems where there are none."""
        self._kind = kind
        self._make = make
        self._wanted = wanted
        self._listed = _listed(kind, options.data, options.test_data, options.bad_rows) if options.data else None

    def num_tasks(self, split: str) -> int | None:
        """Return how many problems a split has, ``None`` where they are made."""
        return num_listed(split, self._listed)

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        """Return tasks of a split, fewer where files have no more."""
        return [self._task(split, index) for index in places(start, count, self.num_tasks(split))]

    def problem(self, task: Task) -> P:
        """Return the problem of a task; ``EnvError`` where the task is of other data."""
        index = task.data.get("index")
        if not isinstance(index, int) or isinstance(index, bool):
            raise EnvError(f"task {task.id}: expected data['index'], got {task.data!r}")
        found = self._problem(task.split, index)
        if found.id != task.data.get("problem"):
            raise EnvError(f"task {task.id} is problem {task.data.get('problem')!r}, the data have {found.id!r} there")
        return found

    def _problem(self, split: str, index: int) -> P:
        found = self._make(split, index) if self._listed is None else self._listed[split][index]
        assert isinstance(found, self._wanted)
        return found

    def _task(self, split: str, index: int) -> Task:
        problem = self._problem(split, index)
        # Neither answers nor tests: tasks are shown and written beside episodes, and tests may be megabytes.
        data: dict[str, Json] = {"index": index, "problem": problem.id, "asks": question_of(problem)}
        return Task(id=f"{self._kind}:{split}:{index}", split=split, seed=stable_hash(problem.id), data=data)


class ProblemEnv(Env, Generic[P]):
    """What environments of mathematics and of programming have in common: their tasks are problems."""

    _problems: ProblemTasks[P]

    def num_tasks(self, split: str) -> int | None:
        """Return how many problems a split has; ``None`` (no end) where they are made."""
        return self._problems.num_tasks(split)

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        """Return tasks of a split. No two splits ask the same."""
        return self._problems.tasks(split, start, count)


@lru_cache(maxsize=16)
def _listed(
    kind: Kind, data: tuple[str, ...], test_data: tuple[str, ...], bad_rows: Literal["refuse", "skip"]
) -> Mapping[str, tuple[Problem, ...]]:
    """Return split -> problems. A problem's split is a hash of what it asks, so it stays where it is when files grow.

    Without test data: 80% train, 10% validation, 10% test, and ``all``. With them ``test`` and ``all`` are the test
    data, train and validation share the rest 80 to 20.
    """
    problems = load_for_play(data, kind, bad_rows)
    held = load_for_play(test_data, kind, bad_rows) if test_data else ()
    asked = {question_hash(problem) for problem in held}
    kept = [problem for problem in problems if question_hash(problem) not in asked]
    if len(kept) < len(problems):
        _LOG.warning("%d problems of %s are in the test data and are left out", len(problems) - len(kept), list(data))

    def owner(problem: Problem) -> str:
        split = split_of(normalised(question_of(problem)))
        return "validation" if held and split == "test" else split

    splits = split_list(kept, owner)
    if held:
        splits["test"] = held
    empty = [split for split in SPLITS if not splits[split]]
    if empty:
        raise ConfigError(f"env.data = {list(data)}: {len(kept)} problems leave split {empty[0]!r} empty; give more")
    return {**splits, "all": held or problems}
