"""Reading and moving slots of a layer that lies in memory in any way, against the same on a dense copy."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import noise

from kvreclaim.ops.reference import compact_layer, gather_slots

HEADS, DIM, BLOCKS = 3, 5, 8
ORDERS = list(permutations(range(4)))
BYTES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])


def laid(dense: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The numbers of [B, K, S, D] in memory whose dims lie in another order, with other numbers between."""
    memory = torch.full((*(dense.shape[dim] for dim in order), 2), 7).to(dense.dtype)
    view = memory[..., 1].permute([order.index(dim) for dim in range(4)])
    view.copy_(dense)
    return view


def numbers(size: int, dtype: torch.dtype) -> torch.Tensor:
    values = noise(1, BLOCKS, HEADS, size, DIM)
    return (values * 50).abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


@BYTES
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_gather_reads_slot_by_slot(order: tuple[int, ...], dtype: torch.dtype) -> None:
    dense, table = numbers(4, dtype), [6, 0, 3]
    x = laid(dense, order)
    got = gather_slots(x, torch.tensor(table), 10)
    assert got.shape == (HEADS, 10, DIM)
    for slot in range(10):
        assert torch.equal(got[:, slot], dense[table[slot // 4], :, slot % 4])
    got.zero_()
    assert torch.equal(x, dense)


@st.composite
def moves(draw):
    """Survivors for all heads or for each, into any mixture of own blocks, in any order, and others."""
    size, num_source = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    num_tokens = draw(st.integers((num_source - 1) * size + 1, num_source * size))
    num_kept = draw(st.integers(1, num_tokens))
    rank = noise(draw(st.integers(0, 999)), draw(st.sampled_from([1, HEADS])), num_tokens).argsort(-1)
    blocks = draw(st.permutations(range(BLOCKS)))
    target = draw(st.permutations(blocks))[: -(-num_kept // size)]
    return size, blocks[:num_source], target, rank[:, :num_kept].sort(-1).values


@BYTES
@given(moves(), st.sampled_from(ORDERS))
@settings(max_examples=60, deadline=None)
def test_compact_moves_slot_by_slot(dtype: torch.dtype, case, order: tuple[int, ...]) -> None:
    size, source, target, kept = case
    before = numbers(size, dtype)
    want = before.clone()
    want[target] = 0
    for head in range(HEADS):
        for i, slot in enumerate(kept[head % len(kept)].tolist()):
            want[target[i // size], head, i % size] = before[source[slot // size], head, slot % size]
    x = laid(before, order)
    compact_layer(x, kept, torch.tensor(source), torch.tensor(target))
    assert torch.equal(x, want)


def test_nothing_between_the_numbers_is_touched() -> None:
    memory = torch.full((4, HEADS, 2, 2 * DIM), 9.0)
    keys = memory[..., :DIM]
    keys.copy_(noise(1, 4, HEADS, 2, DIM))
    compact_layer(keys, torch.tensor([[1, 2]]), torch.tensor([2, 0]), torch.tensor([1]))
    assert bool((memory[..., DIM:] == 9.0).all())
