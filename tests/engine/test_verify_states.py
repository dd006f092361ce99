"""Contents of companions, step by step; no failure of theirs changes an answer."""

from __future__ import annotations

from itertools import pairwise

import pytest
import tiny
import torch
from settings import small
from test_verify import assert_left_nothing
from verifying import GREEDY, PROMPTS, SAMPLED, drafting, on_host, results

from kvreclaim import LLM, SamplingParams
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.engine.features.verification import verifier as verifying_module
from kvreclaim.engine.features.verification.feature import Verification
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.kv_cache import PagedTokens

MIXED = [GREEDY, SAMPLED, GREEDY, SAMPLED]
PLACES = pytest.mark.parametrize("host", [False, True], ids=["pool", "host"])
LONG = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
GIB = 2**30


def verified_of(llm: LLM, host: bool) -> LLM:
    return on_host(llm) if host else llm.sibling()


def add(llm: LLM, config=None, prompts=PROMPTS, params=GREEDY):
    compressor = None if config is None else llm.compressor(config)
    return [llm.engine.add_request(f"r{i}", each, params, compressor) for i, each in enumerate(prompts)]


def held(backend, layers, memory, seq, num_slots) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values [K, num_slots, D] of a sequence, layer by layer."""
    ids = torch.tensor(memory.table(seq.seq_id).block_ids)
    return [backend.gather_tokens(PagedTokens(layer, ids, num_slots)) for layer in layers]


def full_of(llm: LLM, seq) -> list[tuple[torch.Tensor, torch.Tensor]]:
    engine = llm.engine
    return held(engine.backend, engine.cache.layers, engine.memory, seq, seq.num_computed)


def running(llm: LLM):
    return [seq for seq in llm.engine.scheduler.running if seq.num_computed]


@PLACES
@pytest.mark.parametrize("form", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", ["knorm", "snapkv", "query_mixture", "h2o"])
def test_a_companion_holds_its_owners_bytes_where_the_policy_kept_them(
    policy, form, host, make_llm, monkeypatch
):
    monkeypatch.setattr(PassContext, "_needs_positions", lambda self, job: True)
    llm = verified_of(make_llm(kv_cache_dtype=form, max_num_batched_tokens=40), host)
    config, engine = drafting(policy), llm.engine
    add(llm, config)
    verifier = engine.feature(Verification).verifier
    companions, copier = verifier.companions, verifier.tracker.copier
    num_seen = num_evicted = 0
    while engine.has_unfinished:
        engine.step()
        for target in running(llm):
            table = engine.memory.table(target.seq_id)
            assert table.physical_len == table.logical_len == target.num_computed
            companion = companions.get(target)
            if companion is None:
                continue
            num_seen += 1
            assert companion.num_computed == target.num_computed
            table = companions.memory.table(companion.seq_id)
            length = table.physical_len
            assert length < max(config.budget + config.interval, target.num_prompt + 1)
            if target.num_computed >= target.num_prompt:
                assert length < config.budget + config.interval
                assert len(table.block_ids) <= blocks_for(length + config.verify_tokens, 16)
            num_evicted += target.num_computed - length
            layers = copier.compressed.layers
            there = held(engine.backend, layers, companions.memory, companion, length)
            for layer, (ours, full) in enumerate(zip(there, full_of(llm, target), strict=True)):
                kept = engine.signals.positions(companion, length)[layer].long()
                for mine, whole in zip(ours, full, strict=True):
                    assert torch.equal(mine, whole.take_along_dim(kept[..., None], 1))
    assert num_seen > 20
    assert num_evicted > 100
    assert engine.totals.speculation.num_failed == 0
    assert_left_nothing(llm)


def last_full_caches(llm: LLM, config) -> dict:
    """The keys and values of each request after its last step but one, and the blocks that they took."""
    found = {}
    add(llm, config)
    while llm.engine.has_unfinished:
        llm.engine.step()
        for seq in running(llm):
            blocks = len(llm.engine.memory.table(seq.seq_id).block_ids)
            most_drafts = 0 if config is None else config.verify_tokens
            assert blocks <= blocks_for(seq.num_computed + most_drafts, 16)
            found[seq.request_id] = full_of(llm, seq)
    return found


@PLACES
@pytest.mark.parametrize("form", ["fp32", "int8", "turboquant4"])
def test_full_caches_are_those_of_who_never_drafts(form, host, make_llm):
    llm = make_llm(kv_cache_dtype=form)
    plain = last_full_caches(llm, None)
    drafted = last_full_caches(verified_of(llm, host), drafting("snapkv"))
    for name, layers in plain.items():
        for ours, theirs in zip(drafted[name], layers, strict=True):
            for mine, other in zip(ours, theirs, strict=True):
                length = min(mine.shape[1], other.shape[1])
                assert length > len(PROMPTS[int(name[1:])]) + 20
                assert torch.equal(mine[:, :length], other[:, :length])


@PLACES
def test_only_full_caches_are_found_by_others(host, make_llm):
    llm = make_llm()
    verified = verified_of(llm, host)
    prompt = [*PROMPTS[0], *PROMPTS[2]]
    first = verified.generate([prompt], GREEDY, drafting())[0].outputs[0].token_ids
    again = [prompt + list(first)[:30] + [5]]
    expected = results(llm.sibling().generate(again, GREEDY))
    found = verified.generate(again, GREEDY, drafting())
    assert found[0].metrics.num_cached_tokens >= len(prompt) // 16 * 16
    assert results(found)[0][0][1] == expected[0][0][1]
    assert verified.engine.totals.speculation.num_failed == 0
    assert_left_nothing(verified)


@pytest.mark.parametrize(
    ("policy", "host"),
    [
        *(("snapkv", False), ("h2o", False), ("quest", False), ("ada_kv(snapkv)", False)),
        *(("snapkv", True), ("h2o", True), ("ada_kv(snapkv)", True)),
    ],
)
def test_ended_at_any_step_all_of_it_is_gone(policy, host, make_llm):
    verified = verified_of(make_llm(max_num_batched_tokens=24), host)
    params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    for num_steps in range(1, 16):
        add(verified, drafting(policy), params=params)
        for _ in range(num_steps):
            verified.engine.step()
        for name in list(verified.engine.requests):
            verified.engine.abort(name)
        assert_left_nothing(verified)
        assert verified.engine.signals.room.used == 0
    assert verified.engine.totals.speculation.num_draft_tokens > 0


def every_second(function, instead):
    """Wrap a function: every second call goes to another one."""
    calls = [0]

    def either(*arguments, **named):
        calls[0] += 1
        return (instead if calls[0] % 2 == 0 else function)(*arguments, **named)

    return either


def boom(*arguments, **named):
    raise RuntimeError("boom")


def broken(verified: LLM, part: str, monkeypatch) -> None:
    verifier = verified.engine.feature(Verification).verifier
    forward = verifier.runner.forward

    def without_numbers(step, *, observed=True):
        logits, rows = forward(step, observed=observed)
        return torch.full_like(logits, torch.nan), rows

    def drafts_by(function):
        return lambda step, *, observed=True: (forward if observed else function)(step, observed=observed)

    if part == "drafting":
        monkeypatch.setattr(verifying_module, "draft_all", every_second(verifying_module.draft_all, boom))
    elif part == "copying":
        copier = verifier.tracker.copier
        monkeypatch.setattr(copier, "copy", every_second(copier.copy, boom))
    elif part == "choosing":
        monkeypatch.setattr(Knorm, "score_many", every_second(Knorm.score_many, boom))
    elif part == "a draft's pass":
        monkeypatch.setattr(verifier.runner, "forward", drafts_by(every_second(forward, boom)))
    else:
        monkeypatch.setattr(verifier.runner, "forward", drafts_by(every_second(forward, without_numbers)))


@PLACES
@pytest.mark.parametrize("part", ["drafting", "copying", "choosing", "a draft's pass", "logits"])
def test_whatever_fails_answers_are_what_they_are(part, host, make_llm, monkeypatch):
    llm = make_llm()
    expected = results(llm.generate(PROMPTS, MIXED))
    verified = verified_of(llm, host)
    broken(verified, part, monkeypatch)
    assert results(verified.generate(PROMPTS, MIXED, drafting("knorm"))) == expected
    num_failed = verified.engine.totals.speculation.num_failed
    assert num_failed == 0 if part == "logits" else num_failed > 1
    assert verified.engine.totals.speculation.num_draft_tokens > 0
    assert_left_nothing(verified)


def test_in_a_small_pool_companions_give_way_and_come_back(make_llm):
    llm = make_llm(num_blocks=20, max_num_seqs=3)
    prompts = tiny.prompts((60, 50, 40, 30, 20), seed=2)
    plain = llm.sibling()
    expected = [tokens for [(_, tokens, *_)] in results(plain.generate(prompts, LONG))]
    verified = llm.sibling()
    engine = verified.engine
    add(verified, drafting("knorm"), prompts, LONG)
    requests, counts = list(engine.requests.values()), []
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
        counts.append((len(engine.feature(Verification).verifier.companions), len(engine.scheduler.running)))
    gone = sum(later[0] < before[0] and later[1] >= before[1] for before, later in pairwise(counts))
    back = sum(later[0] > before[0] for before, later in pairwise(counts))
    assert [request.sequences[0].token_ids[request.sequences[0].num_prompt :] for request in requests] == [
        list(tokens) for tokens in expected
    ]
    assert gone > 1
    assert back > 1
    # targets go at different paces, so others may meet when the pool is full
    assert engine.totals.num_preemptions <= plain.engine.totals.num_preemptions + 1
    assert engine.totals.speculation.num_accepted_tokens > 0
    assert engine.totals.speculation.num_failed == 0
    assert_left_nothing(verified)


@PLACES
def test_without_room_for_any_there_are_no_drafts(host, make_llm):
    llm = make_llm(num_blocks=200 if host else 8)
    expected = results(llm.generate([PROMPTS[0]], GREEDY))
    verified = (
        on_host(llm, num_blocks=20, max_model_len=None).sibling(num_blocks=2) if host else llm.sibling()
    )
    assert results(verified.generate([PROMPTS[0]], GREEDY, drafting("knorm"))) == expected
    if host:
        assert verified.engine.totals.speculation.num_draft_tokens == 0
    assert verified.engine.totals.speculation.num_failed == 0
    assert_left_nothing(verified)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "quest"])
def test_owners_that_are_preempted(policy, mode, make_llm):
    llm = make_llm()
    expected = [tokens for [(_, tokens, *_)] in results(llm.generate(PROMPTS, GREEDY))]
    below = {"kv_offloading_size": 8e6 / GIB, "swap_space": 8e6 / GIB} if mode == "swap" else {}
    verified = llm.sibling(preemption_mode=mode, **below)
    engine, scheduler = verified.engine, verified.engine.scheduler
    requests = add(verified, drafting(policy))
    decide = scheduler._decide

    def preempting(step):
        if engine.totals.steps % 7 == 6:
            for victim in list(reversed(scheduler.running[1:])):
                scheduler.preemptor.preempt([victim], victim, "itself", step)
            step.pressed = True
        decide(step)

    scheduler._decide = preempting
    while engine.has_unfinished:
        engine.step()
        engine.memory.check()
    found = [seq.token_ids[seq.num_prompt :] for request in requests for seq in request.sequences]
    assert found == [list(tokens) for tokens in expected]
    assert engine.totals.num_preemptions > 3
    assert engine.totals.speculation.num_accepted_tokens > 0
    assert engine.totals.speculation.num_failed == 0
    assert_left_nothing(verified)


def test_drafts_by_n_grams_of_others_in_the_same_engine(make_llm):
    ngram = '{"method": "ngram", "num_speculative_tokens": 4}'
    llm = make_llm()
    expected = results(llm.generate(PROMPTS, GREEDY))
    both = llm.sibling(speculative_config=ngram)
    configs = [drafting(), None, drafting("quest"), None]
    assert results(both.generate(PROMPTS, GREEDY, configs)) == expected
    assert both.engine.totals.speculation.num_failed == 0
    assert_left_nothing(both)


def test_compressed_requests_in_its_company_are_what_they_are_alone(make_llm):
    llm = make_llm()
    lossy = small("knorm")
    expected = results(llm.generate(PROMPTS[:2], GREEDY, lossy))
    found = results(llm.sibling().generate(PROMPTS, GREEDY, [lossy, lossy, drafting(), drafting()]))
    assert found[:2] == expected
