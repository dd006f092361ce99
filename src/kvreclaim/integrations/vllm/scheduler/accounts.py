"""What the ledger reads of vLLM, and what it notes of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.integrations.vllm.scheduler.passes import Counts
from kvreclaim.schedule import EvictionCounters, Footprint
from kvreclaim.schedule.budget.ledger import LedgerPool


class VllmRequest(Protocol):
    """Fields read of vLLM's request. num_computed_tokens counts the steps in flight; of these tokens none is
    taken back where a pass is decided: see speculation.py."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int
    num_tokens: int
    num_output_placeholders: int
    spec_token_ids: list[int]
    resumable: bool
    sampling_params: Any


class PlacedPool(LedgerPool[str], Protocol):
    """The block pool and the tables of all requests, without the places of blocks given back.

    num_blocks: blocks that requests can have
    """

    @property
    def num_blocks(self) -> int: ...

    def places(self, request_id: str) -> int:
        """Blocks that the request has had so far, those given back included; 0 for one that is not known."""

    def covering(self, num_spare: int) -> LedgerPool[str]:
        """The same, in which a pass leaves the last blocks of a table alone: they hold no token."""

    def others_held(self, request_id: str) -> int:
        """Blocks that the request holds in groups that are not compressed."""

    def others_most(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens holds there at most."""

    def others_settled(self, num_tokens: int) -> int:
        """The same, once its prompt is computed."""


@dataclass(slots=True, eq=False)
class RequestAccount:
    """A request: how it is compressed (None: not at all), its cache, and what it has given back so far, also
    before a preemption, with which its account begins anew."""

    settings: CompressionConfig | None
    footprint: Footprint
    account: EvictionCounters = field(default_factory=EvictionCounters)
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, slots=True)
class Caps:
    """Blocks that a compressed request of the present length holds at most: while its prompt is computed, and
    once it is. own: of `prefill` those of the group that is compressed."""

    own: int
    prefill: int
    settled: int


@dataclass(slots=True)
class Forecast:
    """Block needs of the running requests seen so far in a step.

    missing: until their prompts are computed; negative where they give more back than they take
    growth:  what they take while a newcomer's prompt is computed
    """

    num_seen: int = 0
    missing: int = 0
    growth: int = 0
