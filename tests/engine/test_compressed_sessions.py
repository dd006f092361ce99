"""A document is compressed, saved, and queried in another engine, as if that had compressed it itself."""

from __future__ import annotations

import pytest
import tiny
from safetensors import safe_open
from settings import with_options

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError

GIB = 2**30
DOCUMENT, *QUESTIONS = tiny.prompts((150, 7, 12), seed=9)
PROMPTS = [DOCUMENT + question for question in QUESTIONS]
PARAMS = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
AT = len(DOCUMENT)
POLICIES = (
    "knorm",
    "snapkv(window=3)",
    "h2o",
    "kvzap",
    "shares(kvzap)",
    "paged_eviction",
    "kvzip",
)


def config(policy="knorm", **fields):
    return CompressionConfig(policy, **{"budget": 48, "interval": 16, "sinks": 2, "recent": 4, **fields})


def ask(llm, prompt, compression=None, params=PARAMS, salt=None):
    prompts = with_options([prompt], compress_prompt_at=AT, cache_salt=salt)
    (output,) = llm.generate(prompts, params, compression or config())
    assert output.error is None
    one = output.outputs[0]
    logprobs = [entry.logprob for entries in one.logprobs or () for entry in entries.values()]
    llm.engine.memory.check()
    return (one.token_ids, logprobs), output.metrics.num_cached_tokens


def saved(llm, path, compression=None, **more):
    (prompt,) = with_options([DOCUMENT], compress_prompt_at=AT, **more)
    return llm.save_session(prompt, path, compression=compression or config())


@pytest.mark.parametrize("form", ["fp32", "int4", "int8+int4"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy, form, tmp_path, make_llm):
    compression, options = config(policy, budget=50), {"kv_cache_dtype": form}
    alone = make_llm(**options, prefix_snapshot_fraction=0.0, enable_prefix_caching=False)
    expected = [ask(alone, prompt, compression)[0] for prompt in PROMPTS]
    llm = make_llm(**options)
    ask(llm, PROMPTS[0], compression)
    info = saved(llm, tmp_path / "a.session", compression)
    assert (tmp_path / "a.session").stat().st_size == info.num_bytes
    llm = make_llm(**options, num_blocks=150)
    assert llm.load_session(tmp_path / "a.session").num_tokens == info.num_tokens == AT
    llm.engine.memory.check()
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        again, found = ask(llm, prompt, compression)
        assert found == AT
        assert again[0] == answer[0]
        if form == "fp32":
            assert again == answer
    llm.engine.reset_prefix_cache()
    llm.engine.step()
    assert not llm.engine.snapshots.held
    assert llm.engine.memory.stats().in_use == 0


def test_it_takes_the_memory_of_its_budget(tmp_path, make_llm):
    llm = make_llm()
    ask(llm, PROMPTS[0])
    whole = llm.save_session(DOCUMENT, tmp_path / "whole.session")
    small = saved(llm, tmp_path / "small.session")
    assert small.num_bytes < whole.num_bytes / 2
    with safe_open(tmp_path / "small.session", "pt") as file:
        assert len(file.get_tensor("blocks")) == 3


@pytest.mark.parametrize("host", [0.0, 16e6 / GIB])
def test_wherever_it_lies(host, tmp_path, make_llm):
    """The file is the same from the device, the host, and the disk alone."""
    options = {"num_blocks": 24, "kv_offloading_size": host, "prefix_snapshot_fraction": 0.5}
    if host:
        options |= {"kv_offloading_disk_path": str(tmp_path), "kv_offloading_disk_size": 16e6 / GIB}
    llm = make_llm(**options)
    expected, _ = ask(llm, PROMPTS[0])
    saved(llm, tmp_path / "device.session")
    (big,) = tiny.prompts((360,), seed=1)
    llm.generate(big, PARAMS)
    if not host:
        with pytest.raises(InvalidArgumentError, match="nothing is cached of these 150 tokens so compressed"):
            saved(llm, tmp_path / "host.session")
        return
    saved(llm, tmp_path / "host.session")
    llm.close()
    llm = make_llm(**options)
    saved(llm, tmp_path / "disk.session")
    llm.close()
    first, *others = [(tmp_path / f"{name}.session").read_bytes() for name in ("device", "host", "disk")]
    assert others == [first, first]
    plain = make_llm()
    plain.load_session(tmp_path / "disk.session")
    assert ask(plain, PROMPTS[0]) == (expected, AT)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"kv_cache_dtype": "bf16"}, "kv_format"),
        ({"block_size": 32}, "block_size"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens"),
    ],
)
def test_another_engine_refuses_it_by_name(change, field, tmp_path, make_llm):
    llm = make_llm()
    ask(llm, PROMPTS[0])
    saved(llm, tmp_path / "a.session")
    with pytest.raises(InvalidArgumentError, match=f"saved with another {field}") as error:
        make_llm(**change).load_session(tmp_path / "a.session")
    assert error.value.field == field


def test_refusals(tmp_path, make_llm):
    llm = make_llm()
    ask(llm, PROMPTS[0])
    saved(llm, tmp_path / "a.session")
    with pytest.raises(InvalidArgumentError, match="compression is given without compress_prompt_at"):
        llm.save_session(DOCUMENT, tmp_path / "b.session", compression=config())
    with pytest.raises(InvalidArgumentError, match="compression evicts nothing"):
        llm.save_session(*with_options([DOCUMENT], compress_prompt_at=AT), tmp_path / "b.session")
    with pytest.raises(InvalidArgumentError, match="takes 3 blocks, but compressed prefixes may have 2"):
        make_llm(num_blocks=10, max_model_len=150).load_session(tmp_path / "a.session")
    with pytest.raises(InvalidArgumentError, match="nothing is cached"):
        saved(llm, tmp_path / "b.session", config(budget=64))


def test_others_make_room(tmp_path, make_llm):
    """The least recently used of those on the device, as far as the fraction goes."""
    llm = make_llm()
    ask(llm, PROMPTS[0])
    saved(llm, tmp_path / "a.session")
    small = make_llm(num_blocks=30, prefix_snapshot_fraction=0.12)
    other = tiny.prompts((150,), seed=3)[0]
    small.generate(with_options([[*other, 5]], compress_prompt_at=150), PARAMS, config())
    small.load_session(tmp_path / "a.session")
    small.engine.memory.check()
    assert len(small.engine.scheduler.snapshots) == 1
    assert ask(small, PROMPTS[1])[1] == AT
