"""Programming: a tester writes test cases, a coder writes the program. They end when program and tests agree.

Both see the statement, its public tests and what of earlier rounds did not fit together; the coder also sees this
round's tests, which may be wrong. Hidden tests, references and known wrong programs never reach a prompt::

    phi = share of the hidden tests that the coder's last program passes
    team of the coder = phi(after) - phi(before)    + solve_bonus when it passes all of them
    local of the coder = format_reward              if its program parses and ends well on a test
    team of the tester = 0
    local of the tester = share of its tests that the reference confirms
                          + share of wrong programs that its confirmed tests catch

Wrong programs are the problem's own and all candidates of the coder in earlier rounds, played or not, that fail a
hidden test. Where a problem has no reference, two or more different candidates that pass all hidden tests stand in for
it; without them the tester has no verdict. A suite that is empty, or catches none of the wrong programs there are,
earns nothing.

Success means that the last program passes all hidden tests. The workflow is the one for code of arXiv 2510.11062.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

from pydantic import Field, model_validator

from coterie.data.small_programs import LEVELS, make_program_problem, some_tests
from coterie.env import EnvOptions, Expert, Prompt, Score, Team
from coterie.envs.answer_texts import block, cut, parses, program_of
from coterie.envs.once import once
from coterie.envs.problem_tasks import ProblemEnv, ProblemOptions, ProblemTasks
from coterie.envs.suites import Suite, judged, read_suite, shown, shown_text, write_suite
from coterie.errors import ConfigError
from coterie.grading import grade
from coterie.grading.report import Grade, Mark
from coterie.problems import CodeProblem, CodeTest, ProgramTest
from coterie.sandbox.execution import Limits
from coterie.sandbox.shared import shared_pool
from coterie.types import Outcome, Reward, Scored, Task, system, user

_SHOWN_CHARS = 3000
_Write: TypeAlias = Callable[[str], str]
_COMPACT_STATEMENT, _COMPACT_SUITE = 4, 24


class CodingOptions(ProblemOptions):
    """Options of programming."""

    REWARDS: ClassVar[tuple[str, ...]] = ("reward", "solve_bonus", "format_reward")

    level: int = Field(default=1, ge=min(LEVELS), le=max(LEVELS))
    """Of made problems: 1 one number, 2 one step on a list, 3 two or three."""
    max_rounds: int = Field(default=5, ge=1, le=100)
    """Rounds after which an episode without agreement ends."""
    max_tests: int = Field(default=5, ge=1, le=50)
    """Tests of one answer that are read; later ones are left out."""
    max_wrong: int = Field(default=16, ge=1)
    """Wrong programs that a suite is tried on: the problem's own first, then the coder's, those played first."""
    show_public: bool = True
    """Show the problem's public tests, and which a program fails; else they are not used. They are never rewarded."""
    style: Literal["plain", "compact"] = "plain"
    """``plain``: English for language models; ``compact``: few characters for tiny ones."""
    reward: Literal["dense", "outcome"] = "dense"
    """``dense``: differences of the share of hidden tests passed; ``outcome``: 1 where all are passed, else 0."""
    solve_bonus: float = Field(default=0.0, ge=0.0)
    """Added once to the dense team reward by the first program that passes all hidden tests."""
    format_reward: float = Field(default=0.1, ge=0.0)
    """Local reward of a program that parses and ends well."""

    @model_validator(mode="after")
    def _compact_is_for_level_1(self) -> CodingOptions:
        if self.style == "compact" and (self.data or self.level != 1):
            raise ValueError("style = 'compact' is for made problems of level 1; use style = 'plain'")
        return self


@dataclass(frozen=True, slots=True)
class Work:
    """What came of a program ("" : none that parses): share of hidden tests, does it run, what did not fit."""

    program: str = ""
    share: float = 0.0
    runs: bool = False
    agrees: bool = False
    mismatches: tuple[str, ...] = ()

    def draw(self) -> str:
        """Return it for people."""
        return "\n".join([f"passes {self.share:.0%} of the hidden tests", *self.mismatches])


@dataclass(frozen=True, slots=True)
class State:
    """The programs and suites so far, and what else the coder tried: candidates that were not played."""

    works: tuple[Work, ...] = ()
    suites: tuple[Suite, ...] = ()
    tried: tuple[Work, ...] = ()

    def programs(self, right: bool) -> list[str]:
        """Return the different programs that pass all hidden tests, or that do not: played ones first."""
        known = [work for work in (*self.tried, *self.works) if work.program and (work.share == 1.0) is right]
        return list(dict.fromkeys(work.program for work in reversed(known)))

    @property
    def phi(self) -> float:
        """The share of hidden tests that the last program passes, programs that do not parse left out."""
        shares = [work.share for work in self.works if work.program]
        return shares[-1] if shares else 0.0


class Coding(ProblemEnv[CodeProblem]):
    """The environment of programming; see the module's first lines for the rules."""

    roles: ClassVar[tuple[str, ...]] = ("tester", "coder")
    scored_roles: ClassVar[tuple[str, ...]] = ("tester", "coder")
    Options: ClassVar[type[EnvOptions]] = CodingOptions
    options: CodingOptions

    def __init__(self, options: EnvOptions | None = None) -> None:
        """Make a fresh instance; ``ConfigError`` if the coder does not play or the data cannot be used."""
        super().__init__(options)
        if "coder" not in self.active_roles:
            raise ConfigError(f"env.roles = {list(self.active_roles)}: 'coder' must play, alone or with 'tester'")
        level, short = self.options.level, self.options.style == "compact"
        self._problems = ProblemTasks(
            "code", self.options, CodeProblem, lambda split, index: make_program_problem(level, split, index, short)
        )

    async def play(self, task: Task, team: Team) -> Outcome:
        """Play one task: per round tests (if the tester plays) and a program, until they agree."""
        problem = self._problems.problem(task)
        state = State()
        for round in range(self.options.max_rounds):
            suite: Suite | None = None
            if "tester" in self.active_roles:
                prompt = self._prompt("tester", problem, state, None)
                score, expert = self._score_tester(problem, state), self._tester(task)
                suite = (await team.act("tester", prompt, score=score, round=round, expert=expert)).result
            prompt = self._prompt("coder", problem, state, suite)
            scored = self._score_coder(problem, state, suite)
            answer = await team.act("coder", prompt, score=scored, round=round, expert=_coder(problem, self._block))
            work, suites = answer.result, (*state.suites, suite) if suite else state.suites
            state = State((*state.works, work), suites, (*state.tried, *answer.others))
            if work.agrees:
                break
        return self._outcome(state)

    # ---- scores ----

    def _score_tester(self, problem: CodeProblem, state: State) -> Score[Suite]:
        right = [problem.reference] if problem.reference else _agreed(state)
        wrong = list(dict.fromkeys([*problem.wrong, *state.programs(right=False)]))[: self.options.max_wrong]

        async def score(text: str) -> Scored[Suite]:
            compact = self.options.style == "compact"
            tests = read_suite(text, problem, self.options.max_tests, compact)
            if not tests:
                return Scored(Reward(0.0, 0.0), Suite())
            if not right:
                return Scored(Reward(0.0, None), Suite(tests))
            suite = await judged(tests, problem, right, wrong, shared_pool())
            return Scored(Reward(0.0, suite.confirmed + suite.caught), suite)

        return once(score)

    def _score_coder(self, problem: CodeProblem, state: State, suite: Suite | None) -> Score[Work]:
        hidden, seen = hidden_tests(problem), (*self._public(problem), *(suite.tests if suite else ()))

        async def score(text: str) -> Scored[Work]:
            program = self._program(text)
            if not program:
                return Scored(Reward(0.0, 0.0), Work())
            report = await grade(replace(problem, tests=hidden), program, shared_pool())
            mismatches = await _mismatches(problem, seen, program)
            work = Work(
                program,
                report.share,
                runs=any(one.mark in (Mark.PASSED, Mark.WRONG) for one in report.grades),
                agrees=not mismatches and (suite is None or bool(suite.tests)),
                mismatches=mismatches,
            )
            return Scored(Reward(self._team(state, work), self.options.format_reward if work.runs else 0.0), work)

        return once(score)

    def _public(self, problem: CodeProblem) -> tuple[CodeTest, ...]:
        return public_tests(problem) if self.options.show_public else ()

    def _team(self, state: State, work: Work) -> float:
        first = work.share == 1.0 and all(earlier.share < 1.0 for earlier in state.works)
        if self.options.reward == "outcome":
            return float(work.share == 1.0)
        return work.share - state.phi + (self.options.solve_bonus if first else 0.0)

    def _program(self, text: str) -> str:
        if self.options.style == "compact":
            return text if parses(text) else ""
        return program_of(text)

    def _block(self, program: str) -> str:
        return program if self.options.style == "compact" else block(program)

    def _tester(self, task: Task) -> Expert | None:
        """Return the scripted tester of made problems: fresh tests, with noise some of them wrong."""
        index, level = task.data["index"], self.options.level
        if self.options.data or not isinstance(index, int):
            return None

        def expert(rng: random.Random, noise: float) -> str:
            compact = self.options.style == "compact"
            tests = some_tests(level, task.split, index, rng, min(2 if compact else 3, self.options.max_tests))
            slipped = [
                ProgramTest(stdin=test.stdin, expected=f"{int(test.expected) + rng.choice((-2, -1, 1, 2))}\n")
                if rng.random() < noise
                else test
                for test in tests
            ]
            return write_suite(slipped, compact)

        return expert

    def _outcome(self, state: State) -> Outcome:
        end, tests = state.works[-1], sum(len(suite.tests) for suite in state.suites)
        solved = state.phi == 1.0
        bonus = self.options.solve_bonus if any(work.share == 1.0 for work in state.works) else 0.0
        rounds = max(1, len(state.suites))
        return Outcome(
            success=solved,
            team=float(solved) if self.options.reward == "outcome" else state.phi + bonus,
            truncated=not end.agrees,
            metrics={
                "rounds": len(state.works),
                "passed": state.phi,
                "agreed": float(end.agrees),
                "tests": tests,
                "confirmed": sum(suite.confirmed for suite in state.suites) / rounds,
                "caught": sum(suite.caught for suite in state.suites) / rounds,
            },
        )

    # ---- prompts ----

    def _prompt(self, role: str, problem: CodeProblem, state: State, suite: Suite | None) -> Prompt:
        if self.options.style == "compact":
            return _compact(role, problem, state, suite)
        who = _WHO[role if "tester" in self.active_roles else "alone"]
        form = (_CALLS if problem.entry else _PAIRS) if role == "tester" else ""
        what = f"a Python function {problem.entry}" if problem.entry else "a Python program that reads stdin and prints"
        rules = _RULES.format(max_rounds=self.options.max_rounds, what=what, who=who, form=form)
        return [system(rules.strip()), user(self._situation(problem, state, suite))]

    def _situation(self, problem: CodeProblem, state: State, suite: Suite | None) -> str:
        """Return the part of the plain prompt that changes: problem, earlier rounds, and this round's tests."""
        lines = [f"Round {len(state.works) + 1}. The problem:", problem.statement]
        if problem.starter and not problem.statement.endswith(problem.starter.strip()):
            lines += ["The program begins with:", block(problem.starter)]
        public = self._public(problem)
        if public:
            lines += ["Public tests:", *(_cut(shown(test)) for test in public)]
        if state.works:
            last = state.works[-1]
            lines += ["The last program:", block(_cut(last.program)) if last.program else "none that parses"]
            if last.mismatches:
                lines += ["Where it and the tests differ (either may be wrong):", *last.mismatches]
        if suite is not None:
            lines.append("The tester's tests of this round, which may be wrong:")
            lines += [_cut(shown(test)) for test in suite.tests] or ["none that can be read"]
        return "\n".join(lines)


def hidden_tests(problem: CodeProblem) -> tuple[CodeTest, ...]:
    """Return the tests that decide: those that are not public, or all where all are (then none is shown)."""
    return tuple(test for test in problem.tests if not test.public) or problem.tests


def public_tests(problem: CodeProblem) -> tuple[CodeTest, ...]:
    """Return the tests that prompts may show."""
    public = tuple(test for test in problem.tests if test.public)
    return public if len(public) < len(problem.tests) else ()


async def _mismatches(problem: CodeProblem, seen: tuple[CodeTest, ...], program: str) -> tuple[str, ...]:
    """Return in words which of the tests that the roles know a program fails, and how."""
    if not seen:
        return ()
    report = await grade(replace(problem, tests=seen), program, shared_pool())
    failed = [(test, one) for test, one in zip(seen, report.grades, strict=True) if not one.passed]
    return tuple([f"{_cut(shown(test))}: {_cut(await _instead(problem, test, one, program))}" for test, one in failed])


async def _instead(problem: CodeProblem, test: CodeTest, found: Grade, program: str) -> str:
    """Return what a program did instead of passing a test: what it printed, or why it ended."""
    if not isinstance(test, ProgramTest) or found.mark is not Mark.WRONG:
        return found.reason
    done = await shared_pool().run(program, test.stdin.encode(), Limits(cpu_s=problem.cpu_s))
    return f"the program prints {shown_text(done.stdout.decode('utf-8', errors='replace'))}"


def _agreed(state: State) -> list[str]:
    """Return different programs that pass all hidden tests, where there are two at least."""
    passing = state.programs(right=True)
    return passing if len(passing) > 1 else []


def _coder(problem: CodeProblem, write: _Write) -> Expert | None:
    """Return the scripted coder of a problem with a reference: with noise it writes a wrong program."""
    if not problem.reference:
        return None

    def expert(rng: random.Random, noise: float) -> str:
        slips: Sequence[str] = problem.wrong or ("pass",)
        return write(rng.choice(slips) if rng.random() < noise else problem.reference)

    return expert


def _compact(role: str, problem: CodeProblem, state: State, suite: Suite | None) -> str:
    """Return the prompt of one length: the role's letter, the statement, how the last program fared, the tests."""
    mark = "." if not state.works else "?" if not state.works[-1].program else "x"
    known = suite or (state.suites[-1] if state.suites else Suite())
    tests = write_suite([test for test in known.tests if isinstance(test, ProgramTest)], compact=True)
    statement = problem.statement.rjust(_COMPACT_STATEMENT, ".")
    return role[0].upper() + statement + mark + tests[:_COMPACT_SUITE].ljust(_COMPACT_SUITE, ".")


def _cut(text: str) -> str:
    return cut(text, _SHOWN_CHARS)


_WHO = {
    "tester": "You are the tester of a team of two: you write tests, which the coder's program is run on.",
    "coder": (
        "You are the coder of a team of two: a tester writes tests for you, hidden tests decide. Write the whole "
        "program in one ```python block."
    ),
    "alone": "You are the coder: hidden tests decide. Write the whole program in one ```python block.",
}
_PAIRS = 'Write them in one ```json block: [{"input": "what stdin holds", "output": "what must be printed"}, ...]'
_CALLS = "Write them in one ```python block of lines like: assert f(1, [2]) == 3"
# Who is asked stands late: what two roles' prompts begin alike with is computed once.
_RULES = """\
The task is to write {what}. There are at most {max_rounds} rounds; they end when program and tests agree.
{who}
{form}"""
