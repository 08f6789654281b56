"""Which beginnings of prompts are known, and which are worth computing first.

The states (keys and values) of a token depend on the weights and on the tokens up to it, on nothing after it. So what
was computed for one prompt serves every other prompt of the same weights as far as the two begin alike.

Shapes: B prompts that were computed together, P tokens of the longest of them (the others are padded on the left),
H key-value heads, D width of a head.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

import torch

KEPT_TOKENS = 32768
"""Tokens, padding included, whose states are kept: half of the largest batch, so memory grows by less than half."""
PASS_TOKENS = 256
"""A second pass over the model must save at least so many tokens; it costs time of its own."""
WORTH = 0.25
"""Share of the tokens of whole prompts that must be saved; putting states together costs time of its own."""

Owner: TypeAlias = tuple[int, str, int]
"""Whose states they are: the identity of the model, the adapter's route, the version of the weights."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The ids of a prompt, at least one, and the weights that read it."""

    owner: Owner
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class States:
    """Keys and values, each (B, H, P, D), of every layer for prompts that were computed together."""

    prompts: tuple[Prompt, ...] = field(repr=False)
    layers: tuple[tuple[torch.Tensor, torch.Tensor], ...] = field(repr=False)

    @property
    def width(self) -> int:
        """P."""
        return max(len(prompt.ids) for prompt in self.prompts)

    @property
    def num_tokens(self) -> int:
        """What they take of the limit: B * P."""
        return len(self.prompts) * self.width


@dataclass(frozen=True, slots=True)
class Found:
    """The first ``length`` tokens of a prompt are those of row ``row`` of ``states``; 0: nothing is known."""

    states: States | None = None
    row: int = 0
    length: int = 0


NOTHING = Found()


class PrefixCache:
    """States of prompts computed before, found by the longest common beginning; the least recently used go first.

    What was computed together is kept and dropped together, so nothing is copied to keep it.
    """

    def __init__(self, max_tokens: int = KEPT_TOKENS) -> None:
        """Hold at most so many tokens, padding included."""
        self._max_tokens = max_tokens
        # In order of use, the latest last. Values: nothing; a dict is an ordered set here.
        self._used: dict[States, None] = {}
        self._places: dict[Prompt, tuple[States, int]] = {}
        self._sorted: dict[Owner, list[tuple[int, ...]]] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens held now, padding included."""
        return sum(states.num_tokens for states in self._used)

    def find(self, prompt: Prompt) -> Found:
        """Return the longest known beginning of a prompt, without its last token, whose logits are always computed."""
        known = self._sorted.get(prompt.owner, [])
        place = bisect_left(known, prompt.ids)
        # In sorted order what shares most with a prompt stands right beside the place where the prompt would be.
        lengths = {ids: common_length(ids, prompt.ids[:-1]) for ids in known[max(place - 1, 0) : place + 1]}
        if not lengths or max(lengths.values()) == 0:
            return NOTHING
        best = max(lengths, key=lambda ids: lengths[ids])
        states, row = self._places[Prompt(prompt.owner, best)]
        self._used.pop(states)
        self._used[states] = None
        return Found(states, row, lengths[best])

    def keep(self, states: States) -> None:
        """Take over states, and drop the least recently used beyond the limit; what alone exceeds it is not kept."""
        if states.num_tokens > self._max_tokens:
            return
        while self.num_tokens + states.num_tokens > self._max_tokens:
            self._drop(next(iter(self._used)))
        self._used[states] = None
        for row, prompt in enumerate(states.prompts):
            if prompt not in self._places:
                insort(self._sorted.setdefault(prompt.owner, []), prompt.ids)
            self._places[prompt] = (states, row)

    def _drop(self, states: States) -> None:
        del self._used[states]
        for prompt in set(states.prompts):
            place = self._places.get(prompt)
            # Else newer states hold the same prompt, or did and are gone.
            if place is not None and place[0] is states:
                del self._places[prompt]
                known = self._sorted[prompt.owner]
                del known[bisect_left(known, prompt.ids)]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # the first ``low`` are equal, the first ``high + 1`` are not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class Plan:
    """What to compute before the prompts, and how many tokens are then computed in all, padding included."""

    beginnings: tuple[Prompt, ...]
    num_tokens: int


def plan(prompts: Sequence[Prompt], known: Sequence[int]) -> Plan | None:
    """Return what to compute before the prompts go on from what is known of them; ``None``: compute them whole.

    ``known`` is how many tokens of each prompt are known. The prompts are put in groups that have their first so many
    tokens in common. A first pass computes what a group has in common, once, and of a prompt that is alone all but the
    last token; groups with little left to compute stay out of it. How many tokens, and which groups, is what leaves
    the fewest tokens to compute in both passes. Two passes must save ``PASS_TOKENS`` over one, and all that is done
    ``WORTH`` of the tokens of whole prompts.
    """
    longest = max(len(prompt.ids) for prompt in prompts)
    rests = [len(prompt.ids) - length for prompt, length in zip(prompts, known, strict=True)]
    best = Plan((), len(prompts) * max(rests))
    limit = best.num_tokens - PASS_TOKENS
    order = sorted(range(len(prompts)), key=lambda row: (prompts[row].owner, prompts[row].ids))
    shared = [_shared(prompts[a], prompts[b]) for a, b in pairwise(order)]
    for depth in sorted({longest, *shared} - {0}, reverse=True):  # with ``longest`` each is alone
        groups = [_group(prompts, known, rows) for rows in _runs(order, shared, depth)]
        candidate = _two_passes(groups, len(prompts))
        if candidate.num_tokens <= min(limit, best.num_tokens - 1):
            best = candidate
    return best if best.num_tokens <= (1 - WORTH) * len(prompts) * longest else None


def _shared(a: Prompt, b: Prompt) -> int:
    """Return how many tokens two prompts have in common, without the last token of either; 0 if weights differ."""
    return common_length(a.ids[:-1], b.ids[:-1]) if a.owner == b.owner else 0


def _runs(order: Sequence[int], shared: Sequence[int], depth: int) -> list[list[int]]:
    """Return the rows in order, cut where neighbours share less than ``depth`` tokens."""
    runs = [[order[0]]]
    for row, length in zip(order[1:], shared, strict=True):
        if length >= depth:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


@dataclass(frozen=True, slots=True)
class _Group:
    """Prompts with a common beginning. Tokens of the longest rest, if the first pass does without it; of its
    beginning that are not known yet; of the longest rest after the first pass.
    """

    beginning: Prompt
    rest: int
    first: int
    then: int


def _group(prompts: Sequence[Prompt], known: Sequence[int], rows: Sequence[int]) -> _Group:
    """Return the group of rows that stand in sorted order; of one row alone the beginning is all but a token."""
    start, end = prompts[rows[0]], prompts[rows[-1]]
    length = _shared(start, end)  # in sorted order the first and the last have in common what all have
    return _Group(
        beginning=Prompt(start.owner, start.ids[:length]),
        rest=max(len(prompts[row].ids) - known[row] for row in rows),
        first=max(length - max(known[row] for row in rows), 0),
        then=max(len(prompts[row].ids) - max(length, known[row]) for row in rows),
    )


def _two_passes(groups: Sequence[_Group], num_prompts: int) -> Plan:
    """Return the plan that computes the beginnings of some groups first, those with the longest rests."""
    able = sorted((group for group in groups if group.first > 0), key=lambda group: -group.rest)
    first, then = 0, max((group.rest for group in groups if group.first == 0), default=0)
    count, best = 0, num_prompts * max(group.rest for group in groups)
    for number, group in enumerate(able, start=1):
        first, then = max(first, group.first), max(then, group.then)
        left_out = able[number].rest if number < len(able) else 0
        num_tokens = number * first + num_prompts * max(then, left_out)
        if num_tokens < best:
            count, best = number, num_tokens
    return Plan(tuple(group.beginning for group in able[:count]), best)
