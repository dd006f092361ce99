"""The states of recurrent layers: a slot for each sequence, and which slots a step reads and writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

import torch
from torch import Tensor

StateKind = Literal["conv", "recurrent"]
"""The last inputs of a convolution; what a layer sums up of all tokens (SSM state, linear attention)."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """One tensor that a recurrent layer keeps of a sequence. index: number among the layer's of this kind"""

    kind: StateKind
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


States = dict[tuple[StateKind, int], Tensor]
"""A layer's tensors, each with a first dimension for sequences, by kind and index."""


@dataclass(frozen=True, slots=True, eq=False)
class StateCall:
    """Tokens that a recurrent layer computes in one go.

    rows:   of the flat step, where the tokens lie
    decode: one token of each of several sequences; else all tokens are of one sequence
    read:   [n] slots of their states; None: a sequence that begins
    write:  [n] slots of what they become; None: nothing is kept of it
    """

    rows: slice | Tensor
    decode: bool
    read: Tensor | None
    write: Tensor | None


class StateStore:
    """The states of all recurrent layers: [num_slots, *shape] for each tensor of each layer."""

    def __init__(self, layers: Sequence[Sequence[StateShape]], num_slots: int, device: torch.device) -> None:
        self.device = device
        self.layers: list[States] = [
            {
                (one.kind, one.index): torch.zeros((num_slots, *one.shape), dtype=one.dtype, device=device)
                for one in layer
            }
            for layer in layers
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of a slot."""
        return sum(tensor[0].nbytes for layer in self.layers for tensor in layer.values())

    def gather(self, layer: int, slots: Tensor) -> States:
        """Copies of a layer's states in these slots."""
        return {key: tensor.index_select(0, slots) for key, tensor in self.layers[layer].items()}

    def put(self, layer: int, slots: Tensor, states: States) -> None:
        """Write a layer's states into these slots."""
        for key, tensor in self.layers[layer].items():
            tensor.index_copy_(0, slots, states[key])

    def save(self, slot: int) -> list[Tensor]:
        """A slot's tensors on the host."""
        return [tensor[slot].to("cpu", copy=True) for layer in self.layers for tensor in layer.values()]

    def write_bytes(self, slot: int, row: Tensor) -> None:
        """Copy a slot's tensors into [state_bytes] uint8, one behind the other."""
        for part, own in self._parts(slot, row):
            part.copy_(own)

    def read_bytes(self, slot: int, row: Tensor) -> None:
        """Fill a slot with what `write_bytes` gave."""
        for part, own in self._parts(slot, row):
            own.copy_(part)

    def _parts(self, slot: int, row: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the row, and the bytes of the tensors that lie in them."""
        end = 0
        for layer in self.layers:
            for tensor in layer.values():
                own = tensor[slot].view(-1).view(torch.uint8)
                start, end = end, end + len(own)
                yield row[start:end], own

    def load(self, slot: int, saved: Sequence[Tensor]) -> None:
        """Fill a slot with what `save` gave."""
        tensors = (tensor for layer in self.layers for tensor in layer.values())
        for tensor, one in zip(tensors, saved, strict=True):
            tensor[slot].copy_(one)


@dataclass(frozen=True, slots=True)
class StateRun:
    """A sequence's tokens in a flat step.

    start:  row of its first token
    slot:   of its state before; None: it begins
    writes: slots to write: the first behind its known tokens, then one behind each draft
    """

    start: int
    num_tokens: int
    slot: int | None
    writes: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class PackedRuns:
    """All tokens of a step for kernels that take them at once; int64 tensors.

    starts: [N + 1] row of each sequence's first token, and the number of rows
    read:   [N] slots of their states; -1: it begins
    write:  [T] slots of the state behind each token; -1: not kept; the last one of a sequence is
    parts:  rows that decode, and the others, each with its runs, where a step has both: kernels have other
            loops for either, and a row must not depend on other rows
    """

    starts: Tensor
    read: Tensor
    write: Tensor
    parts: tuple[tuple[Tensor, PackedRuns], ...] = ()

    @classmethod
    def of(cls, runs: Sequence[StateRun]) -> PackedRuns:
        """Pack runs that fill a step in their order."""
        starts, read, write = [0], list[int](), list[int]()
        for run in runs:
            starts.append(starts[-1] + run.num_tokens)
            read.append(-1 if run.slot is None else run.slot)
            write += [-1] * (run.num_tokens - len(run.writes)) + list(run.writes)
        kinds = [run.num_tokens == 1 and run.slot is not None for run in runs]
        parts = tuple(cls._part(runs, kinds, kind) for kind in (True, False)) if len(set(kinds)) > 1 else ()
        return cls(torch.tensor(starts), torch.tensor(read), torch.tensor(write), parts)

    @classmethod
    def _part(cls, runs: Sequence[StateRun], kinds: list[bool], kind: bool) -> tuple[Tensor, PackedRuns]:
        own = [run for run, each in zip(runs, kinds, strict=True) if each is kind]
        rows = torch.cat([torch.arange(run.start, run.start + run.num_tokens) for run in own])
        return rows, cls.of(own)


@dataclass(frozen=True, eq=False)
class StateStep:
    """Plan of recurrent layers in one forward pass: runs in the order of their rows.

    calls: the same for code that takes tokens of one sequence, or one token of each of several. Rows that
        decode, and drafts of the same place in their rows, are in one call.
    """

    store: StateStore
    runs: Sequence[StateRun]
    slot: int | None = None

    @classmethod
    def behind(cls, store: StateStore, slot: int) -> StateStep:
        """All tokens go on from this slot's state, and nothing is kept."""
        return cls(store, (), slot)

    @cached_property
    def packed(self) -> PackedRuns | None:
        """None where nothing is kept, which is no work for kernels that go from slot to slot."""
        return PackedRuns.of(self.runs) if self.slot is None else None

    @cached_property
    def calls(self) -> tuple[StateCall, ...]:
        device = self.store.device
        if self.slot is not None:
            return (StateCall(slice(None), False, torch.tensor([self.slot], device=device), None),)
        calls: list[StateCall] = []
        waves: list[list[tuple[int, int, int]]] = [[]]  # row, slot to read, slot to write
        for run in self.runs:
            num_known = run.num_tokens - len(run.writes) + 1
            if num_known == 1 and run.slot is not None:
                waves[0].append((run.start, run.slot, run.writes[0]))
            else:
                read = None if run.slot is None else torch.tensor([run.slot], device=device)
                write = torch.tensor([run.writes[0]], device=device)
                calls.append(StateCall(slice(run.start, run.start + num_known), False, read, write))
            drafts = zip(run.writes, run.writes[1:], strict=False)
            for depth, (read_slot, write_slot) in enumerate(drafts, 1):
                if depth == len(waves):
                    waves.append([])
                waves[depth].append((run.start + num_known - 1 + depth, read_slot, write_slot))
        for wave in filter(None, waves):
            rows, read, write = torch.tensor(list(zip(*wave, strict=True)), device=device)
            first = wave[0][0]
            in_a_row = all(row == first + i for i, (row, _, _) in enumerate(wave))
            where = slice(first, first + len(wave)) if in_a_row else rows
            calls.append(StateCall(where, True, read, write))
        return tuple(calls)
