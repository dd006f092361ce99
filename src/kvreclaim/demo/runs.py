"""The demo's experiments: the same sequences under every policy, then many requests at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.demo.in_place import InPlace
from kvreclaim.demo.report import LoadRun, PolicyRun
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import RequestOutput, ScoreOutput, StepStats
from kvreclaim.eval.chain import ChainTask
from kvreclaim.eval.example import Example, TokenKind, accuracy, exact_match, progress
from kvreclaim.eval.requests import timed
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.sampling_params import SamplingParams

POLICIES: dict[str, tuple[str, dict[str, object]]] = {
    "streaming_llm": ("streaming_llm", {}),
    "knorm": ("knorm", {}),
    "knorm-large": ("knorm", {"keep": "large"}),
    "triattention": ("triattention", {}),
    "query_mixture": ("query_mixture", {}),
}
"""Name in the table -> (policy, its options)."""
HEADLINE = "query_mixture"
OnProgress = Callable[[str], None]


@dataclass(frozen=True)
class DemoPlan:
    """Sizes of the demo; the defaults end in under five minutes on two cores.

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

    def settings(self) -> list[tuple[str, float | None]]:
        """(policy, fraction) of every run."""
        return [("full", None), *((p, f) for f in self.fractions for p in POLICIES)]

    def budget(self, fraction: float) -> int:
        return round(self.final_length * fraction)

    def names(self, policy: str, fraction: float | None) -> dict[str, Any]:
        """Setting of a run, for its report."""
        budget = None if fraction is None else self.budget(fraction)
        return {"policy": policy, "fraction": fraction, "budget": budget}

    def compression(self, policy: str, fraction: float | None) -> CompressionConfig | None:
        if fraction is None:
            return None
        name, options = POLICIES[policy]
        return CompressionConfig(
            name,
            self.budget(fraction),
            interval=self.interval,
            sinks=self.sinks,
            recent=self.recent,
            options=options,
        )

    def chance(self, fraction: float) -> float:
        """Share of the blocks that evicting at random, the same slots in every head, would empty.

        Source: a block of S slots is empty with probability (1 - r)^S when r of the tokens stay.
        """
        return (1 - fraction) ** self.block_size


def run_policies(plan: DemoPlan, llm: LLM, scorer: LLM, on_progress: OnProgress) -> list[PolicyRun]:
    """Every policy at every budget: teacher-forced accuracy, then free-running generation.

    llm has the demo's pool; scorer one that holds all scored sequences, so that nothing is computed twice.
    """
    examples = [plan.task.sample(seed) for seed in range(max(plan.num_scored, plan.num_generated))]
    in_place = llm.engine.extensions.add(InPlace(plan.block_size))
    runs = []
    for policy, fraction in plan.settings():
        on_progress(policy if fraction is None else f"{policy} {fraction:.0%}")
        config = plan.compression(policy, fraction)
        scored = _score(scorer, examples[: plan.num_scored], config)
        in_place.freed.clear()
        outputs, _, figures = _generate(llm, examples[: plan.num_generated], config)
        figures |= plan.names(policy, fraction) | _accuracies(examples, scored) | _progress(examples, outputs)
        chance = None if fraction is None else plan.chance(fraction)
        runs.append(
            PolicyRun(freed_in_place=sum(in_place.freed.values()), chance_efficiency=chance, **figures)
        )
    return runs


def run_load(plan: DemoPlan, llm: LLM, on_progress: OnProgress) -> list[LoadRun]:
    """Many requests at once in the same pool, without and with compression."""
    examples = [plan.task.sample(1_000 + seed) for seed in range(plan.num_load)]
    runs = []
    for policy, fraction in (("full", None), (HEADLINE, plan.load_fraction)):
        on_progress(f"load, {policy}")
        outputs, steps, figures = _generate(llm, examples, plan.compression(policy, fraction))
        figures |= plan.names(policy, fraction) | load_figures(outputs, steps)
        runs.append(LoadRun(num_requests=len(examples), **figures))
    return runs


def _score(scorer: LLM, examples: Sequence[Example], config: CompressionConfig | None) -> list[ScoreOutput]:
    prompts, traces = [list(e.prompt) for e in examples], [list(e.trace) for e in examples]
    return timed(lambda: scorer.score(prompts, traces, config))[0]


def _generate(
    llm: LLM, examples: Sequence[Example], config: CompressionConfig | None
) -> tuple[list[RequestOutput], list[StepStats], dict[str, Any]]:
    """Return the examples' prompts continued greedily, each to its trace's length."""
    params = [SamplingParams(temperature=0.0, max_tokens=len(e.trace), ignore_eos=True) for e in examples]
    return generate_batch(llm, [list(e.prompt) for e in examples], params, config)


def generate_batch(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    config: CompressionConfig | None,
) -> tuple[list[RequestOutput], list[StepStats], dict[str, Any]]:
    """One batch of generations in a pool that starts empty and without cached prefixes. Returns: outputs,
    what each step did, and the fields of PoolRun that follow from the batch."""
    memory = llm.engine.memory
    memory.reset_prefix_cache()
    memory.pool.reset_peak()
    steps: list[StepStats] = []
    outputs, elapsed_s = timed(lambda: llm.generate(prompts, params, config, on_step=steps.append))
    return (
        outputs,
        steps,
        {
            "peak_blocks": memory.stats().peak_in_use,
            "preemptions": sum(out.metrics.preemptions for out in outputs),
            "tokens_per_s": sum(out.metrics.num_generated_tokens for out in outputs) / elapsed_s,
            "elapsed_s": elapsed_s,
            "blocks_over_time": [step.blocks_in_use for step in steps],
        },
    )


def load_figures(outputs: Sequence[RequestOutput], steps: Sequence[StepStats]) -> dict[str, Any]:
    """Figures of a run under load."""
    running = [step.num_running for step in steps]
    waits = [out.metrics.ttft_s or 0.0 for out in outputs]
    return {"most_running": max(running), "mean_running": mean(running), "longest_wait_s": max(waits)}


def _accuracies(examples: Sequence[Example], scored: list[ScoreOutput]) -> dict[str, Any]:
    def right(*kinds: TokenKind) -> float:
        return mean(accuracy(e, s.predicted, kinds) for e, s in zip(examples, scored, strict=False))

    return {
        "num_scored": len(scored),
        "accuracy": right(TokenKind.LOOKUP, TokenKind.RESTORE),
        "lookup_accuracy": right(TokenKind.LOOKUP),
        "carry_accuracy": right(TokenKind.RESTORE),
    }


def _progress(examples: Sequence[Example], outputs: list[RequestOutput]) -> dict[str, Any]:
    """Correct share of free-running generation, and what it evicted."""
    pairs = [(e, out.outputs[0].token_ids) for e, out in zip(examples, outputs, strict=False)]
    perfect = sum(out.metrics.blocks_perfect for out in outputs)
    freed = sum(out.metrics.blocks_freed for out in outputs)
    return {
        "num_generated": len(outputs),
        "progress": mean(progress(*pair) for pair in pairs),
        "exact_match": mean(exact_match(*pair) for pair in pairs),
        "tokens_evicted": sum(out.metrics.tokens_evicted for out in outputs),
        "blocks_freed": freed,
        "reclaim_efficiency": freed / perfect if perfect else None,
    }
