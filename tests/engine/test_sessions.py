"""Sessions go to a file and come back, whole and for the same engine, or not at all."""

from __future__ import annotations

import pytest
import tiny
from settings import assert_idle, with_options

from kvreclaim import SamplingParams
from kvreclaim.errors import InvalidArgumentError

GIB = 2**30
(PROMPT,) = tiny.prompts((133,), seed=6)
PARAMS = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0)
FULL = 160 // 16 * 16


def answer(llm, prompt=PROMPT, params=PARAMS, salt=None):
    (output,) = llm.generate(with_options([prompt], cache_salt=salt), params)
    assert output.error is None
    assert_idle(llm)
    one = output.outputs[0]
    return one.token_ids, [entry.logprob for drawn in one.logprobs for entry in drawn.values()], output


def conversation(llm):
    """A prompt, its answer, and a next turn, uninterrupted."""
    first, _, _ = answer(llm)
    turn = [*PROMPT, *first, 5, 7, 9]
    return turn, answer(llm, turn)


@pytest.mark.parametrize("form", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("host", [0.0, 8e6 / GIB])
def test_after_a_restore_tokens_are_those_without_interruption(form, host, tmp_path, make_llm):
    options = {"kv_cache_dtype": form, "kv_offloading_size": host}
    first = make_llm(**options)
    turn, (expected, logprobs, whole) = conversation(first)
    info = first.save_session(turn, tmp_path / "a.session")
    assert info.num_tokens >= FULL
    assert (tmp_path / "a.session").stat().st_size == info.num_bytes
    second = make_llm(**options)
    assert second.load_session(tmp_path / "a.session").num_tokens == info.num_tokens
    second.engine.memory.check()
    tokens, again, output = answer(second, turn)
    assert tokens == expected
    assert again == logprobs
    assert output.metrics.num_cached_tokens == whole.metrics.num_cached_tokens >= FULL


def test_out_of_every_tier(tmp_path, make_llm):
    options = {
        "num_blocks": 14,
        "kv_offloading_size": 8e6 / GIB,
        "kv_offloading_disk_path": str(tmp_path),
        "kv_offloading_disk_size": 8e6 / GIB,
        "kv_load_policy": "wait_complete",
    }
    llm = make_llm(**options)
    tokens, _, _ = answer(llm)
    everything = [*PROMPT, *tokens]
    for seed in range(3):  # others take its blocks of the pool
        answer(llm, tiny.prompts((150,), seed=20 + seed)[0])
    num_tokens = llm.save_session(everything, tmp_path / "host.session").num_tokens
    assert num_tokens == FULL
    llm.close()
    llm = make_llm(**options)
    assert llm.save_session(everything, tmp_path / "disk.session").num_tokens == FULL
    llm.close()
    plain = make_llm()
    plain.load_session(tmp_path / "disk.session")
    assert answer(plain)[0] == tokens
    one, other = ((tmp_path / name).read_bytes() for name in ("host.session", "disk.session"))
    assert one == other


def test_a_salt_is_needed_again(tmp_path, make_llm):
    llm = make_llm()
    answer(llm, salt="a")
    with pytest.raises(InvalidArgumentError, match="nothing of these 133 tokens is cached"):
        llm.save_session(PROMPT, tmp_path / "a.session")
    llm.save_session(*with_options([PROMPT], cache_salt="a"), tmp_path / "a.session")
    llm = make_llm()
    llm.load_session(tmp_path / "a.session", cache_salt="a")
    assert answer(llm, PROMPT)[2].metrics.num_cached_tokens == 0
    assert answer(llm, salt="a")[2].metrics.num_cached_tokens == 128


def test_a_damaged_file_changes_nothing(tmp_path, make_llm):
    path = tmp_path / "a.session"
    llm = make_llm()
    answer(llm)
    llm.save_session(PROMPT, path)
    whole = path.read_bytes()
    llm = make_llm()
    for place in range(0, len(whole), len(whole) // 64):
        damaged = bytearray(whole)
        damaged[place] ^= 16
        path.write_bytes(damaged)
        with pytest.raises(InvalidArgumentError):
            llm.load_session(path)
    for length in (0, 7, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(InvalidArgumentError, match="damaged"):
            llm.load_session(path)
    assert llm.engine.memory.stats().cached == 0
    path.write_bytes(whole)
    assert llm.load_session(path).num_tokens == 128


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_cache_dtype": "bf16"}, "kv_format"),
        ({"block_size": 32}, "block_size"),
        ({"kernels": "reference"}, "backend_layout"),
        ({"family": "qwen3"}, "config"),
        ({"hf_overrides": {"rms_norm_eps": 0.3}}, "config"),
    ],
)
def test_another_engine_refuses_it_by_name(change, field, tmp_path, make_llm):
    llm = make_llm(kernels="native")
    answer(llm)
    llm.save_session(PROMPT, tmp_path / "a.session")
    with pytest.raises(InvalidArgumentError, match=f"saved with another {field}") as error:
        make_llm(**{"kernels": "native"} | change).load_session(tmp_path / "a.session")
    assert error.value.field == field


def test_room_is_checked_first(tmp_path, make_llm):
    llm = make_llm()
    answer(llm)
    llm.save_session(PROMPT, tmp_path / "a.session")
    with pytest.raises(InvalidArgumentError, match="takes 8 blocks, but 6 of 6 can be had"):
        make_llm(num_blocks=6, max_model_len=90).load_session(tmp_path / "a.session")
