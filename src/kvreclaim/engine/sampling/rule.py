"""A restriction of an output's tokens, which a feature makes (engine/feature.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class OutputRule(Protocol):
    """Restricts the tokens of one output: whether it may end here, and which tokens may come next."""

    @property
    def may_end(self) -> bool: ...

    def allows(self, token: int) -> bool: ...

    def take(self, token: int) -> bool:
        """Take the next token into account. Returns: whether the output is complete. Raises:
        InvalidArgumentError if it cannot go on."""

    @staticmethod
    def restrict(logits: Tensor, places: list[int], rules: Sequence[Any]) -> None:
        """Leave in logits [N, V], in the rows at these places, the tokens that may come next. rules: of these
        rows, all of one type. Raises: InvalidArgumentError."""
