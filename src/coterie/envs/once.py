"""Scores that cost something, worked out once a text: candidates of one act are often equal to the letter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from coterie.types import Scored

R = TypeVar("R")


def once(score: Callable[[str], Awaitable[Scored[R]]]) -> Callable[[str], Awaitable[Scored[R]]]:
    """Return a score that remembers what it found for a text, and shares what is still being worked out.

    For the score of one act, which is a pure function. A failure is not remembered, so it can be tried again.
    """
    found: dict[str, Scored[R]] = {}
    under_way: dict[str, asyncio.Task[Scored[R]]] = {}

    async def work_out(text: str) -> Scored[R]:
        try:
            found[text] = await score(text)
            return found[text]
        finally:
            del under_way[text]

    async def scored(text: str) -> Scored[R]:
        if text in found:
            return found[text]
        if text not in under_way:
            under_way[text] = asyncio.create_task(work_out(text))
        return await under_way[text]

    return scored
