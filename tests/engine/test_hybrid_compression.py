"""Compression over a model with recurrent layers acts on its attention layers, and their states follow it:
whatever is kept or begun with, answers are those of the request alone."""

from __future__ import annotations

from functools import partial
from itertools import cycle

import pytest
import tiny
import torch
from checking import (
    check_company,
    check_forks,
    check_preemption,
    check_roomy,
    check_scoring,
    tokens,
)
from prefill_shadow import PrefillShadow
from settings import assert_idle, small, with_options
from shadow import Shadow
from test_conversations import FIRST, NEW, PROMPT, ask, config, conversation, goes_on, params, with_probs
from test_groups import EveryShadow
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.model.capture import capture_queries

FAMILIES = ("qwen3-next", "falcon-h1", "lfm2")
"""A delta rule, Mamba 2 beside attention in each layer, short convolutions."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
POLICIES = (
    "query_mixture",
    "snapkv(window=3)",
    "surrogate",
    "h2o",
    "paged_eviction",
    "ada_kv(snapkv(window=3),alpha=0)",
    "shares(kvzap)",
    "critical(knorm)",
    "protect(knorm, first=5)",
    "quest",
)
BOTH = ("query_mixture", "ada_kv(snapkv(window=3),alpha=0)")
"""Policies with equal and with unequal heads."""


@pytest.mark.parametrize(("policy", "family"), list(zip(POLICIES, cycle(FAMILIES), strict=False)))
def test_every_policy_over_the_attention_layers(policy, family, make_llm, monkeypatch):
    """Blocks come back, though what a step computes before is in states that do not shrink."""
    llm = make_llm(family, block_size=8, max_num_batched_tokens=32)
    shadow = EveryShadow(llm, monkeypatch)
    outputs = llm.generate(tiny.prompts((70, 9, 33), seed=3), GREEDY, small(policy, budget=40))
    assert [out.error for out in outputs] == [None] * 3
    assert shadow.worst <= 1e-5, f"attention is off by {shadow.worst:.2e} in {shadow.num_calls} calls"
    assert not shadow.wrong
    if policy != "quest":
        assert outputs[0].metrics.compactions >= 2
        assert outputs[0].metrics.blocks_freed > 0
    assert_idle(llm)


@pytest.mark.parametrize(
    ("kv_format", "family"), list(zip(("int8", "int4", "turboquant4"), FAMILIES, strict=True))
)
def test_formats_of_the_cache(kv_format, family, make_llm, monkeypatch):
    llm = make_llm(family, block_size=16, kv_cache_dtype=kv_format, kernels="native")
    shadow = Shadow(llm, monkeypatch)
    for _ in range(2):
        outputs = llm.generate(tiny.prompts((70, 9, 33), seed=3), GREEDY, small("knorm", budget=48))
        assert [out.error for out in outputs] == [None] * 3
    assert not shadow.wrong
    assert shadow.num_hits
    assert shadow.worst <= 1e-3


def test_a_budget_that_is_never_reached_changes_nothing(make_llm):
    check_roomy(partial(make_llm, "lfm2"), CompressionConfig(BOTH[1], budget=200))


@pytest.mark.parametrize(("check", "policy"), list(zip((check_company, check_scoring), BOTH, strict=True)))
def test_company_changes_nothing(policy, check, make_llm):
    check(partial(make_llm, "falcon-h1"), small(policy, budget=32))


@pytest.mark.parametrize(("policy", "family"), list(zip(BOTH, ("lfm2", "falcon-h1"), strict=True)))
def test_preemption_changes_nothing(policy, family, make_llm):
    make = partial(make_llm, family)
    if family == "lfm2":
        check_preemption(make, small(policy, interval=16), 26)
    check_forks(make, small(policy, budget=40, interval=16), 13)


def test_prompts_that_are_computed_sparsely(make_llm, monkeypatch):
    llm = make_llm("falcon-h1", block_size=8, max_num_batched_tokens=48, max_num_seqs=8)
    shadow = PrefillShadow(llm, monkeypatch)
    method = "pooled(alpha=0.9, rows=16, first=24, last=6, layers=0, block=8, sinks=1, local=1)"
    outputs = llm.generate(with_options(tiny.prompts((150, 83), seed=3), sparse_prefill=method), GREEDY)
    assert [out.error for out in outputs] == [None] * 2
    assert shadow.worst <= 1e-5
    assert shadow.blocks_left_out > 0
    assert_idle(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compressed_document_and_its_state_are_begun_with(family, make_llm):
    document, *questions = tiny.prompts((90, 7, 12), seed=9)
    prompts = with_options([document + each for each in questions], compress_prompt_at=len(document))
    settings = small("query_mixture", budget=32)
    alone = make_llm(family, prefix_snapshot_fraction=0.0, enable_prefix_caching=False)
    llm, found = make_llm(family), []
    for prompt in prompts:
        (expected,), (output,) = (each.generate(prompt, GREEDY, settings) for each in (alone, llm))
        assert tokens([output]) == tokens([expected])
        found.append(output.metrics.num_cached_tokens)
    assert found == [0, len(document)]
    llm.engine.reset_prefix_cache()
    llm.engine.step()
    assert_idle(llm)


@pytest.mark.parametrize("family", FAMILIES)
def test_turns_go_on_from_what_was_kept_and_its_state(family, make_llm):
    limits = {"max_num_batched_tokens": 24, "spread_compression": False}
    alone = make_llm(family, **limits, enable_prefix_caching=False, prefix_snapshot_fraction=0.0)
    expected = goes_on(alone, (PROMPT, NEW), (FIRST, 10), config("knorm"))
    llm = make_llm(family, **limits, conversation_snapshots=True)
    answer, metrics = ask(llm, conversation(llm, config("knorm")), 10, config("knorm"))
    assert metrics.num_snapshot_tokens == len(PROMPT) + FIRST - 1
    assert answer.token_ids == expected[1][0]
    assert with_probs(answer.token_ids, answer.logprobs)[1] == pytest.approx(expected[1][1], abs=1e-4)


@pytest.mark.parametrize("host", [0.0, 0.01])
def test_snapshots_take_no_more_slots_than_checkpoints_may(host, make_llm):
    """They do where others run, too; the rest goes to the host, with its states."""
    llm = make_llm(
        "lfm2",
        state_checkpoints=2,
        max_num_seqs=2,
        conversation_snapshots=True,
        kv_offloading_size=host,
        prefix_snapshot_fraction=1.0,
    )
    slots, snapshots = llm.engine.memory.recurrent, llm.engine.scheduler.snapshots
    prompts, most = tiny.prompts((90,) * 8, seed=4), []
    first = llm.generate(
        prompts, params(FIRST), config("knorm"), on_step=lambda _: most.append(len(snapshots))
    )
    assert max(most) == 2 or host
    texts = [p + t + NEW for p, t in zip(prompts, tokens(first), strict=True)]
    again = llm.generate(texts[::-1], params(FIRST), config("knorm"))
    assert sum(out.metrics.num_snapshot_tokens > 0 for out in again) == (8 if host else 2)
    llm.engine.memory.check()
    on_device = sum(not snapshots.is_parked(one) for one in snapshots)
    assert slots.num_used <= slots.num_checkpoints + on_device <= 4


@pytest.mark.parametrize("family", tiny.HYBRIDS)
def test_queries_are_shown_as_transformers_computes_them(family, make_llm, tiny_dir):
    """Queries of several documents in one pass; turned back by a rotation that was found in spite of the
    layers that mix tokens."""
    seen = []

    def spy(module, query, *args, **kwargs):
        seen.append(query[0])
        return sdpa_attention_forward(module, query, *args, **kwargs)

    AttentionInterface.register("spying", spy)
    model = tiny.load_oracle(tiny_dir(family))
    model.set_attn_implementation("spying")
    documents, found, rotated = tiny.prompts((33, 12), seed=2), {}, {}
    with torch.inference_mode():
        per_document = []
        for document in documents:
            seen.clear()
            model(torch.tensor([document]))
            per_document.append(list(seen))
    loaded = make_llm(family, num_blocks=8).loaded
    capture_queries(loaded, documents, rotated.__setitem__, rotated=True)
    capture_queries(loaded, documents, found.__setitem__)
    for layer, parts in enumerate(zip(*per_document, strict=True)):
        torch.testing.assert_close(rotated[layer], torch.cat(parts, dim=1), atol=1e-3, rtol=1e-3)
        assert found[layer][:, [0, 33]] == pytest.approx(rotated[layer][:, [0, 33]], abs=1e-5)
    assert loaded.facts.rope_problem is None
