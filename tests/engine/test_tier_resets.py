"""Prefixes are forgotten: in the pool alone, or on host and disk as well, and then for good."""

from __future__ import annotations

import time

import pytest
import tiny
from settings import assert_idle

from kvreclaim import SamplingParams

GIB = 2**30
PROMPTS = tiny.prompts((150, 97, 260), seed=4)
PARAMS = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
FULL = [(len(prompt) - 1) // 16 * 16 for prompt in PROMPTS]


@pytest.fixture
def start(tmp_path, make_llm):
    def start(**options):
        sizes = {"kv_offloading_size": 16e6 / GIB, "kv_offloading_disk_size": 32e6 / GIB}
        where = {"kv_offloading_disk_path": str(tmp_path), "kv_load_policy": "wait_complete"}
        return make_llm(**sizes, **where, **options)

    return start


def ask(llm):
    """Tokens, and of each prompt how many came from anywhere, from below the pool, from disk."""
    outputs = llm.generate(PROMPTS, PARAMS)
    assert_idle(llm)
    figures = [out.metrics for out in outputs]
    found = [(m.num_cached_tokens, m.num_loaded_tokens, m.num_disk_tokens) for m in figures]
    return [out.outputs[0].token_ids for out in outputs], found


def write_all(llm):
    """Wait until all is written, whatever the load of the machine."""
    disk = llm.engine.tiers.disk
    while disk.tier.num_storing:
        disk.submit()
        time.sleep(0.002)
        disk.poll()


def test_the_pool_alone(start):
    llm = start()
    plain, found = ask(llm)
    assert found == [(0, 0, 0)] * 3
    assert ask(llm) == (plain, [(n, 0, 0) for n in FULL])
    llm.engine.reset_prefix_cache(external=False)
    assert ask(llm) == (plain, [(n, n, 0) for n in FULL])
    stats = llm.engine.tier_stats()
    assert (stats.host_hit_tokens, stats.disk_hit_tokens) == (sum(FULL), 0)
    assert stats.asked_tokens == 2 * sum(FULL)
    llm.close()
    again = start()
    assert ask(again) == (plain, [(n, n, n) for n in FULL])
    assert again.engine.tier_stats().disk_hit_tokens == sum(FULL)
    assert again.engine.tier_stats().host_hit_tokens == 0
    again.close()


def test_all_of_it_and_for_good(start):
    llm = start()
    plain, _ = ask(llm)
    llm.engine.reset_prefix_cache()
    assert llm.engine.tier_stats().disk.slots.cached == 0
    llm.close()
    llm = start()
    assert llm.engine.tiers.disk.num_recovered == 0
    assert ask(llm) == (plain, [(0, 0, 0)] * 3)
    llm.close()
    llm = start()
    assert ask(llm) == (plain, [(n, n, n) for n in FULL])
    llm.close()


def test_while_blocks_are_loaded(start):
    """Requests that wait for the disk go on without it, and what they compute is found again."""
    llm = start()
    plain, _ = ask(llm)
    write_all(llm)
    llm.close()
    llm = start()
    engine = llm.engine
    requests = [engine.add_request(str(i), prompt, PARAMS) for i, prompt in enumerate(PROMPTS)]
    assert engine.memory.offload.on_disk.num_deferred == 3  # tier_stats would take in what has come meanwhile
    engine.reset_prefix_cache()
    engine.memory.check()
    assert engine.tier_stats().deferred_seqs == 0
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
    assert [request.sequences[0].token_ids[len(request.prompt_token_ids) :] for request in requests] == plain
    assert all(request.metrics.num_cached_tokens == 0 for request in requests)
    assert ask(llm) == (plain, [(n, 0, 0) for n in FULL])
    llm.close()


def test_without_tiers(make_llm):
    llm = make_llm()
    plain, _ = ask(llm)
    llm.engine.reset_prefix_cache()
    assert ask(llm) == (plain, [(0, 0, 0)] * 3)
    assert llm.engine.tier_stats() is None


def test_while_others_run(start):
    llm = start()
    engine = llm.engine
    engine.add_request("long", PROMPTS[2], PARAMS)
    engine.step()
    engine.reset_prefix_cache()
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
    llm.close()
    again = start()
    assert again.engine.tiers.disk.num_recovered == 0, "it was computed before the reset"
    again.close()
