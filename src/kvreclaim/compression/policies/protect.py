"""Protection of tokens at given positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvreclaim.checks import is_int
from kvreclaim.compression.policy import Signal, Trait, Wrapper
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.options import option


@dataclass(frozen=True)
class Protect(Wrapper):
    """Another policy's ranking, with the tokens at given logical positions ranked first.

    A token at position p of L is protected if p < first, p >= L - last, or a <= p < b for a span
    (a, b). Protected tokens are evicted only after all others, the worst of them first. With unequal heads
    each head keeps all of them, and its other tokens by its count; if they exceed the budget, each head
    keeps the best of them, up to the budget.

    Three things differ from CompressionConfig. Its `sinks` and `recent` count live slots and hold
    absolutely: they must fit into the budget. Its `protect_prompt` covers the prompt, whole, and ranks
    below them. Here positions are those of the text, any stretch of it can be named, and too many
    protected tokens are no error: they compete with each other.

    inner: ranks the tokens; with a policy that evicts whole blocks, a block that holds a protected
           token is evicted after all that hold none
    first: leading tokens of the text
    last:  tokens of the text before the next one
    spans: pairs (a, b), b excluded; without any of the three the ranking is inner's
    Cost: inner's cost and O(T) per span; state: logical positions of the slots.
    """

    first: int = option(0, low=0, unit=" tokens")
    last: int = option(0, low=0, unit=" tokens")
    spans: tuple[tuple[int, int], ...] = ()
    name = "protect"
    reranks = True
    unfit = (Trait.KEEPS_ALL, Trait.CACHE_RELATIVE)
    remedy = "wrap a policy that ranks tokens, such as protect(snapkv)"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "spans", _checked_spans(self.spans))

    @property
    def needs(self) -> frozenset[Signal]:
        return self.inner.needs | {Signal.POSITIONS}

    def protects(self, logical_len: int) -> tuple[tuple[int, int], ...]:
        ends = ((0, self.first), (logical_len - self.last, logical_len))
        named = (span for span in (*ends, *self.spans) if span[0] < span[1])
        return (*named, *self.inner.protects(logical_len))


def _checked_spans(spans: object) -> tuple[tuple[int, int], ...]:
    entries = spans if isinstance(spans, Sequence) and not isinstance(spans, str) else [spans]
    checked = []
    for entry in entries:
        pair = tuple(entry) if isinstance(entry, Sequence) and all(map(is_int, entry)) else ()
        if len(pair) != 2 or not 0 <= pair[0] < pair[1]:
            raise InvalidArgumentError(
                f"an entry of protect option 'spans' is {entry!r}; it must be a pair (a, b) of positions, "
                "0 <= a < b, as in spans=((100, 200))."
            )
        checked.append((pair[0], pair[1]))
    return tuple(checked)
