"""Sequences over a cache of kivi4, and a shadow of what each must read: bf16 tokens in blocks that are being
filled, what came back when a block was sealed, and survivors of compactions."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import KVCache, PagedTokens

KIVI = FORMATS["kivi4"]
SLACK = 1 + 1e-4


@dataclass(frozen=True, slots=True)
class Dims:
    layers: int = 2
    heads: int = 2
    k_dim: int = 6
    v_dim: int = 10
    size: int = 4

    @property
    def facts(self) -> tuple[LayerFacts, ...]:
        one = LayerFacts(2 * self.heads, self.heads, self.k_dim, self.v_dim, Softmax(1.0))
        return (one,) * self.layers


@dataclass(slots=True, eq=False)
class Row:
    """One sequence: its table, and what its slots hold: k, v [L, K, T, *]; moved [L, K, T] bool: the key lies
    by token in a full block."""

    blocks: list[int]
    k: Tensor
    v: Tensor
    moved: Tensor

    @property
    def length(self) -> int:
        return self.k.shape[2]


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """Tokens of one sequence in a step: k, v [L, K, t, *]; copies, fresh: what its table needed."""

    row: Row
    copies: list[tuple[int, int]]
    fresh: list[int]
    k: Tensor
    v: Tensor


def half_step(x: Tensor, dim: int, reach: float, smallest: float) -> Tensor:
    least, most = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = torch.maximum((most - least) / 15, ((most + least) / 2).abs() / reach)
    return step.clamp_min(smallest) / 2 * SLACK


def key_steps(x: Tensor) -> Tensor:
    """Half a step of each group of 32 dims."""
    return torch.cat([half_step(p, -1, 40.5, 2.0**-10).expand_as(p) for p in x.split(32, -1)], -1)


def value_steps(x: Tensor) -> Tensor:
    return torch.cat([half_step(p, -1, 7.5, 2.0**-8).expand_as(p) for p in x.split(32, -1)], -1)


class Walk:
    """Drives the ops of one back-end as the engine does: keep_open, copies, fresh blocks, every layer."""

    def __init__(self, ops: ModuleType, dims: Dims, num_blocks: int = 24, max_seqs: int = 4) -> None:
        self.ops, self.dims, self.max_seqs = ops, dims, max_seqs
        self.cache: KVCache = ops.allocate(
            dims.facts, num_blocks, dims.size, like=torch.empty(0), kv_format=KIVI, open_rows=2 * max_seqs
        )
        self.rows: dict[int, Row] = {}
        self.refs = [0] * num_blocks
        self._next = 0
        self._noise = torch.Generator().manual_seed(num_blocks)

    def begin(self) -> int:
        d, empty = self.dims, torch.empty
        blank = (d.layers, d.heads, 0)
        moved = torch.empty(blank, dtype=torch.bool)
        self.rows[self._next] = Row([], empty(*blank, d.k_dim), empty(*blank, d.v_dim), moved)
        self._next += 1
        return self._next - 1

    def fork(self, parent: int) -> int:
        child = self.begin()
        row = self.rows[parent]
        self.rows[child] = Row(list(row.blocks), row.k.clone(), row.v.clone(), row.moved.clone())
        for block in row.blocks:
            self.refs[block] += 1
        return child

    def end(self, name: int) -> None:
        for block in self.rows.pop(name).blocks:
            self.refs[block] -= 1

    def take(self, count: int) -> list[int]:
        free = [block for block, refs in enumerate(self.refs) if refs == 0][:count]
        assert len(free) == count, "the walk needs a larger pool"
        for block in free:
            self.refs[block] += 1
        return free

    def write(
        self,
        lengths: dict[int, int],
        *,
        failures: tuple[int, ...] = (),
        ended: tuple[int, ...] = (),
        alone: bool = False,
    ) -> None:
        """Append tokens to sequences in one step.

        failures: passes that get so many layers far, first; alone: then every sequence has one of its own
        ended: sequences that lose their blocks when the others have taken theirs
        """
        size = self.dims.size
        step: list[Written] = []
        for name, count in lengths.items():
            row = self.rows[name]
            copies: list[tuple[int, int]] = []
            if row.length % size and self.refs[row.blocks[-1]] > 1:
                old = row.blocks[-1]
                row.blocks[-1] = self.take(1)[0]
                self.refs[old] -= 1
                copies.append((old, row.blocks[-1]))
            fresh = self.take(-(-(row.length + count) // size) - len(row.blocks))
            row.blocks += fresh
            k, v = self._tokens(count, self.dims.k_dim), self._tokens(count, self.dims.v_dim)
            step.append(Written(row, copies, fresh, k, v))
        for name in ended:
            self.end(name)
        for layers in failures:
            self._pass(step, layers)
        for part in [[item] for item in step] if alone else [step]:
            self._pass(part, self.dims.layers)
        for item in step:
            self._append(item)

    def compact(self, name: int, kept: Tensor) -> None:
        """kept: [L | 1, K | 1, M]; into blocks of its own that nobody shares, then fresh ones."""
        row, size = self.rows[name], self.dims.size
        wanted = -(-kept.shape[-1] // size)
        own = [block for block in row.blocks if self.refs[block] == 1][:wanted]
        targets = own + self.take(wanted - len(own))
        self.ops.compact(self.cache, kept, torch.tensor(row.blocks), torch.tensor(targets))
        for block in row.blocks:
            self.refs[block] -= block not in own
        row.blocks = targets
        slots = kept.expand(self.dims.layers, self.dims.heads, -1)
        k, v = (x.take_along_dim(slots[..., None], 2) for x in (row.k, row.v))
        moved = row.moved.take_along_dim(slots, 2)
        was_open = slots >= row.length // size * size
        full = kept.shape[-1] // size * size
        row.k, row.v = self._gathered(row.blocks, kept.shape[-1])
        in_full = torch.arange(kept.shape[-1]) < full
        error = (row.k - k).abs()
        assert not error[in_full & moved].any()
        assert (error <= key_steps(k))[in_full.expand_as(moved)].all()
        error = (row.v - v).abs()
        assert not error[in_full & ~was_open].any()
        assert (error <= value_steps(v))[in_full.expand_as(moved)].all()
        assert torch.equal(row.k[:, :, full:], k[:, :, full:].bfloat16().float())
        assert torch.equal(row.v[:, :, full:], v[:, :, full:].bfloat16().float())
        row.moved = in_full.expand_as(moved).clone()

    def check(self) -> None:
        for name, row in self.rows.items():
            k, v = self._gathered(row.blocks, row.length)
            assert torch.equal(k, row.k), f"keys of sequence {name}"
            assert torch.equal(v, row.v), f"values of sequence {name}"

    def keep_open(self, copies: list[tuple[int, int]]) -> None:
        """As the runner does: the blocks that next tokens go to, and those that are copied from."""
        size = self.dims.size
        unfilled = {block for row in self.rows.values() for block in row.blocks[row.length // size :]}
        self.ops.keep_open(self.cache, unfilled | {source for source, _ in copies})

    def _pass(self, step: list[Written], num_layers: int) -> None:
        copies = [pair for item in step for pair in item.copies]
        self.keep_open(copies)
        if copies:
            self.ops.copy_blocks(self.cache, copies)
        if fresh := [block for item in step for block in item.fresh]:
            self.ops.prepare_blocks(self.cache, fresh)
        slots = torch.cat([self._slots(item) for item in step])
        k, v = (torch.cat([getattr(item, name) for item in step], 2) for name in ("k", "v"))
        for layer in range(num_layers):
            self.ops.write_kv(
                self.cache.layers[layer], k[layer].transpose(0, 1), v[layer].transpose(0, 1), slots
            )

    def _slots(self, item: Written) -> Tensor:
        places = torch.arange(item.row.length, item.row.length + item.k.shape[2])
        return (
            torch.tensor(item.row.blocks)[places // self.dims.size] * self.dims.size + places % self.dims.size
        )

    def _append(self, item: Written) -> None:
        """What the row holds now: what is sealed comes back within half a step of each channel and token."""
        row, size = item.row, self.dims.size
        first, count = row.length // size, item.k.shape[2]
        row.k = torch.cat((row.k, item.k.bfloat16().float()), 2)
        row.v = torch.cat((row.v, item.v.bfloat16().float()), 2)
        row.moved = torch.cat((row.moved, torch.zeros((*row.moved.shape[:2], count), dtype=torch.bool)), 2)
        k, v = self._gathered(row.blocks, row.length)
        for start in range(first * size, row.length // size * size, size):
            at = slice(start, start + size)
            step = half_step(row.k[:, :, at], 2, 40.5, 2.0**-10)
            assert ((k[:, :, at] - row.k[:, :, at]).abs() <= step).all()
            assert ((v[:, :, at] - row.v[:, :, at]).abs() <= value_steps(row.v[:, :, at])).all()
            row.k[:, :, at], row.v[:, :, at] = k[:, :, at], v[:, :, at]

    def _tokens(self, count: int, dim: int) -> Tensor:
        size = (self.dims.layers, self.dims.heads, count, dim)
        return torch.randn(size, generator=self._noise) + torch.linspace(-2, 2, dim)

    def _gathered(self, blocks: list[int], length: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor(blocks, dtype=torch.int64)
        layers = [
            self.ops.gather_tokens(PagedTokens(self.cache.layers[layer], ids, length))
            for layer in range(self.dims.layers)
        ]
        k, v = (torch.stack(side) for side in zip(*layers, strict=True))
        assert k.dtype == v.dtype == torch.float32
        return k, v
