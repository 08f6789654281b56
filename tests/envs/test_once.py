"""Equal candidates are scored once, also at the same time; failures are tried again."""

from __future__ import annotations

import asyncio

import pytest

from coterie.envs.once import once
from coterie.types import Reward, Scored


def test_equal_texts_are_worked_out_once_and_others_apart() -> None:
    calls: list[str] = []

    async def score(text: str) -> Scored[str]:
        calls.append(text)
        await asyncio.sleep(0)
        return Scored(Reward(float(len(text))), text)

    remembered = once(score)

    async def all_at_once() -> list[Scored[str]]:
        return await asyncio.gather(*(remembered(text) for text in ("a", "bb", "a", "a")))

    assert [scored.result for scored in asyncio.run(all_at_once())] == ["a", "bb", "a", "a"]
    assert asyncio.run(all_at_once())[1].reward == Reward(2.0)
    assert calls == ["a", "bb"]


def test_a_failure_is_not_remembered() -> None:
    calls: list[str] = []

    async def score(text: str) -> Scored[str]:
        calls.append(text)
        if len(calls) == 1:
            raise OSError("the sandbox is away")
        return Scored(Reward(1.0), text)

    remembered = once(score)
    with pytest.raises(OSError, match="away"):
        asyncio.run(_of(remembered("a")))
    assert asyncio.run(_of(remembered("a"))).reward == Reward(1.0)


async def _of(waiting: object) -> Scored[str]:
    found = await waiting  # type: ignore[misc]
    assert isinstance(found, Scored)
    return found
