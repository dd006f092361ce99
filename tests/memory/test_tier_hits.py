"""A device and a host together hit what one cache of the host's size hits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from kvreclaim.memory import MemoryManager
from kvreclaim.offload.plan.tiered_offload import TieredOffload


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
        memory.offload.pop_swap_ins()
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
