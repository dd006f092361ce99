"""Runs a batch of requests through an engine and times it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvreclaim.chunks import Chunk, chunk_reuse_of
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM, Observer
from kvreclaim.engine.api.prompts import Piece
from kvreclaim.engine.request.outputs import RequestMetrics, RequestOutput, ScoreOutput
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.eval.agreement import Divergence
from kvreclaim.eval.plan import GridColumn
from kvreclaim.eval.task import Answer, Item
from kvreclaim.sampling_params import SamplingParams


def engine_prompts(items: Sequence[Item], setting: GridColumn) -> list[dict[str, Any]]:
    """Return whole prompts, or their pieces. Raises: InvalidArgumentError for prompts without chunks if these
    are to be reused."""
    how, method = chunk_reuse_of(setting.chunk_reuse), {"sparse_prefill": setting.sparse_prefill}
    if how is None:
        if setting.evicts:
            return [
                {"prompt_token_ids": list(item.prompt), "compress_prompt_at": item.compress_at, **method}
                for item in items
            ]
        return [{"prompt_token_ids": list(item.prompt), **method} for item in items]
    if not all(item.chunks for item in items):
        raise InvalidArgumentError(
            f"chunk reuse {setting.chunk_reuse} is for prompts with chunks, and this task has none; take "
            "needles:chunks, table:chunks or assignments:chunks, or whole."
        )
    return [{"prompt": _pieces(item), "chunk_reuse": how, **method} for item in items]


def _pieces(item: Item) -> list[Piece]:
    prompt, end = list(item.prompt), 0
    pieces: list[Piece] = []
    for first, stop in item.chunks:
        pieces += [prompt[end:first], Chunk(prompt[first:stop])]
        end = stop
    return [piece for piece in [*pieces, prompt[end:]] if piece]


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
