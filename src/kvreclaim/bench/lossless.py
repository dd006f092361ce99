"""Tokens per second and blocks on the device in full, lossy and verify mode.

Full caches lie in the pool or on the host. Prompts are computed once; every run finds them in the prefix
cache, so only decoding is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from time import perf_counter

from rich.console import Console
from rich.table import Table

from kvreclaim import demo_model, real_model
from kvreclaim.bench.common import Row, alternate, sheet
from kvreclaim.bench.plans import DEMO, LosslessPlan
from kvreclaim.bench.systems.base import random_prompts
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.features.verification.feature import Verification
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.overrides import yarn
from kvreclaim.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class LosslessRun:
    """One run. rate: tokens per second; device_blocks: most in use on the device; moved: bytes from the host;
    drafted, accepted: tokens; rounds: of drafts."""

    tokens: list[list[int]]
    rate: float
    device_blocks: int
    moved: int
    drafted: int
    accepted: int
    rounds: int


def documentation(llm: LLM, length: int, count: int) -> list[list[int]]:
    """Return pieces of Python's documentation of this length; disjoint if it is long enough. Random tokens
    for a model without a tokenizer."""
    if llm.loaded.tokenizer is None:
        return random_prompts(count, length, llm.loaded.vocab_size, 0)
    text = llm.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))
    step = max(1, (len(text) - length) // count)
    return [(text * (1 + length // len(text)))[n * step : n * step + length] for n in range(count)]


def draw(
    llm: LLM, prompts: list[list[int]], config: CompressionConfig | None, num_tokens: int
) -> LosslessRun:
    """Generate num_tokens greedy tokens after each prompt; timing starts after the last prefill."""
    engine, params = llm.engine, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    requests = [llm.add_prompt(prompt, params, config) for prompt in prompts]
    while not all(request.prompt_done for request in requests):
        engine.step()
    seen = sum(request.sequences[0].num_generated for request in requests)
    totals, blocks = engine.totals.speculation, 0
    before = totals.num_drafts, totals.num_draft_tokens, totals.num_accepted_tokens
    moved = engine.totals.streamed_bytes
    pool = engine.feature(Verification).verifier.companions.memory.pool
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


Prompts = Callable[[int, int], list[list[int]]]
"""(tokens, count) -> prompts for the demo model."""


def run(plan: LosslessPlan, console: Console, own: Prompts) -> list[Row]:
    """own: prompts for the demo model.

    Returns: a row for each context, batch and system: tokens_per_s, ratio to "full", device_blocks,
    moved_bytes per token, per_verification, accepted, equal (sequences that draw the full cache's tokens)."""
    rows: list[Row] = []
    for context in plan.contexts:
        for batch in plan.batches:
            rows += _measure(plan, context, batch, console, own)
    return rows


def _measure(plan: LosslessPlan, context: int, batch: int, console: Console, own: Prompts) -> list[Row]:
    is_demo = plan.model == Path(DEMO) or (plan.model is None and real_model() is None)
    model = demo_model() if is_demo else plan.model or real_model()
    assert model is not None, "one of them is there"
    length = context + plan.tokens
    known = LLM(model, dtype=plan.dtype, num_blocks=64).loaded.facts.max_position
    needed = batch * (blocks_for(length, 16) + 4)
    pool = LLM(
        model,
        dtype=plan.dtype,
        num_blocks=2 * needed + batch * blocks_for(plan.budget + 2048, 16),
        max_num_seqs=batch,
        max_model_len=length,
        hf_overrides=yarn(known, length),
    )
    prompts = own(context, batch) if is_demo else documentation(pool, context, batch)
    console.print(f"{batch} x {context}: computing the prompts")
    draw(pool, prompts, None, 1)
    hosted = None
    if any("host" in name for name in plan.systems):
        size = needed * pool.engine.cache.bytes_per_block
        device_blocks = batch * (blocks_for(plan.budget + 256, 16) + 4) + blocks_for(plan.budget + 2048, 16)
        hosted = pool.sibling(full_cache_host_size=size / 2**30, num_blocks=device_blocks)
        for prompt in prompts:
            graft(pool, hosted, prompt)
    runs = {}
    for name in plan.systems:
        llm = hosted if "host" in name else pool
        assert llm is not None, "made on first use"
        runs[name] = partial(draw, llm, prompts, _config(plan, name), plan.tokens)
    times: dict[str, list[LosslessRun]] = {}
    for _ in range(plan.rounds):
        for name, found in alternate(runs, 1).items():
            times.setdefault(name, []).extend(found)
            console.print(f"{name}: {found[0].rate:,.1f} tokens/s")
    return [_row(plan, context, batch, name, times) for name in plan.systems]


def _row(plan: LosslessPlan, context: int, batch: int, name: str, times: dict[str, list[LosslessRun]]) -> Row:
    every, full = times[name], times["full"]
    one = every[-1]
    pairs = zip(every, full, strict=True)
    row: Row = {
        **plan.facts(),
        "context": context,
        "batch": batch,
        "system": name,
        "tokens_per_s": median(each.rate for each in every),
        "ratio": median(mine.rate / other.rate for mine, other in pairs),
        "device_blocks": one.device_blocks,
        "moved_bytes": one.moved / sum(map(len, one.tokens)),
        "equal": sum(a == b for a, b in zip(one.tokens, full[-1].tokens, strict=True)),
    }
    if one.rounds:
        row |= {"per_verification": 1 + one.accepted / one.rounds, "accepted": one.accepted / one.drafted}
    if name == "verify-host" and "full-host" in times:
        pairs = zip(every, times["full-host"], strict=True)
        row["over_host"] = median(mine.rate / other.rate for mine, other in pairs)
    return row


def _config(plan: LosslessPlan, name: str) -> CompressionConfig | None:
    if name.startswith("full"):
        return None
    verify = name.startswith("verify")
    return CompressionConfig(plan.policy, budget=plan.budget, verify=verify, verify_tokens=plan.drafts)


def graft(source: LLM, target: LLM, tokens: list[int]) -> None:
    """Copy the full blocks of a prompt that one engine has cached into another one of the same model, format
    and layout, under their prefix keys."""
    from_memory, memory = source.engine.memory, target.engine.memory
    known = from_memory.match_prefix(from_memory.keys(tokens)).block_ids
    keys, seq_id = memory.keys(tokens), target.engine.lifecycle.new_id()
    memory.admit(seq_id, memory.match_prefix(keys, max_tokens=0))
    memory.grow(seq_id, len(known) * memory.block_size)
    blocks = memory.blocks(seq_id)
    for own, given in zip(target.engine.cache.planes, source.engine.cache.planes, strict=True):
        own[:, blocks] = given[:, list(known)]
    memory.commit(seq_id, len(known) * memory.block_size)
    memory.free(seq_id)


def speed_table(rows: Sequence[Row]) -> Table:
    columns = {
        "system": "{system}",
        "context": "{context:,}",
        "batch": "{batch}",
        "tokens/s": "{tokens_per_s:,.1f}",
        "/ full": "{ratio:.2f}",
        "/ full-host": "{over_host:.2f}",
        "blocks on device": "{device_blocks:,}",
        "bytes moved / token": "{moved_bytes:,.0f}",
        "tokens / verification": "{per_verification:.2f}",
        "drafts accepted": "{accepted:.3f}",
        "sequences as full": "{equal}",
    }
    title = "{policy}, budget {budget}, {drafts} drafts at most".format_map(rows[0])
    return sheet(title, columns, rows)
