"""Generation after prompts of real text, timed."""

from __future__ import annotations

from dataclasses import dataclass
from pydoc_data.topics import topics
from time import perf_counter

from kvreclaim.bench.systems.base import random_prompts
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LosslessRun:
    """One run. rate: tokens per second; device_blocks: in use on the device at most; moved: bytes from the
    host; drafted, accepted: tokens; rounds: of drafts."""

    tokens: list[list[int]]
    rate: float
    device_blocks: int
    moved: int
    drafted: int
    accepted: int
    rounds: int


def documentation(llm: LLM, length: int, count: int) -> list[list[int]]:
    """Pieces of Python's own documentation, of so many tokens each; they share nothing where it is long
    enough. Random tokens for a model without a tokenizer."""
    if llm.loaded.tokenizer is None:
        return random_prompts(count, length, llm.loaded.vocab_size, 0)
    text = llm.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    step = max(1, (len(text) - length) // count)
    return [(text * (1 + length // len(text)))[n * step : n * step + length] for n in range(count)]


def draw(
    llm: LLM, prompts: list[list[int]], config: CompressionConfig | None, num_tokens: int
) -> LosslessRun:
    """num_tokens greedy tokens behind each prompt; the time starts when the last prompt is there."""
    engine, params = llm.engine, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [llm._add(prompt, params, config) for prompt in prompts]
    while not all(request.prompt_done for request in requests):
        engine.step()
    seen = sum(request.sequences[0].num_generated for request in requests)
    totals, blocks = engine.totals.speculation, 0
    before = totals.num_drafts, totals.num_draft_tokens, totals.num_accepted_tokens
    moved, pool = engine.totals.streamed_bytes, engine.verifier.companions.memory.pool
    started = perf_counter()
    while engine.has_unfinished:
        engine.step()
        blocks = max(blocks, pool.num_in_use)
    elapsed_s = perf_counter() - started
    tokens = [request.sequences[0].token_ids[len(request.prompt_token_ids) :] for request in requests]
    return LosslessRun(
        tokens,
        (sum(map(len, tokens)) - seen) / elapsed_s if elapsed_s else 0.0,
        blocks,
        engine.totals.streamed_bytes - moved,
        totals.num_draft_tokens - before[1],
        totals.num_accepted_tokens - before[2],
        totals.num_drafts - before[0],
    )
