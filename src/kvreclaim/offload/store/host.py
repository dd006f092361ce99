"""Slots in host memory, one run of bytes each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.free_memory import free_host_memory_bytes
from kvreclaim.ops.blocks_io import BlockCopies, bytes_per_block

Move = tuple[int, int]


class HostSlots:
    """[N, bytes_per_block] uint8; pinned for a cache on a GPU, so that copies run at the bus's speed,
    beside the engine's steps.

    Planes next to the blocks (scores [L, B, ...]) are in a second tensor, `beside`, made at their first move.

    Raises: InvalidArgumentError if there is not enough memory.
    """

    def __init__(self, planes: Sequence[Tensor], num_slots: int) -> None:
        self.planes = tuple(planes)
        self.bytes_per_slot = bytes_per_block(planes)
        self.beside: Tensor | None = None
        self.copies = BlockCopies(self.planes[0].device)
        needed, free = num_slots * self.bytes_per_slot, free_host_memory_bytes()
        if needed > free:
            raise InvalidArgumentError(
                f"kv_offloading_size takes {needed / 2**30:.2f} GiB of host memory, but only "
                f"{free / 2**30:.2f} GiB are free; lower it.",
                field="kv_offloading_size",
            )
        self.bytes = self._empty(num_slots, self.bytes_per_slot)

    def _empty(self, num_slots: int, num_bytes: int) -> Tensor:
        on_gpu = self.planes[0].device.type == "cuda"
        return torch.empty((num_slots, num_bytes), dtype=torch.uint8, pin_memory=on_gpu)

    def view(self, slot: int) -> memoryview:
        """The bytes of a slot, without a copy, when moves of slots are over."""
        self.copies.wait()
        row: Any = self.bytes[slot].numpy()
        return memoryview(row)

    def read(self, moves: Sequence[Move], beside: Sequence[Tensor] = ()) -> int:
        """Fill slots from blocks, (block, slot) each; beside: further planes. Returns: bytes moved."""
        blocks, slots = [block for block, _ in moves], [slot for _, slot in moves]
        self.copies.read(self.planes, blocks, self.bytes, slots)
        if beside:
            self.copies.read(beside, blocks, self._for(beside), slots)
        return len(moves) * self.bytes_per_slot

    def write(self, moves: Sequence[Move], beside: Sequence[Tensor] = ()) -> int:
        """Fill blocks from slots, (slot, block) each. Returns: bytes moved."""
        slots, blocks = [slot for slot, _ in moves], [block for _, block in moves]
        self.copies.write(self.planes, self.bytes, slots, blocks)
        if beside:
            self.copies.write(beside, self._for(beside), slots, blocks)
        return len(moves) * self.bytes_per_slot

    def rows(self, slots: Sequence[int]) -> tuple[Tensor, Tensor | None]:
        """Return copies of the bytes of slots [n, bytes_per_slot], and of their planes next to them."""
        self.copies.wait()
        places = torch.tensor(slots, dtype=torch.int64)
        return self.bytes[places], None if self.beside is None else self.beside[places]

    def fill(self, slots: Sequence[int], bytes_: Tensor, beside: Tensor | None) -> None:
        """Put blocks [n, bytes_per_slot] uint8 into slots, and their extra planes."""
        self.copies.wait()
        rows = torch.tensor(slots, dtype=torch.int64)
        self.bytes[rows] = bytes_
        if beside is not None:
            if self.beside is None:
                self.beside = self._empty(len(self.bytes), beside.shape[1]).zero_()
            self.beside[rows] = beside

    def _for(self, beside: Sequence[Tensor]) -> Tensor:
        if self.beside is None:
            self.beside = self._empty(len(self.bytes), bytes_per_block(beside)).zero_()
        return self.beside
