"""Acts of many episodes as batches: an engine runs when all live episodes wait, so no batch depends on timing."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from coterie.engines import Completion, Engine, Request
from coterie.env import Expert
from coterie.errors import EngineError, EnvError, guarded
from coterie.faults import fault_point
from coterie.types import Episode, Failure

_SETTLE_PASSES = 4
"""Passes of the event loop without news after which every live episode is taken to wait: a task that awaits only acts
and scores asks for its next act within one pass, ``asyncio.gather`` needs one more to start its children."""

ExpertDraw = Callable[[Request, Expert | None], tuple[Completion, ...]]
"""What experts say instead of an engine."""
Exchange = Callable[[Sequence[Request]], Awaitable[list[tuple[Completion, ...]]]]
"""``await exchange(requests)``: what ``Engine.generate`` returns, from an engine that is somewhere else."""


class Guest:
    """One attempt of one episode at the batcher's table."""

    def __init__(self, batcher: Batcher, deadline: asyncio.Timeout, deadline_s: float) -> None:
        self.batcher = batcher
        self.deadline = deadline
        self.deadline_s = deadline_s
        self.waiting: list[tuple[Request, asyncio.Future[tuple[Completion, ...]]]] = []
        self.num_scoring = 0
        self.ahead: list[asyncio.Task[Episode]] = []
        self.gone = False

    async def draw(self, request: Request, expert: Expert | None) -> tuple[Completion, ...]:
        """Return the completions of a request once its batch has run; the deadline stands still meanwhile."""
        if self.gone:
            raise EnvError(f"act {request.act} of {request.episode.text()} came after its episode had ended")
        if self.batcher.expert is not None:
            return self.batcher.expert(request, expert)
        future: asyncio.Future[tuple[Completion, ...]] = asyncio.get_running_loop().create_future()
        self.waiting.append((request, future))
        self._changed()
        try:
            return await future
        finally:
            # still on the list only if the env itself gave up on the act, for example by a timeout of its own
            self.waiting = [item for item in self.waiting if item[1] is not future]
            self._changed()

    def scoring(self, change: int) -> None:
        """Count the acts whose candidates are being scored; a batch does not run meanwhile."""
        self.num_scoring += change
        self._changed()

    async def watch(self, plays: Sequence[Coroutine[Any, Any, Episode]]) -> list[Episode]:
        """Let other episodes play at the same table; return them once they have ended. This one waits meanwhile."""
        tasks = [self.batcher.seat(play) for play in plays]
        self.ahead += tasks
        self._changed()
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            self.ahead = [task for task in self.ahead if task not in tasks]
            self._changed()

    def _changed(self) -> None:
        """Let the deadline stand still while this episode can do nothing but wait, start it anew otherwise."""
        if self.gone or self.deadline.expired():
            return
        loop = asyncio.get_running_loop()
        self.deadline.reschedule(None if self.idle else loop.time() + self.deadline_s)
        self.batcher.news()

    @property
    def idle(self) -> bool:
        """True when this episode can only go on after a batch."""
        return bool(self.waiting or self.ahead) and self.num_scoring == 0

    def leave(self) -> None:
        """Take this attempt from the table; acts it left behind are dropped, and what plays ahead for them."""
        self.gone = True
        for task in self.ahead:
            task.cancel()
        for _, future in self.waiting:
            future.cancel()
        self.waiting = []
        self.batcher.guests.remove(self)
        self.batcher.news()


class Batcher:
    """Runs the engine when all live episodes wait, with the batch ordered by key.

    So a batch depends on the episodes alone, not on timing: the deterministic clock of design section 5.
    """

    def __init__(
        self,
        engine: Engine | None,
        exchange: Exchange | None,
        before_batch: Callable[[], None],
        expert: ExpertDraw | None,
    ) -> None:
        self.engine = engine
        self.exchange = exchange
        self.before_batch = before_batch
        self.expert = expert
        self.guests: list[Guest] = []
        self.live = 0
        self._count = 0
        self._changed = asyncio.Event()

    def seat(self, play: Coroutine[Any, Any, Episode]) -> asyncio.Task[Episode]:
        """Let one more episode play; it is live until it has ended, however it ends."""
        self.live += 1
        task = asyncio.create_task(play)
        task.add_done_callback(self._left)
        return task

    def _left(self, task: asyncio.Task[Episode]) -> None:  # noqa: ARG002
        self.live -= 1
        self.news()

    def news(self) -> None:
        """Say that an episode asked, ended, or came."""
        self._count += 1
        self._changed.set()

    async def serve(self) -> None:
        """Serve batches until no episode is live; raises what ``before_batch`` raises."""
        while self.live:
            if await self._settled():
                await self._run()
            else:
                self._changed.clear()
                await self._changed.wait()

    async def _settled(self) -> bool:
        """Return True once every live episode waits and nothing has happened for some passes of the loop."""
        quiet, seen = 0, self._count
        while quiet < _SETTLE_PASSES:
            if len(self.guests) < self.live or not all(guest.idle for guest in self.guests):
                return False
            if not any(guest.waiting for guest in self.guests):
                return False
            await asyncio.sleep(0)
            quiet = quiet + 1 if seen == self._count else 0
            seen = self._count
        return True

    async def _run(self) -> None:
        """Generate for everything that waits; an engine failure goes to every act of the batch."""
        self.before_batch()
        batch = sorted((item for guest in self.guests for item in guest.waiting), key=lambda item: item[0].key())
        for guest in self.guests:
            guest.waiting = []
        requests = [request for request, _ in batch]
        failures: list[Failure] = []
        results: list[tuple[Completion, ...]] = []
        with guarded("engine", failures.append):
            fault_point("rollout-batch", requests[0].episode.step)
            if self.exchange is not None:
                results = await self.exchange(requests)
            else:
                assert self.engine is not None
                results = self.engine.generate(requests)
            check_completions(requests, results)
        for index, (_, future) in enumerate(batch):
            if failures:
                future.set_exception(EngineError(f"{failures[0].kind}: {failures[0].message}\n{failures[0].traceback}"))
            else:
                future.set_result(results[index])


def check_completions(requests: Sequence[Request], results: Sequence[tuple[Completion, ...]]) -> None:
    """Raise ``EngineError`` unless every request got its candidates, each with ids and finite log-probs <= 0.

    A failed generation is an error, never a turn and never a stand-in end token (design: invariants 1 and 2).
    """
    if len(results) != len(requests):
        raise EngineError(f"the engine answered {len(results)} of {len(requests)} requests")
    for request, completions in zip(requests, results, strict=True):
        name = f"act {request.act} of {request.episode.text()}"
        if len(completions) != len(request.candidates):
            raise EngineError(f"{name}: asked for {len(request.candidates)} candidates, got {len(completions)}")
        for completion in completions:
            ids, logprobs = len(completion.ids), len(completion.logprobs)
            if ids != logprobs or ids < 1:
                raise EngineError(
                    f"{name}: a completion has {ids} ids and {logprobs} log-probs; expected equal and >= 1"
                )
            if ids > request.sampling.max_tokens:
                raise EngineError(f"{name}: {ids} tokens came, {request.sampling.max_tokens} were allowed")
            if not all(math.isfinite(value) and value <= 0.0 for value in completion.logprobs):
                raise EngineError(f"{name}: log-probs must be finite and <= 0, got {min(completion.logprobs)}")
