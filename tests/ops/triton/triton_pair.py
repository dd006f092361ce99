"""The same cache on the CPU for the reference and on the device of the kernels; all else in it NaN."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from paged_oracle import Ask, Shape, World, under, world
from tolerances import TOLERANCES
from torch import Tensor

from kvreclaim.ops import reference
from kvreclaim.ops import triton as kernels
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.triton.support import is_interpreted

DEVICE = torch.device("cpu" if is_interpreted() else "cuda")
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=["fp32", "fp16", "bf16"]
)


def random(seed: int, *size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(DEVICE, dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """kernel: a copy of reference's cache on DEVICE; block_ids int64 on the CPU."""

    kernel: KVCache
    reference: KVCache
    block_ids: Tensor
    num_tokens: int

    @property
    def device_ids(self) -> Tensor:
        return self.block_ids.to(DEVICE)


def on_device(cache: KVCache) -> KVCache:
    return KVCache.plain(cache.k.clone().to(DEVICE), cache.v.clone().to(DEVICE), cache.softmaxes)


def make_pair(shape: Shape, num_tokens: int, seed: int = 0) -> Pair:
    """One sequence in shuffled blocks; for the kernels, what lies past its end in its last block is NaN."""
    w = world(shape, [Ask(1, num_tokens)], seed)
    ids = torch.from_numpy(w.batch.sequences[0].block_ids)
    return Pair(poisoned(w), w.cache, ids, num_tokens)


def poisoned(w: World) -> KVCache:
    """The cache on DEVICE with NaN in every slot past a sequence's end."""
    size = w.cache.block_size
    k, v = w.cache.k.clone(), w.cache.v.clone()
    for seq in w.batch.sequences:
        for slot in range(seq.seq_len, len(seq.block_ids) * size):
            for x in (k, v):
                x[:, seq.block_ids[slot // size], :, slot % size] = torch.nan
    return KVCache.plain(k.to(DEVICE), v.to(DEVICE), w.cache.softmaxes)


def moved(seq: SequenceSlots) -> SequenceSlots:
    positions = seq.slot_positions
    return seq if positions is None else replace(seq, slot_positions=positions.to(DEVICE))


def wanted(w: World, layer: int = 0, **how) -> Tensor:
    """The reference's answer. It takes no empty sequences, which have no rows anyway."""
    queried = tuple(seq for seq in w.batch.sequences if seq.query_len)
    if not queried:
        return w.q[layer]
    batch = AttentionBatch.build(queried, w.shape.block_size, torch.device("cpu"))
    return reference.paged_attention(w.q[layer], under(w.cache, layer, **how), batch)


def attend_both(w: World, layer: int = 0, **how) -> tuple[Tensor, Tensor]:
    """paged_attention of the kernels, with NaN past every sequence's end, and of the reference."""
    how = {"scale": w.shape.dim**-0.5, **how}
    want = wanted(w, layer, **how)
    there = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in how.items()}
    batch = AttentionBatch.build(tuple(moved(seq) for seq in w.batch.sequences), w.shape.block_size, DEVICE)
    q = w.q[layer].to(DEVICE)
    return kernels.paged_attention(q, under(poisoned(w), layer, **there), batch), want


def assert_close(got: Tensor, want: Tensor) -> None:
    """Within the tolerance of the dtype. Compiled kernels multiply 16-bit probabilities, each rounded."""
    tolerance = dict(TOLERANCES[want.dtype])
    if want.dtype != torch.float32 and not is_interpreted():
        tolerance["atol"] = 4 * torch.finfo(want.dtype).eps
    torch.testing.assert_close(got.cpu(), want, **tolerance)
