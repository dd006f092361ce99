"""Split a step into parts by their kind of attention."""

from __future__ import annotations

from kvreclaim.compression.compressor import Compressor
from kvreclaim.engine.attend.cell_tables import uneven_part
from kvreclaim.engine.attend.parts import AttentionPart, HeadPart, PlainPart
from kvreclaim.engine.attend.prefill import SparsePart, sparse_tokens
from kvreclaim.engine.attend.reads import SparseReads
from kvreclaim.engine.request.request import Scheduled
from kvreclaim.engine.signals.store import DigestStore
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.cells import cell_layers
from kvreclaim.ops.kv_cache import KVCache


def reads_part(item: Scheduled) -> bool:
    """Return whether its queries attend to some of the sequence's cached tokens only."""
    if item.seq.footprint.all_exact:
        return False
    return item.seq.reads_sparsely or bool(sparse_tokens(item))


def has_head_tables(item: Scheduled) -> bool:
    """Return whether the sequence's heads have block tables of their own in this step."""
    return item.seq.state.cells is not None or reads_part(item)


def split(
    step: list[Scheduled],
    batch: AttentionBatch,
    memory: MemoryManager,
    cache: KVCache,
    ops: Backend,
    digests: DigestStore,
) -> tuple[AttentionPart, ...]:
    """Return the parts of a step; () if all its sequences have one table for all layers and heads."""
    if not any(has_head_tables(item) for item in step):
        return ()
    members: dict[Compressor | bool, list[int]] = {}
    parts: list[AttentionPart] = []

    def even(places: list[int]) -> AttentionPart:
        return PlainPart(ops, cache, batch.part(places), batch.rows_of(places))

    def uneven(places: list[int]) -> AttentionPart:
        return uneven_part([step[i] for i in places], batch.rows_of(places), memory, cache, ops)

    for i, item in enumerate(step):
        if sparse_tokens(item):
            dense = even([i]) if item.seq.state.cells is None else uneven([i])
            parts.append(SparsePart(item, dense, memory, cache, ops))
            continue
        sparse = item.seq.request.compressor if item.seq.reads_sparsely else None
        members.setdefault(sparse or item.seq.state.cells is not None, []).append(i)
    for kind, places in members.items():
        if isinstance(kind, Compressor):
            reads = SparseReads([step[i] for i in places], memory, cache, ops, digests)
            parts.append(HeadPart(ops, cell_layers(cache), batch.rows_of(places), None, reads.batch))
        else:
            parts.append(uneven(places) if kind else even(places))
    return tuple(parts)
