"""The contract of an environment as checks (design: section 4). Each returns what it saw, or raises what is broken."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from coterie.env import Score
from coterie.envs.splits import SPLITS
from coterie.observed import HOSTILE, Record, Subject, constant, require, scored_by, scripted, strange
from coterie.types import Reward

_DISJOINT_TASKS = 20
IN_CHECK = "COTERIE_IN_CHECK"
"""Set in the process that a check starts; a module that checks itself when imported would start another without end."""
_PROCESS_DEADLINE_S = 120.0
_LIST_TASKS = """
import importlib, json, sys
module, name, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
cls = vars(importlib.import_module(module))[name]
env = cls(cls.Options.model_validate(options))
rows = [[t.id, t.split, t.seed, t.data] for t in env.tasks("train", 0, int(sys.argv[4]))]
sys.stdout.write(json.dumps(rows))
"""


def _tasks(subject: Subject) -> str:
    """Tasks are a function of (split, index): the same again, in parts, and in whatever instance."""
    for split in SPLITS:
        whole = subject.some(split, 4)
        require(subject.some(split, 4) == whole, f"tasks({split!r}, 0, {len(whole)}) differs at the second call")
        half = len(whole) // 2
        env = subject.make()
        later = env.tasks(split, half, len(whole) - half)  # asked for first: no call may depend on an earlier one
        parts = env.tasks(split, 0, half) + later
        require(parts == whole, f"tasks({split!r}, 0, {len(whole)}) is not tasks(0, {half}) + tasks({half}, ...)")
        wrong = [task.id for task in whole if task.split != split]
        require(not wrong, f"tasks {wrong} of split {split!r} say that they are of another split")
    return f"equal again and in parts, in {len(SPLITS)} splits"


def _task_data(subject: Subject) -> str:
    """Task data is JSON: written and read back it is equal."""
    tasks = [task for split in SPLITS for task in subject.some(split, subject.num_tasks)]
    for task in tasks:
        try:
            back = json.loads(json.dumps(task.data, allow_nan=False))
        except (TypeError, ValueError) as error:
            require(False, f"the data of task {task.id!r} is not JSON: {error}")
        require(
            back == task.data,
            f"the data of task {task.id!r} changes when written as JSON and read back; use lists, not tuples, "
            "and strings as keys",
        )
    return f"{len(tasks)} tasks written and read back"


def _task_ids(subject: Subject) -> str:
    """No id occurs twice, and no instance is in two splits."""
    splits = {split: subject.some(split, _DISJOINT_TASKS) for split in SPLITS}
    ids = [task.id for tasks in splits.values() for task in tasks]
    twice = sorted({name for name in ids if ids.count(name) > 1})
    require(not twice, f"task ids occur twice: {twice[:5]}; put the split and the index into the id")
    where: dict[str, str] = {}
    for split, tasks in splits.items():
        for task in tasks:
            text = json.dumps(task.data, sort_keys=True)
            require(
                where.setdefault(text, split) == split,
                f"task {task.id!r} has the same data as a task of split {where[text]!r}: a model would be tested on "
                "what it was trained on. See coterie.envs.splits.make_instance",
            )
    return f"{len(ids)} tasks, none in two splits"


def _other_process(subject: Subject) -> str:
    """Another process, with other string hashes, makes the same tasks."""
    if "<" in subject.cls.__qualname__ or subject.cls.__module__ == "__main__":
        return "not checked: the class cannot be imported by name"
    tasks = subject.some("train", subject.num_tasks)
    command = [sys.executable, "-c", _LIST_TASKS, subject.cls.__module__, subject.cls.__qualname__]
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "77", IN_CHECK: "1"}
    code, output, errors = _run([*command, json.dumps(dict(subject.options)), str(len(tasks))], environment)
    require(code == 0, f"another process cannot make the tasks:\n{errors[-2000:]}")
    same = json.loads(output) == [[task.id, task.split, task.seed, task.data] for task in tasks]
    require(
        same,
        "another process makes other tasks from the same arguments; use coterie.keyed.keyed_random, not hash(), "
        "set order or a generator shared between calls",
    )
    return f"{len(tasks)} tasks equal in another process"


def _run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str, str]:
    """Return exit code, output and errors of a process; past the deadline it ends with all that it has started."""
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        done = False
        try:
            output, errors = process.communicate(timeout=_PROCESS_DEADLINE_S)
            done = True
        except subprocess.TimeoutExpired:
            require(
                False,
                f"another process did not make the tasks within {_PROCESS_DEADLINE_S:g} s; does the module start "
                "something when it is imported, or does tasks() take that long?",
            )
        finally:
            if not done:  # after an interrupt too: its group is not the terminal's, so nobody else ends it
                os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, output, errors


def _strange_answers(subject: Subject) -> str:
    """Whatever is said, the play ends with an outcome, and is not won."""
    records = subject.play(strange)
    for text in ("", "\u00b2", "9" * 5000):
        records += subject.play(constant(text))
    for record in records:
        for act, turn in zip(record.acts, record.episode.played, strict=True):
            for text in HOSTILE if act.score is not None else ():
                assert act.score is not None
                _reward(act.score, text, turn.role)
    truncated = sum(record.outcome.truncated for record in records)
    return f"{len(records)} plays ended, {truncated} of them truncated"


def _loss(subject: Subject) -> str:
    """Answering nothing does not win, and an empty answer is never well-formed."""
    records = subject.play(constant(""))
    won = [record.episode.task.id for record in records if record.outcome.success]
    require(not won, f"tasks {won} are won by empty answers")
    for record in records:
        for act in record.acts:
            if act.score is None or act.expert is None:
                continue
            empty, good = (_reward(act.score, text, act.role).local for text in ("", act.expert_texts()[0]))
            require(
                empty is None or good is None or empty < good or empty <= 0.0,
                f"role {act.role!r}: the empty answer gets the local reward {empty}, no less than the expert's {good}; "
                "an empty answer is never well-formed",
            )
    return f"{len(records)} plays of empty answers, none won"


def _win(subject: Subject) -> str:
    """The experts win at least once, where every act has one."""
    records = subject.play(scripted(0.0))
    without = sorted({act.role for record in records for act in record.acts if act.expert is None})
    won = sum(record.outcome.success for record in records)
    if not won and without:
        return f"not checked: roles {without} have no expert, so nobody knows how to win"
    require(
        won > 0,
        f"the experts (noise 0) won none of {len(records)} tasks: they play badly, or success is never reported",
    )
    return f"the experts won {won} of {len(records)}"


def _rewards(subject: Subject) -> str:
    """Rewards and outcomes are finite numbers of the right kinds, for roles that exist."""
    records = [record for noise in (0.0, 0.5, 1.0) for record in subject.play(scripted(noise))]
    for record in records:
        outcome, name = record.outcome, f"the outcome of task {record.episode.task.id!r}"
        require(isinstance(outcome.success, bool), f"{name}: success is {outcome.success!r}, expected True or False")
        require(isinstance(outcome.truncated, bool), f"{name}: truncated is {outcome.truncated!r}, expected a bool")
        strangers = sorted(set(outcome.local) - set(subject.cls.roles))
        require(not strangers, f"{name}: local rewards for {strangers}, roles are {list(subject.cls.roles)}")
        numbers: dict[str, object] = {"team": outcome.team, **outcome.local, **outcome.metrics}
        known = {key: value for key, value in numbers.items() if key != "team" or value is not None}
        odd = {key: value for key, value in known.items() if not _finite(value)}
        require(not odd, f"{name}: expected finite numbers, got {odd}")
        labels = {key: value for key, value in outcome.labels.items() if not isinstance(value, str)}
        require(not labels, f"{name}: labels must be strings, got {labels}")
        for act in record.acts:
            for text in act.expert_texts() if act.score is not None else ():
                assert act.score is not None
                _reward(act.score, text, act.role)
    return f"{sum(len(record.acts) for record in records)} acts in {len(records)} plays"


def _scored_roles(subject: Subject) -> str:
    """Roles are declared right: all that act are in ``roles``, and ``scored_roles`` always come with a score."""
    roles, scored = subject.cls.roles, subject.cls.scored_roles
    require(len(set(roles)) == len(roles) > 0, f"roles = {roles}: expected each role once, and at least one")
    strangers = sorted(set(scored) - set(roles))
    require(not strangers, f"scored_roles has {strangers}, which are not in roles {list(roles)}")
    records = [*subject.play(scripted(0.5)), *subject.play(strange)]
    acts = [act for record in records for act in record.acts]
    scores = subject.make().scores  # may say no for a role that other options have scored
    bare = sorted({act.role for act in acts if act.score is None and scores(act.role.partition("[")[0])})
    require(not bare, f"roles {bare} are in scored_roles but were asked without a score; give score=, or take them out")
    asked = sorted({act.role for act in acts})
    return f"asked were {asked}; scored are {list(scored)}"


def _pure_scores(subject: Subject) -> str:
    """Calling a score, for this text or others, changes neither later scores nor the play."""
    plain = subject.play(scripted(0.5))
    for record in plain:
        for act, turn in zip(record.acts, record.episode.played, strict=True):
            if act.score is None:
                continue
            texts = [turn.text, *act.expert_texts(), *HOSTILE]
            first = [_reward(act.score, text, act.role) for text in texts]
            again = [_reward(act.score, text, act.role) for text in reversed(texts)][::-1]
            for text, before, after in zip(texts, first, again, strict=True):
                require(
                    before == after,
                    f"score of role {act.role!r} gave {before}, later {after}, for the text {text[:80]!r}; it must "
                    "depend on the state at its act and the text alone. Keep states as values that nothing changes",
                )
    _same(plain, subject.play(scripted(0.5), meddle=True), "when its scores are called for other texts before")
    return f"{sum(len(record.acts) for record in plain)} acts, each scored for {len(HOSTILE) + 3} texts twice"


def _determinism(subject: Subject) -> str:
    """The same key and texts give the same play, alone or beside others; tasks are not changed by it."""
    tasks = subject.some("train", subject.num_tasks)
    kept = copy.deepcopy([dict(task.data) for task in tasks])
    together = subject.play(scripted(0.5), tasks)
    require([dict(task.data) for task in tasks] == kept, "play() changed the data of its task; copy what it changes")
    _same(together, subject.play(scripted(0.5), tasks), "the second time; random numbers must come from team.rng")
    alone = [subject.play(scripted(0.5), [task])[0] for task in reversed(tasks)][::-1]
    _same(together, alone, "when played alone; instances must share nothing that changes")
    return f"{len(tasks)} tasks, played three times"


def _replay(subject: Subject) -> str:
    """An episode can be replayed to any of its acts and goes on as before."""
    count = 0
    for record in subject.play(scripted(0.5)):
        for upto in range(len(record.acts) + 1):
            again = subject.replay(record.episode, upto, scripted(0.5))
            _same([record], [again], f"when replayed to act {upto}")
            count += 1
    return f"{count} replays"


def _reward(score: Score[Any], text: str, role: str) -> Reward:
    """Return the reward of a text; both parts must be finite numbers, or ``None`` for no verdict."""
    reward = asyncio.run(scored_by(score, text)).reward
    for name, part in asdict(reward).items():
        require(
            part is None or _finite(part),
            f"score of role {role!r}: Reward.{name} is {part!r} for the text {text[:80]!r}; expected a finite number, "
            "or None where there is no verdict",
        )
    return reward


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _same(expected: Sequence[Record], found: Sequence[Record], when: str) -> None:
    """Raise with the first difference of two lists of plays."""
    for old, new in zip(expected, found, strict=True):
        before, after = old.course(), new.course()
        differing = [index for index, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]]
        if differing or len(before) != len(after):
            index = differing[0] if differing else min(len(before), len(after)) - 1
            require(
                False,
                f"the play of task {old.episode.task.id!r} differs {when}. At act {index} it was\n  {before[index]}\n"
                f"and then\n  {after[index]}",
            )


CHECKS: Mapping[str, Callable[[Subject], str]] = {
    "tasks are the same at every call": _tasks,
    "tasks are the same in every process": _other_process,
    "task data is JSON": _task_data,
    "splits are disjoint": _task_ids,
    "roles are as declared": _scored_roles,
    "any answer ends in an outcome": _strange_answers,
    "empty answers lose": _loss,
    "the experts win": _win,
    "rewards are finite": _rewards,
    "scores are pure": _pure_scores,
    "plays are deterministic": _determinism,
    "plays can be replayed": _replay,
}
"""By name, in the order in which they are best read: the first that fails often explains the others."""
