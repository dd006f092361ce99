"""Counts tokens of reasoning, and ends it after thinking_token_budget tokens."""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.features.thinking.tracker import FIELD, ThinkTracker, closing_ids
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.step.engine import Engine
from kvreclaim.parsers.thinking import ThinkSpan
from kvreclaim.refusals import Feature


class ThinkingBudgets(RequestFeature):
    """The option is the span of reasoning in the outputs; a budget alone is refused."""

    option = ThinkSpan
    is_made = True  # from the chat template and the prompt
    parameter = FIELD

    def __init__(self, engine: Engine) -> None:
        self._tokenizer = engine.loaded.tokenizer

    def conditions(self, spec: RequestSpec) -> Mapping[Feature, object]:
        return {
            Feature.THINKING_BUDGET: spec.params.thinking_token_budget is not None,
            Feature.UNKNOWN_REASONING: spec.option(ThinkSpan) is None,
        }

    def claim(self, draft: RequestDraft) -> None:
        if draft.spec.params.thinking_token_budget is None:
            return
        span = draft.spec.option(ThinkSpan)
        if span is not None:
            closing_ids(span, self._tokenizer)

    def reader(self, request: Request) -> ThinkTracker | None:
        span = request.spec.option(ThinkSpan)
        if span is None:
            return None
        return ThinkTracker(span, self._tokenizer, request.params.thinking_token_budget)

    def report(self, request: Request, metrics: RequestMetrics) -> None:
        readers = [seq.reader for seq in request.sequences]
        metrics.num_reasoning_tokens = sum(r.num_tokens for r in readers if isinstance(r, ThinkTracker))
