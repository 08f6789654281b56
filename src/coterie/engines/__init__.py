"""What an engine is: something that turns acts into completions, for policies it knows by name and version."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Protocol

from coterie.types import EpisodeKey, StopReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How completions of a role are drawn. ``temperature`` 0 means greedy; nothing is truncated or penalised."""

    temperature: float = 1.0
    max_tokens: int = 64
    stop: tuple[str, ...] = ()

    def ending(
        self, ids: Sequence[int], end_ids: Set[int], decode: Callable[[Sequence[int]], str]
    ) -> tuple[StopReason, str | None] | None:
        """Return why a completion ends with the last of its ids, and its text where a stop string cuts it.

        ``None``: it goes on.
        """
        if ids[-1] in end_ids:
            return StopReason.END, None
        if self.stop:
            text = decode(ids)
            ends = [text.find(stop) for stop in self.stop if stop in text]
            if ends:
                return StopReason.STOP, text[: min(ends)]
        return (StopReason.LENGTH, None) if len(ids) >= self.max_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One act, as the engine sees it: K completions of one prompt by one policy at one version.

    ``candidates`` are the candidate numbers to draw (their number is K); with episode, act and token position they key
    the randomness.
    """

    episode: EpisodeKey
    act: int
    role: str
    seat: int
    policy: str
    version: int
    prompt_ids: tuple[int, ...]
    candidates: tuple[int, ...]
    sampling: Sampling

    def key(self) -> tuple[str, int]:
        """Return what batches are ordered by."""
        return (self.episode.text(), self.act)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What was sampled: ids, log-probs of the sampling distribution (nats), decoded text, why it ended."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    stop_reason: StopReason


class Engine(Protocol):
    """Generates for policies. Must serve exactly the version a request names, or raise ``EngineError``."""

    def version(self, policy: str) -> int:
        """Return the version of the weights it would generate with now."""
        ...

    def remembering(self) -> Engine:
        """Return the engine of one rollout: work that it has done for earlier requests may be used for later ones.

        It begins with nothing, so that what a rollout draws depends, to the bit, on that rollout alone, whatever was
        played before it or is played beside it.
        """
        ...

    def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Return, for each request in order, one completion per candidate in order."""
        ...
