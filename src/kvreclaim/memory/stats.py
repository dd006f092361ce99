"""What the memory tells about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """A snapshot; free + cached + in_use = num_blocks.

    in_use, cached, free:        referenced; unreferenced but still to be hit; neither
    peak_in_use:                 the most blocks in use since the start or the last reset_peak
    prefix_query_tokens:         prompt tokens of the sequences admitted while caching is on
    prefix_hit_tokens:           those of them that were found
    prefix_evictions:            cached blocks reused for something else
    blocks_freed_by_compression: net of fresh blocks, so it can fall while siblings hold the rest
    cow_copies:                  shared tail blocks that had to be copied before a write
    """

    num_blocks: int
    in_use: int
    cached: int
    free: int
    peak_in_use: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    prefix_evictions: int
    blocks_freed_by_compression: int
    cow_copies: int
