"""Worker processes as Ray actors: asked with a deadline, known by name, made again when they are lost."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from coterie.cluster.wire import LostError
from coterie.errors import ConfigError, TrainError
from coterie.types import Json

_LOST = (RayActorError, WorkerCrashedError, ObjectLostError, OutOfMemoryError)
_SLICE_S = 5.0
"""After so many seconds without an answer it is looked whether the cluster is still there."""
_LOOK_S = 1.0
"""So often it is looked anyway: as long as all workers answer, a run does not notice that it has no head any more."""
_GONE_S = 20.0
"""A cluster that cannot be reached for so long is gone."""
_CONNECT_S = 2.0
_BIRTH_S = 600.0
"""A worker may take so long to start and to load its models; calls made meanwhile wait."""
_log = logging.getLogger(__name__)

Tell = Callable[[str, Mapping[str, Json]], None]
"""``tell(kind, fields)``: where losses and replacements are recorded."""


class Watch:
    """Knows whether the cluster is still there, so that nobody waits for one that is gone."""

    def __init__(self, address: str) -> None:
        """Watch the head of a cluster, ``HOST:PORT``; ``ConfigError`` where that is no address."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or "/" in host:
            raise ConfigError(f"hardware.address or RAY_ADDRESS is {address!r}: expected HOST:PORT of a cluster's head")
        self.address = address
        self._place = (host.strip("[]"), int(port))
        self._looked = time.monotonic()

    def look(self) -> None:
        """Check, unless that was done a moment ago."""
        if time.monotonic() - self._looked > _LOOK_S:
            self.check()

    def check(self) -> None:
        """Raise ``TrainError`` where the head cannot be reached, or Ray has given up this process's own node."""
        self._looked = time.monotonic()
        end = time.monotonic() + _GONE_S
        while not self.reachable():
            if time.monotonic() > end:
                raise TrainError(
                    f"the Ray cluster at {self.address} is gone: its head has not answered for {_GONE_S:g} s. Start a "
                    "cluster again, then go on with --resume from the last checkpoint"
                )
            time.sleep(1.0)
        here = ray.get_runtime_context().get_node_id()
        if any(node["NodeID"] == here and not node["Alive"] for node in ray.nodes()):
            raise TrainError(
                f"the Ray cluster at {self.address} has lost the node of this run's own process (its raylet ended). "
                "Start it again, then go on with --resume from the last checkpoint"
            )

    def reachable(self) -> bool:
        """Return whether the head of the cluster takes connections."""
        try:
            socket.create_connection(self._place, timeout=_CONNECT_S).close()
        except OSError:
            return False
        return True


class RayActor:
    """Implements ``coterie.cluster.wire.Actor``."""

    def __init__(
        self, name: str, make: Callable[[], Any], watch: Watch, *, deadline_s: float, max_restarts: int, tell: Tell
    ) -> None:
        """Make the worker; it is not waited for. ``make`` returns an actor's handle."""
        self.name = name
        self._make = make
        self._watch = watch
        self._deadline_s = deadline_s
        self._max_restarts = max_restarts
        self._tell = tell
        self.restarts = 0
        self.handle: Any = make()
        # Asked for before anything else, since an actor takes its calls in their order.
        self._birth: Any = self.handle.__ray_ready__.remote()

    def wait(self, ref: Any, doing: str) -> Any:
        """Return what a call of this worker comes to. ``doing`` says in errors what it was about.

        ``LostError`` where the worker died or let its deadline pass; what the call itself raises is raised here, and
        ``TrainError`` where the whole cluster is gone.
        """
        self._watch.look()
        birth = self._birth
        if birth is not None:
            self._get(birth, "its start", max(_BIRTH_S, self._deadline_s))
            if self._birth is birth:  # and not that of a replacement, made meanwhile
                self._birth = None
        return self._get(ref, doing, self._deadline_s)

    def restart(self, why: LostError) -> None:
        """Put a new worker in the place of a lost one; ``TrainError`` once it was replaced too often."""
        self.restarts += 1
        self._tell("worker_lost", {"worker": self.name, "error": str(why), "restarts": self.restarts})
        _log.warning("%s", why)
        if self.restarts > self._max_restarts:
            raise TrainError(
                f"{why}. It has been replaced {self._max_restarts} times, which is hardware.max_restarts; look at the "
                "worker's log in Ray's session folder, then go on with --resume"
            ) from why
        self.stop()
        self.handle = self._make()
        self._birth = self.handle.__ray_ready__.remote()

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        ray.kill(self.handle)

    def _get(self, ref: Any, doing: str, limit_s: float) -> Any:
        """Return what a call comes to within a limit; see ``wait``."""
        end = time.monotonic() + limit_s
        while True:
            left = end - time.monotonic()
            try:
                return ray.get(ref, timeout=max(0.0, min(left, _SLICE_S)))
            except GetTimeoutError:
                if left > _SLICE_S:
                    self._watch.check()
                    continue
                raise LostError(f"{self.name} gave no answer for {limit_s:g} s to {doing}") from None
            except RayTaskError as error:
                if isinstance(error.cause, RayError):  # what was sent to the worker is gone, with the node it lay on
                    raise TrainError(f"{self.name}, {doing}: {in_short(error.cause)}. Go on with --resume") from error
                raise error.cause from error
            except _LOST as error:
                self._watch.check()
                if isinstance(error, RayActorError) and error.actor_init_failed:
                    raise TrainError(f"{self.name} cannot be made: {in_short(error)}") from error
                raise LostError(f"{self.name} died over {doing}: {in_short(error)}") from error
            except RayError as error:
                self._watch.check()
                raise TrainError(f"{self.name}, {doing}: Ray failed: {in_short(error)}") from error


def in_short(error: Exception) -> str:
    """Return the first and the last line of what Ray says; between them is a traceback if the worker raised."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
