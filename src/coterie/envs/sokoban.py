"""Sokoban: push every box onto a goal. A tool drafts moves, a planner decides which are made.

Every round the tool's draft is simulated (nothing moves), the planner sees draft and result, and the planner's answer
is executed. Solved means every box is on a goal. Arithmetic of the reward::

    phi = max(0, 1 - p / p0)            p: fewest pushes left, p0: those of the start; 0 when a box is stuck for good
    team = phi(after) - phi(before)     + solve_bonus when the moves solve the level
    local = format_reward               if the answer is well-formed, else 0

p is exact on levels of up to two boxes and 12 x 12 cells, above that the cheapest matching of boxes to goals. Pushing
to and fro sums to exactly 0. Levels are made by reverse play, or read from a file of standard XSB text (``levels``).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from coterie.env import Env, EnvOptions, Expert, Prompt, Score, Team
from coterie.envs.seats import SeatOptions
from coterie.envs.sokoban_levels import draw_level, read_levels
from coterie.envs.sokoban_rules import MalformedLevelError, Position, canonical, cells, inside, parse
from coterie.envs.sokoban_script import Attempt, answer_moves, blind_moves, execute, phi
from coterie.envs.sokoban_solver import solution
from coterie.envs.splits import make_instance, num_listed, places, split_list
from coterie.errors import ConfigError, EnvError
from coterie.keyed import stable_hash
from coterie.types import Json, Outcome, Reward, Scored, Task, system, user

_BUCKET = 4


class SokobanOptions(SeatOptions):
    """Options of Sokoban.

    Levels of size 6 with one box take 5.6 moves on average (2 to 20).
    """

    size: int = Field(default=6, ge=5, le=20)
    """Rows and columns of a made level, its outer wall included: 6 leaves 4 x 4 cells to move in."""
    boxes: int = Field(default=1, ge=1, le=8)
    """Boxes (and goals) of a made level; at most a quarter of the cells within the outer wall."""
    walls: float = Field(default=0.1, ge=0.0, le=0.4)
    """Probability that a cell within the outer wall of a made level is a wall."""
    levels: str | None = None
    """A file of XSB levels to play instead of made ones."""
    max_rounds: int = Field(default=5, ge=1, le=200)
    """Rounds after which an unsolved episode is truncated."""
    max_moves: int = Field(default=5, ge=1, le=200)
    """Most moves in one answer; a longer answer is not well-formed."""
    reward: Literal["dense", "outcome"] = "dense"
    """``dense``: differences of the potential; ``outcome``: 1 where the moves solve the level, else 0."""
    style: Literal["plain", "compact"] = "plain"
    """``plain``: English for language models; ``compact``: fixed-length characters for tiny ones."""
    solve_bonus: float = Field(default=1.0, ge=0.0)
    """Added once to the dense team reward by the answer that solves the level."""
    format_reward: float = Field(default=0.1, ge=0.0)
    """Local reward of a well-formed answer."""
    compact_end_map: bool = False
    """Compact planner prompts also hold the map as seen from the end of the draft."""

    @model_validator(mode="after")
    def _made_or_read(self) -> SokobanOptions:
        # Compared by value: a resolved recipe writes every default out, and must still be readable.
        made = {"size": self.size, "boxes": self.boxes, "walls": self.walls}
        ignored = sorted(name for name, value in made.items() if value != type(self).model_fields[name].default)
        if self.levels is not None and ignored:
            raise ValueError(f"{ignored} would be ignored with levels = {self.levels!r}: give one or the other")
        most = (self.size - 2) ** 2 // 4
        if self.boxes > most:
            raise ValueError(f"boxes = {self.boxes}: expected at most {most} at size = {self.size}")
        return self


class Sokoban(Env):
    """The Sokoban environment; see the module's first lines for the rules."""

    roles: ClassVar[tuple[str, ...]] = ("tool", "planner")
    scored_roles: ClassVar[tuple[str, ...]] = ("tool", "planner")
    Options: ClassVar[type[EnvOptions]] = SokobanOptions
    options: SokobanOptions

    def __init__(self, options: EnvOptions | None = None) -> None:
        """Make a fresh instance; ``ConfigError`` if the planner does not play or a level cannot be played."""
        super().__init__(options)
        if "planner" not in self.active_roles:
            raise ConfigError(f"env.roles = {list(self.active_roles)}: 'planner' must play, alone or with 'tool'")
        levels = () if self.options.levels is None else read_levels(self.options.levels)
        self._listed = {**split_list(levels, lambda each: each.split), "all": levels} if levels else None
        size = self.options.size
        self._width = max((each.start.level.width for each in levels), default=size)
        self._height = max((each.start.level.height for each in levels), default=size)

    def num_tasks(self, split: str) -> int | None:
        """Return how many levels of the file a split has, or ``None`` where levels are made without end."""
        return num_listed(split, self._listed)

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        """Return tasks of a split, fewer where a file has no more. No two splits share a level, turned or mirrored.

        Made levels have no end. Levels of a file keep their order; its split ``all`` holds every one.
        """
        return [self._task(split, index) for index in places(start, count, self.num_tasks(split))]

    async def play(self, task: Task, team: Team) -> Outcome:
        """Play one task: per round a draft by the tool (if it plays) and an answer by the planner."""
        start = now = self._start_of(task)
        history: list[Attempt] = []
        for round in range(self.options.max_rounds):
            score = self._score(start, now)
            draft: Attempt | None = None
            for seat in self.options.drafting_seats():
                prompt = self._prompt(seat, now, None, history)
                drafted = await team.act(seat, prompt, score=score, round=round, expert=self._expert(start, now, None))
                draft = drafted.result
            prompt = self._prompt("planner", now, draft, history)
            planned = await team.act(
                "planner", prompt, score=score, round=round, expert=self._expert(start, now, draft)
            )
            history.append(planned.result)
            now = planned.result.position
            if now.solved:
                break
        return self._outcome(task, start, history)

    # ---- tasks ----

    def _task(self, split: str, index: int) -> Task:
        data: dict[str, Json]
        if self._listed is not None:
            each = self._listed[split][index]
            seed, data = (
                stable_hash(each.start.xsb()),
                {"xsb": each.start.xsb(), "title": each.title, "line": each.line},
            )
        else:
            size, boxes, walls = self.options.size, self.options.boxes, self.options.walls
            name = f"sokoban/size={size}/boxes={boxes}/walls={walls}"
            seed, level = make_instance(name, split, index, lambda rng: draw_level(rng, size, boxes, walls), canonical)
            data = {"xsb": level.xsb(), "shortest": len(solution(level).moves)}
        return Task(id=f"sokoban:{split}:{index}", split=split, seed=seed, data=data)

    def _start_of(self, task: Task) -> Position:
        """Return the position a task starts with; ``EnvError`` if its data is not a level of this env, to be solved."""
        text = task.data.get("xsb")
        try:
            start = parse(text if isinstance(text, str) else "")
        except MalformedLevelError as error:
            raise EnvError(f"task {task.id}: data['xsb'] is no level: {error.reason}; got {text!r}") from error
        level = start.level
        if start.solved or level.width > self._width or level.height > self._height:
            raise EnvError(
                f"task {task.id}: expected a level of at most {self._width} x {self._height} cells with a box off its "
                f"goal, got {level.width} x {level.height}:\n{text}"
            )
        return start

    # ---- answers ----

    def _parse(self, text: str) -> str:
        """Return the moves of an answer, "" if it is not well-formed.

        compact: the whole text is 1 to ``max_moves`` letters of UDLR. plain: so is the rest of the last line that
        starts with ``Answer:``, where spaces and commas may separate the letters.
        """
        moves = text
        if self.options.style == "plain":
            found = re.findall(r"^[ \t]*Answer:(.*)$", text, flags=re.MULTILINE)
            moves = re.sub(r"[\s,]", "", found[-1]) if found else ""
        return moves if re.fullmatch(f"[UDLR]{{1,{self.options.max_moves}}}", moves) else ""

    def _write(self, moves: str) -> str:
        return moves if self.options.style == "compact" else f"Answer: {' '.join(moves)}"

    def _score(self, start: Position, now: Position) -> Score[Attempt]:
        """Return the scorer of a role: the moves' worth if they were made, whether they are a draft or the answer."""
        before = phi(now, start)

        def score(text: str) -> Scored[Attempt]:
            attempt = execute(now, self._parse(text))
            solves = attempt.position.solved
            if self.options.reward == "outcome":
                team = float(solves)
            else:
                team = phi(attempt.position, start) - before + (self.options.solve_bonus if solves else 0.0)
            return Scored(Reward(team, self.options.format_reward if attempt.moves else 0.0), attempt)

        return score

    def _expert(self, start: Position, now: Position, draft: Attempt | None) -> Expert:
        def expert(rng: random.Random, noise: float) -> str:
            if draft is not None and self.options.blind_planner:
                return self._write(blind_moves(draft, rng, noise))
            return self._write(answer_moves(start, now, draft, rng, noise, self.options.max_moves))

        return expert

    def _outcome(self, task: Task, start: Position, history: Sequence[Attempt]) -> Outcome:
        end = history[-1].position
        bonus = self.options.solve_bonus if end.solved else 0.0
        metrics = {
            "rounds": float(len(history)),
            "moves": float(sum(attempt.made for attempt in history)),
            "stuck": float(history[-1].mark == "x"),
        }
        labels = {"boxes": str(start.boxes.bit_count())}
        shortest = task.data.get("shortest")
        if isinstance(shortest, int):
            metrics["shortest"] = float(shortest)
            bucket = (shortest - 1) // _BUCKET * _BUCKET
            labels["length"] = f"{bucket + 1:02d}-{bucket + _BUCKET:02d}"
        return Outcome(
            success=end.solved,
            team=float(end.solved) if self.options.reward == "outcome" else phi(end, start) + bonus,
            truncated=not end.solved,
            metrics=metrics,
            labels=labels,
        )

    # ---- prompts ----

    def _prompt(self, seat: str, now: Position, draft: Attempt | None, history: Sequence[Attempt]) -> Prompt:
        if self.options.style == "compact":
            return self._compact(now, draft, history)
        rules = _RULES.format(
            max_moves=self.options.max_moves,
            max_rounds=self.options.max_rounds,
            who=self.options.who(_WHO, seat, draft is not None),
            example=" ".join("RRDLUU"[: self.options.max_moves]),
        )
        hidden, own = draft is not None and self.options.blind_planner, not self.options.has_tool
        return [system(rules), user(_situation(now, draft, history, hidden=hidden, own=own))]

    def _compact(self, now: Position, draft: Attempt | None, history: Sequence[Attempt]) -> str:
        """Return the prompt of one fixed length per role.

        First asked in a round: map, ways, last answer, its mark. Asked with a draft: map (unless it is hidden), ways,
        draft, its mark, how many of its moves are legal, the ways from its end, and (option) the map from there.
        """
        width = self.options.max_moves
        hidden = draft is not None and self.options.blind_planner
        here = ("" if hidden else self._rolled(now)) + self._ways(now)
        if draft is None:
            return here + (history[-1].padded(width) + history[-1].mark if history else "-" * (width + 1))
        legal = str(draft.made).rjust(len(str(width)), "0")
        end_map = self._rolled(draft.position) if self.options.compact_end_map and not hidden else ""
        return here + draft.padded(width) + draft.mark + legal + self._ways(draft.position) + end_map

    def _ways(self, now: Position) -> str:
        """Return rows and columns from the agent to the nearest box off a goal, and from that box to the nearest goal
        without a box, walls aside, as signed numbers of equal width: ``"+1-2+0+3"``.
        """
        width, goals = now.level.width, now.level.goals
        row, column = divmod(now.agent, width)
        agent = (row, column)
        box = _nearest(agent, now.boxes & ~goals, width)
        goal = _nearest(box, goals & ~now.boxes, width)
        digits = len(str(max(self._width, self._height) - 1)) + 1
        steps = (box[0] - agent[0], box[1] - agent[1], goal[0] - box[0], goal[1] - box[1])
        return "".join(f"{step:+0{digits}d}" for step in steps)

    def _rolled(self, now: Position) -> str:
        """Return the map as the agent sees it, row by row, its own cell first; floor is ``-``, the agent is not drawn.

        The map is cyclic: what is one step to the right is always character 1. The wall around every level keeps its
        sides apart. Smaller levels of a file are filled up with walls, and so is all that is outside their walls.
        """
        level, area = now.level, inside(now.level, now.agent)
        rows = [["#"] * self._width for _ in range(self._height)]
        for cell in cells(area):
            row, column = divmod(cell, level.width)
            rows[row][column] = {" ": "-", "@": "-", "+": "."}.get(symbol := now.symbol(cell), symbol)
        row, column = divmod(now.agent, level.width)
        return "".join("".join(line[column:] + line[:column]) for line in rows[row:] + rows[:row])


def _nearest(here: tuple[int, int], there: int, width: int) -> tuple[int, int]:
    """Return the cell of a set that is nearest as the crow walks, the first of several; ``here`` for an empty set."""
    found = [divmod(cell, width) for cell in cells(there)]
    return min(found, key=lambda cell: abs(cell[0] - here[0]) + abs(cell[1] - here[1]), default=here)


_WHO = {
    "tool": "You are the tool of a team of two: you draft the moves, the planner sees it simulated and decides.",
    "planner": "You are the planner of a team of two: the tool drafts moves for you, your own answer is executed.",
    "blind": "You are the planner of a team of two: you do not see the map, the tool does and drafts moves for you; "
    "your own answer is executed.",
    "alone": "You are the planner: your answer is executed.",
    "drafting": "You are the planner: draft moves first; you will see where they lead before you give your answer.",
}
# Who is asked stands late: what two roles' prompts begin alike with is computed once.
_RULES = """\
The task is a Sokoban level: push every box onto a goal.
On the map # is a wall, @ is where you stand, $ is a box, . is a goal, * is a box on a goal, + is you on a goal, and
a space is free. Row 0 is at the top, column 0 at the left.
Moves: U (row - 1), D (row + 1), L (column - 1), R (column + 1). Moving into a box pushes it one cell
in the same direction. Boxes cannot be pulled. You cannot move into a wall or push a box into a wall or another box: the
first move that tries is not made and ends the answer. A box in a corner that is no goal is lost. An answer has 1 to
{max_moves} moves, and there are at most {max_rounds} rounds, so a long solution is made piece by piece.
{who}
Think briefly if you need to, then end with one line in exactly this form:
Answer: {example}"""


def _situation(now: Position, draft: Attempt | None, history: Sequence[Attempt], *, hidden: bool, own: bool) -> str:
    """Return the part of the plain prompt that changes: map (unless hidden), positions, what was tried, the draft."""
    boxes, goals = _where(now, now.boxes), _where(now, now.level.goals)
    lines = [
        *([f"Round {len(history) + 1}."] if hidden else [f"Round {len(history) + 1}. The map:", now.xsb()]),
        f"You are at {_where(now, 1 << now.agent)}. Boxes at: {boxes}. Goals at: {goals}.",
    ]
    if history:
        lines.append(f"Executed last round: {history[-1].sentence()}")
    if draft is not None:
        whose = "Your" if own else "The tool's"
        lines.append(f"{whose} draft, simulated from here: {draft.sentence()}")
        if draft.made and not hidden:
            lines += ["The map at the end of the draft:", draft.position.xsb()]
    return "\n".join(lines)


def _where(now: Position, board: int) -> str:
    places = (divmod(cell, now.level.width) for cell in cells(board))
    return ", ".join(f"row {row} column {column}" for row, column in places)
