"""Compressed caches draft for models with recurrent layers: a companion has its target's state, and what it
writes while it drafts is dropped."""

from __future__ import annotations

from itertools import cycle

import pytest
import tiny
from breaking import Breaking
from settings import assert_idle
from test_verify import assert_drafted, assert_left_nothing
from verifying import GREEDY, POLICIES, PROMPTS, SAMPLED, drafting

from kvreclaim import SamplingParams

FAMILIES = ("qwen3-next", "falcon-h1", "lfm2", "jamba")
MIXED = [GREEDY, SAMPLED, GREEDY, SAMPLED]


def tokens(outputs) -> list:
    assert [out.error for out in outputs] == [None] * len(outputs)
    return [[(o.text, o.token_ids, o.finish_reason) for o in out.outputs] for out in outputs]


@pytest.mark.parametrize(("policy", "family"), list(zip(POLICIES, cycle(FAMILIES), strict=False)))
def test_every_policys_answers_are_the_full_caches(policy, family, make_llm):
    llm = make_llm(family)
    expected = tokens(llm.generate(PROMPTS, MIXED))
    verified = llm.sibling()
    assert tokens(verified.generate(PROMPTS, MIXED, drafting(policy))) == expected
    assert_drafted(verified)


@pytest.mark.parametrize("family", tiny.HYBRIDS)
def test_every_familys_answers_are_transformers(family, make_llm, tiny_dir):
    """Where a companion keeps everything, every draft is accepted, too: it drafts from the target's state."""
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    llm = make_llm(family)
    found = llm.generate(PROMPTS, greedy, drafting("knorm", budget=120))
    assert [out.outputs[0].token_ids for out in found] == tiny.greedy(tiny_dir(family), PROMPTS, 40)
    counts = llm.engine.totals.speculation
    assert counts.num_draft_tokens == counts.num_accepted_tokens > 100
    assert_drafted(llm)


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_several_outputs_of_a_prompt(family, make_llm):
    llm = make_llm(family)
    params = SamplingParams(n=3, temperature=1.2, seed=5, max_tokens=40, ignore_eos=True)
    expected = tokens(llm.generate(PROMPTS, params))
    verified = llm.sibling()
    assert tokens(verified.generate(PROMPTS, params, drafting("snapkv"))) == expected
    assert_drafted(verified)


@pytest.mark.parametrize(("host", "family"), [(0.0, "qwen3-next"), (0.01, "lfm2"), (0.01, "falcon-h1")])
def test_sequences_that_give_way(family, host, make_llm):
    mode = "swap" if host else "recompute"
    llm = make_llm(family, num_blocks=200, block_size=8)
    expected = tokens(llm.generate(PROMPTS, MIXED))
    tight = llm.sibling(num_blocks=21, kv_offloading_size=host, preemption_mode=mode, max_num_seqs=3)
    found = tight.generate(PROMPTS, MIXED, drafting("query_mixture", budget=32))
    assert tokens(found) == expected
    assert sum(out.metrics.preemptions for out in found) > 0
    assert tight.engine.totals.speculation.num_accepted_tokens > 0
    assert_left_nothing(tight)


@pytest.mark.parametrize("family", FAMILIES[:3])
def test_passes_that_fail(family, make_llm):
    llm = make_llm(family)
    expected = tokens(llm.generate(PROMPTS, MIXED))
    broken, counted = llm.sibling(), [0]

    def should(ids):
        counted[0] += len(ids) > 1
        return len(ids) > 1 and counted[0] % 3 == 0

    breaking = Breaking(broken, should)
    assert tokens(broken.generate(PROMPTS, MIXED, drafting("snapkv"))) == expected
    assert breaking.num_raised > 3
    assert_left_nothing(broken)


@pytest.mark.parametrize("state_drafts", [0, 1, 5])
def test_drafts_take_the_slots_that_are_left(state_drafts, make_llm, monkeypatch):
    """At max_num_seqs those kept for them, and no checkpoint is evicted for one; a request alone has all."""
    prompts = tiny.prompts((30, 33, 35, 30, 20, 10), seed=2)
    llm = make_llm("lfm2", max_num_seqs=3, state_checkpoints=2, state_drafts=state_drafts)
    states, counts = llm.engine.memory.recurrent, llm.engine.totals.speculation
    assert (states.sizes.num_slots, states.sizes.num_checkpoints) == (3 * (2 + state_drafts) + 2, 2)
    take, fewest = states.slots.take, []

    def watched():
        fewest.append(states.slots.num_free)
        return take()

    monkeypatch.setattr(states.slots, "take", watched)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    expected = tokens(llm.sibling().generate(prompts, params))
    assert tokens(llm.generate(prompts, params, drafting("knorm", budget=100))) == expected
    assert counts.num_draft_tokens == counts.num_accepted_tokens >= 30 * state_drafts
    before = counts.num_draft_tokens
    assert tokens(llm.generate(prompts[0], params, drafting("knorm", budget=100))) == expected[:1]
    assert counts.num_draft_tokens == counts.num_accepted_tokens > before + 20
    assert min(fewest) >= 1
    assert_idle(llm)
