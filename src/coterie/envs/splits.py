"""Disjoint splits: an instance's split is a hash of its canonical form, so no instance, made or listed, is in two."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from coterie.errors import ConfigError, EnvError
from coterie.keyed import keyed_random, stable_hash

T = TypeVar("T")

SPLITS = ("train", "validation", "test")
_SHARES = (80, 90, 100)
_MAX_ATTEMPTS = 10_000


def split_of(canonical: str) -> str:
    """Return the split an instance belongs to: 80% train, 10% validation, 10% test.

    ``canonical`` must be equal for all forms of an instance that count as the same (the symmetries of a grid).
    """
    bucket = stable_hash("split", canonical) % 100
    return next(split for split, share in zip(SPLITS, _SHARES, strict=True) if bucket < share)


def check_split(split: str, *more: str) -> None:
    """Raise ``ConfigError`` unless ``split`` is a known one; ``more`` names further splits of the env (``"all"``)."""
    if split not in (*SPLITS, *more):
        raise ConfigError(f"no split {split!r}: expected one of {[*SPLITS, *more]}")


def split_list(items: Iterable[T], owner: Callable[[T], str]) -> dict[str, tuple[T, ...]]:
    """Return the items of a list by split, in the list's order; ``owner`` says which split an item belongs to."""
    parts: dict[str, list[T]] = {split: [] for split in SPLITS}
    for item in items:
        parts[owner(item)].append(item)
    return {split: tuple(part) for split, part in parts.items()}


def num_listed(split: str, listed: Mapping[str, Sequence[object]] | None) -> int | None:
    """Return how many instances a split of a list has (``"all"``: the whole list), ``None`` where they are made."""
    if listed is None:
        check_split(split)
        return None
    check_split(split, "all")
    return len(listed[split])


def places(start: int, count: int, available: int | None) -> range:
    """Return ``count`` places of a split from ``start``, fewer where no more are available (``None``: no end)."""
    return range(start, start + count if available is None else min(start + count, available))


def make_instance(
    name: str, split: str, index: int, make: Callable[[random.Random], T | None], canonical: Callable[[T], str]
) -> tuple[int, T]:
    """Return (seed, instance) number ``index`` of a split; a function of the arguments alone.

    ``name`` holds the env and every option that changes what is made. ``make`` returns ``None`` where a draw is not a
    valid instance; draws outside the split are discarded too. Raises ``EnvError`` after 10,000 draws.
    """
    check_split(split)
    for attempt in range(_MAX_ATTEMPTS):
        seed = stable_hash("instance", name, split, index, attempt)
        made = make(keyed_random(seed))
        if made is not None and split_of(canonical(made)) == split:
            return seed, made
    raise EnvError(f"{name}: no instance of split {split!r} in {_MAX_ATTEMPTS} draws; are the options too narrow?")
