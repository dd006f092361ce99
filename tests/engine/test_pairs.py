"""Features that change no token, together with each other feature: the output is that of the other alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
from supported import supported_pairs

from kvreclaim import BeamSearchParams, Chunk, ChunkReuse, CompressionConfig, SamplingParams
from kvreclaim.refusals import Feature as F

GIB = 2**30
REPEATED, MIDDLE, LAST = tiny.prompts((32, 64, 37), seed=9)
PROMPT = [*REPEATED, *MIDDLE, *REPEATED, *LAST]
CHUNKS = [Chunk(REPEATED), Chunk(MIDDLE), LAST]
FILLER = tiny.prompts((150, 150), seed=10)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
POOLED = "pooled(alpha=0.9, rows=16, first=24, last=6, layers=0, block=16, sinks=1, local=1)"


@dataclass(frozen=True)
class Part:
    """Options that switch a feature on. engine, compression, sampling, request: options by name"""

    family: str | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    compression: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)


def policy(name: str) -> Part:
    return Part(compression={"policy": name})


NEUTRAL = {
    F.VERIFY: Part(compression={"verify": True}),
    F.SEVERAL_OUTPUTS: Part(sampling={"n": 2, "temperature": 1.0, "top_k": 1}),
    F.PROMPT_LOGPROBS: Part(sampling={"prompt_logprobs": 0}),
    F.SESSION: Part(),
    F.HOST_CACHE: Part(engine={"full_cache_host_size": 0.01}),
    F.OFFLOADING: Part(engine={"kv_offloading_size": 8e6 / GIB}),
    F.DISK: Part(engine={"kv_offloading_size": 8e6 / GIB, "kv_offloading_disk_size": 8e6 / GIB}),
    F.DRAFTS: Part(engine={"speculative_config": NGRAM}),
    F.BATCH_INVARIANT: Part(engine={"batch_invariant": True}),
}
LOSSY = {
    F.SPARSE_PREFILL: Part(request={"sparse_prefill": POOLED}),
    F.CHUNK_REUSE: Part(
        request={"prompt": [Chunk(REPEATED), Chunk(MIDDLE), LAST], "chunk_reuse": ChunkReuse()}
    ),
    F.COMPRESS_AT: Part(request={"compress_prompt_at": 96}),
    F.DROPS: Part(request={"drop_spans": [(32, 80)]}),
    F.BEAM_SEARCH: Part(),
    F.SCORING: Part(),
    F.PROTECT_PROMPT: Part(compression={"protect_prompt": True, "budget": 192}, sampling={"max_tokens": 60}),
    F.EVICTS: policy("knorm"),
    F.READS_SPARSELY: policy("quest"),
    F.WHOLE_BLOCKS: policy("paged_eviction"),
    F.UNEQUAL_HEADS: policy("ada_kv(knorm, alpha=0)"),
    F.CACHE_POSITIONS: policy("streaming_llm(positions=cache)"),
    F.PROMPT_ONLY: policy("snapkv(window=3, when=prefill)"),
    F.TOKEN_SCORES: policy("kvzap"),
    F.ATTENTION_MASS: policy("h2o"),
    F.RECENT_QUERIES: policy("snapkv(window=3)"),
    F.FUTURE_QUERIES: policy("oracle"),
    F.READS_AGAIN: policy("kvzip"),
    F.OUTPUT_PROJECTION: policy("critical(knorm)"),
    F.QUANTISED: Part(engine={"kv_cache_dtype": "int8"}),
    F.WINDOW_TABLES: Part("gemma2"),
    F.SHARED_WINDOWS: Part("gemma2", engine={"disable_hybrid_kv_cache_manager": True}),
    F.RECURRENT: Part("qwen3-next"),
    F.LATENT: Part("deepseek-v2"),
}
PARTS = NEUTRAL | LOSSY


def outputs(on: set[F], make_llm, tmp_path) -> list[list[float]]:
    """Return what an engine answers to the prompt: tokens, or log-probabilities of a continuation. A second
    answer, after other prompts or a saved session, is the same."""
    if {F.CHUNK_REUSE, F.PROMPT_ONLY} <= on:
        on = on | {F.READS_AGAIN}  # snapkv looks at queries, and reused tokens have none
    parts = [part for each, part in PARTS.items() if each in on]
    merged: dict[str, dict[str, Any]] = {}
    for name in ("engine", "compression", "sampling", "request"):
        merged[name] = {key: value for part in parts for key, value in getattr(part, name).items()}
    family = next((part.family for part in parts if part.family), "llama")
    engine = {"block_size": 16, "num_blocks": 40, "max_num_batched_tokens": 192, "max_num_seqs": 8}
    if F.DISK in on:
        path = tmp_path / str(len(on))
        path.mkdir(exist_ok=True)
        engine["kv_offloading_disk_path"] = str(path)
    llm = make_llm(family, **engine, **merged["engine"])
    compression = None
    if merged["compression"] or F.COMPRESS_AT in on:
        settings = {"policy": "knorm", "budget": 48, "interval": 16, "sinks": 2, "recent": 8}
        compression = CompressionConfig(**settings | merged["compression"])
    prompt = {"prompt_token_ids": PROMPT} if "prompt" not in merged["request"] else {}
    prompt |= merged["request"]
    sampling = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True, **merged["sampling"]}

    def run() -> list[list[float]]:
        if on & {F.SCORING, F.FUTURE_QUERIES}:
            (score,) = llm.score([prompt], [FILLER[0][:60]], compression)
            llm.engine.memory.check()
            return [score.logprobs]
        if F.BEAM_SEARCH in on:
            params = BeamSearchParams(beam_width=2, max_tokens=sampling["max_tokens"])
            (found,) = llm.beam_search([prompt], params, compression)
        else:
            (found,) = llm.generate([prompt], SamplingParams(**sampling), compression)
        assert found.error is None
        llm.engine.memory.check()
        return [list(one.token_ids) for one in found.outputs]

    first = run()
    if F.SESSION in on:
        llm.save_session(PROMPT, tmp_path / "s.session")
        llm.close()
        llm = make_llm(family, **engine, **merged["engine"])
        llm.load_session(tmp_path / "s.session")
    else:
        llm.generate(FILLER, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    again = run()
    assert_same(again, first)
    llm.close()
    return again


def assert_same(found: list[list[float]], wanted: list[list[float]]) -> None:
    """Check that all outputs have the same tokens, or about the same log-probabilities, as far as both go."""
    for one, other in itertools.product(found, wanted):
        length = min(len(one), len(other))
        assert one[:length] == pytest.approx(other[:length], abs=1e-3)


PAIRS = [tuple(sorted(pair)) for pair, file in supported_pairs().items() if file == "engine/test_pairs.py"]


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=lambda feature: feature.name)
def test_together_as_alone(one, other, make_llm, tmp_path):
    """A pair answers twice alike, and a feature that changes no token changes none beside another."""
    found = outputs({one, other}, make_llm, tmp_path)
    for neutral, rest in ((one, other), (other, one)):
        if neutral in NEUTRAL:
            is_drafting = neutral is F.VERIFY and PARTS[rest].compression
            wanted = outputs(set() if is_drafting else {rest}, make_llm, tmp_path)
            assert_same(found, wanted)
