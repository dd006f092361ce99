"""The engine's block pool at a glance, and the blocks that running sequences share, for a page that draws
them."""

from __future__ import annotations

import numpy as np

from kvreclaim.engine.request.request import Request, Sequence
from kvreclaim.engine.step.engine import Engine
from kvreclaim.memory import blocks
from kvreclaim.page.sharing import Sharing, share_tree
from kvreclaim.page.view import CACHED, FREE, IN_USE, PINNED, SHARED, PoolView, RequestView


def pool_view(engine: Engine) -> PoolView:
    """The pool between two steps; called in the engine's thread. O(blocks of the pool), in numpy."""
    pool = engine.memory.pool
    pool.pins.expire()
    refs, idle = np.frombuffer(pool.refs, dtype=np.int32), np.frombuffer(pool.idle_refs, dtype=np.int32)
    bits = np.frombuffer(pool.marks, dtype=np.uint8)
    state = np.where((bits & blocks.CACHED) | (idle > 0), np.uint8(CACHED), np.uint8(FREE))
    state[(bits & blocks.PINNED) > 0] = PINNED
    state[refs > idle] = IN_USE
    state[refs > idle + 1] = SHARED
    running: dict[str, list[Sequence]] = {}
    for seq in engine.scheduler.running:
        running.setdefault(seq.request.request_id, []).append(seq)
    owner = np.full(pool.num_blocks, -1, dtype=np.int32)
    for index, sequences in reversed(list(enumerate(running.values()))):
        for seq in sequences:
            owner[seq.block_row(engine.memory.table(seq.seq_id))] = index
            for group in engine.memory.windows:
                owner[group.table(seq.seq_id).blocks()] = index
    requests = tuple(_request_view(engine, seqs[0].request, seqs) for seqs in running.values())
    return PoolView(state, owner, requests)


def _request_view(engine: Engine, request: Request, sequences: list[Sequence]) -> RequestView:
    tables = [engine.memory.table(seq.seq_id) for seq in sequences]
    return RequestView(
        request_id=request.request_id,
        num_sequences=len(sequences),
        logical_len=sum(table.logical_len for table in tables),
        physical_len=sum(table.physical_len for table in tables),
        num_blocks=sum(engine.memory.num_blocks(seq.seq_id) for seq in sequences),
        num_evicted=sum(seq.account.num_evicted for seq in sequences),
        blocks_freed=sum(seq.account.blocks_freed for seq in sequences),
        promise="" if request.compressor is None else f"budget {request.compressor.budget}",
    )


def who_shares(engine: Engine) -> Sharing:
    """Return the running sequences that share blocks. Call between two steps, in the engine's thread."""
    running = engine.scheduler.running
    owners: dict[str, int] = {}
    rows = [seq.block_row(engine.memory.table(seq.seq_id)) for seq in running]
    return share_tree(rows, [owners.setdefault(seq.request_id, len(owners)) for seq in running])
