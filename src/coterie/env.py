"""The environment contract: rules as straight async code, and how an env is found by name.

An env author overrides ``tasks`` and ``play``; everything else has a default. See docs/write-an-env.md.
"""

from __future__ import annotations

import difflib
import importlib
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Protocol, TypeAlias, TypeVar, overload

from pydantic import BaseModel, ConfigDict, ValidationError

from coterie.errors import ConfigError, guarded
from coterie.types import Failure, Json, Message, Outcome, Played, Scored, Task

R = TypeVar("R")
Prompt: TypeAlias = str | Sequence[Message]
"""A string is one user message."""
Score: TypeAlias = Callable[[str], Scored[R] | Awaitable[Scored[R]]]
Expert: TypeAlias = Callable[[random.Random, float], str]
"""``expert(rng, noise)``: a scripted answer for the state at hand; noise 0 is the script's best play, 1 its worst."""


class Team(Protocol):
    """What an env sees of the team that plays it."""

    @property
    def rng(self) -> random.Random:
        """The env's own randomness, keyed by the episode: the same in every replay."""
        ...

    @overload
    async def act(
        self, role: str, prompt: Prompt, *, score: Score[R], round: int | None = None, expert: Expert | None = None
    ) -> Played[R]: ...

    @overload
    async def act(
        self, role: str, prompt: Prompt, *, score: None = None, round: int | None = None, expert: Expert | None = None
    ) -> Played[None]: ...

    async def act(
        self,
        role: str,
        prompt: Prompt,
        *,
        score: Score[R] | None = None,
        round: int | None = None,
        expert: Expert | None = None,
    ) -> Played[R] | Played[None]:
        """Ask a role (``"drafter"``, or seat ``"drafter[2]"``) and return the turn the episode goes on from.

        ``score(text)`` must be a pure function of the state and the text; it is called for every candidate before one
        is chosen. ``round`` is the pass over the roles this act belongs to; left out, it is the number of earlier acts
        of the same role and seat. ``expert`` gives the scripted answer that demonstrations are made of.
        """
        ...


class EnvOptions(BaseModel):
    """Options of an env, set by the recipe's ``[env]`` table. Subclass it; unknown keys are refused."""

    # The docstring under an option is what the command line shows of it.
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    REWARDS: ClassVar[tuple[str, ...]] = ()
    """Options that change rewards and nothing else: demonstrations do not depend on them."""

    roles: tuple[str, ...] | None = None
    """The roles that play; ``None`` means all of the env's."""


class Env(ABC):
    """The rules of one kind of problem. An instance plays one task once; two episodes share no instance."""

    # ---- the surface you override -------------------------------------------------------------------------------

    roles: ClassVar[tuple[str, ...]]
    """All roles, in workflow order."""
    scored_roles: ClassVar[tuple[str, ...]] = ()
    """Roles whose candidates can be scored at once; tree sampling needs every trained role here."""
    Options: ClassVar[type[EnvOptions]] = EnvOptions

    @abstractmethod
    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        """Return tasks ``start`` to ``start + count`` of a split, the same at every call and in every process."""

    @abstractmethod
    async def play(self, task: Task, team: Team) -> Outcome:
        """Play one task to its end; depends on the task, ``team.rng`` and the texts ``act`` returns, nothing else."""

    def num_tasks(self, split: str) -> int | None:  # noqa: ARG002
        """Return how many tasks a split has, or ``None`` where they are made without end."""
        return None

    def scores(self, role: str) -> bool:
        """Return whether the candidates of a role can be scored at once."""
        return role in self.scored_roles

    # ---- machinery below ----------------------------------------------------------------------------------------

    def __init__(self, options: EnvOptions | None = None) -> None:
        """Make a fresh instance; ``options`` must be of this class's ``Options``."""
        self.options = options if options is not None else self.Options()
        if not isinstance(self.options, self.Options):
            raise ConfigError(
                f"{type(self).__name__} takes {self.Options.__qualname__}, got {type(self.options).__qualname__}"
            )
        chosen = self.options.roles
        if chosen is not None:
            unknown = [role for role in chosen if role not in self.roles]
            if unknown or not chosen or len(set(chosen)) != len(chosen):
                raise ConfigError(
                    f"env.roles = {list(chosen)}: expected a non-empty choice, each once, of {list(self.roles)}"
                )

    @property
    def active_roles(self) -> tuple[str, ...]:
        """The roles that play under these options, in workflow order."""
        chosen = self.options.roles
        return self.roles if chosen is None else tuple(role for role in self.roles if role in chosen)


BUILT_IN: dict[str, str] = {
    "code": "coterie.envs.coding:Coding",
    "math": "coterie.envs.maths:Maths",
    "mixed": "coterie.envs.mixed:Mixed",
    "plan_path": "coterie.envs.plan_path:PlanPath",
    "sokoban": "coterie.envs.sokoban:Sokoban",
    "sudoku": "coterie.envs.sudoku:Sudoku",
}


def env_class(name: str) -> type[Env]:
    """Return the env class of a built-in name or of ``module:Class``; ``ConfigError`` says what exists."""
    target = BUILT_IN.get(name, name)
    module_name, _, class_name = target.partition(":")
    if not class_name:
        near = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no env named {name!r}: known are {sorted(BUILT_IN)}, or give 'module:Class'{hint}")
    modules: list[ModuleType] = []
    failures: list[Failure] = []
    with guarded(f"import of {module_name}", failures.append):
        modules.append(importlib.import_module(module_name))
    if failures:
        raise ConfigError(f"env {name!r}: {_import_error(module_name, failures[0])}")
    (module,) = modules
    found: object = vars(module).get(class_name)
    if not (isinstance(found, type) and issubclass(found, Env)):
        raise ConfigError(f"env {name!r}: {module_name!r} has no Env subclass {class_name!r}")
    return found


def _import_error(module_name: str, failure: Failure) -> str:
    """Return why a module cannot be imported: it is nowhere, or it raised, and then in which line."""
    missing = re.fullmatch(r"No module named '(.+)'", failure.message)
    if missing and f"{module_name}.".startswith(f"{missing[1]}."):
        return (
            f"cannot import {module_name!r}: {failure.message}. Looked for beside the recipe file, in the current "
            "folder and on PYTHONPATH; a run does not know where its recipe lay"
        )
    places = re.findall(r'File "([^<"]+)", line (\d+)', failure.traceback)
    own = [place for place in places if Path(place[0]).stem == module_name.rpartition(".")[2]]
    path, line = (own or places or [("an unknown file", "?")])[-1]
    return f"importing {module_name!r} raised {failure.kind}: {failure.message} ({path}, line {line})"


def make_env(name: str, options: dict[str, Json]) -> Env:
    """Return a fresh env with validated options; an unknown option is refused with the nearest known one."""
    cls = env_class(name)
    unknown = [key for key in options if key not in cls.Options.model_fields]
    if unknown:
        known = sorted(cls.Options.model_fields)
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"env {name!r} has no option {unknown[0]!r}: known are {known}{hint}")
    try:
        return cls(cls.Options.model_validate(options))
    except ValidationError as error:
        lines = [f"env.{'.'.join(str(part) for part in item['loc'])}: {item['msg']}" for item in error.errors()]
        raise ConfigError(f"env {name!r}: " + "; ".join(lines)) from error
