"""Blocks go to host slots and back to other blocks, byte for byte."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvreclaim.ops import blocks_io
from kvreclaim.ops.blocks_io import bytes_per_block, consecutive, read_blocks, write_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS, PLACES = [7, 0, 3, 4, 5, 1], [2, 3, 4, 9, 0, 1]


def planes(seed: int) -> list[Tensor]:
    """Keys, values and parameters [L, B, ...] of three dtypes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 8, 2, 4, 6), torch.bfloat16), ((2, 8, 2, 4, 3), torch.float32), ((2, 8, 5), torch.uint8)
    made = [torch.randint(0, 200, shape, generator=generator).to(dtype) for shape, dtype in shapes]
    return [plane.to(DEVICE) for plane in made]


@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_blocks_come_back(at_once: int, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pinned and DEVICE.type == "cpu":
        pytest.skip("memory is pinned for a GPU")
    source, target = planes(1), planes(2)
    before = [plane.clone() for plane in target]
    monkeypatch.setattr(blocks_io, "MAX_BYTES", at_once * bytes_per_block(source))
    slots = torch.zeros(10, bytes_per_block(source), dtype=torch.uint8, pin_memory=pinned)
    read_blocks(source, BLOCKS, slots, PLACES)
    write_blocks(target, slots, PLACES, BLOCKS[::-1])
    for ours, theirs, old in zip(target, source, before, strict=True):
        old[:, BLOCKS[::-1]] = theirs[:, BLOCKS]
        assert torch.equal(ours, old)
    assert not slots[[i for i in range(10) if i not in PLACES]].any()


def test_copies_of_runs_are_those_of_each_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, over tensors of the CPU."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    rows, slots = torch.arange(12, dtype=torch.uint8).view(6, 2), torch.zeros(10, 2, dtype=torch.uint8)
    blocks_io._copy_runs(slots, PLACES, rows, to_slots=True)
    assert torch.equal(slots[PLACES], rows)
    back = torch.zeros_like(rows)
    blocks_io._copy_runs(slots, PLACES, back, to_slots=False)
    assert torch.equal(back, rows)


@pytest.mark.parametrize(
    ("places", "found"), [([], []), ([3], [(0, 3, 1)]), (PLACES, [(0, 2, 3), (3, 9, 1), (4, 0, 2)])]
)
def test_consecutive(places: list[int], found: list[tuple[int, int, int]]) -> None:
    assert consecutive(places) == found
