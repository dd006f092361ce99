"""One example under one policy: the verdict and what it cost; one line of the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvreclaim.engine.request.outputs import RequestMetrics

TRACE = "trace_tokens"
"""The extra figure of tasks with a chain of thought: tokens generated."""
SUMMED = ("blocks_freed", "blocks_perfect", "tokens_evicted", "compactions", "preemptions")


class Result(BaseModel):
    """Figures of one example.

    points, out_of, found, lost, extra, cached_by_turn, agreement_by_turn: as in task.TaskScore
    num_tokens, budget:  final length (at most, if the answer was generated) and budget, tokens
    full_blocks:         blocks that the full cache of this sequence takes at its end
    answer_blocks:       most blocks that its table held behind the prompt; peak_blocks: at any time
    timed_tokens, elapsed_s: tokens generated, or computed (not hit) where nothing was, and its share of the
                         batch's wall time; generated says which
    note:                what could not be done besides, and why
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    points: float
    out_of: float
    found: tuple[float, ...] = ()
    lost: tuple[float, ...] = ()
    extra: dict[str, float] = {}
    cached_by_turn: tuple[float, ...] = ()
    agreement_by_turn: tuple[float, ...] = ()
    num_tokens: int
    budget: int
    full_blocks: int
    answer_blocks: int
    peak_blocks: int
    blocks_freed: int
    blocks_perfect: int
    tokens_evicted: int
    compactions: int
    preemptions: int
    gone_tokens: int = 0
    timed_tokens: int
    elapsed_s: float
    generated: bool
    note: str | None = None


def over(requests: Sequence[RequestMetrics]) -> RequestMetrics:
    """Metrics of a session: the last request's, with sums and peaks over all of them."""
    totals = {name: sum(getattr(each, name) for each in requests) for name in (*SUMMED, "num_gone_tokens")}
    peaks = {name: max(getattr(each, name) for each in requests) for name in ("peak_blocks", "answer_blocks")}
    return replace(requests[-1], **totals, **peaks)


def cost(metrics: RequestMetrics) -> dict[str, Any]:
    """The fields of Result that the engine tells."""
    return {name: getattr(metrics, name) for name in ("peak_blocks", *SUMMED)} | {
        "answer_blocks": metrics.answer_blocks or metrics.peak_blocks,
        "gone_tokens": metrics.num_gone_tokens,
    }
