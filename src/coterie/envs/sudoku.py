"""Sudoku: fill a grid so that every row, column and box holds each digit once. A tool drafts a grid, a planner decides.

Every round the tool's draft is checked against the rules (nothing is placed), the planner sees draft and conflicts, and
the planner's grid is placed. The next round sees that grid and its conflicts, never which cells are right. Solved means
a full grid that keeps the clues and breaks no rule. Arithmetic of the reward::

    phi = share of the blanks that equal the only solution, 0 if a clue was changed
    team = phi(after) - phi(before)     + solve_bonus when the grid solves the puzzle
    local = format_reward               if the answer is well-formed (n*n digits from 1 to n), else 0

The rules follow the Sudoku task of arXiv 2510.11062, with unique solutions, clues that count and disjoint splits.
"""

from __future__ import annotations

import pathlib
import random
import re
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from coterie.env import Env, EnvOptions, Expert, Prompt, Team
from coterie.envs import sudoku_rules as rules
from coterie.envs.seats import SeatOptions
from coterie.envs.splits import make_instance, num_listed, places
from coterie.envs.sudoku_lists import listed_splits
from coterie.envs.sudoku_script import Attempt, Board, mended_grid, slipped_grid
from coterie.errors import ConfigError
from coterie.keyed import stable_hash
from coterie.types import Outcome, Reward, Scored, Task, system, user

_DEFAULT_BLANKS = {4: 8, 9: 40}
# 4x4 with one blank has two puzzles up to symmetry, so no validation split; above the maximum, drawing gets slow.
_BLANKS_RANGE = {4: (2, 12), 9: (2, 56)}
_ANSWER_TAG = re.compile(r"^[ \t]*Answer:", flags=re.MULTILINE)


# ---- the environment --------------------------------------------------------------------------------------------


class SudokuOptions(SeatOptions):
    """Options of Sudoku."""

    size: Literal[4, 9] = 4
    """Rows and columns of the grid."""
    blanks: int | None = None
    """Blanks of a made puzzle, exactly: 2 to 12 (4x4, default 8) or 2 to 56 (9x9, default 40)."""
    puzzles: pathlib.Path | None = None
    """A public list to play instead of made puzzles: one a line, or CSV ``puzzle,solution``; see ``sudoku_lists``."""
    drop_ambiguous: bool = False
    """Leave out listed puzzles with several solutions (logged) instead of refusing the list."""
    max_rounds: int = Field(default=4, ge=1, le=100)
    """Rounds after which an unsolved episode is truncated."""
    reward: Literal["dense", "outcome"] = "dense"
    """``dense``: differences of the potential; ``outcome``: 1 where the grid solves the puzzle, else 0."""
    style: Literal["plain", "compact"] = "plain"
    """``plain``: English for language models; ``compact``: fixed-length characters for tiny ones."""
    solve_bonus: float = Field(default=1.0, ge=0.0)
    """Added once to the dense team reward by the answer that solves the puzzle."""
    format_reward: float = Field(default=0.1, ge=0.0)
    """Local reward of a well-formed answer."""

    @model_validator(mode="after")
    def _blanks_fit(self) -> SudokuOptions:
        low, high = _BLANKS_RANGE[self.size]
        if self.blanks is not None and not low <= self.blanks <= high:
            raise ValueError(f"blanks = {self.blanks}: expected {low} to {high} for size {self.size}")
        if self.blanks is not None and self.puzzles is not None:
            raise ValueError("blanks and puzzles are both set: listed puzzles have the blanks they have; drop one")
        if self.drop_ambiguous and self.puzzles is None:
            raise ValueError("drop_ambiguous without puzzles: made puzzles always have one solution; drop it")
        return self


class Sudoku(Env):
    """The Sudoku environment; see the module's first lines for the rules."""

    roles: ClassVar[tuple[str, ...]] = ("tool", "planner")
    scored_roles: ClassVar[tuple[str, ...]] = ("tool", "planner")
    Options: ClassVar[type[EnvOptions]] = SudokuOptions
    options: SudokuOptions

    def __init__(self, options: EnvOptions | None = None) -> None:
        """Make a fresh instance; ``ConfigError`` if the planner does not play or the list of puzzles is unusable."""
        super().__init__(options)
        if "planner" not in self.active_roles:
            raise ConfigError(f"env.roles = {list(self.active_roles)}: 'planner' must play, alone or with 'tool'")
        self._listed: dict[str, tuple[rules.Puzzle, ...]] | None = None
        if self.options.puzzles is not None:
            self._listed = listed_splits(self.options.puzzles, self.options.size, self.options.drop_ambiguous)

    def num_tasks(self, split: str) -> int | None:
        """Return how many listed puzzles a split has; ``None`` (no end) where puzzles are made."""
        return num_listed(split, self._listed)

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        """Return tasks of a split, fewer where a list has no more. No two splits share a puzzle, in any form.

        Made puzzles have no end. Puzzles of a list keep their order; its split ``all`` holds every one.
        """
        return [self._task(split, index) for index in places(start, count, self.num_tasks(split))]

    async def play(self, task: Task, team: Team) -> Outcome:
        """Play one task: per round a draft by the tool (if it plays) and a grid by the planner."""
        board = Board.of(task)
        history: list[Attempt] = []
        for round in range(self.options.max_rounds):
            draft: Attempt | None = None
            for seat in self.options.drafting_seats():
                prompt = self._prompt(seat, board, None, history)
                drafted = await team.act(
                    seat, prompt, score=self._score(board), round=round, expert=self._expert(board, None)
                )
                draft = drafted.result
            prompt = self._prompt("planner", board, draft, history)
            planned = await team.act(
                "planner", prompt, score=self._score(board), round=round, expert=self._expert(board, draft)
            )
            history.append(planned.result)
            board = planned.result.board
            if board.solved:
                break
        return self._outcome(history)

    # ---- tasks ----

    def _task(self, split: str, index: int) -> Task:
        size = self.options.size
        if self._listed is not None:
            puzzle = self._listed[split][index]
            seed = stable_hash("sudoku", puzzle.clues)
        else:
            blanks = _DEFAULT_BLANKS[size] if self.options.blanks is None else self.options.blanks
            seed, puzzle = make_instance(
                f"sudoku/size={size}/blanks={blanks}",
                split,
                index,
                lambda rng: rules.make_puzzle(size, blanks, rng),
                lambda made: rules.canonical(made.clues),
            )
        data = {"clues": puzzle.clues, "solution": puzzle.solution}
        return Task(id=f"sudoku:{split}:{index}", split=split, seed=seed, data=data)

    # ---- answers ----

    def _parse(self, text: str) -> str:
        """Return the grid of an answer as n*n digits, "" if it is not well-formed.

        compact: the whole text is the n*n digits, row by row. plain: after the last line that starts with ``Answer:``
        stand exactly n lines of n digits, where spaces, commas and bars may separate digits; empty lines, rulers and
        code fences are skipped, and the grid ends at the first other line.
        """
        size = self.options.size
        if self.options.style == "compact":
            grid = text
        else:
            grid = ""
            rows: list[str] = []
            tags = list(_ANSWER_TAG.finditer(text))
            for line in text[tags[-1].end() :].splitlines() if tags else ():
                row = re.sub(r"[\s,|]", "", line)
                if re.fullmatch(r"[-+=]*|```\w*", row):
                    continue
                if not re.fullmatch(f"[1-{size}]+", row):
                    break
                rows.append(row)
            if [len(row) for row in rows] == [size] * size:
                grid = "".join(rows)
        return grid if re.fullmatch(f"[1-{size}]{{{size * size}}}", grid) else ""

    def _write(self, grid: str) -> str:
        return grid if self.options.style == "compact" else "\n".join(("Answer:", *rules.rows_of(grid)))

    def _score(self, board: Board) -> _Score:
        """Return the scorer of a role: the grid's worth if it were placed, whether it is a draft or the answer."""

        def score(text: str) -> Scored[Attempt]:
            grid = self._parse(text)
            after = board.after(grid)
            solves = after.solved and not board.solved
            if self.options.reward == "outcome":
                team = float(solves)
            else:
                team = after.phi - board.phi + (self.options.solve_bonus if solves else 0.0)
            return Scored(Reward(team, self.options.format_reward if grid else 0.0), Attempt(grid, after))

        return score

    def _expert(self, board: Board, draft: Attempt | None) -> Expert:
        """Return the scripted player: noise 0 solves; with noise it slips, or trusts whatever was drafted."""

        def expert(rng: random.Random, noise: float) -> str:
            if draft is not None and self.options.blind_planner:
                return self._write(mended_grid(board, draft, rng))
            grid = slipped_grid(board, rng, noise)
            if grid != board.solution and draft is not None and draft.grid and rng.random() < 0.5:
                grid = draft.grid
            return self._write(grid)

        return expert

    def _outcome(self, history: Sequence[Attempt]) -> Outcome:
        end = history[-1].board
        bonus = self.options.solve_bonus if end.solved else 0.0
        blanks = end.clues.count(rules.BLANK)
        return Outcome(
            success=end.solved,
            team=float(end.solved) if self.options.reward == "outcome" else end.phi + bonus,
            truncated=not end.solved,
            metrics={
                "rounds": len(history),
                "blanks": blanks,
                "right": end.phi,
                "conflicts": sum(end.marks),
                "clues_changed": float(end.grid is not None and bool(rules.changed_clues(end.clues, end.grid))),
            },
            labels={"size": f"{end.size}x{end.size}", "blanks": f"{blanks:02d}"},
        )

    # ---- prompts ----

    def _prompt(self, seat: str, board: Board, draft: Attempt | None, history: Sequence[Attempt]) -> Prompt:
        hidden, own = draft is not None and self.options.blind_planner, not self.options.has_tool
        if self.options.style == "compact":
            shown = board if draft is None else Board(board.clues, board.solution).after(draft.grid)
            return _compact(seat, shown, hidden=hidden)
        size = self.options.size
        text = _RULES.format(
            size=size,
            box=2 if size == 4 else 3,
            max_rounds=self.options.max_rounds,
            who=self.options.who(_WHO, seat, draft is not None),
            example="\n".join(_example(size)),
        )
        return [system(text), user(_situation(board, draft, history, hidden=hidden, own=own))]


_Score: TypeAlias = Callable[[str], Scored[Attempt]]

_WHO = {
    "tool": "You are the tool of a team of two: you draft the grid, the planner sees your draft checked and decides.",
    "planner": "You are the planner of a team of two: the tool drafts a grid for you, your own answer is placed.",
    "blind": "You are the planner of a team of two: you do not see the puzzle, the tool does and drafts a grid for "
    "you; your own answer is placed.",
    "alone": "You are the planner: your answer is placed.",
    "drafting": "You are the planner: draft a grid first; you will see it checked before you give your answer.",
}
# Who is asked stands late: what two roles' prompts begin alike with is computed once.
_RULES = """\
The task is a Sudoku of {size} rows and {size} columns:
fill every '.' so that each row, each column and each {box}x{box} box holds every digit from 1 to {size} exactly once.
The digits of the puzzle (the clues) must stay as they are.
There are at most {max_rounds} rounds. An answer is always the whole grid, clues included.
{who}
Think briefly if you need to, then end with the grid in exactly this form (this example is of another puzzle):
Answer:
{example}"""


def _example(size: int) -> list[str]:
    """Return the rows of some full grid."""
    box = 2 if size == 4 else 3
    return [
        "".join(str((box * (row % box) + row // box + col) % size + 1) for col in range(size)) for row in range(size)
    ]


def _situation(board: Board, draft: Attempt | None, history: Sequence[Attempt], *, hidden: bool, own: bool) -> str:
    """Return the part of the plain prompt that changes: puzzle, what was placed, and the draft.

    Where the puzzle is hidden, so is the grid placed last; the check of the draft says which clues it changed.
    """
    whose = "Your" if own else "The tool's"
    lines = [f"Round {len(history) + 1}."]
    if not hidden:
        lines = [f"Round {len(history) + 1}. The puzzle:", *rules.rows_of(board.clues)]
    if history and not history[-1].grid:
        lines.append("Your last answer was not well-formed, so nothing was placed.")
    if board.grid is not None and not hidden:
        lines += ["The grid placed last, not solved:", *rules.rows_of(board.grid), board.report()]
    if draft is not None and draft.grid:
        checked = Board(board.clues, board.solution, draft.grid)
        report = checked.report()
        lines += [f"{whose} draft, checked but not placed:", *rules.rows_of(draft.grid), report]
    elif draft is not None:
        lines.append(f"{whose} draft was not well-formed.")
    return "\n".join(lines)


def _compact(role: str, shown: Board, *, hidden: bool) -> str:
    """Return the prompt of 1 + 3 n*n characters: the role's letter, then per cell its clue, digit and conflict mark.

    The clues are ``-`` where they are hidden.

    First asked in a round, the digits are those placed last; asked with a draft, those of the draft (``-`` where there
    are none). A cell's three facts stand side by side and cell i starts at character 1 + 3 i, in the order of the
    answer's digits, so which characters a digit depends on is the same in every prompt.
    """
    grid = "-" * len(shown.clues) if shown.grid is None else shown.grid
    marks = "".join("x" if mark else "-" for mark in shown.marks)
    clues = "-" * len(grid) if hidden else shown.clues
    return role[0].upper() + "".join(map("".join, zip(clues, grid, marks, strict=True)))
