"""What the ledger reads of requests and of the block pool, and what it notes of each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from kvreclaim.compression import CompressionConfig
from kvreclaim.schedule.plan import CompactionPlan, TableState


class Request(Protocol):
    """What is read of vLLM's request. num_computed_tokens counts the steps in flight; without speculative
    decoding none of these tokens is taken back."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int
    num_tokens: int
    resumable: bool
    sampling_params: Any


@dataclass(frozen=True, slots=True)
class Applied:
    """A plan carried out: the blocks that hold the survivors, and how many more are free than before (fewer
    where others hold the sources)."""

    target_ids: tuple[int, ...]
    blocks_freed: int


class Pool(Protocol):
    """The block pool and the tables of all requests.

    num_blocks: blocks that requests can have
    num_free:   of them, held by no request
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free(self) -> int: ...

    def places(self, request_id: str) -> int:
        """Blocks that the request has had so far, those given back included; 0 for one that is not known."""

    def table(self, request_id: str) -> TableState:
        """Its blocks in the order of their tokens, without the places of blocks given back."""

    def apply(self, request_id: str, plan: CompactionPlan) -> Applied:
        """Make the plan's targets the request's table, keep it out of the prefix index from now on, and give
        back every other block of it."""


@dataclass(frozen=True, slots=True)
class State:
    """What has happened to a request's cache.

    shift:         logical minus physical length, tokens, a multiple of the block size
    prompt_slots:  leading slots that held prompt tokens after the last pass
    last_computed: logical length at the last pass
    """

    shift: int = 0
    prompt_slots: int = 0
    last_computed: int = 0


FRESH = State()


@dataclass(slots=True)
class Account:
    """A request: how it is compressed (None: not at all), its cache, and what it has given back so far.

    most: tokens that it holds at most; None: its whole length, or its whole prompt
    """

    settings: CompressionConfig | None
    most: int | None = None
    state: State = FRESH
    tokens_evicted: int = 0
    blocks_freed: int = 0
    compactions: int = 0


@dataclass(frozen=True, slots=True)
class Caps:
    """Blocks that a compressed request of the present length holds at most: while its prompt is computed, and
    once it is."""

    prefill: int
    settled: int


@dataclass(slots=True)
class Forecast:
    """Of the running requests seen so far in a step, in blocks.

    missing: until their prompts are computed; negative where they give more back than they take
    growth:  what they take while a newcomer's prompt is computed
    """

    num_seen: int = 0
    missing: int = 0
    growth: int = 0
