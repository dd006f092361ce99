"""The timed ops: their calls, and the bytes and operations they require."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvreclaim.bench.kernel_shapes import GROUP, Filled, KernelShape
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.rope import RopeLayout

CENTERS, OFFSETS = 16, 5
VERIFIED = (5, 9)
"""Queries of a sequence that verify 4 and 8 drafts."""
MAX_LAYER_BYTES = 512 * 2**20


@dataclass(frozen=True)
class KernelCase:
    """One op at one shape.

    run:        one layer's call on a filled cache, by layer
    moved:      bytes of one call that any kernel has to read, or read and write
    against:    the bandwidth that `moved` is compared with
    flops:      of one call, for ops that arithmetic may bound; 0 elsewhere
    all_layers: it does all layers in one call
    result:     compared after a run, by layer; None: the returned tensor
    """

    op: str
    shape: KernelShape
    run: Callable[[Filled, int], Tensor | None]
    moved: int
    against: str = "read"
    flops: int = 0
    all_layers: bool = False
    result: Callable[[Filled, int], Tensor] | None = None


def attention(shape: KernelShape) -> KernelCase:
    """Decode (queries 1), the verification of drafts, or a prefill chunk at the end of the context."""
    q = _queries(shape)

    def run(filled: Filled, layer: int) -> Tensor:
        return filled.backend.paged_attention(q, filled.cache.layers[layer], filled.batch)

    seen = shape.context - (shape.queries - 1) / 2
    flops = int(4 * q.numel() * seen)
    names = {1: "decode attention", **{count: f"verifying attention, {count} new" for count in VERIFIED}}
    op = names.get(shape.queries, f"prefill attention, {shape.queries} new")
    return KernelCase(op, shape, run, 2 * shape.side_bytes, flops=flops if shape.queries > 1 else 0)


def column_sums(shape: KernelShape) -> KernelCase:
    """The attention mass of that step, a second pass over the keys."""
    plain, q = attention(shape), _queries(shape)

    def run(filled: Filled, layer: int) -> Tensor:
        return filled.backend.column_sums(q, filled.cache.layers[layer], filled.batch)

    op = plain.op.replace("attention", "column sums")
    return KernelCase(op, shape, run, shape.side_bytes, flops=plain.flops // 2)


def triattention(shape: KernelShape) -> KernelCase:
    """Both products of TriAttention for one sequence."""
    heads, bands = shape.kv_heads * GROUP, shape.head_dim // 2
    queries, weights = _fp32((heads, 1, shape.head_dim)), _fp32((heads, bands)).abs()
    layout = RopeLayout(torch.ones(bands, dtype=torch.float64))
    queries, weights = queries.to(shape.device), weights.to(shape.device)

    def run(filled: Filled, layer: int) -> Tensor:
        return filled.backend.trig_norm_scores(filled.paged(layer), queries, weights, layout)

    return KernelCase("triattention scores", shape, run, shape.side_bytes)


def mixture(shape: KernelShape) -> KernelCase:
    """The policy's default: 16 centres at 5 offsets."""
    heads = shape.kv_heads * GROUP
    centers = _fp32((heads, CENTERS, OFFSETS, shape.head_dim)).to(shape.device)
    variances = _fp32((heads, CENTERS, shape.head_dim)).square().to(shape.device) * 0.1

    def run(filled: Filled, layer: int) -> Tensor:
        return filled.backend.mixture_scores(filled.paged(layer), centers, variances, 0.125, slice(None))

    products = heads * CENTERS * (OFFSETS + 1)
    return KernelCase(
        "mixture scores", shape, run, shape.side_bytes, flops=2 * products * shape.head_dim * shape.context
    )


def key_norms(shape: KernelShape) -> KernelCase:
    def run(filled: Filled, layer: int) -> Tensor:
        return filled.backend.token_norms(filled.paged(layer), values=False)

    return KernelCase("key norms", shape, run, shape.side_bytes)


def surrogate(shape: KernelShape) -> KernelCase:
    """The linear score of keys and values of one sequence."""
    bands = shape.head_dim // 2
    layout = RopeLayout(torch.ones(bands, dtype=torch.float64))
    weights = _fp32((shape.kv_heads, 2 * shape.head_dim - bands + 3)).to(shape.device)

    def run(filled: Filled, layer: int) -> Tensor:
        return filled.backend.surrogate_scores(filled.paged(layer), weights, layout)

    return KernelCase("surrogate scores", shape, run, 2 * shape.side_bytes)


def write(shape: KernelShape) -> KernelCase:
    """Write new tokens of a prefill chunk to their slots; the tokens stay unchanged."""
    sources: dict[int, tuple[Tensor, Tensor]] = {}

    def run(filled: Filled, layer: int) -> None:
        if layer not in sources:
            sources[layer] = filled.tokens(layer, 0)
        k, v = sources[layer]
        filled.backend.write_kv(filled.cache.layers[layer], k, v, filled.slots[0])

    moved = 2 * (shape.plain_bytes + shape.side_bytes)
    return KernelCase("write K/V", shape, run, moved, against="copy", result=_whole)


def gather(shape: KernelShape) -> KernelCase:
    def run(filled: Filled, layer: int) -> None:
        filled.backend.gather_tokens(filled.paged(layer))

    copies = 2 * shape.plain_bytes // shape.dtype.itemsize * shape.format.number.itemsize
    return KernelCase(
        "gather tokens", shape, run, 2 * shape.side_bytes + copies, against="copy", result=_whole
    )


def compact(shape: KernelShape, budget: int) -> KernelCase:
    """Move one sequence's survivors of a pass, different in each layer and head, together in place."""
    generator = torch.Generator().manual_seed(3)
    order = torch.rand(shape.layers, shape.kv_heads, shape.context, generator=generator).argsort(-1)
    kept = order[..., :budget].sort(-1).values.to(shape.device)
    moving = int((kept != torch.arange(budget, device=shape.device)).sum())

    def run(filled: Filled, layer: int) -> None:
        ids = filled.one
        filled.backend.compact(filled.cache, kept, ids, ids[: blocks_for(budget, shape.block_size)])

    def result(filled: Filled, layer: int) -> Tensor:
        return filled.gather(layer, budget)

    moved = int(2 * moving * shape.token_bytes)
    return KernelCase(
        f"compact to {budget:,}", shape, run, moved, against="copy", all_layers=True, result=result
    )


def _whole(filled: Filled, layer: int) -> Tensor:
    return filled.gather(layer, filled.shape.context)


def _fp32(size: tuple[int, ...]) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(2))


def _queries(shape: KernelShape) -> Tensor:
    """Random queries of one step: [T, H, D]."""
    size = (shape.batch * shape.queries, shape.kv_heads * GROUP, shape.head_dim)
    return _fp32(size).to(shape.device, shape.dtype)


def standard(device: str = "cpu", formats: Sequence[str] = ("auto",)) -> Iterator[KernelCase]:
    """The cases of `kvreclaim bench kernels`. formats: of K/V under bf16 queries; cases with fp32 queries
    exist only if no format is named."""
    for dtype in (torch.bfloat16, torch.float32) if tuple(formats) == ("auto",) else (torch.bfloat16,):
        for head_dim in (64, 128):
            for context, batch in ((1024, 1), (16_384, 8), (65_536, 1)):
                layers = max(2, min(8, MAX_LAYER_BYTES // (2 * context * batch * 2 * head_dim * 2)))
                step = KernelShape(context, batch, head_dim, 2, dtype, layers=layers, device=device)
                for shape in _stored(step, formats):
                    yield attention(shape)
                    if batch > 1:
                        yield from (attention(replace(shape, queries=count)) for count in VERIFIED)
                    if dtype == torch.bfloat16 and batch > 1:
                        yield column_sums(shape)
    for head_dim in (64, 128):
        chunk = KernelShape(8192, 1, head_dim, 2, torch.bfloat16, layers=2, queries=512, device=device)
        for shape in _stored(chunk, formats):
            yield from (attention(shape), column_sums(shape))
        for context, turns in ((2176, 16), (32_768, 1)):
            one = KernelShape(context, 1, head_dim, 2, torch.bfloat16, turns=turns, device=device)
            for shape in _stored(one, formats):
                yield from (triattention(shape), mixture(shape), surrogate(shape), key_norms(shape))
                yield compact(shape, 2048)
        for shape in _stored(one, formats):
            yield from (write(replace(shape, context=2048)), gather(shape))


def _stored(shape: KernelShape, formats: Sequence[str]) -> list[KernelShape]:
    return [replace(shape, kv_format=name) for name in formats]
