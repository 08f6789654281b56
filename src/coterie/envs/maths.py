"""Mathematics: a tool works on a problem, a reasoner gives the answer. They end when they agree, or after some rounds.

Every round the tool writes a program that prints an answer (``tool = "python"``: it runs in the sandbox) or drafts an
answer (``tool = "none"``); the reasoner sees what came of it and answers. Arithmetic of the reward::

    phi = 1 if the reasoner's last well-formed answer is right, else 0
    team = phi(after) - phi(before); for the tool: as if its answer were the reasoner's
    local = format_reward if there is an answer: a box, or for a program one that ends well and prints something

Success means that the reasoner's last answer is right. Whether an answer is right never reaches a prompt. The workflow
is the one for mathematics of arXiv 2510.11062.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar, Literal

from pydantic import Field, model_validator

from coterie.boxed import last_boxed
from coterie.data.arithmetic import ANSWER_CHARS, LEVELS, QUESTION_CHARS, make_problem
from coterie.env import EnvOptions, Expert, Prompt, Score, Team
from coterie.envs.answer_texts import block, cut, last_line, printed, program_of
from coterie.envs.once import once
from coterie.envs.problem_tasks import ProblemEnv, ProblemOptions, ProblemTasks
from coterie.errors import ConfigError
from coterie.grading.maths import verify
from coterie.grading.report import bad_end
from coterie.problems import MathProblem
from coterie.sandbox.execution import Limits
from coterie.sandbox.shared import shared_pool
from coterie.types import Outcome, Reward, Scored, Task, system, user

_SHOWN_CHARS = 2000


class MathsOptions(ProblemOptions):
    """Options of mathematics."""

    REWARDS: ClassVar[tuple[str, ...]] = ("format_reward",)

    level: int = Field(default=1, ge=min(LEVELS), le=max(LEVELS))
    """Of made problems: 1 sums below 50, 2 products and longer sums, 3 brackets, 4 fractions, 5 stories."""
    tool: Literal["python", "none"] = "python"
    """``python``: the tool writes a program, which runs in the sandbox; ``none``: it drafts an answer."""
    max_rounds: int = Field(default=4, ge=1, le=100)
    """Rounds after which an episode without agreement ends."""
    style: Literal["plain", "compact"] = "plain"
    """``plain``: English for language models; ``compact``: fixed-length characters for tiny ones."""
    format_reward: float = Field(default=0.1, ge=0.0)
    """Local reward of an answer that can be read."""
    cpu_s: float = Field(default=4.0, gt=0.0, le=60.0)
    """Processor time of the tool's program in seconds."""

    @model_validator(mode="after")
    def _compact_is_for_made_problems(self) -> MathsOptions:
        if self.style == "compact" and (self.data or self.level not in QUESTION_CHARS or self.tool != "none"):
            raise ValueError(
                f"style = 'compact' is for made problems of level 1 to {max(QUESTION_CHARS)} and tool = 'none'; use "
                "style = 'plain'"
            )
        return self


@dataclass(frozen=True, slots=True)
class Work:
    """What came of an answer: the answer itself ("" : none that can be read), whether it is right, and a program."""

    answer: str
    right: bool
    program: str = ""
    output: str = ""

    def draw(self) -> str:
        """Return it for people."""
        return f"{self.program}\n{self.output}\nanswer: {self.answer or 'none'}".strip()


@dataclass(frozen=True, slots=True)
class State:
    """The answers so far: the tool's and the reasoner's last, and the reasoner's last that can be read."""

    drafts: tuple[Work, ...] = ()
    answers: tuple[Work, ...] = ()

    @property
    def phi(self) -> float:
        """1 where the reasoner's last answer that can be read is right."""
        readable = [work for work in self.answers if work.answer]
        return float(readable[-1].right) if readable else 0.0


class Maths(ProblemEnv[MathProblem]):
    """The environment of mathematics; see the module's first lines for the rules."""

    roles: ClassVar[tuple[str, ...]] = ("tool", "reasoner")
    scored_roles: ClassVar[tuple[str, ...]] = ("tool", "reasoner")
    Options: ClassVar[type[EnvOptions]] = MathsOptions
    options: MathsOptions

    def __init__(self, options: EnvOptions | None = None) -> None:
        """Make a fresh instance; ``ConfigError`` if the reasoner does not play or the data cannot be used."""
        super().__init__(options)
        if "reasoner" not in self.active_roles:
            raise ConfigError(f"env.roles = {list(self.active_roles)}: 'reasoner' must play, alone or with 'tool'")
        level = self.options.level
        self._problems = ProblemTasks(
            "math", self.options, MathProblem, lambda split, index: make_problem(level, split, index)
        )

    async def play(self, task: Task, team: Team) -> Outcome:
        """Play one task: per round the tool's work (if it plays) and the reasoner's answer, until they agree."""
        problem = self._problems.problem(task)
        state = State()
        for round in range(self.options.max_rounds):
            draft: Work | None = None
            if "tool" in self.active_roles:
                prompt = self._prompt("tool", problem, state, None)
                score, expert = self._score_tool(problem, state), self._expert("tool", problem, None)
                draft = (await team.act("tool", prompt, score=score, round=round, expert=expert)).result
            prompt = self._prompt("reasoner", problem, state, draft)
            score, expert = self._score_reasoner(problem, state), self._expert("reasoner", problem, draft)
            work = (await team.act("reasoner", prompt, score=score, round=round, expert=expert)).result
            state = State((*state.drafts, draft) if draft else state.drafts, (*state.answers, work))
            if work.answer and (draft is None or await self._same(draft.answer, work.answer)):
                return self._outcome(state, agreed=draft is not None)
        return self._outcome(state, agreed=False, truncated=True)

    # ---- answers ----

    async def _same(self, gold: str, answer: str) -> bool:
        """Return whether an answer is worth the same as ``gold``; "" is never."""
        if not gold or not answer:
            return False
        if self.options.style == "compact":
            return number(gold) is not None and number(gold) == number(answer)
        return (await verify(gold, f"\\boxed{{{answer}}}")).correct

    def _read(self, text: str) -> str:
        """Return the answer of a text, "" where there is none: the last box, or in compact style the whole text."""
        if self.options.style == "compact":
            return text if len(text) <= ANSWER_CHARS and number(text) is not None else ""
        return (last_boxed(text) or "").strip()

    def _score_reasoner(self, problem: MathProblem, state: State) -> Score[Work]:
        async def score(text: str) -> Scored[Work]:
            answer = self._read(text)
            work = Work(answer, await self._same(problem.answer, answer))
            return Scored(self._reward(state, work), work)

        return once(score)

    def _score_tool(self, problem: MathProblem, state: State) -> Score[Work]:
        """Return the tool's scorer: the worth of its answer if the reasoner gave it."""

        async def score(text: str) -> Scored[Work]:
            work = await self._run(problem, text) if self.options.tool == "python" else None
            if work is None:
                answer = self._read(text)
                work = Work(answer, await self._same(problem.answer, answer))
            return Scored(self._reward(state, work), work)

        return once(score)

    async def _run(self, problem: MathProblem, text: str) -> Work:
        program = program_of(text)
        if not program:
            return Work("", False)
        done = await shared_pool().run(program, limits=Limits(cpu_s=self.options.cpu_s))
        ended = bad_end(done)
        if ended is not None:
            return Work("", False, program, ended.reason)
        output = printed(done.stdout)
        answer = last_boxed(last_line(output)) or last_line(output)
        return Work(answer, await self._same(problem.answer, answer), program, output)

    def _reward(self, state: State, work: Work) -> Reward:
        after = State(answers=(*state.answers, work))
        return Reward(after.phi - state.phi, self.options.format_reward if work.answer else 0.0)

    def _expert(self, role: str, problem: MathProblem, draft: Work | None) -> Expert:
        """Return the scripted player: noise 0 knows the answer; with noise it slips, or trusts whatever was drafted."""

        def expert(rng: random.Random, noise: float) -> str:
            answer = problem.answer if rng.random() >= noise else slipped(problem.answer, rng)
            if answer != problem.answer and draft is not None and draft.answer and rng.random() < 0.5:
                answer = draft.answer
            if role == "tool" and self.options.tool == "python":
                return block(f"print({answer!r})")
            return answer if self.options.style == "compact" else f"\\boxed{{{answer}}}"

        return expert

    def _outcome(self, state: State, *, agreed: bool, truncated: bool = False) -> Outcome:
        readable = [work.answer for work in state.answers if work.answer]
        drafted = [work for work in state.drafts if work.right]
        return Outcome(
            success=state.phi == 1.0,
            team=state.phi,
            truncated=truncated,
            metrics={
                "rounds": len(state.answers),
                "agreed": float(agreed),
                "answered": float(bool(readable)),
                "tool_right": len(drafted) / max(1, len(state.drafts)),
            },
        )

    # ---- prompts ----

    def _prompt(self, role: str, problem: MathProblem, state: State, draft: Work | None) -> Prompt:
        if self.options.style == "compact":
            return self._compact(role, problem, state, draft)
        alone = "tool" not in self.active_roles
        who = _WHO["alone" if alone else f"{role}/{self.options.tool}" if role == "tool" else role]
        rules = _RULES.format(max_rounds=self.options.max_rounds, who=who)
        return [system(rules), user(_situation(problem, state, draft))]

    def _compact(self, role: str, problem: MathProblem, state: State, draft: Work | None) -> str:
        """Return the prompt of one length: the role's letter, the question, then two answers.

        First asked in a round: the tool's and the reasoner's last. Asked with a draft: the draft and the reasoner's.
        """
        shown = draft or (state.drafts[-1] if state.drafts else None)
        answers = (shown, state.answers[-1] if state.answers else None)
        texts = [(work.answer if work else "").rjust(ANSWER_CHARS, ".") for work in answers]
        return role[0].upper() + problem.question.rjust(QUESTION_CHARS[self.options.level], ".") + "".join(texts)


def number(text: str) -> Fraction | None:
    """Return the value of a whole number, decimal or fraction in plain digits, ``None`` for anything else."""
    try:
        return Fraction(text) if text.isascii() and "_" not in text and "e" not in text.lower() else None
    except (ValueError, ZeroDivisionError):
        return None


def slipped(answer: str, rng: random.Random) -> str:
    """Return a wrong answer near a right one."""
    value = number(answer)
    return str(value + rng.choice((-10, -2, -1, 1, 2, 10))) if value is not None else str(rng.randrange(1000))


_WHO = {
    "tool/python": (
        "You are the tool of a team of two: you write a Python program whose last line of output is the answer and "
        "nothing else. It is run, and the reasoner sees what it prints. Write the program in one ```python block."
    ),
    "tool/none": (
        "You are the tool of a team of two: you draft an answer, which the reasoner sees. Put it into \\boxed{}."
    ),
    "reasoner": (
        "You are the reasoner of a team of two: a tool works on the problem for you and may be wrong; your own answer "
        "counts. Put it into \\boxed{}; the last box is read."
    ),
    "alone": "You are the reasoner: your answer counts. Put it into \\boxed{}; the last box is read.",
}
# Who is asked stands late: what two roles' prompts begin alike with is computed once.
_RULES = """\
The task is a problem of mathematics with one final answer. There are at most {max_rounds} rounds.
{who}
Think step by step, briefly, before you answer."""


def _situation(problem: MathProblem, state: State, draft: Work | None) -> str:
    """Return the part of the plain prompt that changes: the problem, the last round, and the tool's work."""
    lines = [f"Round {len(state.answers) + 1}. The problem:", problem.question]
    if state.drafts:
        lines.append(f"Last round the tool's answer was: {_cut(state.drafts[-1].answer) or 'none that can be read'}")
    if state.answers:
        last = _cut(state.answers[-1].answer) or "none that can be read"
        lines.append(f"Last round the reasoner's answer was: {last}" + (" They differ." if state.drafts else ""))
    if draft is not None and draft.program:
        lines += ["The tool's program:", block(_cut(draft.program)), "It printed:", _cut(draft.output) or "nothing"]
    elif draft is not None:
        lines.append(f"The tool's answer: {_cut(draft.answer) or 'none that can be read'}")
    return "\n".join(lines)


def _cut(text: str) -> str:
    return cut(text, _SHOWN_CHARS)
