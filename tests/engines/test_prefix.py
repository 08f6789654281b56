"""Known beginnings are found, kept within a limit, and a second pass is made where it saves enough."""

from __future__ import annotations

import random

import pytest
import torch

from coterie.engines.prefix import NOTHING, PASS_TOKENS, Plan, PrefixCache, Prompt, States, common_length, plan

OWNER = (1, "adapter0", 0)
SAME = tuple(range(10))


def prompt(*ids: int, owner: tuple[int, str, int] = OWNER) -> Prompt:
    return Prompt(owner, ids)


def states(*prompts: Prompt) -> States:
    width = max(len(item.ids) for item in prompts)
    return States(prompts, ((torch.zeros(len(prompts), 1, width, 1), torch.zeros(len(prompts), 1, width, 1)),))


# ---- the cache --------------------------------------------------------------------------------------------------


def test_the_longest_common_beginning_is_found_but_never_the_last_token() -> None:
    cache = PrefixCache()
    kept = states(prompt(1, 2, 3, 4), prompt(1, 2, 5), prompt(7))
    cache.keep(kept)
    for asked, row, length in (
        (prompt(1, 2, 3, 9, 9), 0, 3),
        (prompt(1, 2, 5, 6), 1, 3),
        (prompt(1, 2, 5), 0, 2),
        (prompt(1, 2, 3, 4, 0), 0, 4),
    ):
        found = cache.find(asked)
        assert (found.states, found.row, found.length) == (kept, row, length)
    assert cache.find(prompt(7)) == cache.find(prompt(8, 1)) == NOTHING


def test_the_find_is_the_best_of_all_that_is_kept() -> None:
    """Against comparing with everything, over prompts of few different tokens."""
    rng = random.Random(0)
    cache = PrefixCache()
    drawn = [prompt(*(rng.randrange(3) for _ in range(rng.randint(1, 9)))) for _ in range(300)]
    kept: list[Prompt] = []
    lengths = set()
    for item in drawn:
        best = max((common_length(other.ids, item.ids[:-1]) for other in kept), default=0)
        assert cache.find(item).length == best
        lengths.add(best)
        cache.keep(states(item))
        kept.append(item)
    assert lengths >= {0, 3, 6}


@pytest.mark.parametrize("owner", [(2, "adapter0", 0), (1, "adapter1", 0), (1, "adapter0", 1)])
def test_another_model_adapter_or_version_knows_nothing(owner: tuple[int, str, int]) -> None:
    cache = PrefixCache()
    cache.keep(states(prompt(1, 2, 3)))
    assert cache.find(prompt(1, 2, 3, owner=owner)) == NOTHING
    assert cache.find(prompt(1, 2, 3)).length == 2


def test_the_least_recently_used_go_first_and_padding_counts() -> None:
    cache = PrefixCache(max_tokens=12)
    cache.keep(states(prompt(1, 1, 1), prompt(1)))  # 6 tokens
    cache.keep(states(prompt(2, 2, 2, 2)))
    assert cache.num_tokens == 10
    cache.find(prompt(1, 1, 0))
    cache.keep(states(prompt(3, 3, 3)))
    assert cache.num_tokens == 9
    assert [cache.find(prompt(n, n, 0)).length for n in (1, 2, 3)] == [2, 0, 2]
    cache.keep(states(*[prompt(4, n) for n in range(7)]))
    assert cache.num_tokens == 9, "14 tokens at once are too many and drop nothing"


def test_a_prompt_that_is_kept_twice_outlives_the_older_states() -> None:
    cache = PrefixCache(max_tokens=6)
    cache.keep(states(prompt(1, 2, 3)))
    newer = states(prompt(1, 2, 3))
    cache.keep(newer)
    cache.keep(states(prompt(5, 6, 7)))
    assert cache.find(prompt(1, 2, 9)).states is newer


# ---- the plan ---------------------------------------------------------------------------------------------------


def test_whatever_is_asked_and_kept_in_any_order_what_is_found_is_there_and_begins_alike() -> None:
    """Few different prompts, several per batch, a limit that drops all the time: also newer states before older."""
    rng = random.Random(1)
    cache = PrefixCache(max_tokens=60)
    pool = [prompt(*(rng.randrange(3) for _ in range(rng.randint(1, 6)))) for _ in range(30)]
    lengths = set()
    for _ in range(2000):
        asked = rng.choice(pool)
        found = cache.find(asked)
        lengths.add(found.length)
        if found.states is not None:
            assert found.states in cache._used
            assert found.states.prompts[found.row].ids[: found.length] == asked.ids[: found.length]
        cache.keep(states(*rng.choices(pool, k=rng.randint(1, 4))))
        assert cache.num_tokens <= 60
        assert sorted(ids for known in cache._sorted.values() for ids in known) == sorted(p.ids for p in cache._places)
        assert {id(held) for held, _ in cache._places.values()} <= {id(held) for held in cache._used}
    assert lengths == set(range(6))


def test_equal_prompts_are_computed_once_up_to_their_last_token() -> None:
    """40 prompts of 10 tokens: 9 once, then 1 for each."""
    assert plan([prompt(*SAME)] * 40, [0] * 40) == Plan((prompt(*SAME[:9]),), 9 + 40)


def test_a_second_pass_that_saves_too_little_is_not_made() -> None:
    """n equal prompts of 10 tokens: two passes take 9 + n, one takes 10 n; they save 9 (n - 1)."""
    assert PASS_TOKENS == 256
    assert plan([prompt(*SAME)] * 29, [0] * 29) is None, "252 saved"
    assert plan([prompt(*SAME)] * 30, [0] * 30) == Plan((prompt(*SAME[:9]),), 39)


def test_what_is_known_is_used_where_it_saves_a_quarter() -> None:
    prompts = [prompt(n, *SAME[1:]) for n in range(4)]
    assert plan(prompts, [2, 2, 2, 2]) is None
    assert plan(prompts, [3, 3, 3, 3]) == Plan((), 4 * 7)
    assert plan(prompts, [9, 9, 9, 2]) is None, "all rows of a pass are as wide as the widest"


def test_groups_share_their_own_beginning_and_who_is_alone_is_computed_whole_but_for_a_token() -> None:
    """30 and 29 prompts of 12 tokens that differ in the last two, and one that is like nothing else."""
    prompts = [prompt(*SAME, n, n) for n in range(30)] + [prompt(*SAME[:4], *SAME[:6], n, n) for n in range(29)]
    rest = prompt(*range(50, 62))
    best = plan([*prompts, rest], [0] * 60)
    assert best is not None
    assert set(best.beginnings) == {prompt(*SAME), prompt(*SAME[:4], *SAME[:6]), prompt(*range(50, 61))}
    assert best.num_tokens == 3 * 11 + 60 * 2


def test_what_has_little_left_to_compute_stays_out_of_the_first_pass() -> None:
    """40 equal prompts of 10 tokens, of which nothing is known, and 20 others, of which 8 are known each.

    9 tokens once and then 2 for each are 129; with the others first it would be 21 rows of 9 and then 60, 249.
    """
    others = [prompt(*range(10 * n, 10 * n + 10)) for n in range(5, 25)]
    prompts = [*[prompt(*SAME)] * 40, *others]
    assert plan(prompts, [0] * 40 + [8] * 20) == Plan((prompt(*SAME[:9]),), 9 + 60 * 2)
    assert plan(prompts, [9] * 40 + [8] * 20) == Plan((), 60 * 2)
    alone = [*[prompt(*SAME)] * 40, others[0]]
    assert plan(alone, [9] * 40 + [0]) == Plan((prompt(*others[0].ids[:9]),), 9 + 41)


def test_beginnings_are_not_shared_between_owners() -> None:
    other = prompt(*SAME, owner=(1, "adapter1", 0))
    best = plan([*[prompt(*SAME)] * 40, *[other] * 40], [0] * 80)
    assert best == Plan((prompt(*SAME[:9]), Prompt(other.owner, SAME[:9])), 2 * 9 + 80)
