"""The heads of a model on one tensor-parallel rank, by vLLM's own division."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The query heads and KV heads of the model that one tensor-parallel rank holds."""

    heads: slice
    kv_heads: slice

    @classmethod
    def of_rank(cls, rank: int, size: int, num_heads: int, num_kv_heads: int) -> Shard:
        """Both in equal runs by rank; with fewer KV heads than ranks, neighbouring ranks hold the same one.

        size divides num_heads, and num_kv_heads or the other way round: vLLM loads no other model.
        """
        assert num_heads % size == 0, (num_heads, size)
        heads = num_heads // size
        if num_kv_heads >= size:
            assert num_kv_heads % size == 0, (num_kv_heads, size)
            kv_heads = num_kv_heads // size
            first = rank * kv_heads
        else:
            assert size % num_kv_heads == 0, (num_kv_heads, size)
            kv_heads, first = 1, rank // (size // num_kv_heads)
        return cls(slice(rank * heads, (rank + 1) * heads), slice(first, first + kv_heads))
