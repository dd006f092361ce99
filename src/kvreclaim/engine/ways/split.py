"""Which part of a step attends to which sequences."""

from __future__ import annotations

from kvreclaim.compression import Compressor
from kvreclaim.engine.core.request import Scheduled, Sequence
from kvreclaim.engine.signals.digests import DigestStore
from kvreclaim.engine.ways.cells import uneven_part
from kvreclaim.engine.ways.parts import Part, PlainPart, rows_of
from kvreclaim.engine.ways.reads import reads_part
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.kv_cache import KVCache


def has_head_tables(seq: Sequence) -> bool:
    """Whether the sequence's heads do not share one block table."""
    return seq.state.cells is not None or seq.reads_sparsely


def split(
    step: list[Scheduled],
    batch: AttentionBatch,
    memory: MemoryManager,
    cache: KVCache,
    ops: Backend,
    digests: DigestStore,
) -> tuple[Part, ...]:
    """The parts of a step; () if all its sequences have one table for all layers and heads."""
    if not any(has_head_tables(item.seq) for item in step):
        return ()
    members: dict[Compressor | bool, list[int]] = {}
    for i, item in enumerate(step):
        sparse = item.seq.request.compressor if item.seq.reads_sparsely else None
        members.setdefault(sparse or item.seq.state.cells is not None, []).append(i)
    parts: list[Part] = []
    for kind, places in members.items():
        rows, items = rows_of(step, places, cache.device), [step[i] for i in places]
        if isinstance(kind, Compressor):
            parts.append(reads_part(items, rows, memory, cache, ops, digests))
        elif kind:
            parts.append(uneven_part(items, rows, memory, cache, ops))
        else:
            slots = tuple(batch.sequences[i] for i in places)
            own = AttentionBatch.build(slots, batch.block_size, cache.device)
            parts.append(PlainPart(ops, cache, own, rows))
    return tuple(parts)
