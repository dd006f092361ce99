"""What a request knows of its features, which are defined above it (engine/feature.py)."""

from __future__ import annotations

from typing import Any, Protocol

from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.sampling.rule import OutputRule


class TokenReader(Protocol):
    """Follows one output, token by token.

    forced:     the next token; None: any may follow
    num_answer: the last characters of the text so far that may hold stop strings; None: all new ones
    is_unsure:  whether it is not known yet that the text so far may hold stop strings
    """

    num_answer: int | None
    is_unsure: bool

    @property
    def forced(self) -> int | None: ...

    def take(self, token: int) -> None:
        """Take the next token into account."""


class FeatureHooks(Protocol):
    """Methods of engine.feature.RequestFeature that are called for a request it belongs to."""

    def begin(self, seq: Any) -> None: ...

    def reader(self, request: Any) -> TokenReader | None: ...

    def rule(self, request: Any) -> OutputRule | None: ...

    def before_pass(self, seq: Any) -> None: ...

    def report(self, request: Any, metrics: RequestMetrics) -> None: ...
