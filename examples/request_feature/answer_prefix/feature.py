"""Begins every output of a request with given tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvreclaim.checks import require
from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.step.engine import Engine

COUNTER = "kvreclaim:answer_prefix_tokens"


@dataclass(frozen=True, slots=True)
class AnswerPrefix:
    """answer_prefix: token ids that every output begins with"""

    answer_prefix: Sequence[int]


class PrefixReader:
    """Forces the tokens of the prefix, one after the other."""

    def __init__(self, tokens: Sequence[int], counts: Counter[str]) -> None:
        self._left, self._counts = list(reversed(tokens)), counts
        self.num_answer: int | None = None
        self.is_unsure = False

    @property
    def forced(self) -> int | None:
        return self._left[-1] if self._left else None

    def take(self, token: int) -> None:
        if self._left:
            self._left.pop()
            self._counts[COUNTER] += 1


class AnswerPrefixes(RequestFeature):
    """The prefix counts as generated tokens."""

    option = AnswerPrefix
    prompt_keys: ClassVar = {"answer_prefix": list}
    usage: ClassVar = {"prefix_tokens": lambda metrics: metrics.counts.get("prefix_tokens", 0)}
    counters: ClassVar = {COUNTER: "Tokens of answer prefixes."}

    def __init__(self, engine: Engine) -> None:
        self._vocab_size, self._counts = engine.loaded.vocab_size, engine.totals.counts

    @classmethod
    def http_fields(cls) -> dict[str, tuple[Any, Any]]:
        from pydantic import Field

        return {"answer_prefix": (list[int] | None, Field(None, min_length=1, max_length=64))}

    def claim(self, draft: RequestDraft) -> None:
        prefix, limit = draft.spec.option(AnswerPrefix).answer_prefix, draft.spec.params.max_tokens
        wrong = [token for token in prefix if type(token) is not int or not 0 <= token < self._vocab_size]
        require(
            not wrong,
            f"answer_prefix holds {wrong[:1]}; ids are integers from 0 to {self._vocab_size - 1}.",
            "answer_prefix",
        )
        require(
            limit is None or len(prefix) < limit,
            f"answer_prefix has {len(prefix)} tokens, but max_tokens is {limit}; shorten it or raise "
            "max_tokens.",
            "answer_prefix",
        )

    def reader(self, request: Request) -> PrefixReader:
        return PrefixReader(request.spec.option(AnswerPrefix).answer_prefix, self._counts)

    def report(self, request: Request, metrics: RequestMetrics) -> None:
        most = len(request.spec.option(AnswerPrefix).answer_prefix)
        metrics.counts["prefix_tokens"] = sum(min(most, seq.num_generated) for seq in request.sequences)
