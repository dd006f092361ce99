"""How long a sequence may get where the pool is smaller than the model's context."""

from __future__ import annotations

import logging
from dataclasses import replace

import psutil
import pytest
import tiny
import torch
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.config import EngineConfig
from kvreclaim.engine.request import sizing
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError

SMALL = {"block_size": 8, "num_blocks": 10, "max_num_batched_tokens": 32}
FITS = small("knorm")
"""Holds 24 + 32 slots at most, of any length."""

PROMPT_ONLY = "snapkv(window=4, when=prefill)"


def greedy(max_tokens: int | None) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def test_max_tokens_that_the_pool_cannot_hold_are_refused(make_llm):
    llm = make_llm(**SMALL)
    [prompt] = tiny.prompts((10,))
    message = r"max_tokens is 200, .* needs 210 slots, but the pool holds 80 \(10 .* lower max_tokens to 70"
    with pytest.raises(RequestTooLongError, match=message) as refused:
        llm.generate(prompt, greedy(200))
    assert refused.value.field == "max_tokens"
    for allowed in (70, None):
        (out,) = llm.generate(prompt, greedy(allowed))
        assert (len(out.outputs[0].token_ids), out.outputs[0].finish_reason) == (70, "length")
    assert_idle(llm)


def test_a_caller_may_let_outputs_end_early(make_llm):
    llm = make_llm(**SMALL)
    request = llm.engine.add_request("one", tiny.prompts((10,))[0], greedy(200), may_end_early=True)
    while not request.finished:
        llm.engine.step()
    assert len(request.output().outputs[0].token_ids) == 70


def test_the_models_length_is_lowered_to_what_the_pool_holds(make_llm, caplog):
    with caplog.at_level(logging.WARNING):
        llm = make_llm(**SMALL)
    assert llm.engine.max_model_len == 80
    [line] = [record.message for record in caplog.records if "max_model_len" in record.message]
    assert line.startswith("max_model_len is 80, not 512, the model's: ")
    assert (
        "may need 512 slots, but the pool holds 80 (10 blocks of 8); to have more, raise num_blocks" in line
    )


def test_a_length_that_is_set_and_that_the_pool_cannot_hold_is_refused(make_llm):
    message = (
        r"max_model_len is 81, .* need 81 slots, but the pool holds 80 .*; lower it to 80, or leave it out"
    )
    with pytest.raises(InvalidArgumentError, match=message) as refused:
        make_llm(**SMALL, max_model_len=81)
    assert refused.value.field == "max_model_len"
    assert make_llm(**SMALL, max_model_len=80).engine.max_model_len == 80
    assert make_llm(**SMALL, max_model_len=300, compression=FITS).engine.max_model_len == 300


def test_a_pool_that_holds_no_token_is_refused(make_llm):
    with pytest.raises(InvalidArgumentError, match="which windows take some of"):
        make_llm("gemma2", block_size=8, num_blocks=1)


def test_a_compression_of_its_own_lets_a_request_be_longer(make_llm, caplog):
    """The engine's own decides max_model_len; what another request holds decides how long that one may be."""
    llm = make_llm(**SMALL)
    [prompt] = tiny.prompts((150,))
    (out,) = llm.generate(prompt, greedy(50), FITS)
    assert len(out.outputs[0].token_ids) == 50
    caplog.clear()
    compressing = make_llm(**SMALL, compression=FITS)
    assert compressing.engine.max_model_len == 512
    assert not [record for record in caplog.records if "max_model_len" in record.message]
    with pytest.raises(RequestTooLongError, match="max_tokens is 200"):
        compressing.generate(prompt[:10], greedy(200), small("full"))


def test_drafting_holds_as_much_as_the_full_cache(make_llm):
    assert make_llm(**SMALL, compression=small("knorm", verify=True)).engine.max_model_len == 80


@pytest.mark.parametrize(
    ("family", "policy"), [("llama", None), ("llama", "knorm"), ("llama", PROMPT_ONLY), ("gemma3", None)]
)
def test_all_requests_of_max_model_len_are_served_and_longer_ones_are_not(family, policy, make_llm):
    config = None if policy is None else small(policy)
    sizes = {"block_size": 4, "num_blocks": 19, "max_num_batched_tokens": 64, "compression": config}
    llm = make_llm(family, **sizes)
    longest = llm.engine.max_model_len
    assert 8 < longest < llm.loaded.facts.max_position
    for length in (1, longest // 2, longest - 1):
        (out,) = llm.generate(tiny.prompts((length,)), greedy(longest - length))
        assert out.error is None
        assert len(out.outputs[0].token_ids) == longest - length
    with pytest.raises(RequestTooLongError, match="but the pool holds 76"):
        llm.generate(tiny.prompts((longest + 1,)), greedy(1))
    assert_idle(llm)


def test_a_sibling_chooses_from_the_memory_that_is_free_now(make_llm, monkeypatch):
    """Its errors no longer name a number that was never passed."""
    llm = make_llm(num_blocks=None, max_num_seqs=4)
    chosen = llm.engine.config
    block_bytes = llm.engine.cache.bytes_per_block
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: 2 * 20 * block_bytes)
    other = llm.sibling()
    assert (chosen.num_blocks, llm.engine.max_model_len) == (4 * 512 // 16, 512)
    assert (other.engine.config.num_blocks, other.engine.max_model_len) == (20, 20 * 16)
    assert other.engine.config.max_signal_bytes <= 20 * block_bytes < chosen.max_signal_bytes
    assert other.sibling(num_blocks=9).sibling().engine.config.num_blocks == 9, "what was passed stays"


@pytest.mark.parametrize(
    ("device", "given", "share"), [("cuda", None, 0.9), ("cpu", None, 0.5), ("cuda", 0.2, 0.2)]
)
def test_a_gpu_gives_the_pool_nine_tenths_of_its_free_memory(make_llm, monkeypatch, device, given, share):
    facts = replace(make_llm().loaded.facts, device=torch.device(device))
    block_bytes = make_llm().engine.cache.bytes_per_block
    monkeypatch.setattr(sizing, "free_memory_bytes", lambda device: 40 * block_bytes)
    config = EngineConfig(kv_memory_fraction=given, max_num_seqs=64, max_signal_bytes=0)
    assert sizing.choose_limits(config, facts).num_blocks == int(40 * share)


def test_model_and_pool_stay_within_a_memory_limit(make_llm):
    llm, memory = make_llm(), psutil.Process().memory_info()
    used, more = memory.rss - memory.shared, 64 << 20
    config = EngineConfig(memory_limit=(used + more) / (1 << 30), max_num_seqs=1 << 20, max_signal_bytes=0)
    num_bytes = sizing.choose_limits(config, llm.loaded.facts).num_blocks * llm.engine.cache.bytes_per_block
    assert 0.4 * more < num_bytes <= 0.51 * more
    with pytest.raises(InvalidArgumentError, match=r"under memory_limit 0\.05 GiB holds no block"):
        sizing.choose_limits(EngineConfig(memory_limit=0.05), llm.loaded.facts)
