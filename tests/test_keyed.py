"""Random numbers are hashes of what they are for: stable, independent, without a position to lose."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from scipy import stats

from coterie.keyed import keyed_random, stable_hash, uniforms


def test_hashes_are_the_same_in_every_process_and_for_every_hash_seed() -> None:
    """Written down once: a change of these numbers changes every run ever recorded."""
    expected = [stable_hash(0), stable_hash("ab", "c"), stable_hash(7, "token", "train", 3, "task", 0, 1, 2)]
    code = (
        "from coterie.keyed import stable_hash as h; print(h(0), h('ab','c'), h(7,'token','train',3,'task',0,1,2), "
        "hash('ab'))"
    )
    seen = []
    for seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout.split()
        assert [int(number) for number in output[:3]] == expected
        seen.append(output[3])
    assert seen[0] != seen[1], "Python's own hash was meant to differ"
    assert expected == EXPECTED


EXPECTED = [9549033805879814570, 6617615575610711863, 7849454643220564566]


def test_parts_cannot_be_confused() -> None:
    keys = [("ab", "c"), ("a", "bc"), ("abc",), (1, "1"), ("1", 1), (11,), (1, 1), ("",), (), (-1,), ("-1",)]
    assert len({stable_hash(*key) for key in keys}) == len(keys)


def test_lone_surrogates_have_a_hash() -> None:
    assert stable_hash("\ud800") != stable_hash("\ud801")


def test_uniforms_lie_in_the_half_open_interval_and_broadcast() -> None:
    keys = np.array([[stable_hash(i)] for i in range(300)], dtype=np.uint64)
    positions = np.arange(200, dtype=np.uint64)
    drawn = uniforms(keys, positions)
    assert drawn.shape == (300, 200)
    assert drawn.dtype == np.float64
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    assert drawn[17, 5] == uniforms(keys[17], positions[5:6])[0]


def test_uniforms_are_uniform_and_neighbours_are_independent() -> None:
    keys = np.array([[stable_hash("k", i)] for i in range(400)], dtype=np.uint64)
    drawn = uniforms(keys, np.arange(100, dtype=np.uint64))
    assert stats.kstest(drawn.reshape(-1), "uniform").pvalue > 0.001
    for a, b in ((drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:])):
        pairs = np.zeros((8, 8))
        np.add.at(pairs, ((a * 8).astype(int).reshape(-1), (b * 8).astype(int).reshape(-1)), 1)
        assert stats.chi2_contingency(pairs).pvalue > 0.001


def test_the_extreme_keys_stay_in_range() -> None:
    ends = np.array([0, 2**64 - 1], dtype=np.uint64)
    drawn = uniforms(ends[:, None], np.array([0, 2**64 - 2, 2**64 - 1], dtype=np.uint64))
    assert bool(((drawn >= 0.0) & (drawn < 1.0)).all())


def test_generators_of_different_keys_do_not_share_a_position() -> None:
    first = keyed_random("a", 1)
    expected = [keyed_random("a", 1).random() for _ in range(3)]
    assert len(set(expected)) == 1
    keyed_random("b").random()
    assert first.random() == expected[0]
