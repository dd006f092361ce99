"""What the scheduler tells the workers: which requests are compressed before this step, into which blocks.

Travels inside vLLM's SchedulerOutput, by pickle: plain values, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.compression import CompressionConfig


@dataclass(frozen=True, slots=True)
class Pass:
    """One compression of one request. Lengths in tokens, per layer and KV head.

    settings:     what to choose by; statistics are the worker's own
    source_ids:   blocks that hold the num_tokens live tokens, in table order
    target_ids:   blocks that hold the `keep` survivors afterwards; may overlap the sources
    logical_len:  tokens computed so far, evicted ones included: the position of the next query
    prompt_slots: leading live slots that hold prompt tokens
    first:        nothing of this request has been evicted yet
    shift:        logical minus physical length after this pass, a multiple of the block size
    """

    request_id: str
    settings: CompressionConfig
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    num_tokens: int
    keep: int
    logical_len: int
    prompt_slots: int
    first: bool
    shift: int


@dataclass(frozen=True, slots=True)
class StepMessage:
    """The passes of a step, in the order to keep: a later one may write what an earlier one has read."""

    passes: tuple[Pass, ...]


@dataclass(slots=True)
class Totals:
    """Sums since the start. seconds: of the worker of rank 0."""

    tokens_evicted: int = 0
    blocks_freed: int = 0
    compactions: int = 0
    postponed: int = 0
    seconds: float = 0.0
