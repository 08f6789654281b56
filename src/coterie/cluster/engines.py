"""The engines of policies that share a model, in rollout workers: who answers which act, with which weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coterie.cluster.wire import Actor, LostError
from coterie.engines import Completion, Request
from coterie.errors import EngineError, TrainError


class EnginePool:
    """Equal rollout workers of some policies. Each holds all of these policies at the versions that were sent last.

    An act goes to the worker that has its task, so that prompts which begin alike meet; a task that is new goes to the
    worker with the fewest tokens so far. Which that is depends on the acts alone, so equal rollouts are dealt equally.
    """

    def __init__(self, workers: Sequence[Actor]) -> None:
        """Take over workers that have the same policies loaded, at version 0."""
        self.workers = list(workers)
        self._models: dict[str, Any] = {}
        self._sent: dict[str, tuple[int, Any]] = {}
        self._rollout = -1
        self._place: dict[str, int] = {}
        self._tokens = [0] * len(self.workers)
        self._past: list[list[tuple[Request, ...]]] = [[] for _ in self.workers]

    def send_model(self, policy: str, weights: Any) -> None:
        """Give all workers the weights that a warm start left in a policy's model; ``weights`` is a reference."""
        self._models[policy] = weights
        self._each(lambda worker: worker.handle.load_model.remote(policy, weights), f"the model of policy {policy!r}")

    def send(self, policy: str, version: int, weights: Any) -> None:
        """Give all workers a version of a policy and return once each has confirmed that it serves it."""
        self._sent[policy] = (version, weights)
        self._past = [[] for _ in self.workers]  # of a rollout that is over; no version of it is served any more
        what = f"version {version} of policy {policy!r}"
        confirmed = self._each(lambda worker: worker.handle.load.remote(policy, version, weights), what)
        _confirm(what, version, confirmed)

    def begin(self, rollout: int, requests: Sequence[Request]) -> Callable[[], list[tuple[Completion, ...]]]:
        """Ask for the completions of each request; return what waits for them and returns them, in order.

        A worker that is lost on the way is replaced. Pools that have begun work at the same time.
        """
        if rollout != self._rollout:
            self._rollout, self._place = rollout, {}
            self._tokens = [0] * len(self.workers)
            self._past = [[] for _ in self.workers]
        shares: list[list[int]] = [[] for _ in self.workers]
        for index, request in enumerate(requests):
            shares[self._worker_of(request)].append(index)
        asked = [(number, tuple(requests[i] for i in share)) for number, share in enumerate(shares) if share]
        refs = {number: self._ask(number, part) for number, part in asked}

        def finish() -> list[tuple[Completion, ...]]:
            answers: dict[int, tuple[Completion, ...]] = {}
            for number, part in asked:
                results = self._answer(number, part, refs[number])
                if len(results) != len(part):
                    name = self.workers[number].name
                    raise EngineError(f"{name} answered {len(results)} of {len(part)} requests")
                answers.update(zip(shares[number], results, strict=True))
            for number, part in asked:
                self._past[number].append(part)
            return [answers[index] for index in range(len(requests))]

        return finish

    # ---- machinery below ----------------------------------------------------------------------------------------

    def _worker_of(self, request: Request) -> int:
        task = request.episode.task_id
        if task not in self._place:
            self._place[task] = min(range(len(self.workers)), key=lambda number: (self._tokens[number], number))
        number = self._place[task]
        self._tokens[number] += len(request.prompt_ids) + len(request.candidates) * request.sampling.max_tokens
        return number

    def _ask(self, number: int, part: Sequence[Request]) -> Any:
        return self.workers[number].handle.generate.remote(self._rollout, part)

    def _answer(self, number: int, part: Sequence[Request], ref: Any) -> list[tuple[Completion, ...]]:
        worker = self.workers[number]
        while True:
            try:
                results: list[tuple[Completion, ...]] = worker.wait(ref, acts_text(part))
                return results
            except LostError as lost:
                self._renew(number, lost)
                ref = self._ask(number, part)

    def _renew(self, number: int, lost: LostError) -> None:
        """Replace a worker, and bring the new one to where the lost one was.

        Its answers to the earlier batches of the rollout are known; it makes them again because what it remembers of
        them decides, in the last bits, what comes next.
        """
        worker = self.workers[number]
        while True:
            worker.restart(lost)
            try:
                for policy, weights in self._models.items():
                    worker.wait(worker.handle.load_model.remote(policy, weights), "the models")
                for policy, (version, weights) in self._sent.items():
                    what = f"version {version} of policy {policy!r}"
                    done = worker.wait(worker.handle.load.remote(policy, version, weights), what)
                    _confirm(what, version, {worker.name: done})
                for part in self._past[number]:
                    worker.wait(self._ask(number, part), f"{acts_text(part)}, once more")
                return
            except LostError as again:
                lost = again

    def _each(self, call: Callable[[Actor], Any], doing: str) -> Mapping[str, Any]:
        """Return what workers answer to a call; not a lost one's: its replacement has been sent everything."""
        refs = [call(worker) for worker in self.workers]
        results = {}
        for number, worker in enumerate(self.workers):
            try:
                results[worker.name] = worker.wait(refs[number], doing)
            except LostError as lost:
                self._renew(number, lost)
        return results


def _confirm(what: str, version: int, served: Mapping[str, Any]) -> None:
    """Raise ``TrainError`` unless every worker serves the version it was sent."""
    for worker, found in served.items():
        if found != version:
            raise TrainError(f"{worker} was sent {what} and serves version {found}; nothing may be sampled from it")


def acts_text(requests: Sequence[Request]) -> str:
    """Return which acts these are: how many, and role, task and act of the first."""
    first = requests[0]
    return (
        f"{len(requests)} acts, the first: role {first.role!r}, task {first.episode.task_id!r}, act {first.act} of "
        f"{first.episode.text()}"
    )
