"""The interface of a compression policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.spec.traits import Trait, unfit_to_wrap
from kvreclaim.compression.stats import LayerStats
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.key_source import KeySource
from kvreclaim.ops.moving import to_device
from kvreclaim.options import check_options
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


class Signal(Enum):
    """Inputs of a policy other than keys and values. The engine provides them."""

    QUERY_STATS = auto()
    """Moments of the queries before rotation, and a verified rotation of every layer."""
    QUERY_CENTERS = auto()
    """Statistics with several centres per query head. Only kvreclaim's calibration makes them."""
    QUERY_COVARIANCE = auto()
    """Statistics with the covariance of the queries. Only kvreclaim's calibration makes them."""
    SURROGATE = auto()
    """Statistics with learned weights of cached keys and values. Only kvreclaim's calibration makes them."""
    HEAD_SHARES = auto()
    """Statistics with each head's share of kept tokens. Only kvreclaim's calibration makes them."""
    RECENT_QUERIES = auto()
    """Last query_window queries of each layer, rotated."""
    ATTENTION_MASS = auto()
    """Attention that each slot has received from all queries so far."""
    POSITIONS = auto()
    """Logical position of the token in each slot."""
    OUTPUT_PROJECTION = auto()
    """Output projection of each head into the residual stream."""
    FUTURE_QUERIES = auto()
    """Future queries; available only for a given text (LLM.score)."""
    TOKEN_SCORES = auto()
    """Statistics with weights of hidden states, and each token's score by them during its forward pass."""
    READ_AGAIN = auto()
    """Attention to the prompt's tokens while the model repeats it; only with prompt_only."""


class Mode(StrEnum):
    """Heads that share one kept set. Every (layer, KV head) keeps the same number of tokens in all modes."""

    UNION = "union"
    """All layers and heads: top tokens of the maximum over both."""
    PER_HEAD = "per_head"
    """A KV head in all layers: top tokens of the mean over layers."""
    PER_LAYER_HEAD = "per_layer_head"
    """No sharing: each (layer, KV head) keeps its own top tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerSignals:
    """Signals of one layer of one sequence; None for signals that the policy does not need.

    queries:           [H, w, D] rotated, oldest first, w <= query_window (less early in a sequence)
    mass:              [K, T] fp32, attention probabilities summed over all queries so far and the query
                       heads of the KV head
    positions:         [K, T] int32 logical positions, ascending
    output_projection: [H, Dv, M] the layer's W_o by query head; M the model's hidden size
    future_queries:    [H, N, D] rotated queries of the tokens from the next one on, N >= 0
    read_again:        [K, T] fp32, maximum attention to each token while the model repeats the prompt
    token_scores:      [K, T] fp32, score of each token's hidden state by the statistics' weights
    """

    queries: Tensor | None = None
    mass: Tensor | None = None
    positions: Tensor | None = None
    output_projection: Tensor | None = None
    future_queries: Tensor | None = None
    read_again: Tensor | None = None
    token_scores: Tensor | None = None


NO_SIGNALS = LayerSignals()


@dataclass(frozen=True, slots=True, eq=False)
class LayerView:
    """One layer of one live sequence. Valid during the call of score; read-only.

    source:      T keys (rotated) and values in token order; can score them inside the cache
    logical_len: position of the next query, in tokens; above T if tokens have been evicted
    stats:       statistics of this layer's queries; None unless the policy needs them
    candidates:  tokens that may be evicted; the rest are protected sinks or recent tokens
    signals:     the signals that the policy needs, except statistics
    first:       True if nothing has been evicted yet: neighbouring slots hold neighbouring tokens
    budget:      tokens that each head keeps, protected ones included; with unequal heads the average while
                 they are scored, and each head's own number when it is reranked
    first_head:  index in its layer of the view's first KV head

    num_layers:  layers that the view shows (any_layers): the heads of all of them, layer by layer; `layer` is
                 the first

    With unequal heads a view shows one KV head: K = 1, H = G.
    """

    layer: int
    source: KeySource
    logical_len: int
    facts: LayerFacts
    stats: LayerStats | None
    candidates: slice
    signals: LayerSignals = NO_SIGNALS
    first: bool = True
    budget: int = 0
    first_head: int = 0
    num_layers: int = 1

    @property
    def keys(self) -> Tensor:
        """[K, T, D] any float dtype; copied out of the cache at each access."""
        return self.source.tensors()[0]

    @property
    def values(self) -> Tensor:
        """[K, T, Dv] any float dtype; copied out of the cache at each access."""
        return self.source.tensors()[1]


@dataclass(frozen=True, slots=True, eq=False)
class CountsQuestion:
    """Input of `counts`, the number of tokens that each head of one sequence keeps. All fields except scores
    lie on the host.

    scores:      scores[layer][head] [T] fp32 of the tokens that may be evicted; T may differ
    protected:   [L, K] float64 tokens that each head keeps in addition: sinks, recent and protected ones; or
                 one number for all heads
    budget:      tokens per head on average, protected ones included
    logical_len: position of the next query: tokens of the text so far, evicted ones included
    stats:       of each layer; None unless the policy needs them
    """

    scores: Sequence[Sequence[Tensor]]
    protected: Tensor | int
    budget: int
    logical_len: int
    stats: Sequence[LayerStats] | None = None

    def protected_on(self, device: torch.device) -> Tensor | int:
        """Return `protected` on this device, for sums with counts."""
        return to_device(self.protected, device) if isinstance(self.protected, Tensor) else self.protected

    @property
    def free(self) -> float:
        """Average number of unprotected tokens that a head keeps."""
        return self.budget - float(np.asarray(self.protected, dtype=np.float64).mean())

    @property
    def limit(self) -> Tensor:
        """[L, K] float64: tokens of each head that may be evicted."""
        return torch.tensor([[len(head) for head in layer] for layer in self.scores], dtype=torch.float64)


class CompressionPolicy(ABC):
    """Ranks the tokens of one layer. A subclass is a frozen dataclass; its fields are the policy's parameters
    (CompressionConfig.options). Fields declared with options.option are checked by type and bounds, all
    others in __post_init__, with InvalidArgumentError.

    Class attributes or properties of a subclass:

    name:           the policy's name in specs
    eviction_method: effect on memory. KEEP and READS never call score. Under BLOCKS a block's score is the
                    mean over its tokens, layers and heads. CELLS also calls counts. READS calls block_scores,
                    and budget is the tokens read per head
    query_window:   queries kept for Signal.RECENT_QUERIES
    prompt_only:    True if it compresses only once, at the end of the prompt
    cache_relative: True if a token's position is its slot: keys are rotated again when they move
    reranks:        True if the order of a head's tokens depends on how many the head keeps, or if some are
                    protected; then override rerank, or protects
    any_heads:      True if score_many takes views of one KV head each, from any layers
    any_layers:     True if a view may show num_layers > 1, as a GPU's passes have it: scores do not depend on
                    the index of the layer
    """

    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_options(self, f"{self.name} option '{{}}'")

    @property
    def eviction_method(self) -> EvictionMethod:
        """A subclass overrides this with a plain class attribute."""
        return EvictionMethod.COMPACT

    @property
    def query_window(self) -> int:
        return 0

    @property
    def prompt_only(self) -> bool:
        return False

    @property
    def cache_relative(self) -> bool:
        return False

    @property
    def reranks(self) -> bool:
        return False

    @property
    def any_heads(self) -> bool:
        return False

    @property
    def any_layers(self) -> bool:
        return False

    @property
    def needs(self) -> frozenset[Signal]:
        """Signals that the policy needs. A subclass overrides this with a plain class attribute."""
        return frozenset()

    @property
    def default_mode(self) -> Mode:
        """Default mode. A subclass overrides this with a plain class attribute."""
        return Mode.PER_LAYER_HEAD

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """Return scores [K, T] fp32 on the keys' device, higher = keep; finite if keys and values are. Pure:
        no state, clock, log or I/O; the result depends only on the view."""

    def score_many(self, views: Sequence[LayerView]) -> list[Tensor]:
        """Score the same layer of several sequences, or (any_heads) several KV heads. Each result must equal
        `score` of its view alone, bit for bit. Override it to share work (see score_all)."""
        return [self.score(view) for view in views]

    def rerank(self, view: LayerView, scores: Tensor) -> Tensor:
        """Return scores [K, T] fp32 for the selection within each head. They do not compare between heads:
        `counts` uses the original scores. Pure, like `score`."""
        return scores

    def protects(self, logical_len: int) -> tuple[tuple[int, int], ...]:
        """Return spans (a, b) of positions a <= p < b to evict last; `needs` must have POSITIONS."""
        return ()

    def counts(self, question: CountsQuestion) -> Tensor:
        """Return the tokens that each head keeps, [L, K] float, before rounding to blocks; CELLS only. The
        mean is the budget; a head keeps at least its protected tokens. The result is on the host or on the
        scores' device; avoid a synchronisation."""
        raise NotImplementedError(f"{self.name} keeps equal counts")

    def block_scores(self, queries: Tensor, low: Tensor, high: Tensor) -> Tensor:
        """Return block scores [..., K, N] fp32, higher = read; READS only.

        Args:
            queries:   [..., H, D] of one decode step, rotated
            low, high: [..., K, N, D] least and greatest entry of each block's keys
        """
        raise NotImplementedError(f"{self.name} reads every block")


def window_of(policy: CompressionPolicy) -> int | None:
    """Queries before the first pass that must be computed, not found in the prefix index; None: all."""
    if Signal.ATTENTION_MASS in policy.needs:
        return None
    return max(1, policy.query_window) if Signal.RECENT_QUERIES in policy.needs else 1


def traits(policy: CompressionPolicy) -> frozenset[Trait]:
    """Return the traits for which wrappers may refuse the policy."""
    own = unfit_to_wrap(policy.eviction_method)
    return frozenset({own} if own else ()) | ({Trait.CACHE_RELATIVE} if policy.cache_relative else set())


def _of_inner(name: str) -> Any:
    """Make a wrapper's property that returns the inner policy's value."""
    return property(lambda wrapper: getattr(wrapper.inner, name))


@dataclass(frozen=True)
class Wrapper(CompressionPolicy):
    """A policy around another one, `inner`. Methods that are not overridden delegate to it. Raises:
    InvalidArgumentError for an inner policy with a trait in `unfit`.

    default_inner: name of the inner policy by default
    unfit, remedy: traits that an inner policy must not have, and what to use instead; overridden by plain
                   class attributes
    """

    inner: CompressionPolicy
    default_inner: ClassVar[str] = "query_mixture"

    @property
    def unfit(self) -> tuple[Trait, ...]:
        return (Trait.KEEPS_ALL,)

    @property
    def remedy(self) -> str:
        return "wrap a policy that ranks tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        for trait in sorted(traits(self.inner) & set(self.unfit)):
            raise InvalidArgumentError(
                f"{self.name}({self.inner.name}) is refused: {self.inner.name} {trait}; {self.remedy}."
            )

    eviction_method = _of_inner("eviction_method")
    query_window = _of_inner("query_window")
    prompt_only = _of_inner("prompt_only")
    cache_relative = _of_inner("cache_relative")
    reranks = _of_inner("reranks")
    any_heads = _of_inner("any_heads")
    any_layers = _of_inner("any_layers")
    needs = _of_inner("needs")
    default_mode = _of_inner("default_mode")

    def rerank(self, view: LayerView, scores: Tensor) -> Tensor:
        return self.inner.rerank(view, scores)

    def protects(self, logical_len: int) -> tuple[tuple[int, int], ...]:
        return self.inner.protects(logical_len)

    def counts(self, question: CountsQuestion) -> Tensor:
        return self.inner.counts(question)

    def score(self, view: LayerView) -> Tensor:
        return self.inner.score(view)

    def score_many(self, views: Sequence[LayerView]) -> list[Tensor]:
        return score_all(self.inner, views)


def score_all(policy: CompressionPolicy, views: Sequence[LayerView]) -> list[Tensor]:
    """Call score_many, or `score` per view if a subclass overrides only that."""
    for owner in type(policy).__mro__:
        if "score_many" in vars(owner):
            return policy.score_many(views)
        if "score" in vars(owner):
            break
    return [policy.score(view) for view in views]
