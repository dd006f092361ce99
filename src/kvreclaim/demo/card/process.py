"""One chain in a process that the kernel refuses more memory than the card has.

The limit is RLIMIT_DATA: private memory that may be written, touched or not. It counts from what the
libraries have taken, which on a GPU's card would not be.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from kvreclaim import demo_model
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.config import SamplingParams
from kvreclaim.demo.card.plan import REFUSED, CardPlan, CardRun, ChainSample, ChainSetup
from kvreclaim.engine.api.chat import render_chat
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import RequestOutput, StepStats
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.loader import load_tokenizer, read_config
from kvreclaim.model.overrides import yarn

CHUNK = 256
"""Tokens of a prompt in one step, so that activations stay small."""
BLOCK_SIZE = 16
NO_MEMORY = ("allocate", "are free", "holds no block")
"""Words of the sentences that say that memory is not enough."""
QUESTION = "Why do trees lose their leaves in autumn? Think step by step, and check every step."
SAMPLING = SamplingParams(temperature=0.8, seed=0, ignore_eos=True)


def main() -> None:
    """Run this process: a plan and a setup as JSON on the command line; what is found as JSON on stdout."""
    said = json.loads(sys.argv[1])
    plan = CardPlan(**said["plan"] | {"model": Path(said["plan"]["model"]), "setups": ()})
    if plan.threads is not None:
        torch.set_num_threads(plan.threads)
    try:
        print(run_limited(plan, ChainSetup(**said["setup"])).model_dump_json(), flush=True)
    except InvalidArgumentError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)


def run_limited(plan: CardPlan, setup: ChainSetup) -> CardRun:
    """The chain, or why it does not come to its end. The limit stays on this process."""
    base = _taken_by_libraries(plan.model)
    most = base + plan.limit_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    budget = None if setup.policy is None else plan.budget
    found = CardRun(
        name=setup.name,
        kv_cache_dtype=setup.kv_cache_dtype,
        policy=setup.policy,
        budget=budget,
        outcome="done",
    )
    try:
        llm = _load(plan, setup)
        _run(plan, llm, base, found)
    except (InvalidArgumentError, MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and not any(words in str(error) for words in NO_MEMORY):
            raise
        found.outcome, found.said = "out of memory", str(error).split("\n", 1)[0]
    found.peak_bytes = max(found.peak_bytes, taken_bytes() - base)
    return found


def taken_bytes() -> int:
    """Bytes that this process has now, as the limit counts them."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def _taken_by_libraries(model: Path) -> int:
    """A small model has run and the tokenizer is there, so that neither modules, threads and buffers nor
    what no card would hold is counted."""
    llm = LLM(demo_model(), num_blocks=64, max_num_seqs=1, max_num_batched_tokens=CHUNK)
    llm.generate([[1] * 300], SamplingParams(max_tokens=4, ignore_eos=True))
    del llm
    gc.collect()
    tokenizer = load_tokenizer(model)
    taken = taken_bytes()
    del tokenizer  # the model's own takes its place
    return taken


def _load(plan: CardPlan, setup: ChainSetup) -> LLM:
    known = read_config(plan.model).max_position_embeddings
    compression = None
    if setup.policy is not None:
        compression = CompressionConfig(setup.policy, plan.budget, interval=plan.interval)
    whole = blocks_for(plan.num_tokens, BLOCK_SIZE) if setup.whole_pool else None
    return LLM(
        plan.model,
        compression=compression,
        hf_overrides=yarn(known, plan.num_tokens) or {"max_position_embeddings": plan.num_tokens},
        kv_cache_dtype=setup.kv_cache_dtype,
        block_size=BLOCK_SIZE,
        num_blocks=whole,
        max_num_seqs=1,
        max_num_batched_tokens=CHUNK,
        max_signal_bytes=0,
        kv_memory_fraction=plan.pool_share,
        enable_prefix_caching=False,
    )


def _run(plan: CardPlan, llm: LLM, base: int, found: CardRun) -> None:
    """Fill in what the chain does, sample by sample."""
    prompt = prompt_of(llm)
    found.bytes_per_block = llm.engine.cache.bytes_per_block
    found.num_blocks = llm.engine.config.num_blocks or 0
    found.weight_bytes = llm.loaded.weight_bytes
    started = time.perf_counter()

    def sample(tokens: int, blocks: int) -> None:
        found.peak_bytes = max(found.peak_bytes, taken_bytes() - base)
        found.samples.append(
            ChainSample(
                tokens=tokens,
                elapsed_s=time.perf_counter() - started,
                block_bytes=blocks * found.bytes_per_block,
            )
        )

    computed = 0

    def on_step(step: StepStats) -> None:
        nonlocal computed
        before, computed = computed, computed + step.num_tokens
        if before // plan.every != computed // plan.every:
            sample(computed, step.blocks_in_use)

    params = replace(SAMPLING, max_tokens=llm.engine.max_model_len - len(prompt))
    (output,) = llm.generate([prompt], params, on_step=on_step)
    _tell(plan, output, found, time.perf_counter() - started)


def _tell(plan: CardPlan, output: RequestOutput, found: CardRun, elapsed_s: float) -> None:
    metrics, done = output.metrics, output.outputs[0]
    found.tokens, found.elapsed_s = metrics.num_prompt_tokens + len(done.token_ids), elapsed_s
    found.peak_blocks = metrics.peak_blocks
    found.tokens_evicted, found.blocks_freed = metrics.tokens_evicted, metrics.blocks_freed
    if output.error is not None:
        found.outcome, found.said = "failed", output.error
    elif found.tokens < plan.num_tokens:
        found.outcome = "pool full"
        found.said = (
            f"ended as {done.finish_reason!r} at {found.tokens:,} tokens: the one sequence has all "
            f"{found.num_blocks:,} blocks"
        )


def prompt_of(llm: LLM) -> list[int]:
    """The question, by the model's chat template where it has one."""
    tokenizer = llm.tokenizer
    if tokenizer.chat_template is None:
        return list(tokenizer.encode(QUESTION))
    return render_chat(llm.loaded, [{"role": "user", "content": QUESTION}])


if __name__ == "__main__":
    main()
