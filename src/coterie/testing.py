"""For tests of your own environment: ``check_env``, the contract as checks; ``play_once``, a scripted play; more.

``assert_env(MyEnv)`` in a pytest function is what an env needs to be known to keep the contract (docs/write-an-env.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coterie.contract import CHECKS, IN_CHECK
from coterie.engines import Request
from coterie.engines.scripted import ScriptedEngine
from coterie.env import Env, env_class
from coterie.errors import ConfigError, EnvError, guarded
from coterie.observed import DEADLINE_S, HOSTILE, BrokenContractError, Subject, maker, seats_of
from coterie.rollout import Limits, Rollout, plays_of, replay
from coterie.team import Plan
from coterie.types import Episode, Failure, Json, Task

__all__ = ["HOSTILE", "CheckResult", "ScriptedEngine", "assert_env", "check_env", "play_once", "replay", "seats_of"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found; ``message`` says what was seen, and where it failed also what to change."""

    name: str
    passed: bool
    message: str


def check_env(env: type[Env] | str, options: Mapping[str, Json] | None = None, *, tasks: int = 3) -> list[CheckResult]:
    """Return the result of every check of the env contract (design: section 4), on ``tasks`` training tasks.

    ``env`` is a class, a built-in name or ``module:Class``. No model is needed. Raises ``ConfigError`` for an unknown
    name or unknown options.
    """
    cls = env_class(env) if isinstance(env, str) else env
    subject = Subject(cls=cls, make=maker(env, options), options=dict(options or {}), num_tasks=tasks)
    subject.make()
    results = []
    for name, check in CHECKS.items():
        failures: list[Failure] = []
        with guarded(name, failures.append):
            results.append(CheckResult(name, True, check(subject)))
        if failures:
            found = failures[0]
            expected = found.kind == BrokenContractError.__name__
            message = found.message if expected else f"{found.kind}: {found.message}\n{found.traceback}"
            results.append(CheckResult(name, False, message))
    return results


def assert_env(env: type[Env] | str, options: Mapping[str, Json] | None = None, *, tasks: int = 3) -> None:
    """Raise ``AssertionError`` with every failed check of ``check_env``.

    Call it from a test or under ``if __name__ == "__main__"``: a check imports the module again in another process.
    """
    if os.environ.get(IN_CHECK):
        raise ConfigError(
            'assert_env was called while its module was imported; put it under if __name__ == "__main__":'
        )
    failed = [result for result in check_env(env, options, tasks=tasks) if not result.passed]
    if failed:
        raise AssertionError("\n".join(f"{result.name}: {result.message}" for result in failed))


def play_once(
    env: type[Env] | str,
    answers: Sequence[str] | Callable[[str, str], str],
    *,
    options: Mapping[str, Json] | None = None,
    task: Task | None = None,
) -> Episode:
    """Return one plain play with scripted texts, one candidate per act; raises ``TrainError`` if the env raises.

    ``answers``: the texts in the order of acts, or ``answer(role, prompt text)``. ``task`` left out is the first
    training task.
    """
    make = maker(env, options)

    def script(request: Request) -> list[str]:
        if not isinstance(answers, Sequence):
            return [answers(request.role, engine.prompt(request))]
        if request.act >= len(answers):
            raise EnvError(f"act {request.act} asks role {request.role!r}, but only {len(answers)} answers were given")
        return [answers[request.act]]

    engine = ScriptedEngine(script)
    rollout = Rollout(
        make_env=make,
        seats=seats_of(make().active_roles, renderer=engine.renderer),
        plan=Plan(mode="chain", num_candidates=1),
        engine=engine,
        limits=Limits(retries=0, deadline_s=DEADLINE_S, max_failed_fraction=0.0),
    )
    chosen = make().tasks("train", 0, 1)[0] if task is None else task
    return rollout.run(plays_of([chosen], seed=0, purpose="play", step=0, episodes_per_task=1))[0]
