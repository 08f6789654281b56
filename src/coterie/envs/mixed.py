"""Several environments in one run: each task belongs to one of them, drawn by weight, and is played by its rules.

A recipe writes it as ``[[envs]]``. Task ids begin with the part's label, metrics too, and the label ``env`` says which
part an episode was of, so scores are reported apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coterie.env import Env, EnvOptions, Team, make_env
from coterie.envs.splits import check_split, places
from coterie.errors import EnvError
from coterie.keyed import keyed_random, stable_hash
from coterie.types import Outcome, Task


class Part(BaseModel):
    """One of ``[[envs]]``: name, weight, label; all other keys are the env's own options."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    """Tasks of this env in proportion to the weights of all."""
    label: str = ""
    """How tasks and metrics of this env are named; left out, as the env."""

    @property
    def options(self) -> dict[str, Any]:
        """The env's own options."""
        return dict(self.__pydantic_extra__ or {})


class MixedOptions(EnvOptions):
    """Options of a mixture."""

    envs: tuple[Part, ...] = ()
    """The parts; a recipe writes them as ``[[envs]]``."""

    @model_validator(mode="after")
    def _two_parts_with_labels_of_their_own(self) -> MixedOptions:
        labels = [part.label or part.name for part in self.envs]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if len(labels) < 2 or twice:
            raise ValueError(
                f"[[envs]] twice has the label {twice[0]!r}; give each a label of its own"
                if twice
                else f"[[envs]] has {len(labels)} entries; a mixture needs two, one env is written as [env]"
            )
        return self


class Mixed(Env):
    """A mixture of environments; see the module's first lines."""

    roles: ClassVar[tuple[str, ...]] = ()  # they depend on the parts, see active_roles
    Options: ClassVar[type[EnvOptions]] = MixedOptions
    options: MixedOptions

    def __init__(self, options: EnvOptions | None = None) -> None:
        """Make an instance of every part; raises what they raise."""
        super().__init__(options)
        self._envs = {part.label or part.name: make_env(part.name, part.options) for part in self.options.envs}
        self._weights = tuple(part.weight for part in self.options.envs)
        resolved = [
            Part.model_validate(
                {"name": part.name, "weight": part.weight, "label": label, **env.options.model_dump(mode="json")}
            )
            for part, (label, env) in zip(self.options.envs, self._envs.items(), strict=True)
        ]
        self.options = self.options.model_copy(update={"envs": tuple(resolved)})

    @property
    def active_roles(self) -> tuple[str, ...]:
        """All roles of all parts, each once, in the order of the parts."""
        return tuple(dict.fromkeys(role for env in self._envs.values() for role in env.active_roles))

    def scores(self, role: str) -> bool:
        """Return whether every part that asks a role can score its candidates at once."""
        return all(env.scores(role) for env in self._envs.values() if role in env.active_roles)

    def num_tasks(self, split: str) -> int | None:
        """Return how many tasks can be drawn before a part has no more; ``None`` for training, which begins it anew."""
        check_split(split)
        sizes = [env.num_tasks(split) for env in self._envs.values()]
        if split == "train" or all(size is None for size in sizes):
            return None
        drawn: Counter[int] = Counter()
        count = 0
        while True:
            part = self._part(split, count)
            size = sizes[part]
            if size is not None and drawn[part] == size:
                return count
            drawn[part] += 1
            count += 1

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        """Return tasks of a split; which part a place is of is keyed by the weights, the split and the place."""
        wanted = places(start, count, self.num_tasks(split))
        drawn: Counter[int] = Counter()
        found = []
        for place in range(wanted.stop):
            part = self._part(split, place)
            if place in wanted:
                found.append(self._task(part, split, drawn[part]))
            drawn[part] += 1
        return found

    async def play(self, task: Task, team: Team) -> Outcome:
        """Play a task by the rules of its part."""
        label, inner = task.data.get("env"), task.data.get("task")
        if not isinstance(label, str) or label not in self._envs or not isinstance(inner, Mapping):
            raise EnvError(f"task {task.id}: expected data['env'] out of {sorted(self._envs)} and data['task']")
        own = replace(task, id=str(task.data.get("id")), data=inner)
        outcome = await self._envs[label].play(own, team)
        return replace(
            outcome,
            metrics={f"{label}/{name}": value for name, value in outcome.metrics.items()},
            labels={"env": label, **{f"{label}/{name}": value for name, value in outcome.labels.items()}},
        )

    def _part(self, split: str, place: int) -> int:
        """Return which part a place of a split is of."""
        at = stable_hash("mixed", split, place) / 2**64 * sum(self._weights)
        for number, weight in enumerate(self._weights):
            at -= weight
            if at < 0.0:
                return number
        return len(self._weights) - 1

    def _task(self, part: int, split: str, number: int) -> Task:
        """Return task ``number`` of a part; one that has no more begins anew in another order."""
        label = list(self._envs)[part]
        env = self._envs[label]
        size = env.num_tasks(split)
        epoch, index = (0, number) if size is None else divmod(number, size)
        if size is not None and split == "train":
            order = list(range(size))
            keyed_random("mixed", label, split, epoch).shuffle(order)
            index = order[index]
        (inner,) = env.tasks(split, index, 1)
        again = f"@{epoch}" if epoch else ""
        return replace(inner, id=f"{label}/{inner.id}{again}", data={"env": label, "id": inner.id, "task": inner.data})
