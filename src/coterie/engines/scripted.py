"""An engine that says what a script tells it to: for tests of environments, of credit, of the loop. Needs no model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from coterie.engines import Completion, Request
from coterie.errors import EngineError
from coterie.models.chat import ChatRenderer
from coterie.models.tiny import tiny_tokenizer
from coterie.types import StopReason

Answer: TypeAlias = str | tuple[int, ...] | Completion
"""A text (its end token is added), exact ids, or a whole completion, which is passed on as it is, broken or not."""
Script: TypeAlias = Callable[[Request], Sequence[Answer]] | Mapping[str, Sequence[Answer]]
"""``script(request)``: one answer per candidate; it may raise. Or by role: candidate k of every act gets answer k."""


class ScriptedEngine:
    """Answers by script and remembers every request.

    Example: the drafter always answers "a", "b", "a", ... and the engine fails when the editor is asked::

        engine = ScriptedEngine({"drafter": ["a", "b"]})
        engine.requests[0].prompt_ids, engine.prompt(engine.requests[0])
    """

    def __init__(
        self,
        script: Script,
        *,
        renderer: ChatRenderer | None = None,
        logprob: float = -1.0,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        """Answer by ``script``; ``logprob`` is what every token gets.

        ``renderer`` left out is the tiny character tokenizer's. ``versions`` are those of the policies, 0 if left out.
        """
        self.renderer = ChatRenderer(tiny_tokenizer()) if renderer is None else renderer
        self.batches: list[tuple[Request, ...]] = []
        self._script = script
        self._logprob = logprob
        self._versions = dict(versions or {})

    @property
    def requests(self) -> list[Request]:
        """All requests seen, in the order of their batches."""
        return [request for batch in self.batches for request in batch]

    def prompt(self, request: Request) -> str:
        """Return the text of a request's prompt, without control tokens."""
        return self.renderer.decode(request.prompt_ids)

    def version(self, policy: str) -> int:
        """Return the version of a policy as told at the start."""
        return self._versions.get(policy, 0)

    def remembering(self) -> ScriptedEngine:
        """Return this engine: a script has nothing to use again."""
        return self

    def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Return what the script says for each request; ``EngineError`` for another version or an unscripted role."""
        self.batches.append(tuple(requests))
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> tuple[Completion, ...]:
        if request.version != self.version(request.policy):
            raise EngineError(
                f"policy {request.policy!r} is at version {self.version(request.policy)}, "
                f"the request is for version {request.version}"
            )
        if not isinstance(self._script, Mapping):
            answers = self._script(request)
        elif self._script.get(request.role):
            texts = self._script[request.role]
            answers = [texts[candidate % len(texts)] for candidate in request.candidates]
        else:
            raise EngineError(f"no answers for role {request.role!r}; the script has {sorted(self._script)}")
        return tuple(self._completion(answer, request.sampling.max_tokens) for answer in answers)

    def _completion(self, answer: Answer, max_tokens: int) -> Completion:
        """Return an answer as if it had been sampled: cut at the limit, its text decoded from its ids."""
        if isinstance(answer, Completion):
            return answer
        ids = (*self.renderer.text_ids(answer), self.renderer.end_id) if isinstance(answer, str) else answer
        kept = ids[:max_tokens]
        ended = bool(kept) and kept[-1] in self.renderer.end_ids
        return Completion(
            ids=kept,
            logprobs=(self._logprob,) * len(kept),
            text=self.renderer.decode(kept),
            stop_reason=StopReason.END if ended else StopReason.LENGTH,
        )
