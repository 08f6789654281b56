"""Where the time of a run goes, by the names of its parts; costs nothing while nobody asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

_current: ContextVar[Spent | None] = ContextVar("spent", default=None)


@dataclass(slots=True)
class Spent:
    """Seconds of each part, in the order in which parts were first entered; a part inside another is not in both.

    On an accelerator that works while the processor goes on, time counts where its results are waited for.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    _open: list[tuple[str, bool]] = field(default_factory=list)
    _since: float = 0.0

    def _pass(self) -> None:
        """Count the time up to now for the innermost open part."""
        now = time.perf_counter()
        if self._open:
            name = self._open[-1][0]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now

    @contextmanager
    def part(self, name: str, whole: bool) -> Iterator[None]:
        """Count the time inside for ``name``; ``whole``: for nothing else, whatever parts are entered inside."""
        if self._open and self._open[-1][1]:
            yield
            return
        self._pass()
        self._open.append((name, whole))
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self._pass()
            self._open.pop()


@contextmanager
def profiling() -> Iterator[Spent]:
    """Ask for the time that the parts take inside."""
    spent = Spent()
    token = _current.set(spent)
    try:
        yield spent
    finally:
        _current.reset(token)


@contextmanager
def part(name: str, *, whole: bool = False) -> Iterator[None]:
    """Count the time inside for ``name``, if anybody asks; see ``Spent.part``."""
    spent = _current.get()
    if spent is None:
        yield
        return
    with spent.part(name, whole):
        yield
