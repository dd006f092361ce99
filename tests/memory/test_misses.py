"""Why a prefix missed: every prompt token is a hit or a miss of exactly one reason."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import partial

import pytest

from kvreclaim.memory import MISS_REASONS, BlockKeys, MemoryManager
from kvreclaim.memory.prefix.index import BlockHash, PrefixIndex
from kvreclaim.offload.plan.tiered_offload import TieredOffload

from .sequences import find, run


def missed(memory: MemoryManager) -> dict[str, int]:
    """Tokens by reason, without those of which there are none; the sum is checked."""
    stats = memory.stats()
    assert tuple(stats.misses) == MISS_REASONS
    assert stats.prefix_hit_tokens + sum(stats.misses.values()) == stats.prefix_query_tokens
    return {reason: tokens for reason, tokens in stats.misses.items() if tokens}


def ask(
    memory: MemoryManager, tokens, salt: str | None = None, max_tokens: int | None = None
) -> dict[str, int]:
    """What a request misses, which is not computed."""
    before = memory.stats().misses
    match = find(memory, tokens, salt=salt, max_tokens=max_tokens)
    memory.admit(-1, match)
    memory.free(-1)
    after = memory.stats().misses
    missed(memory)
    return {reason: after[reason] - before[reason] for reason in after if after[reason] != before[reason]}


def test_another_salt():
    memory = MemoryManager(16, 4)
    run(memory, 0, range(13), "a")
    assert ask(memory, range(13), "b") == {"salt": 12, "sub_block": 1}
    assert ask(memory, [*range(4), *range(50, 55)], "b") == {"salt": 8, "sub_block": 1}
    assert ask(memory, range(4, 13), "b") == {"cold": 8, "sub_block": 1}
    run(memory, 1, range(5), "b")
    assert ask(memory, range(13), "b") == {"cold": 8, "sub_block": 1}, "only a first block is judged by salt"
    memory.free(0)
    memory.reset_prefix_cache()
    assert ask(memory, range(13), "c") == {"cold": 12, "sub_block": 1}


def test_the_last_owner_of_a_first_block_takes_the_reason_along():
    memory = MemoryManager(2, 4)
    for seq_id, salt in enumerate("ab"):
        run(memory, seq_id, range(4), salt)
        memory.free(seq_id)
    assert ask(memory, range(5), "c") == {"salt": 4, "sub_block": 1}
    for seq_id in (2, 3):
        assert ask(memory, range(5), "c") == {"salt": 4, "sub_block": 1}
        run(memory, seq_id, [seq_id])
    assert ask(memory, range(5), "c") == {"cold": 4, "sub_block": 1}
    assert ask(memory, range(5), "a") == {"evicted": 4, "sub_block": 1}


def test_how_many_are_remembered():
    index = PrefixIndex(remembered=3)
    root = index.root(None)
    seen = []
    for token in range(8):
        seen.append(BlockKeys(BlockHash(1), [token])[0])
        index.add(root, seen[-1], token)
        index.evict([token])
        index.check()
        known = [i for i, key in enumerate(seen) if index.why_missing(root, key) == "evicted"]
        assert known == list(range(known[0], token + 1)), "the last ones, without a gap"
        assert min(token + 1, 3) <= len(known) <= 6


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (None, {"cold": 4, "sub_block": 1}),
        (12, {"cold": 4, "sub_block": 1}),
        (11, {"ineligible": 4, "sub_block": 1}),
        (8, {"ineligible": 4, "sub_block": 1}),
        (7, {"ineligible": 8, "sub_block": 1}),
        (0, {"ineligible": 12, "sub_block": 1}),
    ],
)
def test_what_a_limit_forbids_is_ineligible(max_tokens, expected):
    memory = MemoryManager(8, 4)
    run(memory, 0, range(9))
    assert ask(memory, range(13), max_tokens=max_tokens) == expected


def test_without_caching_full_blocks_are_ineligible():
    memory = MemoryManager(8, 4, enable_prefix_caching=False)
    assert ask(memory, range(13)) == {"ineligible": 12, "sub_block": 1}
    assert memory.stats().prefix_query_tokens == 13


def two_digests(message: bytes) -> bytes:
    """Roots differ by salt, blocks do not at all."""
    return b"" if message.startswith(b"p") else hashlib.sha256(message).digest()


def test_another_content_under_the_same_digest():
    memory = MemoryManager(8, 4, hash_function=two_digests)
    run(memory, 0, range(5))
    assert ask(memory, range(50, 59)) == {"corrupt": 8, "sub_block": 1}
    assert ask(memory, range(9), "other") == {"corrupt": 8, "sub_block": 1}
    assert ask(memory, range(5)) == {"sub_block": 1}


def conversations(seed: int) -> list[list[int]]:
    """Walks down a few trees: prefixes that come back, sooner or later. Each ends with a token of its own."""
    rng = random.Random(seed)
    found = []
    for number in range(400):
        path, node = [], rng.randrange(12)
        for _ in range(rng.randrange(1, 9)):
            path.append(node)
            node = 12 + 4 * node + rng.randrange(3)
        found.append([*path, -number - 2])
    return found


def hits(memory: MemoryManager, requests: Sequence[Sequence[int]]) -> int:
    """Tokens, in blocks of one, of requests that come one after the other."""
    found = 0
    for seq_id, tokens in enumerate(requests):
        match = memory.match_prefix(memory.keys([*tokens, -1]))
        memory.admit(seq_id, match)
        memory.grow(seq_id, len(tokens) - match.num_tokens)
        memory.commit(seq_id, len(tokens) - match.num_tokens)
        memory.offload.pop_moves_in()
        memory.release_copy_sources()
        memory.offload.pop_stores()
        memory.free(seq_id)
        found += match.num_tokens
    memory.check()
    return found


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("host", [30, 60, 200])
def test_device_and_host_hit_what_one_cache_of_the_hosts_size_hits(seed, host):
    """And the device hits what it hits alone."""
    requests = conversations(seed)
    offload = partial(TieredOffload, num_host_slots=host, host_eviction_policy="lru")
    both = MemoryManager(20, 1, eviction_policy="lru", offload=offload)
    found = hits(both, requests)
    alone = hits(MemoryManager(20, 1, eviction_policy="lru"), requests)
    assert found == hits(MemoryManager(host, 1, eviction_policy="lru"), requests)
    assert 0 < alone < found == alone + both.offload.counts.from_host
