"""Several engines as one: each policy's acts go to the engine that serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coterie.engines import Completion, Engine, Request
from coterie.errors import EngineError


class SplitEngine:
    """Engines with policies of their own each."""

    def __init__(self, by_policy: Mapping[str, Engine]) -> None:
        """Ask these engines; several policies may have the same one."""
        self._by_policy = dict(by_policy)

    def version(self, policy: str) -> int:
        """Return the version of the weights it would generate with now."""
        return self._by_policy[policy].version(policy)

    def remembering(self) -> SplitEngine:
        """Return the engines of one rollout."""
        again = {engine: engine.remembering() for engine in self._engines()}
        return SplitEngine({name: again[engine] for name, engine in self._by_policy.items()})

    def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Return one completion per candidate for each request, in order; ``EngineError`` for an unknown policy."""
        for request in requests:
            if request.policy not in self._by_policy:
                raise EngineError(f"no policy {request.policy!r}; this engine has {sorted(self._by_policy)}")
        answers: dict[int, tuple[Completion, ...]] = {}
        for engine in self._engines():
            mine = [i for i, request in enumerate(requests) if self._by_policy[request.policy] is engine]
            if mine:
                answers.update(zip(mine, engine.generate([requests[i] for i in mine]), strict=True))
        return [answers[index] for index in range(len(requests))]

    def _engines(self) -> list[Engine]:
        """Return each engine once, in the order of the policies."""
        return list(dict.fromkeys(self._by_policy.values()))
