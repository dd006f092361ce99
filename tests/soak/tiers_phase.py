"""One phase of the soak of the tiers, in a process that may be killed: an engine over a directory, requests,
faults of the disk. Reads a JSON object of settings from stdin; writes reports, a JSON object a line."""

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
from dataclasses import dataclass
from typing import Any

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.engine.request.request import Request
from kvreclaim.offload.store.file_io import Buffer, FileIO

NUM_DOCUMENTS = 240
POLICIES = ("query_mixture", "knorm", "streaming_llm", "shares(streaming_llm, by=static)")
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "spread_compression": False,
}
"""All engines have these: where a prompt is compressed depends on the chunks that a step may compute."""
AT_END = 0.25
"""This share of the requests is compressed at their document's end, each document by one policy."""
REPEATS = 4
"""Times that each different request is sent, on average."""
BLOCK_BYTES = 32_768
"""16 tokens of the demo model in fp32."""
NUM_BLOCKS, HOST_SLOTS, DISK_BYTES = 56, 80, 20_000_000
AT_ONCE = 12
PATIENCE_S = 120.0
"""Longest that a step, or the end, may take; then the process says where it is and ends."""
DRAIN_S = 60.0


@dataclass(frozen=True)
class Case:
    """One request. policy: None for the full cache; budget: of the policy; compress_prompt_at: tokens of a
    document that is compressed once for all requests with it; greedy: with several outputs each is drawn from
    one token."""

    prompt: tuple[int, ...]
    max_tokens: int
    n: int
    seed: int
    salt: str | None
    policy: str | None
    budget: int
    compress_prompt_at: int | None
    greedy: bool

    def params(self, logprobs: int | None = None) -> SamplingParams:
        return SamplingParams(
            temperature=0.0 if self.greedy and self.n == 1 else 1.0,
            top_k=1 if self.greedy else 0,
            max_tokens=self.max_tokens,
            n=self.n,
            seed=self.seed,
            ignore_eos=True,
            logprobs=logprobs,
        )

    def compression(self) -> CompressionConfig | None:
        if self.policy is None:
            return None
        return CompressionConfig(self.policy, budget=self.budget, interval=16, sinks=2, recent=8)


def make_cases(seed: int, num_requests: int) -> list[Case]:
    """The same different requests for the same arguments."""
    rng = random.Random(seed)
    documents = [rng.choices(range(5, 200), k=rng.randrange(40, 300)) for _ in range(NUM_DOCUMENTS)]
    return [_case(rng, documents) for _ in range(max(1, num_requests // REPEATS))]


def _case(rng: random.Random, documents: list[list[int]]) -> Case:
    number = min(int(rng.paretovariate(0.5)) - 1, NUM_DOCUMENTS - 1)
    document = documents[number]
    at_end, is_part = rng.random() < AT_END, rng.random() < 0.5
    prompt = document[: rng.randrange(20, len(document) + 1)] if is_part and not at_end else document
    tail = rng.choices(range(5, 200), k=rng.randrange(1 if at_end else 0, 40))
    policy = rng.choice(POLICIES) if rng.random() < 0.35 else None
    return Case(
        prompt=(*prompt, *tail),
        max_tokens=rng.randrange(1, 33),
        n=rng.choice((1, 1, 1, 1, 1, 2, 3)),
        seed=rng.randrange(1000),
        salt=rng.choice((None, None, "red", "green")),
        policy=POLICIES[number % len(POLICIES)] if at_end else policy,
        budget=48 if at_end else rng.choice((32, 48, 80)),
        compress_prompt_at=len(document) if at_end else None,
        greedy=rng.random() < 0.85,
    )


class Faulty(FileIO):
    """Calls that fail, move fewer bytes than requested, or take long, each at this rate."""

    def __init__(self, rate: float, seed: int) -> None:
        self.rate, self.rng = rate, random.Random(seed)

    def _strike(self, *numbers: int) -> None:
        if self.rng.random() < self.rate:
            number = self.rng.choice(numbers)
            raise OSError(number, os.strerror(number))
        if self.rng.random() < self.rate:
            time.sleep(self.rng.random() * 0.1)

    def _cut(self, buffers: Sequence[Any]) -> Sequence[Any]:
        if self.rng.random() < self.rate:
            return [memoryview(buffers[0])[: self.rng.randrange(1, len(buffers[0]))]]
        return buffers

    def preadv(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._strike(errno.EIO)
        return super().preadv(fd, self._cut(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._strike(errno.EIO, errno.ENOSPC)
        return super().pwritev(fd, self._cut(buffers), offset)

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
        kv_offloading_eviction_policy=rng.choice(("lru", "slru", "priority")),
        kv_offload_decode=rng.random() < 0.7,
        prefix_snapshot_fraction=rng.choice((0.06, 0.25, 0.25)),
    )


class Phase:
    """Runs the numbered requests, some of which are given up on the way."""

    def __init__(self, llm: LLM, cases: list[Case], rng: random.Random) -> None:
        self.llm, self.engine, self.cases, self.rng = llm, llm.engine, cases, rng
        self._running: dict[str, tuple[Request, int | None]] = {}

    def run(self, requests: Sequence[tuple[int, int]]) -> None:
        """(place, number of its case)."""
        waiting = deque(requests)
        while waiting or self._running:
            while waiting and len(self._running) < AT_ONCE:
                self._begin(*waiting.popleft())
            for request in self.engine.step().requests:
                if request.finished:
                    self._report(request)
            self._give_up()
            if self.engine.totals.steps % 25 == 0:
                self.engine.memory.check()
                report(stats=self.stats())
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
        self._running[request.request_id] = request, leaves

    def _report(self, request: Request) -> None:
        del self._running[request.request_id]
        tokens = [output.token_ids for output in request.output().outputs]
        preemptions = request.collect_metrics().preemptions
        report(place=int(request.request_id), tokens=tokens, error=request.error, preemptions=preemptions)

    def _give_up(self) -> None:
        now = self.engine.totals.steps
        for name, (_, leaves) in list(self._running.items()):
            if leaves is not None and now >= leaves:
                self.engine.abort(name)
                del self._running[name]
                report(place=int(name), aborted=True)

    def end(self) -> None:
        """All that is under way arrives; then nothing is held any more."""
        tiers, memory, patience = self.engine.tiers, self.engine.memory, time.monotonic() + DRAIN_S
        while tiers.disk.tier.num_loading or tiers.disk.tier.num_storing or tiers.prefixes.is_busy:
            assert time.monotonic() < patience, f"still under way: {self.engine.tier_stats()}"
            tiers.disk.wait()
            tiers.begin_step()
        memory.check()
        self.engine.reset_prefix_cache(external=False)
        memory.check()
        below = (tiers.memory.offload.host.pool, tiers.disk.tier.tier.pool)
        held = [memory.stats().in_use, *(pool.num_in_use for pool in below)]
        assert held == [0, 0, 0], f"referenced in the pool, on the host, on disk: {held}"
        assert not tiers.memory.offload.parking.num_parked, "a sequence is parked"
        report(stats=self.stats())
        self.llm.close()
        report(closed=True)

    def stats(self) -> dict[str, int]:
        """Counts since the start of the phase."""
        found, totals = self.engine.tier_stats(), self.engine.totals
        disk, prefixes = found.disk, found.prefixes
        return {
            "steps": totals.steps,
            "preemptions": totals.num_preemptions,
            "compactions": totals.compactions,
            "swaps": found.swaps,
            "tokens hit on the host": found.host_hit_tokens,
            "tokens read from disk": found.disk_hit_tokens,
            "blocks recovered": disk.recovered,
            "blocks stored": disk.blocks_stored,
            "io errors": disk.counters.io_errors,
            "corrupt": disk.counters.corrupt,
            "compressed prefixes recovered": prefixes.recovered,
            "compressed prefixes begun with": prefixes.hits,
            "compressed prefixes damaged": prefixes.counters.corrupt,
        }


def report(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main() -> None:
    settings = json.loads(sys.stdin.read())
    rng = random.Random(settings["seed"])
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    llm = make_engine(settings["directory"], rng)
    assert llm.engine.cache.bytes_per_block == BLOCK_BYTES, llm.engine.cache.bytes_per_block
    tiers = llm.engine.tiers
    tiers.disk.file.io = tiers.prefixes.files.io = Faulty(settings["fault_rate"], settings["seed"])
    phase = Phase(llm, make_cases(settings["cases_seed"], settings["num_requests"]), rng)
    phase.run(settings["requests"])
    phase.end()
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
