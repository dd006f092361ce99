"""A document is compressed once, and each question about it is answered as if it had been for it alone."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import tiny
from settings import assert_idle, with_options

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.compression.policy import CompressionPolicy
from kvreclaim.errors import InvalidArgumentError

POLICIES = (
    "query_mixture",
    "knorm",
    "snapkv(window=3)",
    "h2o",
    "kvzap",
    "shares(kvzap)",
    "shares(streaming_llm, by=static)",
    "random",
    "kvzip",
)
DOCUMENT, *QUESTIONS = tiny.prompts((150, 7, 12, 20), seed=9)
PROMPTS = [DOCUMENT + question for question in QUESTIONS]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
GIB = 2**30


def config(policy, **fields):
    return CompressionConfig(policy, **{"budget": 32, "interval": 16, "sinks": 2, "recent": 4, **fields})


def with_logprobs(outputs):
    assert all(output.error is None for output in outputs)
    drawn = [output.outputs[0] for output in outputs]
    return [
        (one.token_ids, [entry.logprob for entries in one.logprobs for entry in entries.values()])
        for one in drawn
    ]


def at_document(prompts, **options):
    """The prompts, compressed behind the document."""
    return with_options(prompts, **{"compress_prompt_at": len(DOCUMENT), **options})


def one_by_one(llm, compression):
    """The answers, and the prompt tokens that each one found."""
    outputs = [llm.generate(prompt, PARAMS, compression)[0] for prompt in at_document(PROMPTS)]
    llm.engine.memory.check()
    return with_logprobs(outputs), [output.metrics.num_cached_tokens for output in outputs]


def idle(llm):
    llm.engine.reset_prefix_cache()
    llm.engine.step()
    assert not llm.engine.snapshots.held
    assert_idle(llm)


@pytest.mark.parametrize("kernels", ["reference", "native"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy, kernels, make_llm):
    """Bit for bit the answers of engines that keep nothing."""
    compression = config(policy)
    alone = make_llm(kernels=kernels, prefix_snapshot_fraction=0.0, enable_prefix_caching=False)
    expected, found = one_by_one(alone, compression)
    assert found == [0, 0, 0]
    llm = make_llm(kernels=kernels)
    answers, found = one_by_one(llm, compression)
    assert answers == expected
    assert found[1:] == [len(DOCUMENT)] * 2
    assert len(llm.engine.scheduler.snapshots) == 1
    idle(llm)


@pytest.mark.parametrize("policy", ["knorm", "shares(knorm)"])
def test_what_only_a_snapshot_holds_counts_as_freed(policy, make_llm):
    """A snapshot gives way, so later passes of its request free as many blocks as without one."""
    compression, (prompt, *_) = config(policy), at_document(PROMPTS)
    alone, llm = make_llm(prefix_snapshot_fraction=0.0), make_llm()
    (expected,), (output,) = (each.generate(prompt, PARAMS, compression) for each in (alone, llm))
    assert len(llm.engine.scheduler.snapshots) == 1
    assert output.metrics.compactions > 1
    assert output.metrics.blocks_freed == expected.metrics.blocks_freed > 0
    assert llm.engine.memory.stats().blocks_freed_by_compression == output.metrics.blocks_freed


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_every_format(form, make_llm):
    compression = config("knorm")
    alone = make_llm(kv_cache_dtype=form, prefix_snapshot_fraction=0.0, enable_prefix_caching=False)
    expected, _ = one_by_one(alone, compression)
    llm = make_llm(kv_cache_dtype=form)
    answers, found = one_by_one(llm, compression)
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
    assert found[1:] == [len(DOCUMENT)] * 2
    idle(llm)


def test_together_they_take_the_memory_of_one(make_llm):
    """Ten questions at once over a document: its budget's blocks are there once."""
    prompts = [DOCUMENT + tiny.prompts((5,), seed=seed)[0] for seed in range(10)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    compression = config("knorm", budget=64)
    llm = make_llm()
    llm.generate(at_document(prompts[:1]), params, compression)
    llm.engine.memory.pool.reset_peak()
    outputs = llm.generate(at_document(prompts), params, compression)
    assert all(output.metrics.num_cached_tokens == len(DOCUMENT) for output in outputs)
    assert llm.engine.memory.stats().peak_in_use <= 4 + 10
    idle(llm)


def test_what_differs_does_not_find_it(make_llm):
    llm = make_llm()
    llm.generate(at_document(PROMPTS[:1]), PARAMS, config("knorm"))
    others = (
        (PROMPTS[1], config("knorm", budget=48), {}),
        (PROMPTS[1], config("keydiff"), {}),
        (PROMPTS[1], config("knorm"), {"compress_prompt_at": len(DOCUMENT) - 1}),
        ([DOCUMENT[0] ^ 1, *PROMPTS[1][1:]], config("knorm"), {}),
        (PROMPTS[1], config("knorm"), {"cache_salt": "a"}),
    )
    for prompt, compression, options in others:
        before = llm.engine.scheduler.snapshots.num_hits
        llm.generate(at_document([prompt], **options), PARAMS, compression)
        assert llm.engine.scheduler.snapshots.num_hits == before
    idle(llm)


@pytest.mark.parametrize("host", [0, 16e6 / GIB])
def test_they_give_way(host, make_llm):
    """They give their blocks to requests that need them; from the host they come back."""
    llm = make_llm(num_blocks=24, kv_offloading_size=host, prefix_snapshot_fraction=0.5)
    alone = make_llm(prefix_snapshot_fraction=0.0, enable_prefix_caching=False)
    expected, _ = one_by_one(alone, config("knorm"))
    answers, _ = one_by_one(llm, config("knorm"))
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
    (big,) = tiny.prompts((360,), seed=1)
    assert llm.generate(big, PARAMS)[0].error is None
    snapshots = llm.engine.scheduler.snapshots
    assert len(snapshots) == (1 if host else 0)
    answers, found = one_by_one(llm, config("knorm"))
    assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
    assert (found[0] == len(DOCUMENT)) == bool(host)
    idle(llm)


def test_one_that_gives_way_to_another_is_moved_at_once(make_llm):
    """Between that and the next step a pass may take its blocks."""
    llm = make_llm(num_blocks=24, kv_offloading_size=16e6 / GIB, prefix_snapshot_fraction=0.25)
    engine, prompts = llm.engine, [[*document, 5, 6, 7] for document in tiny.prompts((150,) * 5, seed=21)]
    alone = make_llm(prefix_snapshot_fraction=0.0, enable_prefix_caching=False)
    compression, moved = config("knorm"), 0
    for i, prompt in enumerate(prompts):
        request = engine.add_request(
            f"r{i}", prompt, PARAMS, llm.compressor(compression), compress_prompt_at=150
        )
        while not request.finished:
            before = engine.memory.offload.parking.num_parked
            engine.step()
            moved += engine.memory.offload.parking.num_parked - before
            engine.memory.pool.check()
            free = [block for block, refs in enumerate(engine.memory.pool.refs) if not refs]
            for plane in engine.cache.planes:
                plane[:, free] = 1  # their last owners read them no more
            engine.memory.pool.clear_index()
    assert moved >= 2
    for prompt in prompts:
        batch = with_options([prompt], compress_prompt_at=150)
        (output,) = llm.generate(batch, PARAMS, compression)
        (expected,) = alone.generate(batch, PARAMS, compression)
        assert output.metrics.num_cached_tokens == 150
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    idle(llm)


def test_refusals(make_llm):
    llm = make_llm()
    with pytest.raises(
        InvalidArgumentError, match="compress_prompt_at is 200, but the prompt has 157 tokens"
    ):
        llm.generate(at_document(PROMPTS[:1], compress_prompt_at=200), PARAMS, config("knorm"))
    with pytest.raises(InvalidArgumentError, match="compression evicts nothing"):
        llm.generate(at_document(PROMPTS[:1], compress_prompt_at=20), PARAMS)


def test_policy_objects_of_two_classes_share_no_prefix(make_llm):
    """A class that is defined again under the same name, as in a notebook, may keep other tokens."""

    def mine(sign):
        body = {"name": "mine", "score": lambda _, view: sign * view.source.value_norms()}
        return dataclass(frozen=True)(type("Mine", (CompressionPolicy,), body))()

    llm, classes = make_llm("llama"), [mine(1), mine(-1)]
    answers = []
    for policy in classes:
        answer, cached = one_by_one(llm, config(policy))
        assert (cached[0], cached[1]) == (cached[0], len(DOCUMENT))
        assert cached[0] < len(DOCUMENT)
        answers.append(answer)
    assert answers[0] != answers[1]
    idle(llm)
