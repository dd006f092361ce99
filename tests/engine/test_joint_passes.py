"""Sequences that are due together are compressed as each would be alone, to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import tiny
import torch
from settings import assert_idle
from torch import Tensor

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.compression import registry
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policy import LayerView, Signal
from kvreclaim.compression.registry import make_policy, policy_names
from kvreclaim.engine.compact.job import CompactionResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
SPECS = tuple(
    name
    for name in (
        *policy_names(),
        "query_mixture(form=collapsed)",
        "triattention(aggregate=max)",
    )
    if make_policy(name).eviction_method.evicts and Signal.FUTURE_QUERIES not in make_policy(name).needs
)


def compressed(llm, policy, monkeypatch, *, alone):
    """Positions that every pass kept by sequence, the outputs, and the most sequences of a round."""
    run, passes, most = llm.engine.compression.run, {}, [0]

    def watched(jobs):
        most[0] = max(most[0], len(jobs))
        outcomes = [run([job])[0] for job in jobs] if alone else run(jobs)
        for job, done in zip(jobs, outcomes, strict=True):
            assert isinstance(done, CompactionResult), done
            passes.setdefault(job.seq.request_id, []).append((done.kept, done.prompt_slots, done.gone))
        return outcomes

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.compression, "run", watched)
        prompts = [*tiny.prompts((80, 80, 80), seed=3), *tiny.prompts((60, 80), seed=4)]
        config = CompressionConfig(policy, budget=48, interval=16, sinks=2, recent=8)
        outputs = llm.generate(prompts, GREEDY, config)
    found = [(out.outputs[0].token_ids, out.outputs[0].logprobs, out.metrics.blocks_freed) for out in outputs]
    assert_idle(llm)
    return list(passes.values()), found, most[0]


def same(one, other):
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("form", ["auto", "int8"])
@pytest.mark.parametrize("policy", SPECS)
def test_together_is_as_alone(policy, form, make_llm, monkeypatch):
    options = {"block_size": 16, "max_num_batched_tokens": 512, "kv_cache_dtype": form}
    together, outputs, most = compressed(make_llm(**options), policy, monkeypatch, alone=False)
    alone, expected, _ = compressed(make_llm(**options), policy, monkeypatch, alone=True)
    assert most >= 4
    assert outputs == expected
    for passes, others in zip(together, alone, strict=True):
        assert len(passes) == len(others) >= 1
        for one, other in zip(passes, others, strict=True):
            assert same(one[0], other[0])
            assert one[1:] == other[1:]


@dataclass(frozen=True)
class Backwards(Knorm):
    """Overrides score alone of a policy that scores many at once."""

    name = "backwards"

    def score(self, view: LayerView) -> Tensor:
        return -super().score(view)


def test_a_policy_that_overrides_score_alone_is_called_view_by_view(make_llm, monkeypatch):
    monkeypatch.setattr(registry, "_BUILT_IN", registry._BUILT_IN | {"backwards": Backwards})
    options = {"block_size": 16, "max_num_batched_tokens": 512}
    found, _, most = compressed(make_llm(**options), "backwards", monkeypatch, alone=False)
    expected, *_ = compressed(make_llm(**options), "knorm(keep=large)", monkeypatch, alone=True)
    assert most >= 4
    for passes, others in zip(found, expected, strict=True):
        assert all(same(one[0], other[0]) for one, other in zip(passes, others, strict=True))


@pytest.mark.parametrize("bad_one", [True, False])
def test_what_fails_together_is_done_alone(bad_one, make_llm, monkeypatch):
    """bad_one: one of them cannot be ranked even so; it alone ends."""
    llm = make_llm(block_size=16, max_num_batched_tokens=512, enable_prefix_caching=False)
    config = CompressionConfig("knorm", budget=32, interval=16, sinks=2, recent=8)
    prompts = tiny.prompts((60, 63, 60), seed=3)
    expected = [out.outputs[0].token_ids for out in llm.generate(prompts, GREEDY, config)]
    score_many, numbers = Knorm.score_many, []

    def broken(policy, views):
        numbers.append(len(views))
        if len(views) > 1:
            raise RuntimeError("not together")
        (scores,) = score_many(policy, views)
        return [scores * torch.nan if bad_one and views[0].logical_len == 63 else scores]

    monkeypatch.setattr(Knorm, "score_many", broken)
    outputs = llm.generate(prompts, GREEDY, config)
    assert max(numbers) == 3
    assert [out.error is not None for out in outputs] == [False, bad_one, False]
    for out, tokens in zip(outputs, expected, strict=True):
        assert out.error or out.outputs[0].token_ids == tokens
    assert_idle(llm)


@pytest.mark.parametrize("spread", [True, False])
def test_requests_that_arrive_together_fall_due_apart(spread, make_llm, monkeypatch):
    """Each at points of its own, by its prompt; passes stay an interval apart, and each frees a block."""
    llm = make_llm(block_size=8, max_num_batched_tokens=512, spread_compression=spread)
    run, together, lengths = llm.engine.compression.run, [], {}

    def watched(jobs):
        together.append(len(jobs))
        for job in jobs:
            lengths.setdefault(job.seq.request_id, []).append(job.seq.num_computed)
        return run(jobs)

    monkeypatch.setattr(llm.engine.compression, "run", watched)
    params = SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
    config = CompressionConfig("knorm", budget=48, interval=64, sinks=2, recent=8)
    outputs = llm.generate(tiny.prompts((40,) * 8, seed=6), params, config)
    for points in lengths.values():
        assert all(later - earlier == 64 for earlier, later in pairwise(points))
        assert 48 + 8 <= points[0] <= 48 + 64
    assert all(out.metrics.blocks_freed >= out.metrics.compactions for out in outputs)
    first = {points[0] for points in lengths.values()}
    assert len(lengths) == 8
    assert (max(together), len(first)) == ((8, 1), (1, 8))[spread]
