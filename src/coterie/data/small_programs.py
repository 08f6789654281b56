"""Small programming problems made on the spot: statement, reference, tests, and wrong programs that fail them.

A problem is a recipe of steps on whole numbers. From the same steps come the English (or short) statement, the text of
the reference program and, by working the steps out here, what its tests expect. A wrong program is the text of other
steps, kept where it gives another output on at least one hidden test; so every one is known to fail.

Level 1: one or two steps on one number. Level 2: one step on a list, then one number of it. Level 3: two or three.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coterie.envs.splits import make_instance
from coterie.problems import CodeProblem, ProgramTest

LEVELS = (1, 2, 3)
NUM_TESTS = 8
NUM_PUBLIC = 2
MAX_WRONG = 6


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of step: its words, its short name, its code for an x (or the list xs), and what it does."""

    words: str
    short: str
    code: str
    apply: Callable[[list[int], int], list[int]]


_EACH: dict[str, _Kind] = {
    "mul": _Kind("multiply by {k}", "*{k}", "x * {k}", lambda xs, k: [x * k for x in xs]),
    "add": _Kind("add {k}", "+{k}", "x + {k}", lambda xs, k: [x + k for x in xs]),
    "sub": _Kind("subtract {k}", "-{k}", "x - {k}", lambda xs, k: [x - k for x in xs]),
    "mod": _Kind("take the remainder of dividing by {k}", "%{k}", "x % {k}", lambda xs, k: [x % k for x in xs]),
}
_KEEP: dict[str, _Kind] = {
    "gt": _Kind("keep the numbers greater than {k}", ">{k}", "x > {k}", lambda xs, k: [x for x in xs if x > k]),
    "ge": _Kind("keep the numbers that are at least {k}", ">={k}", "x >= {k}", lambda xs, k: [x for x in xs if x >= k]),
    "lt": _Kind("keep the numbers less than {k}", "<{k}", "x < {k}", lambda xs, k: [x for x in xs if x < k]),
    "div": _Kind("keep the multiples of {k}", "|{k}", "x % {k} == 0", lambda xs, k: [x for x in xs if x % k == 0]),
}
_END: dict[str, tuple[str, str, Callable[[list[int]], int]]] = {
    "sum": ("their sum", "sum(xs)", sum),
    "max": ("the largest (0 if there is none)", "max(xs, default=0)", lambda xs: max(xs, default=0)),
    "min": ("the smallest (0 if there is none)", "min(xs, default=0)", lambda xs: min(xs, default=0)),
    "count": ("how many there are", "len(xs)", len),
    "distinct": ("how many different ones there are", "len(set(xs))", lambda xs: len(set(xs))),
}
_KINDS = _EACH | _KEEP


@dataclass(frozen=True, slots=True)
class Steps:
    """What a program does: (kind, constant) one after the other, then one number of the list ("" : there is one)."""

    steps: tuple[tuple[str, int], ...]
    end: str

    def output(self, xs: Sequence[int]) -> int:
        """Return what the program prints for these numbers."""
        now = list(xs)
        for kind, k in self.steps:
            now = _KINDS[kind].apply(now, k)
        return _END[self.end][2](now) if self.end else now[0]

    def program(self) -> str:
        """Return the program as text."""
        if not self.end:
            text = "int(input())"
            for number, (kind, k) in enumerate(self.steps):
                inner = f"({text})" if number else text
                text = _EACH[kind].code.format(k=k).replace("x", inner, 1).replace(" ", "")
            return f"print({text})"
        lines = ["xs = [int(x) for x in input().split()]"]
        for kind, k in self.steps:
            code = _KINDS[kind].code.format(k=k)
            lines.append(f"xs = [{code} for x in xs]" if kind in _EACH else f"xs = [x for x in xs if {code}]")
        return "\n".join([*lines, f"print({_END[self.end][1]})"])

    def statement(self, short: bool) -> str:
        """Return the task in English, or ``short``: in as few characters as a tiny model should have to read."""
        if short:
            return "".join(_KINDS[kind].short.format(k=k) for kind, k in self.steps) + self.end
        does = ", then ".join(_KINDS[kind].words.format(k=k) for kind, k in self.steps)
        if not self.end:
            return f"Read one whole number. To it, do this: {does}. Print the result."
        each = "For each number: " if self.steps[0][0] in _EACH else ""
        return f"Read one line of whole numbers, separated by spaces. {each}{does}. Print {_END[self.end][0]}."

    def mutants(self) -> list[Steps]:
        """Return other steps near these: another constant, a step left out or changed, another end."""
        found = []
        for place, (kind, k) in enumerate(self.steps):
            kinds = _EACH if kind in _EACH else _KEEP
            changed = [(kind, k + 1), (kind, k - 1), *((other, k) for other in kinds if other != kind)]
            for step in changed:
                if step[1] > 0:
                    found.append(replace(self, steps=(*self.steps[:place], step, *self.steps[place + 1 :])))
            if len(self.steps) > 1:
                found.append(replace(self, steps=self.steps[:place] + self.steps[place + 1 :]))
        return [*found, *(replace(self, end=end) for end in _END if self.end and end != self.end)]


def make_program_problem(level: int, split: str, index: int, short: bool = False) -> CodeProblem:
    """Return problem ``index`` of a split at a level; a function of the arguments alone."""
    seed, steps = _made(level, split, index)
    rng = random.Random(seed)
    inputs = _inputs(level, rng)
    wrong = [
        other for other in steps.mutants() if any(other.output(xs) != steps.output(xs) for xs in inputs[NUM_PUBLIC:])
    ]
    rng.shuffle(wrong)
    return CodeProblem(
        id=f"small_programs{level}/{split}/{index}",
        statement=steps.statement(short),
        tests=tuple(
            ProgramTest(
                stdin=" ".join(map(str, xs)) + "\n", expected=f"{steps.output(xs)}\n", public=number < NUM_PUBLIC
            )
            for number, xs in enumerate(inputs)
        ),
        reference=steps.program(),
        wrong=tuple(dict.fromkeys(other.program() for other in wrong))[:MAX_WRONG],
    )


def some_tests(level: int, split: str, index: int, rng: random.Random, count: int) -> list[ProgramTest]:
    """Return tests of a problem as a scripted tester writes them: drawn by ``rng``, not copied from the hidden ones."""
    _, steps = _made(level, split, index)
    inputs = _inputs(level, rng)[:count]
    return [ProgramTest(stdin=" ".join(map(str, xs)) + "\n", expected=f"{steps.output(xs)}\n") for xs in inputs]


def _made(level: int, split: str, index: int) -> tuple[int, Steps]:
    return make_instance(f"small_programs/{level}", split, index, lambda rng: draw(level, rng), repr)


def draw(level: int, rng: random.Random) -> Steps | None:
    """Return random steps of a level, ``None`` where they do next to nothing."""
    if level == 1:
        count = rng.choice((1, 2, 2, 2))
        steps = tuple((rng.choice(("mul", "add", "sub", "mod")), rng.randrange(2, 10)) for _ in range(count))
        return Steps(steps, "") if len({kind for kind, _ in steps}) == count else None
    count = 1 if level == 2 else rng.choice((2, 3))
    steps = tuple((rng.choice(sorted(_KINDS)), rng.randrange(2, 12)) for _ in range(count))
    made = Steps(steps, rng.choice(sorted(_END)))
    outputs = {made.output(xs) for xs in _inputs(level, rng)}
    return made if len({kind for kind, _ in steps}) == count and len(outputs) > 2 else None


def _inputs(level: int, rng: random.Random) -> list[list[int]]:
    """Return the inputs of the tests: level 1 different numbers, else lists, short ones and longer ones."""
    if level == 1:
        return [[x] for x in rng.sample(range(20), NUM_TESTS)]
    return [[rng.randrange(-5, 30) for _ in range(rng.randrange(1, 4 + number))] for number in range(NUM_TESTS)]
