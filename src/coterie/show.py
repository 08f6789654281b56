"""One episode as a person reads it: the task, every act with its prompt, all candidates with rewards, the outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from random import Random
from typing import Any, Protocol, runtime_checkable

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from coterie.credit import turn_value
from coterie.env import Env, Expert, Prompt, Score, Team
from coterie.errors import ConfigError
from coterie.lineup import Lineup
from coterie.rollout import Event, plays_of
from coterie.types import Episode, Json, Outcome, Played, Task, Turn

_LAST_LINES = 12
_LAST_CHARACTERS = 1200
_OTHERS_CHARACTERS = 160


@runtime_checkable
class Drawable(Protocol):
    """A result of a score that can draw the state it led to; envs opt in by having the method."""

    def draw(self) -> str:
        """Return the state as lines of text."""
        ...


class Watched(Env):
    """Plays as another env does, and keeps what each act's played candidate led to, in the order of the acts."""

    def __init__(self, env: Env, drawings: list[str]) -> None:
        """Watch ``env``; ``drawings`` gets one text per act, "" where the result draws nothing."""
        super().__init__()
        self._env = env
        self._drawings = drawings

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        """Return the watched env's tasks."""
        return self._env.tasks(split, start, count)

    async def play(self, task: Task, team: Team) -> Outcome:
        """Play as the watched env does; a second attempt starts the drawings over."""
        self._drawings.clear()
        return await self._env.play(task, _WatchedTeam(team, self._drawings))


class _WatchedTeam:
    """Hands every act on to the team, and draws its result."""

    def __init__(self, team: Team, drawings: list[str]) -> None:
        self._team = team
        self._drawings = drawings

    @property
    def rng(self) -> Random:
        """The env's own randomness."""
        return self._team.rng

    async def act(
        self,
        role: str,
        prompt: Prompt,
        *,
        score: Score[Any] | None = None,
        round: int | None = None,
        expert: Expert | None = None,
    ) -> Played[Any]:
        """Ask the team; acts are numbered as they are asked, and drawn once they are answered."""
        number = len(self._drawings)
        self._drawings.append("")
        played: Played[Any] = await self._team.act(role, prompt, score=score, round=round, expert=expert)
        if isinstance(played.result, Drawable):
            self._drawings[number] = played.result.draw()
        return played


def play_one(
    lineup: Lineup, *, split: str, index: int, training: bool, temperature: float, event: Event
) -> tuple[Episode, list[str]]:
    """Return the episode of task ``index`` of a split, and what each act led to ("" where the env draws nothing).

    ``training`` draws the recipe's candidates at its temperatures; otherwise one per act at ``temperature``.
    """
    env = lineup.make_env()
    available = env.num_tasks(split)
    if available is not None and index >= available:
        raise ConfigError(f"task {index}: split {split!r} has {available} tasks, numbered from 0")
    drawings: list[str] = []
    rollout = replace(
        lineup.rollout(training=training, event=event, before_batch=lambda: None, temperature=temperature),
        make_env=lambda: Watched(lineup.make_env(), drawings),
    )
    tasks = env.tasks(split, index, 1)
    (episode,) = rollout.run(plays_of(tasks, seed=lineup.recipe.seed, purpose="play", step=0, episodes_per_task=1))
    return episode, drawings


def show_episode(
    episode: Episode,
    *,
    decode: Callable[[Turn], str],
    alpha: float,
    drawings: Sequence[str] = (),
    full: bool = False,
) -> RenderableType:
    """Return an episode for people; ``decode`` gives the text of a turn's prompt, ``drawings`` the state after an act.

    ``full`` shows prompts and all candidates whole; otherwise a prompt's last lines, and the start of what was not
    played. The reward of a candidate is ``alpha`` * team + local.
    """
    parts: list[RenderableType] = [Rule(f"task {episode.task.id} ({episode.task.split})"), draw_task(episode.task)]
    for act, group in groupby(episode.turns, key=lambda turn: turn.act):
        turns = list(group)
        first = turns[0]
        seat = f"[{first.seat}]" if first.seat else ""
        parts.append(Rule(f"round {first.round + 1}: {first.role}{seat} (policy {first.policy}, v{first.version})"))
        parts.append(Text(_prompt_text(decode(first), full), style="dim"))
        parts.append(_candidates(turns, alpha, full))
        drawing = drawings[act] if act < len(drawings) else ""
        if drawing:
            parts.append(Text(f"what it leads to:\n{plain(drawing)}"))
    parts.append(Rule("outcome"))
    parts.append(Text(outcome_line(episode), style="bold"))
    return Group(*parts)


def draw_task(task: Task) -> Text:
    """Return a task's data: rows of text under each other, everything else as ``key: value``."""
    lines = []
    for key, value in task.data.items():
        rows = _rows(value)
        lines += [f"{key}:", *(f"  {row}" for row in rows)] if rows else [f"{key}: {value}"]
    return Text(plain("\n".join(lines)))


def outcome_line(episode: Episode) -> str:
    """Return how an episode ended, in one line."""
    outcome, failure = episode.outcome, episode.failure
    if outcome is None:
        assert failure is not None
        return f"failed: {failure.where}: {failure.kind}: {failure.message}"
    ending = "solved" if outcome.success else "not solved, a limit ended it" if outcome.truncated else "not solved"
    team = "no team reward" if outcome.team is None else f"team reward {outcome.team:g}"
    local = [f"{role} {value:g}" for role, value in outcome.local.items()]
    facts = [f"{name} {value:g}" for name, value in outcome.metrics.items()]
    labels = [f"{name} {value}" for name, value in outcome.labels.items() if name not in outcome.metrics]
    return ", ".join([f"{ending}: {team}", *local, *facts, *labels])


def plain(text: str) -> str:
    """Return text that a terminal shows and never obeys: control characters are written as escapes.

    A model can emit any character, escape sequences too.
    """
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def _candidates(turns: Sequence[Turn], alpha: float, full: bool) -> Table:
    """Return the candidates of one act, best first, with their rewards; the played one is marked."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "#"):
        table.add_column(column)
    for column in ("reward", "team", "local"):
        table.add_column(column, justify="right")
    table.add_column("answer", overflow="fold")
    for turn in sorted(turns, key=lambda turn: -_value(turn, alpha)):
        reward = turn.reward
        team, local = (None, None) if reward is None else (reward.team, reward.local)
        text = turn.text if full or turn.played else _start(turn.text)
        marks = [f"  <{turn.stop_reason.value}>"] if turn.stop_reason.truncated else []
        marks += [f"  {turn.error}"] if turn.error else []
        table.add_row(
            "played" if turn.played else "",
            str(turn.candidate),
            _number(turn_value(turn, alpha)),
            _number(team),
            _number(local),
            Text(plain(text) + plain("".join(marks)) or '""'),
            style="bold" if turn.played else None,
        )
    return table


def _value(turn: Turn, alpha: float) -> float:
    value = turn_value(turn, alpha)
    return float("-inf") if value is None else value


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _start(text: str) -> str:
    """Return one line of at most some characters."""
    line = " ".join(text.split())
    return line if len(line) <= _OTHERS_CHARACTERS else f"{line[:_OTHERS_CHARACTERS]}..."


def _prompt_text(text: str, full: bool) -> str:
    """Return the last lines of a prompt, or all of it."""
    shown = plain(text)
    if full:
        return shown
    tail = "\n".join(shown.split("\n")[-_LAST_LINES:])[-_LAST_CHARACTERS:]
    return tail if tail == shown else f"... {tail}"


def _rows(value: Json) -> list[str]:
    """Return the rows of a list of texts, or of a text of several lines; none for anything else."""
    if isinstance(value, str):
        return value.split("\n") if "\n" in value else []
    if isinstance(value, Mapping) or not isinstance(value, Sequence):
        return []
    rows = [row for row in value if isinstance(row, str)]
    return rows if len(rows) == len(value) else []
