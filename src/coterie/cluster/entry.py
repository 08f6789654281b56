"""The door to the cluster: the only part of it that a run on one machine comes by. Imports no Ray until it is asked."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from coterie.cluster.placement import address_of, check_fits, layout_of, local_nodes
from coterie.errors import ConfigError
from coterie.hardware import HardwareTable
from coterie.lineup import Lineup
from coterie.machine import folder_of
from coterie.types import Json

_HERE = ("127.0.0.1:", "localhost:", "[::1]:")


@contextmanager
def placed(lineup: Lineup, tell: Callable[[str, Mapping[str, Json]], None], folder: Path) -> Iterator[Lineup]:
    """Yield the lineup that plays and trains where its recipe's ``[hardware]`` says: with "local" the lineup itself.

    ``tell`` hears of workers that were lost and replaced. Workers that share a learner meet in ``folder``.
    """
    hardware = lineup.recipe.hardware
    if hardware.backend == "local":
        yield lineup
        return
    layout = layout_of(lineup)
    prepare(hardware)
    from coterie.cluster.start import started

    with started(lineup, layout, tell, folder) as elsewhere:
        yield replace(lineup, elsewhere=elsewhere)


def check_placement(lineup: Lineup) -> list[tuple[str, str, str]]:
    """Return what would be placed where, as (worker, policies, devices); nothing for "local".

    ``ConfigError`` where the cluster that the recipe names, or this machine, does not have what is needed.
    """
    hardware = lineup.recipe.hardware
    if hardware.backend == "local":
        return []
    layout = layout_of(lineup)
    prepare(hardware)
    if address_of(hardware) is None:
        check_fits(layout, local_nodes(hardware, layout))
    else:
        from coterie.cluster.start import connected, nodes

        with connected(hardware, layout, 0):
            check_fits(layout, nodes())
    return layout.rows()


def prepare(hardware: HardwareTable) -> None:
    """Set what Ray reads from the environment when it is imported; ``ConfigError`` where it is not installed."""
    if folder_of("ray") is None:
        raise ConfigError(
            'hardware.backend = "ray" needs the package ray, which is not installed: pip install "coterie[ray]", or '
            'use backend = "local"'
        )
    address = address_of(hardware)
    if address is None or address.startswith(_HERE):
        # Without this Ray puts the machine's public address in the place of the loopback address.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    if address is None:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's 15 gives way to all else on this machine
    else:
        os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # of 20 each warns of what the error then says
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
