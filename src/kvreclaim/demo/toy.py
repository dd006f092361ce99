"""The demo on the demo model: the same sequences under every policy, then many requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.extension import Extension
from kvreclaim.engine.request import request as engine_request
from kvreclaim.engine.request.outputs import RequestOutput, StepStats
from kvreclaim.eval.chain import ChainTask
from kvreclaim.eval.example import Example, TokenKind, accuracy, exact_match, progress
from kvreclaim.eval.plan import keeps
from kvreclaim.eval.requests import timed
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule import Pass


def emptied_blocks(survivors: Sequence[Tensor], num_tokens: int, block_size: int) -> int:
    """Count the full blocks of num_tokens tokens in which no head has a survivor.

    survivors: of each head the positions [n] that it still holds
    """
    full = num_tokens // block_size
    used = torch.cat(list(survivors)).div(block_size, rounding_mode="floor").unique()
    return full - int((used < full).sum())


class InPlace(Extension):
    """Follows the survivors of each sequence through its passes. For sequences that do not fork.

    freed: by seq_id, blocks of its text that are empty after its last pass: what a cache that moves nothing
           could have given back
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.freed: dict[int, int] = {}
        self._survivors: dict[int, tuple[int, list[Tensor]]] = {}

    def compressed(self, seq: engine_request.Sequence, done: Pass[int], kept: Tensor | HeadRows) -> None:
        heads = [slots.cpu() for layer in kept for slots in layer]
        nothing = 0, [torch.empty(0, dtype=torch.int64)] * len(heads)
        start, before = nothing if done.first else self._survivors[seq.seq_id]
        new = torch.arange(start, done.logical_len)
        survivors = [torch.cat([old, new])[slots] for old, slots in zip(before, heads, strict=True)]
        self._survivors[seq.seq_id] = done.logical_len, survivors
        self.freed[seq.seq_id] = emptied_blocks(survivors, done.logical_len, self.block_size)


Row = dict[str, Any]
OnProgress = Callable[[str], None]
POLICIES = ("streaming_llm", "knorm", "knorm(keep=large)", "triattention", "query_mixture")
HEADLINE = "query_mixture"
JUDGED = {
    "accuracy": (TokenKind.LOOKUP, TokenKind.RESTORE),
    "lookup_accuracy": (TokenKind.LOOKUP,),
    "carry_accuracy": (TokenKind.RESTORE,),
}


@dataclass(frozen=True)
class DemoPlan:
    """Sizes of the demo.

    pool_share: blocks of the pool over what the full cache of all generated sequences would need; below
                1, so that the full cache has to preempt
    """

    fractions: tuple[float, ...] = (0.25, 0.1)
    num_scored: int = 24
    num_generated: int = 8
    num_load: int = 24
    load_fraction: float = 0.25
    pool_share: float = 0.7
    interval: int = 128
    sinks: int = 4
    recent: int = 64
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    task: ChainTask = field(default_factory=lambda: ChainTask(num_decoys=25))

    @property
    def final_length(self) -> int:
        """Tokens of the longest sequence, prompt and trace."""
        return self.task.num_prompt_tokens + self.task.num_trace_tokens

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool of the generations and of the load."""
        per_sequence = blocks_for(self.final_length, self.block_size)
        return max(per_sequence, int(self.num_generated * per_sequence * self.pool_share))

    def compression(self, policy: str, fraction: float | None) -> CompressionConfig | None:
        """None for the full cache."""
        if fraction is None:
            return None
        budget = round(self.final_length * fraction)
        return CompressionConfig(policy, budget, interval=self.interval, sinks=self.sinks, recent=self.recent)


def run_policies(plan: DemoPlan, llm: LLM, on_progress: OnProgress) -> list[Row]:
    """Every policy at every budget: teacher-forced accuracy, then free-running generation in llm's pool.

    Rows have JUDGED's shares, over num_scored sequences; progress, the share of the trace before the first
    error, and exact_match, both free-running over num_generated sequences; and freed_in_place, the blocks
    that would have come free had all survivors stayed in their slots.
    """
    # A pool of their own holds all scored sequences, so that nothing is computed twice.
    scorer = llm.sibling(num_blocks=blocks_for(plan.final_length, plan.block_size) * plan.num_scored)
    examples = [plan.task.sample(seed) for seed in range(max(plan.num_scored, plan.num_generated))]
    texts = [(list(e.prompt), list(e.trace)) for e in examples[: plan.num_scored]]
    in_place = llm.engine.extensions.add(InPlace(plan.block_size))
    rows = []
    for policy, fraction in [("full", None), *((p, f) for f in plan.fractions for p in POLICIES)]:
        on_progress(label(policy, fraction))
        config = plan.compression(policy, fraction)
        scored, _ = timed(lambda config=config: scorer.score(*map(list, zip(*texts, strict=True)), config))  # type: ignore[misc]
        shares = {
            name: mean(accuracy(e, s.predicted, kinds) for e, s in zip(examples, scored, strict=False))
            for name, kinds in JUDGED.items()
        }
        in_place.freed.clear()
        outputs, row = _generate(plan, llm, examples[: plan.num_generated], policy, fraction)
        pairs = [(e, out.outputs[0].token_ids) for e, out in zip(examples, outputs, strict=False)]
        free = {
            "progress": mean(progress(*pair) for pair in pairs),
            "exact_match": mean(exact_match(*pair) for pair in pairs),
        }
        rows.append(row | shares | free | {"freed_in_place": sum(in_place.freed.values())})
    return rows


def run_load(plan: DemoPlan, llm: LLM, on_progress: OnProgress) -> list[Row]:
    """Many requests at once in the same pool, without and with compression."""
    examples = [plan.task.sample(1_000 + seed) for seed in range(plan.num_load)]
    rows = []
    for policy, fraction in (("full", None), (HEADLINE, plan.load_fraction)):
        on_progress(f"load, {policy}")
        rows.append(_generate(plan, llm, examples, policy, fraction)[1])
    return rows


def _generate(
    plan: DemoPlan, llm: LLM, examples: Sequence[Example], policy: str, fraction: float | None
) -> tuple[list[RequestOutput], Row]:
    """Continue the examples' prompts greedily, each to its trace's length."""
    params = [SamplingParams(temperature=0.0, max_tokens=len(e.trace), ignore_eos=True) for e in examples]
    prompts = [list(e.prompt) for e in examples]
    return generate_batch(llm, prompts, params, plan.compression(policy, fraction), policy, fraction)


def generate_batch(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    config: CompressionConfig | None,
    policy: str,
    fraction: float | None,
) -> tuple[list[RequestOutput], Row]:
    """One batch of generations in a pool that starts empty and without cached prefixes.

    peak_blocks:   most blocks of the pool in use at once
    longest_wait_s: until the last request had its first token
    """
    memory = llm.engine.memory
    memory.reset_prefix_cache()
    memory.pool.reset_peak()
    steps: list[StepStats] = []
    outputs, elapsed_s = timed(lambda: llm.generate(prompts, params, config, on_step=steps.append))
    done = [out.metrics for out in outputs]
    freed, perfect = (sum(getattr(m, name) for m in done) for name in ("blocks_freed", "blocks_perfect"))
    return outputs, {
        "policy": policy,
        "keeps": "all" if fraction is None else keeps(fraction, None),
        "fraction": fraction,
        "budget": None if config is None else config.budget,
        "num_requests": len(outputs),
        "tokens_evicted": sum(m.tokens_evicted for m in done),
        "blocks_freed": freed,
        "reclaim_efficiency": freed / perfect if perfect else None,
        "peak_blocks": memory.stats().peak_in_use,
        "preemptions": sum(m.preemptions for m in done),
        "most_running": max(step.num_running for step in steps),
        "longest_wait_s": max(m.ttft_s or 0.0 for m in done),
        "tokens_per_s": sum(m.num_generated_tokens for m in done) / elapsed_s,
        "elapsed_s": elapsed_s,
        "blocks_over_time": [step.blocks_in_use for step in steps],
    }


def label(policy: str, fraction: float | None) -> str:
    """Return the name of a line in a chart."""
    return policy if fraction is None else f"{policy} {fraction:.0%}"
