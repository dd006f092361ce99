"""What a frame of the page's feed costs, as a row of docs/page.md for each size of the pool.

OMP_NUM_THREADS=1 .venv/bin/python scripts/page_cost.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from kvreclaim import LLM, SamplingParams, demo_model
from kvreclaim.page.frames import frame_event
from kvreclaim.server.page.snapshot import Recorder

SIZES = ((1000, 16, 8), (100_000, 2, 64))
"""(blocks, tokens per block, sequences of 500 tokens)"""
REPEATS = 101


def milliseconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return 1000 * median(times)


def measure(num_blocks: int, block_size: int, num_sequences: int) -> str:
    engine = LLM(demo_model(), num_blocks=num_blocks, block_size=block_size).engine
    rng = random.Random(0)
    for index in range(num_sequences):
        prompt = [rng.randrange(10, 200) for _ in range(500)]
        engine.add_request(f"r{index}", prompt, SamplingParams(temperature=0, max_tokens=100))
    while engine.scheduler.waiting:
        engine.step()
    result, recorder = engine.step(), Recorder()
    recorder.begin(engine)
    snapshot = recorder.take(engine)
    costs = [
        milliseconds(lambda: recorder.take(engine)),
        milliseconds(lambda: frame_event(snapshot)),
        milliseconds(lambda: recorder.stepped(engine, result)),
    ]
    cells = " | ".join(f"{cost:.3g} ms" for cost in costs)
    return f"| {num_blocks:,} | {num_sequences} | {cells} | {len(frame_event(snapshot)[1]):,} |"


if __name__ == "__main__":
    for size in SIZES:
        print(measure(*size), flush=True)
