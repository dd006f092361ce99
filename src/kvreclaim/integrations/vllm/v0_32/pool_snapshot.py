"""The page's view of the block pool of vLLM 0.32, read between two steps."""

from __future__ import annotations

import time
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from kvreclaim.integrations.vllm.live.recorder import FIRST_BLOCK
from kvreclaim.integrations.vllm.live.step_observer import StepObserver
from kvreclaim.integrations.vllm.scheduler.ledger import Ledger
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.page.frames import Compaction, Snapshot
from kvreclaim.page.sharing import share_tree
from kvreclaim.page.view import CACHED, FREE, IN_USE, SHARED, PoolView, RequestView

if TYPE_CHECKING:
    from kvreclaim.integrations.vllm.live.server import PageServer

REFERENCES, NUMBER = attrgetter("ref_cnt"), attrgetter("block_id")


def open_page(scheduler: Any, options: Options, vllm_config: Any) -> PageServer | None:
    """Serve the page of a scheduler that is ready; None where none is configured. Imports nothing otherwise.

    Raises: InvalidArgumentError where its address cannot be bound.
    """
    if options.page is None:
        return None
    from kvreclaim.integrations.vllm.live.server import PageServer

    ledger: Ledger = scheduler.reclaim
    settings = {
        "models": [vllm_config.model_config.served_model_name],
        "num_blocks": ledger.pool.num_blocks,
        "block_size": ledger.block_size,
        "max_model_len": scheduler.max_model_len,
        "policies": [],
        "default_policy": options.settings.policy,
    }
    return PageServer(
        options.page.of_rank(vllm_config.parallel_config.data_parallel_index),
        settings,
        lambda passes: look(scheduler, scheduler.observer, passes),
        lambda: not scheduler.requests,
    )


def look(scheduler: Any, observer: StepObserver, passes: list[Compaction]) -> Snapshot:
    """Return the current pool. O(blocks + requests)."""
    began_s = time.perf_counter()
    observer.progress.look(scheduler.requests)
    ledger: Ledger = scheduler.reclaim
    pool, tables = ledger.pool.pool, ledger.pool.tables.req_to_blocks  # type: ignore[attr-defined]
    blocks = pool.blocks
    refs = np.fromiter(map(REFERENCES, blocks), np.int32, len(blocks))
    state = np.where(refs > 0, np.uint8(IN_USE), np.uint8(FREE))
    state[refs > 1] = SHARED
    for place in np.flatnonzero(refs == 0).tolist():
        if blocks[place].block_hash is not None:
            state[place] = CACHED
    owner = np.full(len(blocks), -1, np.int32)
    running = list(scheduler.running)
    rows = [_row(tables.get(request.request_id, ())) for request in running]
    for index, row in reversed(list(enumerate(rows))):
        owner[row] = index
    owner[refs == 0] = -1
    requests = tuple(_request(ledger, one, len(row)) for one, row in zip(running, rows, strict=True))
    num_running, num_waiting = scheduler.get_request_counts()
    return Snapshot(
        at_s=time.monotonic(),
        view=PoolView(state[FIRST_BLOCK:], owner[FIRST_BLOCK:], requests),
        sharing=share_tree(rows, range(len(rows))),
        num_running=num_running,
        num_waiting=num_waiting,
        totals=observer.totals(),
        tiers=None,
        compactions=passes,
        first=FIRST_BLOCK,
        look_s=time.perf_counter() - began_s,
    )


def _row(blocks: Any) -> np.ndarray:
    """Ids of a table without the places of blocks given back, where the null block stands, int32."""
    row = np.fromiter(map(NUMBER, blocks), np.int32, len(blocks))
    return row[row >= FIRST_BLOCK]


def _request(ledger: Ledger, request: Any, num_blocks: int) -> RequestView:
    record = ledger.records.get(request.request_id)
    evicted = record.account.num_evicted if record is not None else 0
    return RequestView(
        request_id=request.request_id,
        num_sequences=1,
        logical_len=request.num_computed_tokens,
        physical_len=request.num_computed_tokens - evicted,
        num_blocks=num_blocks,
        num_evicted=evicted,
        blocks_freed=record.counts.blocks_freed if record is not None else 0,
        promise=record.in_words if record is not None else "",
    )
