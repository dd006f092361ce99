"""The engine over every format of the cache: attention is plain attention over what the format makes of the
kept tokens, and how a text came into the cache does not change what follows it."""

from __future__ import annotations

import pytest
import tiny
from checking import check_shadow, tokens
from settings import small

from kvreclaim import SamplingParams
from kvreclaim.ops.formats import FORMATS

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
CODED = tuple(name for name in FORMATS if not FORMATS[name].is_plain)
TOLERANCE = 1e-4
"""Tolerance for keys and values of size 5 or so; sums are in fp32."""


@pytest.fixture
def make(make_llm):
    def make(name: str, family: str = "llama", **arguments):
        arguments = {"block_size": 16, "max_num_batched_tokens": 32, **arguments}
        return make_llm(family, kv_cache_dtype=name, **arguments)

    return make


def check_stored(llm, config, monkeypatch, params=GREEDY, lengths=(70, 9, 33)):
    return check_shadow(llm, config, monkeypatch, params, lengths, tolerance=TOLERANCE)[1]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", FORMATS)
def test_attends_to_what_the_format_makes_of_tokens(name, kernels, make, monkeypatch):
    check_stored(make(name, kernels=kernels, enable_prefix_caching=False), None, monkeypatch)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, "query_mixture") for name in CODED),
        *((name, "shares(surrogate)") for name in FORMATS),
    ],
)
def test_compacted_tokens_keep_their_numbers(name, policy, make, monkeypatch):
    llm = make(name, enable_prefix_caching=False)
    outputs = check_stored(llm, small(policy, budget=32, interval=16), monkeypatch)
    assert outputs[0].metrics.compactions >= 3


@pytest.mark.parametrize("name", CODED)
def test_forked_outputs_and_preemption(name, make, monkeypatch):
    llm = make(name, enable_prefix_caching=False, num_blocks=10)
    params = SamplingParams(temperature=1.0, n=3, max_tokens=30, seed=1, ignore_eos=True)
    outputs = check_stored(llm, small("knorm"), monkeypatch, params, lengths=(30, 40))
    assert all(len(output.token_ids) == 30 for out in outputs for output in out.outputs)
    assert sum(out.metrics.preemptions for out in outputs) > 0


@pytest.mark.parametrize("name", CODED)
def test_latent_caches(name, make, monkeypatch):
    llm = make(name, family="deepseek-v3", enable_prefix_caching=False)
    check_stored(llm, small("query_mixture", budget=32, interval=16), monkeypatch)


@pytest.mark.parametrize("name", CODED)
def test_chunks_neighbours_preemption_and_prefixes_change_no_token(name, make):
    prompts = tiny.prompts((40, 33, 50), seed=1)
    alone = make(name, enable_prefix_caching=False, max_num_batched_tokens=512)
    want = [tokens(alone.generate([prompt], SHORT))[0] for prompt in prompts]
    outputs = make(name, num_blocks=11).generate(prompts, SHORT)
    assert tokens(outputs) == want
    assert sum(out.metrics.preemptions for out in outputs) > 0
    roomy = make(name)
    assert tokens(roomy.generate(prompts, SHORT)) == want
    outputs = roomy.generate(prompts, SHORT)
    assert tokens(outputs) == want
    assert all(out.metrics.num_cached_tokens > 0 for out in outputs)


@pytest.mark.parametrize("name", CODED)
def test_a_budget_that_is_never_reached_changes_no_token(name, make):
    prompts = tiny.prompts((40, 7, 21), seed=1)
    llm = make(name, enable_prefix_caching=False)
    assert tokens(llm.generate(prompts, SHORT, small(budget=200))) == tokens(llm.generate(prompts, SHORT))


def test_blocks_of_two_formats_have_different_keys(make):
    """The first block of the same text, in every format."""
    prompts = tiny.prompts((40,), seed=1)
    keys = []
    for name in FORMATS:
        llm = make(name)
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1))
        keys.append(frozenset(entry.digest for entry in llm.engine.memory.pool.index))
    assert all(len(own) == 2 for own in keys)
    assert len(frozenset().union(*keys)) == 2 * len(FORMATS)
