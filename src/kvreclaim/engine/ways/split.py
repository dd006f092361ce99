"""Which part of a step attends to which sequences."""

from __future__ import annotations

from kvreclaim.compression import Compressor
from kvreclaim.engine.core.request import Scheduled, Sequence
from kvreclaim.engine.signals.store import DigestStore
from kvreclaim.engine.ways.cells import uneven_part
from kvreclaim.engine.ways.parts import HeadPart, Part, PlainPart
from kvreclaim.engine.ways.reads import SparseReads
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.cells import cell_layers
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
        rows, items = batch.rows_of(places), [step[i] for i in places]
        if isinstance(kind, Compressor):
            reads = SparseReads(items, memory, cache, ops, digests)
            parts.append(HeadPart(ops, cell_layers(cache), rows, None, reads.batch))
        elif kind:
            parts.append(uneven_part(items, rows, memory, cache, ops))
        else:
            parts.append(PlainPart(ops, cache, batch.part(places), rows))
    return tuple(parts)
