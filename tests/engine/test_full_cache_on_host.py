"""A full cache in host memory: the answers of a cache in the pool, and the bytes of a formula."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import tiny
from breaking import POISON, answers, break_every_third
from settings import assert_idle, small, with_options

from kvreclaim import LLM, BeamSearchParams, CompressionConfig, SamplingParams
from kvreclaim.chunks import Chunk
from kvreclaim.engine.attend import streamed
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.link import StreamLink

GIB = 2**30
FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4", "turboquant4", "int8+int4")
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, logprobs=2)
MANY = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=20, ignore_eos=True, logprobs=2)
PARAMS = [GREEDY, SAMPLED, MANY, GREEDY]
PROMPTS = tiny.prompts((70, 5, 33, 17), seed=1)


@pytest.fixture(params=[1, 6000, 1 << 22], ids=["each alone", "some", "all"])
def pieces(request, monkeypatch):
    """Sequences that are fetched together."""
    monkeypatch.setattr(streamed, "PIECE_BYTES", request.param)


def on_host(llm: LLM, num_blocks: int = 200, **changes) -> LLM:
    """The same engine over so many blocks in host memory."""
    size = (num_blocks + 0.5) * llm.engine.cache.bytes_per_block / GIB
    return llm.sibling(**{"full_cache_host_size": size, "num_blocks": 1, **changes})


def results(outputs) -> list:
    """Tokens, ends and log-probabilities, which are equal only where all logits are."""
    return [[(o.token_ids, o.finish_reason, o.logprobs) for o in out.outputs] for out in outputs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_same_logits_in_every_format(form, dtype, make_llm, pieces):
    llm = make_llm(kv_cache_dtype=form, dtype=dtype, max_num_batched_tokens=24)
    host = on_host(llm)
    assert results(host.generate(PROMPTS, PARAMS)) == results(llm.generate(PROMPTS, PARAMS))
    assert host.engine.cache.num_blocks == host.engine.memory.pool.num_blocks == 200
    assert_idle(host)


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "deepseek-v3", "mistral", "gemma2"])
def test_other_families(family, make_llm, pieces):
    llm = make_llm(family, disable_hybrid_kv_cache_manager=True)
    host = on_host(llm)
    assert answers(host.generate(PROMPTS, PARAMS)) == answers(llm.generate(PROMPTS, PARAMS))
    assert host.engine.totals.streamed_bytes > 0


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1", "lfm2", "jamba"])
def test_recurrent_layers(family, make_llm, pieces):
    """Their states stay on the device; a prefix hit begins with one of them."""
    llm = make_llm(family)
    host = on_host(llm)
    expected = answers(llm.generate(PROMPTS, PARAMS))
    assert answers(host.generate(PROMPTS, PARAMS)) == expected
    again = host.generate(PROMPTS, PARAMS)
    assert answers(again) == expected
    assert again[0].metrics.num_cached_tokens == 64
    assert host.engine.totals.streamed_bytes > 0
    assert_idle(host)


def test_verify_mode_over_recurrent_layers_is_refused(make_llm):
    host = on_host(make_llm("lfm2"))
    with pytest.raises(InvalidArgumentError, match="recurrent states of"):
        host.generate(PROMPTS, GREEDY, small("knorm", verify=True))


def test_the_reference_kernels(make_llm, pieces):
    llm = make_llm(kernels="reference", block_size=4)
    assert answers(on_host(llm).generate(PROMPTS, PARAMS)) == answers(llm.generate(PROMPTS, PARAMS))


def test_native_decoder_layers_attend_over_it(make_llm):
    llm = make_llm("qwen3", dtype="bfloat16")
    assert "decoder layers: native" in llm.engine.kernels
    assert results(on_host(llm).generate(PROMPTS, PARAMS)) == results(llm.generate(PROMPTS, PARAMS))


class AtOnce:
    """Lanes of a device that has done whatever is queued."""

    def copying(self):
        return nullcontext()

    def wait(self) -> None:
        pass

    def __getattr__(self, name):
        return lambda buffer: None


def test_layers_are_fetched_ahead_by_a_thread(make_llm, pieces):
    llm = make_llm(max_num_batched_tokens=24)
    host = on_host(llm)
    host.engine.runner.stream.link = StreamLink(AtOnce(), pins=False)
    assert results(host.generate(PROMPTS, PARAMS)) == results(llm.generate(PROMPTS, PARAMS))


def test_prefixes_are_found_there(make_llm, pieces):
    llm = make_llm()
    host = on_host(llm)
    for turn in range(2):
        prompts = [[*PROMPTS[0], *tail] for tail in ([], [3, 4], [3, 9])]
        got, wanted = host.generate(prompts, GREEDY), llm.generate(prompts, GREEDY)
        assert results(got) == results(wanted)
        cached = [out.metrics.num_cached_tokens for out in got]
        assert cached == [out.metrics.num_cached_tokens for out in wanted]
        assert all(cached) or not turn


def test_few_blocks_preempt(make_llm, pieces):
    llm = make_llm(max_num_seqs=4, num_blocks=200)
    host = on_host(llm, num_blocks=9, max_num_seqs=4)
    prompts = [p[:40] for p in PROMPTS]
    assert answers(host.generate(prompts, SAMPLED)) == answers(llm.generate(prompts, SAMPLED))
    assert host.engine.totals.num_preemptions > 0
    assert_idle(host)


def test_an_abort_disturbs_no_other_request(make_llm, pieces):
    llm = make_llm()
    host, (first, *others) = on_host(llm), PROMPTS
    wanted = llm.generate([first], SAMPLED)[0].outputs[0].token_ids
    kept = host.engine.add_request("kept", first, SAMPLED)
    for i, prompt in enumerate(others):
        host.engine.add_request(str(i), prompt, SAMPLED)
    for i in range(len(others)):
        host.engine.step()
        host.engine.abort(str(i))
    while host.engine.has_unfinished:
        host.engine.step()
    assert kept.output().outputs[0].token_ids == wanted
    assert_idle(host)


def test_scores_and_beams(make_llm):
    llm = make_llm()
    host, beams = on_host(llm), BeamSearchParams(beam_width=3, max_tokens=12)
    got, wanted = (each.score(PROMPTS[:2], PROMPTS[2:]) for each in (host, llm))
    assert [one.logprobs for one in got] == [one.logprobs for one in wanted]
    found, known = (each.beam_search(PROMPTS[:2], beams) for each in (host, llm))
    assert answers(found) == answers(known)


def test_bytes_are_those_of_the_blocks(make_llm, pieces):
    """Every step brings each block of its sequences that holds something once, and writes the tails back."""
    llm = make_llm(max_num_batched_tokens=48)
    host = on_host(llm)
    size, each = host.engine.config.block_size, host.engine.cache.bytes_per_block
    streamed_blocks, written_blocks, forward = [], [], host.engine.runner.forward

    def counted(step):
        held, touched = set(), 0
        for item in step:
            table = host.engine.memory.table(item.seq.seq_id)
            first, last = item.row.first, item.row.first + item.num_tokens
            held |= set(table.block_ids[: blocks_for(first, size)])
            touched += blocks_for(last, size) - first // size
        streamed_blocks.append(len(held))
        written_blocks.append(touched)
        return forward(step)

    host.engine.runner.forward = counted
    host.generate(PROMPTS, PARAMS)
    totals = host.engine.totals
    assert len(streamed_blocks) == totals.steps
    assert totals.streamed_bytes == sum(streamed_blocks) * each
    assert totals.written_bytes == sum(written_blocks) * each
    assert 0 < totals.stream_buffer_bytes <= host.engine.cache.bytes_per_block * 200


def test_a_pass_that_fails_writes_nothing(make_llm, pieces):
    llm = make_llm()
    prompts = [[t for t in p if t != POISON] for p in PROMPTS]
    wanted = answers(llm.generate(prompts, PARAMS))
    host = on_host(llm)
    broken, planes = break_every_third(host), host.engine.cache.planes
    forward = host.engine.runner.forward

    def watched(step):
        before = [plane.clone() for plane in planes]
        try:
            return forward(step)
        except RuntimeError:
            assert all(a.equal(b) for a, b in zip(before, planes, strict=True))
            raise

    host.engine.runner.forward = watched
    assert answers(host.generate(prompts, PARAMS)) == wanted
    assert broken.num_raised > 0
    assert_idle(host)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("llama", {"kv_offloading_size": 0.01}, "there are no tiers below"),
        ("llama", {"sparse_prefill": "a_shape"}, "sparse prefill a_shape reads some blocks"),
        ("gemma2", {}, "disable_hybrid_kv_cache_manager=True"),
        ("llama", {"full_cache_host_size": 1e-8}, "less than one block"),
        ("llama", {"full_cache_host_size": 1e6}, "of host memory, but only"),
    ],
)
def test_what_an_engine_cannot_have_beside_it(family, options, message, make_llm):
    with pytest.raises(InvalidArgumentError, match=message):
        make_llm(family, **{"full_cache_host_size": 0.01, "num_blocks": None, **options})


def test_what_a_request_cannot_ask_of_it(make_llm, tmp_path):
    host = make_llm(full_cache_host_size=0.01)
    for config in (small("knorm"), small("quest", budget=32, sinks=0, recent=1), small("ada_kv")):
        with pytest.raises(InvalidArgumentError, match=r"keeps its survivors on the device.*verify=True"):
            host.generate(PROMPTS, GREEDY, config)
    sparse = with_options(PROMPTS, sparse_prefill="a_shape")
    with pytest.raises(InvalidArgumentError, match="compute prompts dense"):
        host.generate(sparse)
    with pytest.raises(InvalidArgumentError, match="chunks cannot be reused"):
        host.generate([Chunk(PROMPTS[0]), Chunk(PROMPTS[1]), [1, 2]], GREEDY)
    with pytest.raises(InvalidArgumentError, match="sessions cannot be saved"):
        host.save_session(PROMPTS[0], tmp_path / "a.session")
    assert not host.engine.has_unfinished
    host.generate(PROMPTS, GREEDY, CompressionConfig("full"))


def test_lengths_are_bounded_by_what_it_holds(make_llm):
    llm = make_llm(num_blocks=4)
    size, each = llm.engine.config.block_size, llm.engine.cache.bytes_per_block
    host = llm.sibling(full_cache_host_size=5.5 * each / GIB, max_model_len=None)
    assert host.engine.max_model_len == 5 * size
    longer = on_host(llm, num_blocks=5)
    with pytest.raises(RequestTooLongError, match=r"max_model_len is 80 .* raise full_cache_host_size,"):
        longer.generate([list(range(1, 6 * size))], GREEDY)
    batch, fit = [[1] * (5 * size - 9)], replace(GREEDY, max_tokens=9)
    assert results(longer.generate(batch, fit)) == results(llm.sibling(num_blocks=5).generate(batch, fit))
    (cut,) = longer.generate(batch, GREEDY)
    assert (len(cut.outputs[0].token_ids), cut.outputs[0].finish_reason) == (9, "length")
