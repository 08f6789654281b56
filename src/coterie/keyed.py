"""Keyed randomness: every random number is a stable hash of what it is for, so it does not depend on order.

Batching, scheduling, retries and resumption cannot change a draw, because no generator has a position to lose.
"""

from __future__ import annotations

import hashlib
import random

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def stable_hash(*parts: str | int) -> int:
    """Return an unsigned 64-bit hash of the parts; equal on every machine, process and Python hash seed.

    Parts are length-prefixed, so ``("ab", "c")`` and ``("a", "bc")`` differ, and so do ``1`` and ``"1"``.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else str(part).encode()
        digest.update(f"{'s' if isinstance(part, str) else 'i'}{len(data)}:".encode())
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


def keyed_random(*parts: str | int) -> random.Random:
    """Return a generator of its own for these parts."""
    return random.Random(stable_hash(*parts))


def uniforms(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Return one float64 in [0, 1) per (key, position), by the splitmix64 finaliser; arrays broadcast.

    ``key`` is a ``stable_hash`` of everything but the token position. 53 bits are used, so 1.0 never occurs.
    """
    with np.errstate(over="ignore"):
        mixed = keys + (positions + np.uint64(1)) * _GOLDEN
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX1
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX2
        mixed = mixed ^ (mixed >> np.uint64(31))
    scaled: npt.NDArray[np.float64] = (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return scaled
