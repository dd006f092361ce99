"""Which heads a tensor-parallel rank holds: vLLM's division, written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.compression.head_shares import FRACTIONS
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.stats_metadata import StatsMetadata
from kvreclaim.integrations.vllm.worker.shard import Shard


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "expected"),
    [
        (8, 4, [(0, 4, 0, 2), (4, 8, 2, 4)]),
        (8, 8, [(0, 2, 0, 2), (2, 4, 2, 4), (4, 6, 4, 6), (6, 8, 6, 8)]),
        (8, 2, [(0, 2, 0, 1), (2, 4, 0, 1), (4, 6, 1, 2), (6, 8, 1, 2)]),
        (8, 1, [(0, 4, 0, 1), (4, 8, 0, 1)]),
    ],
)
def test_heads_of_each_rank(num_heads: int, num_kv_heads: int, expected: list[tuple[int, ...]]) -> None:
    size = len(expected)
    for rank, (first, end, first_kv, end_kv) in enumerate(expected):
        shard = Shard.of_rank(rank, size, num_heads, num_kv_heads)
        assert shard == Shard(slice(first, end), slice(first_kv, end_kv))


powers = st.sampled_from([1, 2, 4, 8, 16])


@given(size=powers, num_kv_heads=powers, group=st.integers(1, 6))
def test_every_query_head_finds_its_own_kv_head(size: int, num_kv_heads: int, group: int) -> None:
    """A rank deals its query heads evenly to its KV heads; that must be what the whole model does."""
    group *= max(1, size // num_kv_heads)  # or the query heads could not be divided among the ranks
    num_heads = num_kv_heads * group
    seen: list[int] = []
    for rank in range(size):
        shard = Shard.of_rank(rank, size, num_heads, num_kv_heads)
        heads, kv_heads = range(num_heads)[shard.heads], range(num_kv_heads)[shard.kv_heads]
        assert len(heads) % len(kv_heads) == 0
        local_group = len(heads) // len(kv_heads)
        for local, head in enumerate(heads):
            assert kv_heads[local // local_group] == head // group
        seen += heads
    assert seen == list(range(num_heads))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("num_kv_heads", [4, 1])
def test_statistics_follow_their_heads(shared: bool, num_kv_heads: int) -> None:
    """Every number encodes its layer, head and place."""
    whole = numbered_stats(num_layers=2, num_heads=8, num_kv_heads=num_kv_heads, shared=shared)
    for rank in range(2):
        shard = Shard.of_rank(rank, 2, 8, num_kv_heads)
        part = whole.shard(shard.heads, shard.kv_heads)
        assert (part.metadata.num_heads, part.metadata.num_kv_heads) == (4, max(1, num_kv_heads // 2))
        heads = list(range(4 * rank, 4 * rank + 4))
        rows = list(range(num_kv_heads))[shard.kv_heads] if shared else heads
        for layer in range(2):
            mine, theirs = part.layer(layer), whole.layer(layer)
            for name in ("q_mean", "q_abs_mean", "q_cov"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)[heads]), name
            for name in ("centers", "center_var", "center_weight"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)[rows]), name
            for name in ("surrogate", "surrogate_age", "head_shares"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name)[shard.kv_heads]), name


def numbered_stats(*, num_layers: int, num_heads: int, num_kv_heads: int, shared: bool) -> QueryStats:
    rows = num_kv_heads if shared else num_heads
    head_dim, centers = 4, 3

    def numbers(*shape: int) -> torch.Tensor:
        return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)

    metadata = StatsMetadata(
        model_name="numbered",
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope_style="half",
        source="test",
    )
    return QueryStats(
        metadata=metadata.model_copy(
            update={
                "num_centers": centers,
                "shared_centers": shared,
                "covariance": True,
                "features": 5,
                "ages": 7,
                "fractions": FRACTIONS,
            },
        ),
        q_mean=numbers(num_layers, num_heads, head_dim),
        q_abs_mean=numbers(num_layers, num_heads, head_dim // 2),
        centers=numbers(num_layers, rows, centers, head_dim),
        center_var=numbers(num_layers, rows, centers, head_dim),
        center_weight=numbers(num_layers, rows, centers),
        q_cov=numbers(num_layers, num_heads, head_dim, head_dim),
        surrogate=numbers(num_layers, num_kv_heads, 5),
        surrogate_age=numbers(num_layers, num_kv_heads, 7),
        head_shares=numbers(num_layers, num_kv_heads, len(FRACTIONS)),
    )
