"""The demo's experiments: the same sequences under every policy, then many requests at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Any

from kvreclaim.compression import CompressionConfig
from kvreclaim.config import SamplingParams
from kvreclaim.demo.report import LoadRun, PolicyRun
from kvreclaim.engine.core.outputs import RequestOutput, ScoreOutput, StepStats
from kvreclaim.engine.face.llm import LLM
from kvreclaim.errors import KVReclaimError
from kvreclaim.eval.chain import ChainTask
from kvreclaim.eval.example import Example, Kind, accuracy, exact_match, progress
from kvreclaim.memory.blocks import blocks_for

POLICIES: dict[str, tuple[str, dict[str, object]]] = {
    "evict-only": ("evict-only", {}),
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

    fractions: tuple[float, ...] = (0.5, 0.25, 0.1)
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
    runs = []
    for policy, fraction in plan.settings():
        on_progress(policy if fraction is None else f"{policy} {fraction:.0%}")
        config = plan.compression(policy, fraction)
        scored = _score(scorer, examples[: plan.num_scored], config)
        generated = _Generation.run(llm, examples[: plan.num_generated], config)
        runs.append(_policy_run(policy, fraction, plan, examples, scored, generated))
    return runs


def run_load(plan: DemoPlan, llm: LLM, on_progress: OnProgress) -> list[LoadRun]:
    """Many requests at once in the same pool, without and with compression."""
    examples = [plan.task.sample(1_000 + seed) for seed in range(plan.num_load)]
    runs = []
    for policy, fraction in (("full", None), (HEADLINE, plan.load_fraction)):
        on_progress(f"load, {policy}")
        done = _Generation.run(llm, examples, plan.compression(policy, fraction))
        running = [step.num_running for step in done.steps]
        runs.append(
            LoadRun(
                policy=policy,
                fraction=fraction,
                budget=None if fraction is None else plan.budget(fraction),
                num_requests=len(examples),
                most_running=max(running),
                mean_running=mean(running),
                **done.figures(),
            )
        )
    return runs


def _score(scorer: LLM, examples: Sequence[Example], config: CompressionConfig | None) -> list[ScoreOutput]:
    outputs = scorer.score([list(e.prompt) for e in examples], [list(e.trace) for e in examples], config)
    _raise_errors([out.error for out in outputs])
    return outputs


@dataclass(frozen=True, slots=True, eq=False)
class _Generation:
    """One batch of free-running generations in the pool."""

    outputs: list[RequestOutput]
    steps: list[StepStats]
    peak_blocks: int
    elapsed_s: float

    @classmethod
    def run(cls, llm: LLM, examples: Sequence[Example], config: CompressionConfig | None) -> _Generation:
        """Greedy, each to its trace's length; the pool starts empty and without cached prefixes."""
        memory = llm.engine.memory
        memory.reset_prefix_cache()
        memory.reset_peak()
        steps: list[StepStats] = []
        params = [SamplingParams(temperature=0.0, max_tokens=len(e.trace), ignore_eos=True) for e in examples]
        started = time.perf_counter()
        outputs = llm.generate([list(e.prompt) for e in examples], params, config, on_step=steps.append)
        elapsed_s = time.perf_counter() - started
        _raise_errors([out.error for out in outputs])
        return cls(outputs, steps, memory.stats().peak_in_use, elapsed_s)

    def figures(self) -> dict[str, Any]:
        """The fields of PoolRun that the batch itself tells."""
        metrics = [out.metrics for out in self.outputs]
        return {
            "peak_blocks": self.peak_blocks,
            "preemptions": sum(m.preemptions for m in metrics),
            "tokens_per_s": sum(m.num_generated_tokens for m in metrics) / self.elapsed_s,
            "elapsed_s": self.elapsed_s,
            "blocks_over_time": [step.blocks_in_use for step in self.steps],
        }


def _raise_errors(errors: list[str | None]) -> None:
    failed = [error for error in errors if error is not None]
    if failed:
        raise KVReclaimError(f"{len(failed)} of {len(errors)} demo requests failed: {failed[0]}")


def _policy_run(
    policy: str,
    fraction: float | None,
    plan: DemoPlan,
    examples: Sequence[Example],
    scored: list[ScoreOutput],
    done: _Generation,
) -> PolicyRun:
    metrics = [out.metrics for out in done.outputs]
    perfect = sum(m.blocks_perfect for m in metrics)
    freed = sum(m.blocks_freed for m in metrics)
    texts = [out.outputs[0].token_ids for out in done.outputs]

    def right(*kinds: Kind) -> float:
        return mean(accuracy(e, s.predicted, kinds) for e, s in zip(examples, scored, strict=False))

    return PolicyRun(
        policy=policy,
        fraction=fraction,
        budget=None if fraction is None else plan.budget(fraction),
        num_scored=len(scored),
        accuracy=right(Kind.LOOKUP, Kind.RESTORE),
        lookup_accuracy=right(Kind.LOOKUP),
        carry_accuracy=right(Kind.RESTORE),
        num_generated=len(texts),
        progress=mean(progress(e, t) for e, t in zip(examples, texts, strict=False)),
        exact_match=mean(exact_match(e, t) for e, t in zip(examples, texts, strict=False)),
        tokens_evicted=sum(m.tokens_evicted for m in metrics),
        blocks_freed=freed,
        reclaim_efficiency=freed / perfect if perfect else None,
        chance_efficiency=None if fraction is None else plan.chance(fraction),
        **done.figures(),
    )
