"""One example under one policy: verdict and cost; one line of the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict

from kvreclaim.engine.request.outputs import RequestMetrics

TRACE = "trace_tokens"
"""The extra figure of tasks with a chain of thought: generated tokens."""
SUMMED = ("blocks_freed", "blocks_perfect", "tokens_evicted", "compactions", "preemptions")


class Result(BaseModel):
    """Figures of one example.

    points, out_of, found, lost, extra, cached_by_turn, agreement_by_turn: as in task.TaskScore
    num_tokens, budget:  final length (at most, if the answer was generated) and budget, tokens
    full_blocks:         blocks of the full cache of this sequence at its end
    answer_blocks:       most blocks of its table after the prompt; peak_blocks: at any time
    timed_tokens, elapsed_s: tokens generated, or computed (not hit) if none were, and its share of the
                         batch's wall time; generated says which
    note:                what was omitted, and why
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
    """Return the fields of Result that come from the engine."""
    return {name: getattr(metrics, name) for name in ("peak_blocks", *SUMMED)} | {
        "answer_blocks": metrics.answer_blocks or metrics.peak_blocks,
        "gone_tokens": metrics.num_gone_tokens,
    }
