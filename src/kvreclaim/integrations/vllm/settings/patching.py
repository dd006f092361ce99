"""A function of vLLM is wrapped once, and stays reachable."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MARK = "_kvreclaim_original"


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace owner.name by make(original), once; the original stays reachable under MARK."""
    original = getattr(owner, name)
    if not hasattr(original, MARK):
        wrapped = functools.wraps(original)(make(original))
        setattr(wrapped, MARK, original)
        setattr(owner, name, wrapped)


def original_of(function: Any) -> Any:
    """vLLM's own function, whether it is wrapped by us or not."""
    return getattr(function, MARK, function)
