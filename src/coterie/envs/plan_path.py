"""Plan-Path: walk from a start to a goal on a grid with walls. A tool drafts moves, a planner decides which are made.

Every round the tool's draft is simulated (nothing moves), the planner sees draft and result, and the planner's answer
is executed. There may be several drafting tools. Solved means standing on the goal. Arithmetic of the reward::

    phi = max(0, 1 - d / d0)            d: true distance to the goal (breadth-first), d0: that of the start
    team = phi(after) - phi(before)     + solve_bonus when the moves reach the goal
    local = format_reward               if the answer is well-formed, else 0

so every closed walk sums to exactly 0. The rules follow the Plan-Path task of arXiv 2510.11062, with the current
position in the prompt and true distances.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from coterie.env import Env, EnvOptions, Expert, Prompt, Score, Team
from coterie.envs.answer_texts import block, last_line, printed, program_of
from coterie.envs.grid import Grid, canonical, cells_of, distances, straight_distance
from coterie.envs.halves import compact_planner, compact_tool, message_of, scripted_message, scripted_step, situation
from coterie.envs.maze import Attempt, Board, answer_moves, blind_moves, execute, last_answer, nearest_end
from coterie.envs.once import once
from coterie.envs.seats import SeatOptions
from coterie.envs.splits import make_instance
from coterie.errors import ConfigError
from coterie.keyed import stable_hash
from coterie.sandbox.execution import Verdict
from coterie.sandbox.shared import shared_pool
from coterie.types import Outcome, Reward, Scored, Task, system, user

_BUCKET = 4


class PlanPathOptions(SeatOptions):
    """Options of Plan-Path."""

    knowledge: Literal["shared", "split", "halves"] = "shared"  # type: ignore[assignment]
    """``split``: in a team only the tool sees the map; the planner sees drafts and what became of them. ``halves``: the
    tool sees the walls and not the goal, and says something; the planner sees where the goal is, and what it says."""
    size: int = Field(default=10, ge=3, le=30)
    """Rows and columns of the grid."""
    walls: float = Field(default=0.22, ge=0.0, le=0.6)
    """Probability that a cell is a wall."""
    max_rounds: int = Field(default=4, ge=1, le=100)
    """Rounds after which an unsolved episode is truncated."""
    drafters: int = Field(default=1, ge=1, le=16)
    """Seats of the tool, which draft at the same time, unseen by each other; the planner sees all drafts."""
    max_moves: int = Field(default=4, ge=1, le=200)
    """Most moves in one answer; a longer answer is not well-formed."""
    reward: Literal["dense", "outcome"] = "dense"
    """``dense``: differences of the potential; ``outcome``: 1 where the moves reach the goal, else 0."""
    tool: Literal["moves", "python"] = "moves"
    """``moves``: the tool drafts moves; ``python``: it writes a program that prints them, run in the sandbox."""
    style: Literal["plain", "compact"] = "plain"
    """``plain``: English for language models; ``compact``: fixed-length characters for tiny ones."""
    solve_bonus: float = Field(default=1.0, ge=0.0)
    """Added once to the dense team reward by the answer that reaches the goal."""
    format_reward: float = Field(default=0.1, ge=0.0)
    """Local reward of a well-formed answer."""
    train_detours: float | None = Field(default=None, ge=0.0, le=1.0)
    """Share of training tasks whose shortest path is longer than the straight one; ``None``: as they fall."""
    compact_end_map: bool = False
    """Compact planner prompts also hold the map as seen from the end of the draft."""

    @model_validator(mode="after")
    def _detours_need_walls(self) -> PlanPathOptions:
        if self.train_detours and not self.walls:
            raise ValueError(f"train_detours = {self.train_detours} with walls = 0: without walls no path has a detour")
        if self.tool == "python" and self.style == "compact":
            raise ValueError("tool = 'python' with style = 'compact': programs need words; use style = 'plain'")
        return self

    @model_validator(mode="after")
    def _messages_are_no_drafts(self) -> PlanPathOptions:
        if self.halves and (self.tool == "python" or self.compact_end_map):
            given = "tool = 'python'" if self.tool == "python" else "compact_end_map"
            raise ValueError(
                f"{given} with knowledge = 'halves': the tool sends a message, there is no draft; remove it"
            )
        return self

    @property
    def halves(self) -> bool:
        """Whether tool and planner each hold what the other lacks. Alone a planner sees what both would."""
        return self.knowledge == "halves" and self.has_tool

    @model_validator(mode="after")
    def _drafters_need_a_tool(self) -> PlanPathOptions:
        if self.drafters > 1 and not self.has_tool:
            raise ValueError(f"drafters = {self.drafters}, but the tool does not play; add it to roles, or remove it")
        return self


class PlanPath(Env):
    """The Plan-Path environment; see the module's first lines for the rules."""

    roles: ClassVar[tuple[str, ...]] = ("tool", "planner")
    scored_roles: ClassVar[tuple[str, ...]] = ("tool", "planner")
    Options: ClassVar[type[EnvOptions]] = PlanPathOptions
    options: PlanPathOptions

    def __init__(self, options: EnvOptions | None = None) -> None:
        """Make a fresh instance; ``ConfigError`` if the planner does not play, for nothing would ever move."""
        super().__init__(options)
        if "planner" not in self.active_roles:
            raise ConfigError(f"env.roles = {list(self.active_roles)}: 'planner' must play, alone or with 'tool'")

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        """Return tasks of a split; their number has no end. No two splits share a map, turned or mirrored."""
        return [self._task(split, index) for index in range(start, start + count)]

    def scores(self, role: str) -> bool:
        """Return whether a role's candidates can be scored at once: messages cannot."""
        return super().scores(role) and not (role == "tool" and self.options.halves)

    async def play(self, task: Task, team: Team) -> Outcome:
        """Play one task: per round the drafts of the tool (if it plays) and an answer by the planner."""
        start = board = Board.of(task)
        history: list[Attempt] = []
        for round in range(self.options.max_rounds):
            if self.options.halves:
                history.append(await self._told(board, history, team, round))
                board = history[-1].board
                if board.solved:
                    break
                continue
            asked = [
                team.act(
                    seat,
                    self._prompt(seat, board, (), history),
                    score=self._score_program(board) if self._programs(seat) else self._score(board),
                    round=round,
                    expert=self._expert(board, (), self._programs(seat)),
                )
                for seat in self.options.drafting_seats(self.options.drafters)
            ]
            drafts = [drafted.result for drafted in await asyncio.gather(*asked)]
            prompt = self._prompt("planner", board, drafts, history)
            planned = await team.act(
                "planner", prompt, score=self._score(board), round=round, expert=self._expert(board, drafts)
            )
            history.append(planned.result)
            board = planned.result.board
            if board.solved:
                break
        return self._outcome(start, history)

    async def _told(self, board: Board, history: Sequence[Attempt], team: Team, round: int) -> Attempt:
        """Play a round in which the tool says something, which nothing scores, and the planner answers."""
        compact = self.options.style == "compact"
        asked = [
            team.act(
                seat,
                self._message_prompt(board, history),
                round=round,
                expert=lambda rng, noise: scripted_message(board, rng, noise, compact),
            )
            for seat in self.options.drafting_seats(self.options.drafters)
        ]
        messages = [message_of(said.text, compact) for said in await asyncio.gather(*asked)]
        planned = await team.act(
            "planner",
            self._answer_prompt(board, messages, history),
            score=self._score(board),
            round=round,
            expert=lambda rng, noise: self._write(scripted_step(board, messages, rng, noise)),
        )
        return planned.result

    # ---- tasks ----

    def _task(self, split: str, index: int) -> Task:
        name = f"plan_path/size={self.options.size}/walls={self.options.walls}"
        detour: bool | None = None
        share = self.options.train_detours
        if share is not None and split == "train":
            name += f"/detours={share}"
            detour = stable_hash(name, "detour", index) < share * 2**64
        seed, grid = make_instance(name, split, index, lambda rng: self._draw(rng, detour), canonical)
        return Task(id=f"plan_path:{split}:{index}", split=split, seed=seed, data={"grid": list(grid)})

    def _draw(self, rng: random.Random, detour: bool | None) -> Grid | None:
        """Return one random map, or ``None`` if its goal cannot be reached or its path is not of the wanted kind."""
        size = range(self.options.size)
        grid = [["#" if rng.random() < self.options.walls else "." for _ in size] for _ in size]
        free = sorted(cells_of(["".join(row) for row in grid], "."))
        if len(free) < 2:
            return None
        start, goal = rng.sample(free, 2)
        found = distances(frozenset(free), goal).get(start)
        if found is None or (detour is not None and detour != (found > straight_distance(start, goal))):
            return None
        grid[start[0]][start[1]], grid[goal[0]][goal[1]] = "S", "G"
        return tuple("".join(row) for row in grid)

    # ---- answers ----

    def _parse(self, text: str) -> str:
        """Return the moves of an answer, "" if it is not well-formed.

        compact: the whole text is 1 to ``max_moves`` letters of UDLR. plain: so is the rest of the last line that
        starts with ``Answer:``, where spaces and commas may separate the letters.
        """
        moves = text
        if self.options.style == "plain":
            found = re.findall(r"^[ \t]*Answer:(.*)$", text, flags=re.MULTILINE)
            moves = found[-1] if found else ""
        return self._moves(moves)

    def _moves(self, text: str) -> str:
        """Return the moves of a text that holds nothing else, "" for any other."""
        moves = text if self.options.style == "compact" else re.sub(r"[\s,]", "", text)
        return moves if re.fullmatch(f"[UDLR]{{1,{self.options.max_moves}}}", moves) else ""

    def _write(self, moves: str) -> str:
        return moves if self.options.style == "compact" else f"Answer: {' '.join(moves)}"

    def _score(self, board: Board) -> Score[Attempt]:
        """Return the scorer of a role: the moves' worth if they were made, whether they are a draft or the answer."""

        return lambda text: self._judge(board, self._parse(text))

    def _score_program(self, board: Board) -> Score[Attempt]:
        """Return the scorer of a tool that writes programs: the last line printed is its draft."""

        async def score(text: str) -> Scored[Attempt]:
            program, moves = program_of(text), ""
            if program:
                done = await shared_pool().run(program)
                if done.verdict is Verdict.OK:
                    moves = self._moves(last_line(printed(done.stdout)))
            return self._judge(board, moves)

        return once(score)

    def _judge(self, board: Board, moves: str) -> Scored[Attempt]:
        attempt = execute(board, moves)
        solves = attempt.mark == "*"
        if self.options.reward == "outcome":
            team = float(solves)
        else:
            team = attempt.board.phi - board.phi + (self.options.solve_bonus if solves else 0.0)
        return Scored(Reward(team, self.options.format_reward if attempt.moves else 0.0), attempt)

    def _programs(self, seat: str) -> bool:
        """Return whether a seat answers with programs."""
        return self.options.tool == "python" and seat.partition("[")[0] == "tool"

    def _expert(self, board: Board, drafts: Sequence[Attempt], program: bool = False) -> Expert:
        """Return the scripted player, who knows no more than the prompt tells: a blind planner has the drafts only."""

        def expert(rng: random.Random, noise: float) -> str:
            if drafts and self.options.blind_planner:
                return self._write(blind_moves(board, drafts, rng, noise))
            draft = nearest_end(drafts) if drafts else None
            moves = answer_moves(board, draft, rng, noise, self.options.max_moves)
            return block(f"print({moves!r})") if program else self._write(moves)

        return expert

    def _outcome(self, start: Board, history: Sequence[Attempt]) -> Outcome:
        end = history[-1].board
        bonus = self.options.solve_bonus if end.solved else 0.0
        bucket = (start.shortest - 1) // _BUCKET * _BUCKET
        return Outcome(
            success=end.solved,
            team=float(end.solved) if self.options.reward == "outcome" else end.phi - start.phi + bonus,
            truncated=not end.solved,
            metrics={
                "rounds": len(history),
                "moves": sum(attempt.made for attempt in history),
                "shortest": start.shortest,
            },
            labels={
                "path": "detour" if start.detour else "direct",
                "length": f"{bucket + 1:02d}-{bucket + _BUCKET:02d}",
            },
        )

    # ---- prompts ----

    def _prompt(self, seat: str, board: Board, drafts: Sequence[Attempt], history: Sequence[Attempt]) -> Prompt:
        if self.options.style == "compact":
            return self._compact(board, drafts, history)
        who, form = self.options.who(_WHO, seat, bool(drafts)), "program" if self._programs(seat) else "answer"
        rules = self._rules(who, self._form(form))
        hidden, own = bool(drafts) and self.options.blind_planner, not self.options.has_tool
        return [system(rules), user(_situation(board, drafts, history, hidden=hidden, own=own))]

    def _message_prompt(self, board: Board, history: Sequence[Attempt]) -> Prompt:
        if self.options.style == "compact":
            return compact_tool(board, history, self.options.max_moves)
        return [system(self._rules(_WHO["messenger"], self._form("message"))), user(situation(board, None, history))]

    def _answer_prompt(self, board: Board, messages: Sequence[str], history: Sequence[Attempt]) -> Prompt:
        if self.options.style == "compact":
            return compact_planner(board, messages, history, self.options.max_moves, self.options.size)
        rules = self._rules(_WHO["told"], self._form("answer"))
        return [system(rules), user(situation(board, messages, history))]

    def _rules(self, who: str, form: str) -> str:
        options = self.options
        return _RULES.format(
            size=options.size, max_moves=options.max_moves, max_rounds=options.max_rounds, who=who, form=form
        )

    def _form(self, name: str) -> str:
        return _FORMS[name].format(example=" ".join("RRDRDD"[: self.options.max_moves]))

    def _compact(self, board: Board, drafts: Sequence[Attempt], history: Sequence[Attempt]) -> str:
        """Return the prompt of one fixed length per role.

        First asked in a round: map, the way to the goal, last answer, its mark. Asked with drafts: map (unless it is
        hidden), way, and of each draft its moves, its mark, how many of its moves are legal, the way to the goal from
        its end, and (option) the map from there.
        """
        width, size = self.options.max_moves, self.options.size
        if not drafts:
            return board.rolled() + board.way(size) + last_answer(history, width)
        hidden = self.options.blind_planner
        parts = ["" if hidden else board.rolled(), board.way(size)]
        for draft in drafts:
            legal = str(draft.made).rjust(len(str(width)), "0")
            end_map = draft.board.rolled() if self.options.compact_end_map and not hidden else ""
            parts.append(draft.padded(width) + draft.mark + legal + draft.board.way(size) + end_map)
        return "".join(parts)


_WHO = {
    "tool": "You are the tool of a team of two: you draft moves, the planner sees where they lead and decides.",
    "planner": "You are the planner of a team of two: the tool drafts moves for you, your own answer is executed.",
    "blind": "You are the planner of a team of two: you do not see the map, the tool does and drafts moves for you; "
    "your own answer is executed.",
    "messenger": "You are the tool of a team of two: you see the walls, the planner does not; it knows where the goal "
    "is, you do not. It reads what you say, and moves.",
    "told": "You are the planner of a team of two: you do not see the walls, the tool does; it does not know where the "
    "goal is. Your answer is executed.",
    "alone": "You are the planner: your answer is executed.",
    "drafting": "You are the planner: draft moves first; you will see where they lead before you give your answer.",
}
# Who is asked stands late: what two roles' prompts begin alike with is computed once.
_RULES = """\
The task is to walk to the goal on a grid of {size} rows and {size} columns.
On the map A is where you stand, G is the goal, # is a wall and . is free. Row 0 is at the top, column 0 at the left.
Moves: U (row - 1), D (row + 1), L (column - 1), R (column + 1). Walls and the edge of the grid cannot be crossed: the
first move that tries is not made and ends the answer. An answer has 1 to {max_moves} moves, and there are at most
{max_rounds} rounds, so if the goal is farther away, come as near as you can along a way that leads there.
{who}
{form}"""
_FORMS = {
    "answer": "Think briefly if you need to, then end with one line in exactly this form:\nAnswer: {example}",
    "message": "Tell the planner in one short line what it should know.",
    "program": (
        "Write a Python program in one ```python block. It must hold the map itself, and print the moves as its last "
        "line, in exactly this form:\n{example}"
    ),
}


def _situation(board: Board, drafts: Sequence[Attempt], history: Sequence[Attempt], *, hidden: bool, own: bool) -> str:
    """Return the part of the plain prompt that changes: map (unless hidden), positions, what was tried, the drafts."""
    lines = [
        *([f"Round {len(history) + 1}."] if hidden else [f"Round {len(history) + 1}. The map:", board.draw()]),
        "You are at row {}, column {}. The goal is at row {}, column {}.".format(*board.agent, *board.goal),
    ]
    if history:
        lines.append(f"Executed last round: {history[-1].sentence()}")
    whose = "Your" if own else "The tool's"
    for number, draft in enumerate(drafts, start=1):
        name = f"{whose} draft" if len(drafts) == 1 else f"Draft {number} of the tool"
        lines.append(f"{name}, simulated from here: {draft.sentence()}")
    return "\n".join(lines)
