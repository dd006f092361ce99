"""What the page costs vLLM's scheduler, as a row of docs/vllm.md for each size of the pool.

OMP_NUM_THREADS=1 .vllm-env/bin/python scripts/vllm_page_cost.py

vLLM's own block pool, and a scheduler that has only what is read of one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.block_pool import BlockPool

from kvreclaim.integrations.vllm.ledger import Ledger
from kvreclaim.integrations.vllm.live.feed import SHARE
from kvreclaim.integrations.vllm.live.sights import Sights
from kvreclaim.integrations.vllm.options import Options
from kvreclaim.integrations.vllm.v0_32.looking import look
from kvreclaim.page.frames import frame_event
from kvreclaim.page.viewer import PERIOD_S

SIZES = ((1000, 8), (10_000, 64), (100_000, 256))
"""(blocks, requests that hold nine tenths of them)"""
REPEATS = 31


def microseconds(work: Callable[[], Any], times: int = 1) -> float:
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - began) / times)
    return 1e6 * median(found)


def scheduler_of(num_blocks: int, num_requests: int) -> Any:
    pool = BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=16)
    each = num_blocks * 9 // 10 // num_requests
    requests = {
        f"r{number}": SimpleNamespace(
            request_id=f"r{number}",
            num_computed_tokens=16 * each,
            num_prompt_tokens=8 * each,
            num_tokens=16 * each + 1,
        )
        for number in range(num_requests)
    }
    tables = SimpleNamespace(req_to_blocks={name: pool.get_new_blocks(each) for name in requests})
    options = Options.read({"policy": "streaming_llm", "budget": 1024}, "the script")
    own: Any = SimpleNamespace(pool=pool, tables=tables, places=lambda name: each)
    return SimpleNamespace(
        reclaim=Ledger(options, own, 16, 2048),
        requests=requests,
        running=list(requests.values()),
        get_request_counts=lambda: (num_requests, 0),
    )


def row(num_blocks: int, num_requests: int) -> str:
    scheduler = scheduler_of(num_blocks, num_requests)
    sights = Sights(scheduler.reclaim)
    reading = microseconds(lambda: look(scheduler, sights, []))
    snapshot = look(scheduler, sights, [])
    writing = microseconds(lambda: frame_event(snapshot))
    pause_s = max(PERIOD_S, 1e-6 * (reading + writing) / SHARE)
    share = f"{1e-4 * reading / pause_s:.2g} %"
    cells = f"{reading / 1000:.2g} ms | {writing / 1000:.2g} ms | {1 / pause_s:.2g} | {share}"
    return f"| {num_blocks:,} | {num_requests} | {cells} | {len(frame_event(snapshot)[1]):,} |"


def unwatched() -> float:
    """Of a step, without a page."""
    sights = Sights(scheduler_of(100, 4).reclaim)

    def step() -> None:
        sights.begin_step()
        sights.passed([], [])
        sights.end_step()

    return microseconds(step, 10_000)


if __name__ == "__main__":
    for size in SIZES:
        print(row(*size), flush=True)
    print(f"a step without a page: {unwatched():.2g} us")
