"""What a compression policy is asked, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import ClassVar

from torch import Tensor

from kvreclaim.compression.stats import LayerStats
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.key_source import KeySource


class Signal(Enum):
    """What the engine must have at hand for a policy besides keys and values."""

    QUERY_STATS = auto()
    """Moments of the queries before rotation, and with them a verified rotation of every layer."""
    QUERY_CENTERS = auto()
    """Statistics with several centres per query head (calibrated by us; public files hold none)."""


class Mode(StrEnum):
    """Who shares one kept set. Every (layer, KV head) keeps the same number of tokens in all modes."""

    UNION = "union"
    """All layers and heads: top tokens of the maximum over both."""
    PER_HEAD = "per_head"
    """A KV head in all layers: top tokens of the mean over layers."""
    PER_LAYER_HEAD = "per_layer_head"
    """Nobody: each (layer, KV head) keeps its own top tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerView:
    """One layer of one live sequence, valid during the call of score; nothing in it may be changed.

    source:      its T keys (rotated) and values in token order: score them where they lie
    logical_len: position of the next query, tokens; >= T, more where tokens have been evicted
    stats:       of this layer's queries; None unless the policy needs them
    candidates:  tokens that may be evicted; the rest are protected sinks or recent tokens
    """

    layer: int
    source: KeySource
    logical_len: int
    facts: LayerFacts
    stats: LayerStats | None
    candidates: slice

    @property
    def keys(self) -> Tensor:
        """[K, T, D] any float dtype; copied out of the cache at each access."""
        return self.source.tensors()[0]

    @property
    def values(self) -> Tensor:
        """[K, T, Dv] any float dtype; copied out of the cache at each access."""
        return self.source.tensors()[1]


class CompressionPolicy(ABC):
    """Ranks the tokens of one layer. Subclasses are frozen dataclasses whose fields are their
    parameters (CompressionConfig.options), checked in __post_init__ with InvalidArgumentError.

    name:     how it is asked for
    evicts:   False if it keeps everything; score is then never asked
    compacts: False if survivors stay where they are, so that no block empties except by chance
    """

    name: ClassVar[str]
    evicts: ClassVar[bool] = True
    compacts: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Signal]:
        """What it must be given; a subclass overrides this with a plain class attribute."""
        return frozenset()

    @property
    def default_mode(self) -> Mode:
        """The mode used where the caller names none; a subclass overrides it likewise."""
        return Mode.PER_LAYER_HEAD

    @abstractmethod
    def score(self, view: LayerView) -> Tensor:
        """[K, T] fp32 on the device of the keys, higher = keep; every entry finite if keys and values
        are. Pure: no state, clock, log or I/O; depends on nothing but the view."""
