"""Another engine over the same weights, and what the format of a KV cache refuses."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tiny
from settings import assert_idle, small

from kvreclaim import LLM, SamplingParams
from kvreclaim.config import KV_CACHE_DTYPES, EngineConfig, format_name
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.formats import FORMATS

PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TURNED = small("streaming_llm(positions=cache)")


def test_it_shares_weights_and_nothing_else(make_llm):
    llm = make_llm(num_blocks=60, block_size=8)
    other = llm.sibling(num_blocks=40)
    assert other.loaded is llm.loaded
    assert other.engine.cache.planes[0].data_ptr() != llm.engine.cache.planes[0].data_ptr()
    assert (other.engine.config.num_blocks, other.engine.config.block_size) == (40, 8)
    assert llm.engine.config.num_blocks == 60
    prompts = tiny.prompts((40, 17), seed=4)
    request = llm.engine.add_request("one", prompts[0], PARAMS)
    llm.engine.step()
    answers = other.generate(prompts, PARAMS)  # in the midst of the other's request
    while not request.finished:
        llm.engine.step()
    assert request.output().outputs[0].token_ids == answers[0].outputs[0].token_ids
    assert_idle(llm)
    assert_idle(other)


def test_statistics_and_the_default_compression_go_with_it(make_llm):
    llm = make_llm(compression=small())
    other = llm.sibling(kv_cache_dtype="int8")
    assert other.compression == llm.compression
    (out,) = other.generate(tiny.prompts((60,), seed=4), PARAMS)
    assert out.metrics.compactions > 0


@pytest.mark.parametrize("changes", [{"nope": 1}, {"kv_cache_dtype": "int3"}, {"num_blocks": 0}])
def test_a_wrong_option_is_refused(make_llm, changes):
    with pytest.raises(InvalidArgumentError, match=next(iter(changes))):
        make_llm().sibling(**changes)


def test_names_of_formats():
    assert set(KV_CACHE_DTYPES) == {"auto", *FORMATS}
    aliases = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "fp8": "fp8_e4m3"}
    for alias, name in aliases.items():
        assert EngineConfig(kv_cache_dtype=alias).kv_cache_dtype == name
    for wrong in ("int3", "", None, 8, ["int8"]):
        with pytest.raises(
            InvalidArgumentError, match=r"kv_cache_dtype is .*fp8_e4m3, int8, int4, turboquant4"
        ):
            format_name(wrong)


@pytest.mark.parametrize("form", FORMATS)
def test_the_engine_says_its_format(make_llm, form):
    engine = make_llm(kv_cache_dtype=form).engine
    assert engine.kv_format is engine.cache.format
    assert replace(engine.kv_format, transform="") == FORMATS[form]
    assert engine.kernels.endswith(f"KV {form}")


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if not form.is_plain])
def test_turned_keys_are_refused_before_a_request_is_queued(make_llm, form):
    llm = make_llm(kv_cache_dtype=form)
    refusal = rf"{re.escape(form)} each turn would round them anew; use positions="
    with pytest.raises(InvalidArgumentError, match=refusal):
        llm.generate(tiny.prompts((10, 20)), PARAMS, TURNED)
    assert_idle(llm)


def test_turned_keys_are_refused_at_the_start(make_llm):
    with pytest.raises(InvalidArgumentError, match="would round them anew"):
        make_llm(kv_cache_dtype="int8", compression=TURNED)
    plain = make_llm(compression=TURNED)
    with pytest.raises(InvalidArgumentError, match="would round them anew"):
        plain.sibling(kv_cache_dtype="int4")
    assert isinstance(plain.sibling(kv_cache_dtype="bf16"), LLM)
