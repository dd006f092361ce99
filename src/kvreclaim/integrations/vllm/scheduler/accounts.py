"""The ledger's view of vLLM's requests and pool, and its accounts of requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.integrations.vllm.scheduler.passes import Counts
from kvreclaim.integrations.vllm.settings.max_loss import budget_text
from kvreclaim.schedule import EvictionCounters, Footprint
from kvreclaim.schedule.budget.ledger import LedgerPool


class VllmRequest(Protocol):
    """Fields of vLLM's request. num_computed_tokens includes the steps in flight. When a pass is decided,
    none of these tokens can be rolled back: see speculation.py."""

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
        """Return the blocks of the request so far, freed ones included; 0 for an unknown request."""

    def covering(self, num_spare: int) -> LedgerPool[str]:
        """Return the pool for a pass that keeps the last num_spare blocks of a table, which hold no token."""

    def others_held(self, request_id: str) -> int:
        """Return the blocks that the request holds in groups that are not compressed."""

    def others_most(self, num_tokens: int) -> int:
        """Return the most blocks that a request of num_tokens tokens holds in these groups."""

    def others_settled(self, num_tokens: int) -> int:
        """Return the most blocks that it holds in these groups after its prompt."""


@dataclass(slots=True, eq=False)
class RequestAccount:
    """A request: its settings (None: everything is kept), its cache, and the totals of its passes. A
    preemption resets its account, not its counts.

    promise: what was requested; None: no compression. Its prompt makes settings of it
    kept:    tokens that its last pass has left; 0 before the first one
    """

    settings: CompressionConfig | None
    footprint: Footprint
    promise: CompressionConfig | None = None
    kept: int = 0
    account: EvictionCounters = field(default_factory=EvictionCounters)
    counts: Counts = field(default_factory=Counts)

    @property
    def budget(self) -> int | None:
        """Return the tokens that passes leave; None if everything is kept."""
        return None if self.settings is None else self.settings.budget

    @property
    def in_words(self) -> str:
        """Return what was requested for people, with the budget that the prompt has made of it."""
        if self.promise is None:
            return ""
        given = budget_text(self.promise)
        if not self.promise.is_of_prompt:
            return given
        return f"{given}: {'everything' if self.budget is None else f'{self.budget} tokens'}"


@dataclass(frozen=True, slots=True)
class Caps:
    """Most blocks that a compressed request of its current length holds: during its prompt (prefill), and
    after it (settled). own: of `prefill`, those of the compressed group."""

    own: int
    prefill: int
    settled: int


@dataclass(slots=True)
class Forecast:
    """Block needs of the running requests seen so far in a step.

    missing: until their prompts are computed; negative if they free more than they take
    growth:  blocks that they take while a new request's prompt is computed
    """

    num_seen: int = 0
    missing: int = 0
    growth: int = 0
