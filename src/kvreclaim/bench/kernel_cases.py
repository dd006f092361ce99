"""The shapes that the kernels are timed at: caches filled alike, and what each op must move and compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.rope import RopeLayout

BLOCK_SIZE = 16
GROUP = 4
CENTERS, OFFSETS = 16, 5
MAX_LAYER_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Shape:
    """batch sequences of context tokens each, blocks in random order.

    queries: new tokens of each
    turns:   as many such sets, which calls take in turn, so that one is read from memory as it is when a
             sequence is compressed once in a while
    """

    context: int
    batch: int
    head_dim: int
    kv_heads: int
    dtype: torch.dtype
    layers: int = 8
    queries: int = 1
    turns: int = 1
    device: str = "cpu"

    @property
    def blocks_each(self) -> int:
        return -(-self.context // BLOCK_SIZE)

    @property
    def side_bytes(self) -> int:
        """Bytes of the keys, or of the values, of all sequences in one layer."""
        return self.batch * self.context * self.kv_heads * self.head_dim * self.dtype.itemsize

    def facts(self) -> tuple[LayerFacts, ...]:
        layer = LayerFacts(
            self.kv_heads * GROUP, self.kv_heads, self.head_dim, self.head_dim, self.head_dim**-0.5
        )
        return (layer,) * self.layers

    def describe(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.context:,} x {self.batch}, D {self.head_dim}, {dtype}"


@dataclass(eq=False)
class Filled:
    """One back-end's cache with the shape's keys and values; equal numbers in every back-end."""

    backend: Backend
    shape: Shape
    cache: KVCache = field(init=False)
    turn: int = 0

    def __post_init__(self) -> None:
        shape = self.shape
        like = torch.empty(0, dtype=shape.dtype, device=shape.device)
        num_blocks = shape.batch * shape.turns * shape.blocks_each
        self.cache = self.backend.allocate(shape.facts(), num_blocks, BLOCK_SIZE, like=like)
        for layer in range(shape.layers):
            for number in range(shape.batch * shape.turns):
                k, v = self.tokens(layer, number)
                self.backend.write_kv(self.cache, layer, k, v, self.slots[number])

    def tokens(self, layer: int, number: int) -> tuple[Tensor, Tensor]:
        """[context, K, D] keys and values of one sequence."""
        shape = self.shape
        generator = torch.Generator().manual_seed(1000 * layer + number)
        size = (2, shape.context, shape.kv_heads, shape.head_dim)
        both = torch.randn(size, generator=generator).to(shape.device, shape.dtype)
        return both[0], both[1]

    @cached_property
    def tables(self) -> list[np.ndarray]:
        count = self.shape.batch * self.shape.turns
        order = np.random.default_rng(0).permutation(count * self.shape.blocks_each)
        return [np.ascontiguousarray(row) for row in order.astype(np.int32).reshape(count, -1)]

    @cached_property
    def ids(self) -> list[Tensor]:
        """[blocks] int64 of each sequence."""
        return [torch.from_numpy(row.astype(np.int64)).to(self.shape.device) for row in self.tables]

    @cached_property
    def slots(self) -> list[Tensor]:
        """[context] int64 of each sequence, as write_kv takes them."""
        tokens = torch.arange(self.shape.context, device=self.shape.device)
        return [row[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE for row in self.ids]

    @property
    def one(self) -> Tensor:
        """[blocks] int64 of the sequence whose turn it is, for ops that take one sequence."""
        return self.ids[self.turn * self.shape.batch]

    def gather(self, layer: int, num_tokens: int) -> Tensor:
        """[2, K, num_tokens, D]: what the table of the sequence holds whose turn it is."""
        return torch.stack(self.backend.gather_tokens(PagedTokens(self.cache, layer, self.one, num_tokens)))

    def batch(self) -> AttentionBatch:
        """A step in which every sequence computes its last `queries` tokens."""
        shape = self.shape
        tables = self.tables[: shape.batch]
        sequences = tuple(SequenceSlots(ids, shape.queries, shape.context) for ids in tables)
        return AttentionBatch.build(sequences, BLOCK_SIZE, torch.device(shape.device))


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    run:        one layer's call on a filled cache, by layer
    moved:      bytes of one call that have to be read, or read and written, whatever the kernel
    against:    the bandwidth that `moved` is compared with
    flops:      of one call, for ops that arithmetic may bound; 0 elsewhere
    all_layers: it does all layers in one call
    result:     what is compared after a run, by layer; None: what the run returned
    """

    op: str
    shape: Shape
    run: Callable[[Filled, int], Tensor | None]
    moved: int
    against: str = "read"
    flops: int = 0
    all_layers: bool = False
    result: Callable[[Filled, int], Tensor] | None = None


def attention(shape: Shape) -> Case:
    """Decode (queries 1) or a prefill chunk at the end of the context."""
    heads, num_queries = shape.kv_heads * GROUP, shape.batch * shape.queries
    q = _noise((num_queries, heads, shape.head_dim), shape)
    batches: dict[int, AttentionBatch] = {}

    def run(filled: Filled, layer: int) -> Tensor:
        batch = batches.setdefault(id(filled), filled.batch())
        return filled.backend.paged_attention(q, filled.cache, layer, batch, scale=shape.head_dim**-0.5)

    seen = shape.context - (shape.queries - 1) / 2
    flops = int(4 * num_queries * heads * shape.head_dim * seen)
    op = "decode attention" if shape.queries == 1 else f"prefill attention, {shape.queries} new"
    return Case(op, shape, run, 2 * shape.side_bytes, flops=flops if shape.queries > 1 else 0)


def column_sums(shape: Shape) -> Case:
    """The attention mass of the same step, a second pass over the keys."""
    plain = attention(shape)
    q = _noise((shape.batch * shape.queries, shape.kv_heads * GROUP, shape.head_dim), shape)
    batches: dict[int, AttentionBatch] = {}

    def run(filled: Filled, layer: int) -> Tensor:
        batch = batches.setdefault(id(filled), filled.batch())
        return filled.backend.column_sums(q, filled.cache, layer, batch, scale=shape.head_dim**-0.5)

    op = plain.op.replace("attention", "column sums")
    return Case(op, shape, run, shape.side_bytes, flops=plain.flops // 2)


def triattention(shape: Shape) -> Case:
    """Both products of TriAttention for one sequence."""
    heads, bands = shape.kv_heads * GROUP, shape.head_dim // 2
    queries, weights = _fp32((heads, 1, shape.head_dim)), _fp32((heads, bands)).abs()
    layout = RopeLayout(torch.ones(bands, dtype=torch.float64))
    queries, weights = queries.to(shape.device), weights.to(shape.device)

    def run(filled: Filled, layer: int) -> Tensor:
        return filled.backend.trig_norm_scores(
            PagedTokens(filled.cache, layer, filled.one, shape.context), queries, weights, layout
        )

    return Case("triattention scores", shape, run, shape.side_bytes)


def mixture(shape: Shape) -> Case:
    """16 centres at 5 offsets, the policy's usual."""
    heads = shape.kv_heads * GROUP
    centers = _fp32((heads, CENTERS, OFFSETS, shape.head_dim)).to(shape.device)
    variances = _fp32((heads, CENTERS, shape.head_dim)).square().to(shape.device) * 0.1

    def run(filled: Filled, layer: int) -> Tensor:
        return filled.backend.mixture_scores(
            PagedTokens(filled.cache, layer, filled.one, shape.context),
            centers,
            variances,
            0.125,
            slice(None),
        )

    products = heads * CENTERS * (OFFSETS + 1)
    return Case(
        "mixture scores", shape, run, shape.side_bytes, flops=2 * products * shape.head_dim * shape.context
    )


def key_norms(shape: Shape) -> Case:
    def run(filled: Filled, layer: int) -> Tensor:
        return filled.backend.key_norms(PagedTokens(filled.cache, layer, filled.one, shape.context))

    return Case("key norms", shape, run, shape.side_bytes)


def write(shape: Shape) -> Case:
    """New tokens of a prefill chunk to their slots; the tokens stay as they were."""
    sources: dict[int, tuple[Tensor, Tensor]] = {}

    def run(filled: Filled, layer: int) -> None:
        if layer not in sources:
            sources[layer] = filled.tokens(layer, 0)
        k, v = sources[layer]
        filled.backend.write_kv(filled.cache, layer, k, v, filled.slots[0])

    def result(filled: Filled, layer: int) -> Tensor:
        return filled.gather(layer, shape.context)

    return Case("write K/V", shape, run, 4 * shape.side_bytes, against="copy", result=result)


def gather(shape: Shape) -> Case:
    def run(filled: Filled, layer: int) -> None:
        filled.backend.gather_tokens(PagedTokens(filled.cache, layer, filled.one, shape.context))

    def result(filled: Filled, layer: int) -> Tensor:
        return filled.gather(layer, shape.context)

    return Case("gather tokens", shape, run, 4 * shape.side_bytes, against="copy", result=result)


def compact(shape: Shape, budget: int) -> Case:
    """One sequence's survivors of a pass, other ones in each layer and head, slide together in place."""
    generator = torch.Generator().manual_seed(3)
    order = torch.rand(shape.layers, shape.kv_heads, shape.context, generator=generator).argsort(-1)
    kept = order[..., :budget].sort(-1).values.to(shape.device)
    moving = int((kept != torch.arange(budget, device=shape.device)).sum())

    def run(filled: Filled, layer: int) -> None:
        ids = filled.one
        filled.backend.compact(filled.cache, kept, ids, ids[: -(-budget // BLOCK_SIZE)])

    def result(filled: Filled, layer: int) -> Tensor:
        return filled.gather(layer, budget)

    moved = 2 * 2 * moving * shape.head_dim * shape.dtype.itemsize
    return Case(f"compact to {budget:,}", shape, run, moved, against="copy", all_layers=True, result=result)


def _fp32(size: tuple[int, ...]) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(2))


def _noise(size: tuple[int, ...], shape: Shape) -> Tensor:
    return _fp32(size).to(shape.device, shape.dtype)


def standard(device: str = "cpu") -> Iterator[Case]:
    """The cases of `kvreclaim bench kernels`."""
    for dtype in (torch.bfloat16, torch.float32):
        for head_dim, kv_heads in ((64, 2), (128, 2)):
            for context, batch in ((1024, 1), (16_384, 8), (65_536, 1)):
                layers = max(2, min(8, MAX_LAYER_BYTES // (2 * context * batch * kv_heads * head_dim * 2)))
                step = Shape(context, batch, head_dim, kv_heads, dtype, layers=layers, device=device)
                yield attention(step)
                if dtype == torch.bfloat16 and batch > 1:
                    yield column_sums(step)
    for head_dim in (64, 128):
        chunk = Shape(8192, 1, head_dim, 2, torch.bfloat16, layers=2, queries=512, device=device)
        yield from (attention(chunk), column_sums(chunk))
        for context, turns in ((2176, 16), (32_768, 1)):
            one = Shape(context, 1, head_dim, 2, torch.bfloat16, turns=turns, device=device)
            yield from (triattention(one), mixture(one), key_norms(one), compact(one, 2048))
        yield from (write(Shape(2048, 1, head_dim, 2, torch.bfloat16, device=device)), gather(one))
