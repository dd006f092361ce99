"""The ledger's view of requests and of the block pool, and its notes on each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.integrations.vllm.passes import Counts
from kvreclaim.schedule import Account, Footprint
from kvreclaim.schedule.budget import ledger


class VllmRequest(Protocol):
    """Fields read of vLLM's request. num_computed_tokens counts the steps in flight; without speculative
    decoding none of these tokens is taken back."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int
    num_tokens: int
    resumable: bool
    sampling_params: Any


class PlacedPool(ledger.LedgerPool[str], Protocol):
    """The block pool and the tables of all requests, without the places of blocks given back.

    num_blocks: blocks that requests can have
    """

    @property
    def num_blocks(self) -> int: ...

    def places(self, request_id: str) -> int:
        """Blocks that the request has had so far, those given back included; 0 for one that is not known."""


@dataclass(slots=True, eq=False)
class RequestAccount:
    """A request: how it is compressed (None: not at all), its cache, and what it has given back so far, also
    before a preemption, with which its account begins anew."""

    settings: CompressionConfig | None
    footprint: Footprint
    account: Account = field(default_factory=Account)
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, slots=True)
class Caps:
    """Blocks that a compressed request of the present length holds at most: while its prompt is computed, and
    once it is."""

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
