"""batch_invariant: a request's tokens and log-probabilities are the same, to the bit, whatever else runs."""

from __future__ import annotations

import pytest
import tiny
import tiny_gguf
import tiny_packed
from settings import small

from kvreclaim import LLM, SamplingParams
from kvreclaim.errors import InvalidArgumentError

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3, prompt_logprobs=1)
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True, logprobs=3)
REPEATED = tiny.prompts((75,), seed=3)[0]
PROMPT = [*REPEATED, *REPEATED[:40], *tiny.prompts((190,), seed=4)[0], *REPEATED[:20]]
OTHERS = tiny.prompts((5, 210, 37, 130, 64), seed=5)
CASES = {
    "llama-fp32": ("llama", {"dtype": "float32"}),
    "llama-bf16": ("llama", {"dtype": "bfloat16"}),
    "llama-int8": ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "int8"}),
    "llama-int4": ("llama", {"dtype": "float32", "kv_cache_dtype": "int4"}),
    "llama-fp8": ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}),
    "llama-turboquant4": ("llama", {"dtype": "bfloat16", "kv_cache_dtype": "turboquant4"}),
    "qwen2-bf16": ("qwen2", {"dtype": "bfloat16"}),
    "qwen3-fp32": ("qwen3", {"dtype": "float32"}),
    "qwen3-bf16": ("qwen3", {"dtype": "bfloat16"}),
    "mistral-bf16": ("mistral", {"dtype": "bfloat16", "disable_hybrid_kv_cache_manager": True}),
    "awq-bf16": ("awq", {"dtype": "bfloat16"}),
    "awq-int8-activations": ("awq", {"dtype": "bfloat16", "quantized_activations": "int8"}),
    "gguf-fp32": ("gguf", {"dtype": "float32"}),
    "gguf-auto": ("gguf", {"dtype": "auto"}),
}


@pytest.fixture
def make(request, tiny_dir, tmp_path, monkeypatch):
    """(**engine arguments) -> a batch-invariant engine of the case."""
    model, options = CASES[request.param]
    if model == "awq":
        tiny_packed.write("awq", tmp_path)
        path = tmp_path
    elif model == "gguf":
        path = tmp_path / "tiny.gguf"
        tiny_gguf.write(path)
        monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    else:
        path = tiny_dir(model)

    def build(**more) -> LLM:
        given = {"num_blocks": 400, "max_num_batched_tokens": 512, "batch_invariant": True, **options, **more}
        return LLM(path, device="cpu", cache_packed_weights=False, **given)

    return build


def seen(output):
    """All of a request's outputs, with unrounded log-probabilities."""
    assert output.error is None
    (one,) = output.outputs
    return one.token_ids, one.logprobs, output.prompt_logprobs


every_case = pytest.mark.parametrize("make", CASES, indirect=True)


@every_case
def test_the_same_in_every_chunk_order_and_company(make):
    alone, drawn = make().generate(PROMPT, GREEDY)[0], make().generate(PROMPT, DRAWN)[0]
    for chunk in (16, 64, 200):
        llm = make(max_num_batched_tokens=chunk, enable_prefix_caching=False, max_num_seqs=16)
        assert seen(llm.generate(PROMPT, GREEDY)[0]) == seen(alone), f"chunks of {chunk}"
        outputs = llm.generate([*OTHERS, PROMPT, PROMPT], [GREEDY] * 6 + [DRAWN])
        assert [seen(out) for out in outputs[-2:]] == [seen(alone), seen(drawn)], f"others first, {chunk}"
        outputs = llm.generate([PROMPT, *reversed(OTHERS)], GREEDY)
        assert seen(outputs[0]) == seen(alone), f"others behind, {chunk}"


@every_case
def test_the_same_after_preemption_and_with_a_prefix_hit(make):
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=3)
    alone = make().generate(PROMPT, plain)[0]
    llm = make(num_blocks=36, max_num_batched_tokens=48, preemption_mode="recompute")
    outputs = llm.generate([OTHERS[1], PROMPT, *OTHERS[2:]], plain)
    assert sum(out.metrics.preemptions for out in outputs) > 0
    assert seen(outputs[1]) == seen(alone)
    llm = make(max_num_batched_tokens=64)
    llm.generate([PROMPT[:130], OTHERS[0]], plain)
    (hit,) = llm.generate(PROMPT, plain)
    assert hit.metrics.num_cached_tokens == 128
    assert seen(hit) == seen(alone)


@every_case
def test_the_same_with_drafts(make):
    alone = make().generate(PROMPT, GREEDY)[0]
    llm = make(
        max_num_batched_tokens=64,
        speculative_config={"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 1},
    )
    outputs = llm.generate([*OTHERS, PROMPT], GREEDY)
    assert llm.stats().totals.speculation.num_draft_tokens > 0
    assert seen(outputs[-1]) == seen(alone)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("llama", {"dtype": "float16"}, "linear layers: torch"),
        ("llama", {"kernels": "reference"}, "attention: reference"),
        ("olmo2", {}, "decoder layers: transformers"),
        ("qwen3-moe", {}, "decoder layers: transformers"),
        ("gpt-oss", {"disable_hybrid_kv_cache_manager": True}, "decoder layers: transformers"),
        ("ministral", {}, "disable_hybrid_kv_cache_manager=True"),
        ("deepseek-v2", {}, "latents"),
        ("qwen3-next", {}, "recurrent"),
        ("llama", {"full_cache_host_size": 0.01}, "full_cache_host_size"),
        ("llama", {"sparse_prefill": "pooled"}, "sparse prefill"),
    ],
)
def test_what_depends_on_the_batch_is_refused(family, options, words, tiny_dir):
    given = {"dtype": "float32", "device": "cpu", "num_blocks": 60, **options}
    with pytest.raises(InvalidArgumentError, match=words) as refusal:
        LLM(tiny_dir(family), batch_invariant=True, **given)
    assert refusal.value.field == "batch_invariant"


def test_requests_that_compress_are_refused(make_llm):
    llm = make_llm(batch_invariant=True)
    with pytest.raises(InvalidArgumentError, match="policy query_mixture scores") as refusal:
        llm.generate(PROMPT, GREEDY, small())
    assert refusal.value.field == "batch_invariant"
    (drafted,) = llm.generate(PROMPT, DRAWN, small(verify=True))
    assert seen(drafted) == seen(make_llm(batch_invariant=True).generate(PROMPT, DRAWN)[0])


def test_a_disk_holds_invariant_prefixes_apart(tmp_path, make_llm):
    """Blocks that an engine without the option has left are no hit."""
    disk = {
        "kv_offloading_size": 0.01,
        "kv_offloading_disk_path": str(tmp_path),
        "kv_offloading_disk_size": 0.01,
    }
    cached = []
    for is_invariant in (False, True, True):
        with make_llm(batch_invariant=is_invariant, kv_load_policy="wait_complete", **disk) as llm:
            cached.append(llm.generate(PROMPT, DRAWN)[0].metrics.num_cached_tokens)
    assert cached[:2] == [0, 0]
    assert cached[2] > 0
