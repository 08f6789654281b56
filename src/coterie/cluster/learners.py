"""The learner of one policy in update workers, and how its weights reach the engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from coterie.cluster.engines import EnginePool
from coterie.cluster.wire import Actor, LostError, Stepped
from coterie.errors import TrainError
from coterie.learner import Update
from coterie.models.policy import Policy
from coterie.types import Sample

_Step: TypeAlias = tuple[tuple[Sample, ...], float]
"""Of an update: its samples, and the share of the token budget that is spent."""

_SHOWS_S = 5.0
"""So long after another worker has failed a loss may show."""


class RemoteLearner:
    """Trains a policy in other processes. After every update the engines have the new weights, or nobody goes on.

    A worker that is lost begins again from the last state that was kept, and takes the updates since then once more:
    they are a function of that state and the samples, so nothing shows that it was lost.
    """

    def __init__(
        self, workers: Sequence[Actor], policy: Policy, pool: EnginePool, meeting: Path, limit_s: float
    ) -> None:
        """``policy`` is the one in the run's process: its version follows, its weights stay.

        Several workers share the learner. They meet in a file beside ``meeting``, within ``limit_s``.
        """
        self._workers = list(workers)
        self._meeting = meeting
        self._limit_s = limit_s
        self._meetings = 0
        self._policy = policy
        self._pool = pool
        self._kept: Path | None = None
        self._since: list[_Step] = []
        self.skipped_in_a_row = 0
        self._joined = False

    def begin(self, samples: Sequence[Sample], spent: float = 0.0) -> Callable[[], Update]:
        """Begin an update; return what waits for its end."""
        chosen = (tuple(samples), spent)
        if not self._joined:
            self._again()
        return partial(self._finish, chosen, self._step(chosen))

    def save(self, folder: Path) -> None:
        """Let the worker write its state; the folder must be one that it sees too."""
        place = str(folder.resolve())
        self._steady(lambda: [worker.handle.save.remote(place) for worker in self._workers], "saving")
        if not (folder / "learner.json").is_file():
            raise TrainError(
                f"{self._workers[0].name} saved its state in {place}, and it is not there for this process: the run "
                "folder must be on storage that all nodes share; give one with --out"
            )

    def load(self, folder: Path) -> None:
        """Take over a saved state, and give its weights to the engines."""
        self.kept(folder)
        place = str(self._kept)
        while True:
            try:
                if not self._joined:
                    self._join()
                skipped = self._all([w.handle.load.remote(place) for w in self._workers], f"loading {place}")
                asked = [w.handle.weights.options(num_returns=2).remote() for w in self._workers]
                version = self._all([version for version, _ in asked], f"its version, from {place}")
                break
            except LostError:
                continue
        self.skipped_in_a_row = int(skipped)
        self._serve(int(version), asked[0][1])

    def kept(self, folder: Path) -> None:
        """Note where the state now is, to begin again from if a worker is lost."""
        self._kept, self._since = folder.resolve(), []

    # ---- machinery below ----------------------------------------------------------------------------------------

    def _step(self, step: _Step) -> list[tuple[Any, Any]]:
        """Begin a step in all workers; the weights stay where they are until an engine asks for them."""
        return [tuple(worker.handle.step.options(num_returns=2).remote(*step)) for worker in self._workers]

    def _finish(self, step: _Step, begun: list[tuple[Any, Any]]) -> Update:
        what = f"the update of policy {self._policy.name!r} from version {self._policy.version}"
        while True:
            try:
                stepped: Stepped = self._all([ref for ref, _ in begun], what)
                break
            except LostError:
                self._again()
                begun = self._step(step)
        self._since.append(step)
        self.skipped_in_a_row = stepped.skipped_in_a_row
        if stepped.update.version != self._policy.version:
            self._serve(stepped.update.version, begun[0][1])
        return stepped.update

    def _serve(self, version: int, weights: Any) -> None:
        """Give the engines new weights; only then the run asks for acts of that version."""
        self._pool.send(self._policy.name, version, weights)
        self._policy.version = version

    def _steady(self, ask: Callable[[], list[Any]], what: str) -> Any:
        """Return the first worker's answer to a call that may be made again after workers were replaced."""
        while True:
            if not self._joined:
                self._again()
            try:
                return self._all(ask(), f"{what} policy {self._policy.name!r}")
            except LostError:
                continue  # ``_all`` has replaced the workers

    def _all(self, refs: Sequence[Any], what: str) -> Any:
        """Return the first worker's answer once all have answered; the first error of any of them ends it.

        Where one is lost, all are replaced: the others wait for it within a sum. ``LostError`` tells of it.
        """
        threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="update")
        calls = [threads.submit(worker.wait, ref, what) for worker, ref in zip(self._workers, refs, strict=True)]
        threads.shutdown(wait=False)
        error = _error_of(calls)
        if isinstance(error, LostError):
            for worker in self._workers:
                worker.restart(error)
            self._joined = False
        if error is not None:
            raise error
        return calls[0].result()

    def _again(self) -> None:
        """Bring fresh workers together, and to the state of the lost ones if there were any."""
        while True:
            try:
                self._join()
                if self._kept is not None:
                    place = str(self._kept)
                    self._all([w.handle.load.remote(place) for w in self._workers], f"loading {place}")
                for step in self._since:
                    self._all([ref for ref, _ in self._step(step)], "an update, once more")
                return
            except LostError:
                continue

    def _join(self) -> None:
        """Let the workers share the learner, if there are several."""
        world = len(self._workers)
        if world > 1:
            self._meetings += 1
            store = self._meeting.with_name(f"{self._meeting.name}-{self._meetings}")
            store.unlink(missing_ok=True)  # left by a run that was killed
            calls = [
                w.handle.join.remote(str(store), rank, world, self._limit_s) for rank, w in enumerate(self._workers)
            ]
            try:
                self._all(calls, "joining the others")
            finally:
                store.unlink(missing_ok=True)
        self._joined = True


def _error_of(calls: Sequence[Future[Any]]) -> BaseException | None:
    """Return what went wrong first, or ``None`` once all calls have ended well.

    Over a sum with a worker that is lost the others fail, maybe before its loss shows: then the loss is returned.
    """
    wait(calls, return_when=FIRST_EXCEPTION)
    end = time.monotonic() + _SHOWS_S
    while True:
        errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
        losses = [error for error in errors if isinstance(error, LostError)]
        left, rest_s = [call for call in calls if not call.done()], end - time.monotonic()
        if losses or not errors or not left or rest_s <= 0.0:
            return next(iter(losses or errors), None)
        wait(left, timeout=rest_s, return_when=FIRST_EXCEPTION)
