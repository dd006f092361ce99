"""One phase of the soak of the tiers, in a process that may be killed: an engine over a directory, requests,
faults of the disk. Told by a JSON object on stdin; tells by a JSON object a line."""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import random
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from soak_tiers_cases import LIMITS, Case, make_cases

from kvreclaim import LLM, demo_model
from kvreclaim.engine.request.request import Request
from kvreclaim.tiers.file_io import Buffer, FileIO

BLOCK_BYTES = 32_768
"""Of the demo model in fp32, 16 tokens."""
NUM_BLOCKS, HOST_SLOTS, DISK_BYTES = 56, 80, 20_000_000
AT_ONCE = 12
PATIENCE_S = 120.0
"""Longest that a step, or the end, may take; then the process says where it is and ends."""
DRAIN_S = 60.0


class Faulty(FileIO):
    """Calls that fail, move less than they are asked to, or take long, each at this rate."""

    def __init__(self, rate: float, seed: int) -> None:
        self.rate, self.rng = rate, random.Random(seed)

    def _strike(self, *numbers: int) -> None:
        if self.rng.random() < self.rate:
            number = self.rng.choice(numbers)
            raise OSError(number, os.strerror(number))
        if self.rng.random() < self.rate:
            time.sleep(self.rng.random() * 0.1)

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._strike(errno.EIO)
        if self.rng.random() < self.rate:
            buffers = [memoryview(buffers[0])[: self.rng.randrange(1, len(buffers[0]))]]
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._strike(errno.EIO, errno.ENOSPC)
        if self.rng.random() < self.rate:
            buffers = [memoryview(buffers[0])[: self.rng.randrange(1, len(buffers[0]))]]
        return super().pwritev(fd, buffers, offset)

    def sync(self, fd: int) -> None:
        self._strike(errno.EIO)
        super().sync(fd)


def make_engine(directory: str, rng: random.Random) -> LLM:
    """Everything small, and how it works by chance."""
    return LLM(
        demo_model(),
        **LIMITS,
        num_blocks=NUM_BLOCKS,
        kv_offloading_size=HOST_SLOTS * BLOCK_BYTES / 2**30,
        kv_offloading_disk_path=directory,
        kv_offloading_disk_size=DISK_BYTES / 2**30,
        preemption_mode=rng.choice(("auto", "swap", "swap", "recompute")),
        preemption_victim=rng.choice(("last", "lru", "cost")),
        kv_load_policy=rng.choice(("wait_complete", "wait_complete", "timeout", "best_effort", "race")),
        kv_load_timeout=rng.choice((0.0, 0.05, 1.0)),
        kv_offloading_write_policy=rng.choice(("write_through", "write_through", "write_through_selective")),
        kv_offloading_disk_write_policy=rng.choice(("write_through", "write_through_selective")),
        kv_offloading_eviction_policy=rng.choice(("lru", "slru", "lfu")),
        kv_offload_decode=rng.random() < 0.7,
        prefix_snapshot_fraction=rng.choice((0.06, 0.25, 0.25)),
    )


class Phase:
    """Runs the numbered requests, some of which are given up on the way."""

    def __init__(self, llm: LLM, cases: list[Case], rng: random.Random) -> None:
        self.llm, self.engine, self.cases, self.rng = llm, llm.engine, cases, rng
        self._running: dict[str, tuple[int, int, Request, int | None]] = {}

    def run(self, requests: Sequence[tuple[int, int]]) -> None:
        """(place, number of its case)."""
        waiting = deque(requests)
        while waiting or self._running:
            while waiting and len(self._running) < AT_ONCE:
                self._begin(*waiting.popleft())
            for request in self.engine.step().requests:
                if request.finished:
                    self._tell(request)
            self._give_up()
            if self.engine.totals.steps % 25 == 0:
                self.engine.memory.check()
                say(stats=self.stats())
            faulthandler.dump_traceback_later(PATIENCE_S, exit=True)

    def _begin(self, place: int, number: int) -> None:
        case, config = self.cases[number], self.cases[number].compression()
        compressor = None if config is None else self.llm.compressor(config)
        request = self.engine.add_request(
            str(place),
            list(case.prompt),
            case.params(),
            compressor,
            cache_salt=case.salt,
            compress_prompt_at=case.compress_prompt_at,
        )
        leaves = self.engine.totals.steps + self.rng.randrange(12) if self.rng.random() < 0.06 else None
        self._running[request.request_id] = place, number, request, leaves

    def _tell(self, request: Request) -> None:
        place, number, _, _ = self._running.pop(request.request_id)
        outputs, metrics = request.output().outputs, request.collect_metrics()
        tokens = [output.token_ids for output in outputs]
        say(
            place=place,
            number=number,
            tokens=tokens,
            error=request.error,
            preemptions=metrics.preemptions,
        )

    def _give_up(self) -> None:
        now = self.engine.totals.steps
        for name, (place, number, _, leaves) in list(self._running.items()):
            if leaves is not None and now >= leaves:
                self.engine.abort(name)
                del self._running[name]
                say(place=place, number=number, aborted=True)

    def end(self) -> None:
        """All that is under way arrives; then nothing is held any more."""
        tiers, memory = self.engine.tiers, self.engine.memory
        assert tiers is not None, "there are tiers"
        assert tiers.disk is not None, "there is a disk"
        patience = time.monotonic() + DRAIN_S
        assert tiers.prefixes is not None, "there are compressed prefixes"
        while tiers.disk.tier.num_loading or tiers.disk.tier.num_storing or tiers.prefixes.is_busy:
            assert time.monotonic() < patience, f"still under way: {self.engine.tier_stats()}"
            tiers.disk.wait()
            tiers.begin_step()
        memory.check()
        self.engine.reset_prefix_cache(external=False)
        memory.check()
        held = [
            memory.stats().in_use,
            tiers.memory.offload.host.pool.num_in_use,
            tiers.disk.tier.tier.pool.num_in_use,
        ]
        assert held == [0, 0, 0], f"referenced in the pool, on the host, on disk: {held}"
        assert not tiers.memory.offload.parking.num_parked, "a sequence is parked"
        say(stats=self.stats())
        self.llm.close()
        say(closed=True)

    def stats(self) -> dict[str, int]:
        """Counts since the start of the phase."""
        found, totals = self.engine.tier_stats(), self.engine.totals
        assert found is not None, "there are tiers"
        assert found.disk is not None, "there is a disk"
        assert found.prefixes is not None, "there are compressed prefixes"
        disk, prefixes = found.disk, found.prefixes
        return {
            "steps": totals.steps,
            "tokens hit": self.engine.memory.stats().prefix_hit_tokens,
            "tokens hit on the host": found.host_hit_tokens,
            "tokens read from disk": found.disk_hit_tokens,
            "blocks recovered": disk.recovered,
            "blocks loaded": disk.blocks_loaded,
            "blocks stored": disk.blocks_stored,
            "compressed prefixes found at starts": prefixes.recovered,
            "compressed prefixes written": prefixes.counters.stores,
            "compressed prefixes read": prefixes.counters.loads,
            "compressed prefixes read and begun with": prefixes.hits,
            "compressed prefixes damaged": prefixes.counters.corrupt,
            "compressed prefixes not whole in use": prefixes.unfit,
            "compressed prefixes removed for others": prefixes.counters.removed,
            "compressed prefixes begun with": self.engine.scheduler.snapshots.num_hits,
            "gone": disk.gone,
            "failed": disk.failed,
            "io errors": disk.counters.io_errors,
            "corrupt": disk.counters.corrupt,
            "dropped": disk.counters.dropped,
            "evicted on the host": found.host.evictions,
            "evicted on disk": disk.slots.evictions,
            "preemptions": totals.num_preemptions,
            "swaps": found.swaps,
            "compactions": totals.compactions,
        }


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    told = json.loads(sys.stdin.read())
    rng = random.Random(told["seed"])
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    llm = make_engine(told["directory"], rng)
    assert llm.engine.cache.bytes_per_block == BLOCK_BYTES, llm.engine.cache.bytes_per_block
    tiers = llm.engine.tiers
    assert tiers is not None, "there are tiers"
    assert tiers.disk is not None, "there is a disk"
    assert tiers.prefixes is not None, "there are compressed prefixes"
    tiers.disk.file.io = tiers.prefixes.files.io = Faulty(told["fault_rate"], told["seed"])
    phase = Phase(llm, make_cases(told["cases_seed"], told["num_requests"]), rng)
    phase.run(told["requests"])
    phase.end()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
