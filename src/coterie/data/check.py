"""What is in data sets, and what is wrong with them: lengths, repeats, overlap with evaluation sets, bad rows."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from coterie.data.load import Loaded, Problem, load, normalised, question_of
from coterie.data.rows import BadRow
from coterie.problems import CodeProblem, MathProblem

_SHINGLE = 8
_NEAR = 0.6
_NEAR_SAME_ANSWER = 0.25


@dataclass(frozen=True, slots=True)
class Spread:
    """Smallest, middle and largest of some numbers."""

    least: int
    middle: float
    most: int

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Spread | None:
        """Return their spread, ``None`` without numbers."""
        return cls(min(numbers), median(numbers), max(numbers)) if numbers else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """One source in numbers."""

    source: str
    layouts: tuple[str, ...]
    problems: tuple[Problem, ...]
    repeats: int
    bad: tuple[BadRow, ...]
    chars: Spread | None
    tokens: Spread | None
    tests: Spread | None


@dataclass(frozen=True, slots=True)
class Pair:
    """A problem at ``place`` that asks what an ``earlier`` or held-out one does.

    ``near``: in almost the same words. ``clash``: with another answer.
    """

    place: str
    earlier: str
    near: bool
    clash: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReport:
    """All that a check found."""

    sources: tuple[SourceReport, ...]
    duplicates: tuple[Pair, ...]
    overlap: tuple[Pair, ...]

    @property
    def num_faults(self) -> int:
        """Bad rows, problems that are in an evaluation set too, and equal questions with different answers.

        Almost the same words with another answer is another problem; it is only listed.
        """
        return (
            sum(len(source.bad) for source in self.sources)
            + sum(not (pair.near and pair.clash) for pair in self.overlap)
            + sum(pair.clash for pair in self.duplicates)
        )


def check_sources(
    sources: Sequence[str], against: Sequence[str] = (), count_tokens: Callable[[str], int] | None = None
) -> DataReport:
    """Return what is in the sources, which of their problems ask the same, and which stand in ``against`` too.

    Reads everything; raises ``ConfigError`` where a source cannot be read at all. Bad rows of ``against`` are listed.
    """
    found, held = [load(source) for source in sources], [load(source) for source in against]
    placed = _placed(found)
    return DataReport(
        sources=tuple(
            _report(source, loaded, count_tokens)
            for source, loaded in zip((*sources, *against), (*found, *held), strict=True)
        ),
        duplicates=tuple(_repeated(placed)),
        overlap=tuple(find_overlap(placed, _placed(held))),
    )


def _report(source: str, loaded: Loaded, count_tokens: Callable[[str], int] | None) -> SourceReport:
    texts = [question_of(problem) for problem in loaded.problems]
    return SourceReport(
        source=source,
        layouts=tuple(dict.fromkeys(loaded.layouts.values())),
        problems=loaded.problems,
        repeats=loaded.repeats,
        bad=loaded.bad,
        chars=Spread.of([len(text) for text in texts]),
        tokens=None if count_tokens is None else Spread.of([count_tokens(text) for text in texts]),
        tests=Spread.of([len(problem.tests) for problem in loaded.problems if isinstance(problem, CodeProblem)]),
    )


def _placed(found: Iterable[Loaded]) -> list[tuple[str, Problem]]:
    return [(loaded.places[problem.id], problem) for loaded in found for problem in loaded.problems]


def _repeated(placed: Iterable[tuple[str, Problem]]) -> list[Pair]:
    """Return each problem that asks what an earlier one asks, with that one."""
    first: dict[str, tuple[str, Problem]] = {}
    pairs = []
    for place, problem in placed:
        earlier_place, earlier = first.setdefault(normalised(question_of(problem)), (place, problem))
        if earlier_place != place:
            pairs.append(Pair(place, earlier_place, near=False, clash=_clash(earlier, problem)))
    return pairs


def _clash(one: Problem, other: Problem) -> bool:
    """Return whether the answers differ as far as text tells; programs have no one answer, so they do not."""
    if not (isinstance(one, MathProblem) and isinstance(other, MathProblem)):
        return False
    return normalised(_plain_number(one.answer)) != normalised(_plain_number(other.answer))


def _plain_number(answer: str) -> str:
    return answer.strip().strip("$").lstrip("0") or "0"


def find_overlap(train: Sequence[tuple[str, Problem]], held: Sequence[tuple[str, Problem]]) -> list[Pair]:
    """Return the training problems that are in an evaluation set, in the same or in almost the same words.

    Almost: of all runs of 8 words that either has, 60% are in both; 25% where the answers are equal too.
    """
    equal = {normalised(question_of(problem)): (place, problem) for place, problem in held}
    shingles = [_shingles(question_of(problem)) for _, problem in held]
    where: dict[str, list[int]] = defaultdict(list)
    for number, words in enumerate(shingles):
        for word in words:
            where[word].append(number)
    pairs = []
    for place, problem in train:
        same = equal.get(normalised(question_of(problem)))
        if same is not None:
            pairs.append(Pair(place, same[0], near=False, clash=_clash(problem, same[1])))
            continue
        own = _shingles(question_of(problem))
        shared: dict[int, int] = defaultdict(int)
        for word in own:
            for number in where.get(word, ()):
                shared[number] += 1
        likeness = {number: count / len(own | shingles[number]) for number, count in shared.items()}
        best = max(likeness, key=lambda number: likeness[number], default=None)
        if best is not None and likeness[best] >= _needed(problem, held[best][1]):
            pairs.append(Pair(place, held[best][0], near=True, clash=_clash(problem, held[best][1])))
    return pairs


def _needed(one: Problem, other: Problem) -> float:
    same_answer = isinstance(one, MathProblem) and isinstance(other, MathProblem) and not _clash(one, other)
    return _NEAR_SAME_ANSWER if same_answer else _NEAR


def _shingles(text: str) -> set[str]:
    """Return every run of 8 words; LaTeX's commands count as words, its braces and dollars as nothing."""
    words = re.findall(r"[^\W_]+", text.casefold())
    return {" ".join(words[start : start + _SHINGLE]) for start in range(len(words) - _SHINGLE + 1)}
