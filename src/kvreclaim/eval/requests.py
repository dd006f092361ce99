"""Runs a batch of requests through an engine and times it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM, Observer
from kvreclaim.engine.request.outputs import RequestMetrics, RequestOutput, ScoreOutput
from kvreclaim.errors import KVReclaimError
from kvreclaim.eval.agreement import Divergence
from kvreclaim.eval.plan import GridColumn
from kvreclaim.eval.prompts import engine_prompts
from kvreclaim.eval.task import Answer, Item
from kvreclaim.sampling_params import SamplingParams

Out = TypeVar("Out", ScoreOutput, RequestOutput)
Configs = Sequence[CompressionConfig | None]


class CellError(KVReclaimError):
    """A request of a cell failed while it ran."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """Answer to one item; seconds and tokens are its share of the batch's call."""

    answer: Answer
    metrics: RequestMetrics
    timed_tokens: int
    elapsed_s: float
    generated: bool


def score(
    llm: LLM, items: Sequence[Item], configs: Configs, watchers: list[Divergence] | None, setting: GridColumn
) -> list[TimedAnswer]:
    """Teacher-force the continuations. Raises: CellError."""
    outs, elapsed_s = timed_scores(llm, items, configs, watchers, setting)
    sums = [{}] * len(items) if watchers is None else [watcher.sums() for watcher in watchers]
    return [
        TimedAnswer(
            Answer(tuple(out.predicted), tuple(out.logprobs), compared=compared),
            out.metrics,
            item.num_tokens - out.metrics.num_cached_tokens,
            elapsed_s / len(items),
            generated=False,
        )
        for item, out, compared in zip(items, outs, sums, strict=True)
    ]


def timed_scores(
    llm: LLM,
    items: Sequence[Item],
    configs: Configs,
    watchers: Sequence[Observer] | None,
    setting: GridColumn,
) -> tuple[list[ScoreOutput], float]:
    """The engine's scores of a batch, and seconds. Raises: CellError."""
    prompts = engine_prompts(items, setting)
    texts = [list(item.continuation) for item in items]
    return timed(lambda: llm.score(prompts, texts, configs, observers=watchers))


def generate(llm: LLM, items: Sequence[Item], configs: Configs, setting: GridColumn) -> list[TimedAnswer]:
    """Answer the prompts. Raises: CellError."""
    params = [
        SamplingParams(
            temperature=item.temperature,
            seed=item.seed,
            max_tokens=len(item.continuation) or item.max_new_tokens,
            ignore_eos=bool(item.continuation),
        )
        for item in items
    ]
    prompts = engine_prompts(items, setting)
    outs, elapsed_s = timed(lambda: llm.generate(prompts, params, configs))
    return [
        TimedAnswer(
            Answer(text=out.outputs[0].text, token_ids=tuple(out.outputs[0].token_ids)),
            out.metrics,
            out.metrics.num_generated_tokens,
            elapsed_s / len(items),
            generated=True,
        )
        for out in outs
    ]


def timed(call: Callable[[], list[Out]]) -> tuple[list[Out], float]:
    """Results of a batch, and seconds. Raises: CellError if a request failed."""
    started = time.perf_counter()
    outs = call()
    elapsed_s = time.perf_counter() - started
    failed = [out.error for out in outs if out.error is not None]
    if failed:
        raise CellError(f"{len(failed)} of {len(outs)} requests failed: {failed[0]}")
    return outs, elapsed_s
