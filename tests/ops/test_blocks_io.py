"""Blocks go to host slots and back to other blocks, byte for byte."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvreclaim.ops import blocks_io
from kvreclaim.ops.blocks_io import BlockCopies, bytes_per_block, consecutive, read_blocks, write_blocks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCKS, PLACES = [7, 0, 3, 4, 5, 1], [2, 3, 4, 9, 0, 1]


def planes(seed: int) -> list[Tensor]:
    """Keys, values and parameters [L, B, ...] of three dtypes."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, 8, 2, 4, 6), torch.bfloat16), ((2, 8, 2, 4, 3), torch.float32), ((2, 8, 5), torch.uint8)
    made = [torch.randint(0, 200, shape, generator=generator).to(dtype) for shape, dtype in shapes]
    return [plane.to(DEVICE) for plane in made]


class Late:
    """Lanes of a device that copies at the last moment: when a buffer's copies are waited for."""

    def __init__(self) -> None:
        self.queued: list[tuple[Tensor, Tensor]] = []
        self.calls: list[tuple[str, int]] = []

    def copying(self) -> TorchDispatchMode:
        assert self.calls[-1][0] == "wait_computed", "a copy does not wait for the work on its buffer"
        return Queue(self.queued)

    def free(self, buffer: int) -> None:
        while self.queued:
            target, source = self.queued.pop(0)
            target.copy_(source)

    wait_copied = free

    def __getattr__(self, name: str) -> Any:
        return lambda buffer: self.calls.append((name, buffer))


class Queue(TorchDispatchMode):
    """Keeps copies for later."""

    def __init__(self, queued: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.queued = queued

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self.queued.append(args[:2])
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("pinned", "late"), [(False, False), (False, True), pytest.param(True, False, marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("at_once", [1, 2, 4, 100])
def test_blocks_come_back(at_once: int, pinned: bool, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other blocks go through the same slots at once, and slots that the host fills in between."""
    if pinned and DEVICE.type == "cpu":
        pytest.skip("memory is pinned for a GPU")
    source, target = planes(1), planes(2)
    before = [plane.clone() for plane in target]
    monkeypatch.setattr(blocks_io, "MAX_BYTES", at_once * bytes_per_block(source))
    slots = torch.zeros(10, bytes_per_block(source), dtype=torch.uint8, pin_memory=pinned)
    copies = BlockCopies(DEVICE, Late() if late else None)
    copies.read(source, BLOCKS, slots, PLACES)
    copies.write(target, slots, PLACES, BLOCKS[::-1])
    copies.read(target, [2, 6], slots, PLACES[:2])
    copies.wait()
    for ours, theirs, old in zip(target, source, before, strict=True):
        old[:, BLOCKS[::-1]] = theirs[:, BLOCKS]
        assert torch.equal(ours, old)
    assert torch.equal(slots[PLACES[:2]], read_blocks(target, [2, 6]))
    assert torch.equal(slots[PLACES[2:]], read_blocks(source, BLOCKS[2:]))
    assert not slots[[i for i in range(10) if i not in PLACES]].any()
    write_blocks(target, slots[PLACES[2:]], [2, 3, 0, 6])
    assert torch.equal(read_blocks(target, [2, 3, 0, 6]), slots[PLACES[2:]])


@pytest.mark.parametrize(
    ("places", "found"), [([], []), ([3], [(0, 3, 1)]), (PLACES, [(0, 2, 3), (3, 9, 1), (4, 0, 2)])]
)
def test_consecutive(places: list[int], found: list[tuple[int, int, int]]) -> None:
    assert consecutive(places) == found
