"""Cached prompts: time to the first token by tier, and hit rates by eviction order.

python -m benchmarks tiers --model MODEL --prompt 8144 --rounds 3
python -m benchmarks prefix --trace conversation_trace.jsonl
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import MISSING, dataclass, replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Annotated, Any

from benchmarks.runner import ONE_TOKEN, case, command, timed
from kvreclaim.bench.common import Row, table
from kvreclaim.bench.plans import ModelPlan
from kvreclaim.bench.systems.base import BLOCK_SIZE, CHUNK, random_prompts
from kvreclaim.checks import check_choice, require
from kvreclaim.cli.bench_options import Json, publish
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.engine.api.llm import LLM
from kvreclaim.memory import MemoryManager, eviction_orders, make_order
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.options import option
from kvreclaim.sim.traces.files import read_trace

BEYOND = -1
DISK_SHARE = 1.5
"""Size of the disk tier over the host's: headers and padding have room, too."""
LEAST_DISK_GIB = 0.01
SPARE = 6
"""Prompts that a tier has room for: what makes way is not what is measured."""
DRAIN_S = 60.0
CASES = ("computed", "computed and stored", "device", "host", "disk")


@dataclass(frozen=True, kw_only=True)
class TiersPlan(ModelPlan):
    """answer: tokens that must be equal before anything is timed."""

    prompt: int = option(8192, "Tokens of the prompt.", low=64)
    answer: int = option(8, "Tokens that are compared first.", low=2)
    rounds: int = option(5, "Rounds of all cases.", low=1)


class Places:
    """A plain engine, and in each round two with tiers, one after the other over a new directory.

    num_tokens: of each answer
    """

    def __init__(self, plan: TiersPlan, dtype: str, num_tokens: int) -> None:
        self.plan, self.dtype, self.num_tokens = plan, dtype, num_tokens
        self.plain = self.load(enable_prefix_caching=False)
        blocks = SPARE * blocks_for(plan.prompt, BLOCK_SIZE)
        self.host_gib = blocks * self.plain.engine.cache.bytes_per_block / 2**30
        self.vocab_size = self.plain.loaded.vocab_size
        self.rng = random.Random(0)
        timed(self.plain, self.prompt(), ONE_TOKEN)

    def load(self, **options: Any) -> LLM:
        """An engine with a pool for one prompt and its answer, and little else."""
        length = self.plan.prompt + self.plan.answer + 2 * BLOCK_SIZE
        return LLM(
            self.plan.model,
            dtype=self.dtype,
            block_size=BLOCK_SIZE,
            num_blocks=blocks_for(length, BLOCK_SIZE) + 4,
            max_num_seqs=4,
            max_num_batched_tokens=CHUNK,
            max_model_len=length,
            **options,
        )

    def prompt(self) -> list[int]:
        """A new one."""
        seed = self.rng.randrange(1 << 30)
        return random_prompts(1, self.plan.prompt, self.vocab_size, seed)[0]

    def tiered(self, directory: str) -> LLM:
        return self.load(
            kv_offloading_size=self.host_gib,
            kv_offloading_disk_path=directory,
            kv_offloading_disk_size=max(DISK_SHARE * self.host_gib, LEAST_DISK_GIB),
            kv_load_policy="wait_complete",
        )

    def round(self) -> tuple[dict[str, float], dict[str, list[int]]]:
        """Seconds and answers, by case. Asserts where each prompt was found."""
        prompt = self.prompt()
        spent: dict[str, float] = {}
        answers: dict[str, list[int]] = {}

        def ask(case: str, llm: LLM) -> None:
            before, params = _from_below(llm), replace(ONE_TOKEN, max_tokens=self.num_tokens)
            spent[case], output = timed(llm, prompt, params)
            answers[case] = output.outputs[0].token_ids
            below = [after - was for after, was in zip(_from_below(llm), before, strict=True)]
            self._check_place(case, [output.metrics.num_cached_tokens, *below])

        ask("computed", self.plain)
        with tempfile.TemporaryDirectory(prefix="kvreclaim-bench-") as directory:
            self._with_tiers(directory, prompt, ask)
        return spent, answers

    def _with_tiers(self, directory: str, prompt: list[int], ask: Callable[[str, LLM], None]) -> None:
        other = self.prompt()
        with closing(self.tiered(directory)) as llm:
            timed(llm, other[: len(other) // 2], ONE_TOKEN)
            ask("computed and stored", llm)
            ask("device", llm)
            for filler in (other, self.prompt()):
                timed(llm, filler, ONE_TOKEN)
            ask("host", llm)
            drain(llm)
        with closing(self.tiered(directory)) as llm:
            timed(llm, self.prompt()[: len(other) // 2], ONE_TOKEN)
            ask("disk", llm)

    def _check_place(self, case: str, found: Sequence[int]) -> None:
        """found: hit anywhere, in host memory or below, on disk: all full blocks, or none."""
        size = self.plain.engine.config.block_size
        most = (self.plan.prompt - 1) // size * size
        expected = {"device": (most, 0, 0), "host": (most, most, 0), "disk": (most, most, most)}
        assert tuple(found) == expected.get(case, (0, 0, 0)), f"{case}: {found} tokens, prompt {most}"


@case(
    "first token of {tokens:,} tokens, {model}",
    {"prompt is": "{case}", "ms": "{ms:,.1f}", "computed / this": "{ratio:,.1f} x"},
)
def tiers(plan: TiersPlan) -> list[Row]:
    """Time to the first token of a prompt that is computed, or found on the device, the host or the disk.

    computed: by an engine without tiers; and stored: by one with a host and a disk, which keep it; device: in
    the pool; host: other prompts have taken the pool since; disk: by an engine that was started over a
    directory of another one. The file is in the page cache, so the disk itself is not waited for.
    Answers are compared first, in fp32.
    """
    _, answers = Places(plan, "float32", plan.answer).round()
    for name in CASES[1:]:
        own, computed = answers[name], answers["computed"]
        assert own == computed, f"{name}: {own}, computed {computed}"
    places = Places(plan, plan.dtype, 1)
    rounds = [places.round()[0] for _ in range(plan.rounds)]
    computed_s = median(times["computed"] for times in rounds)
    return [
        {
            "tokens": plan.prompt,
            "block_size": BLOCK_SIZE,
            "case": case,
            "ms": 1e3 * median(times[case] for times in rounds),
            "times_ms": [1e3 * times[case] for times in rounds],
            "ratio": computed_s / median(times[case] for times in rounds),
            "kernels": places.plain.engine.kernels,
        }
        for case in CASES
    ]


def drain(llm: LLM) -> None:
    """Wait until all that is on its way to disk is there."""
    tiers = llm.engine.tiers
    assert tiers is not None, "there are tiers"
    assert tiers.disk is not None, "there is a disk"
    patience = monotonic() + DRAIN_S
    while tiers.disk.tier.num_storing:
        assert monotonic() < patience, f"{tiers.disk.tier.num_storing} blocks under way after {DRAIN_S:.0f} s"
        tiers.disk.wait()
        tiers.disk.poll()


def _from_below(llm: LLM) -> tuple[int, int]:
    """Tokens hit in host memory, those read from disk included, and read from disk, since the start."""
    stats = llm.engine.tier_stats()
    if stats is None:
        return 0, 0
    return stats.host_hit_tokens + stats.disk_hit_tokens, stats.disk_hit_tokens


@dataclass(frozen=True)
class PrefixPlan:
    """The replay of a trace. sizes: of the caches, beside which an infinite one is replayed."""

    trace: Path = option(MISSING, "JSON lines with hash_ids, such as Mooncake's.")
    sizes: tuple[int, ...] = option(
        (1000, 4000, 16_000, 64_000), "Sizes of the cache, in blocks of the trace.", flags=("--blocks",)
    )
    orders: tuple[str, ...] = option(eviction_orders(), "Eviction orders, comma-separated.")

    def __post_init__(self) -> None:
        require(bool(self.orders), "--orders is empty; name at least one eviction order, such as lru.")
        for order in self.orders:
            check_choice("an entry of --orders", order, eviction_orders())


@command
def prefix(plan: Annotated[PrefixPlan, ConfigOptions(config=PrefixPlan)], json_file: Json = None) -> None:
    """Prefix hit rates of a block-hash trace, by eviction order and size of the cache.

    A block of the cache is a block of the trace (512 tokens). Every block counts, also the partial one at the
    end of a prompt, as the authors of the Mooncake trace count. Requests are served one after the other; each
    holds all its blocks until it ends.
    """
    requests = [each.ids for each in read_trace(plan.trace).requests]
    longest = max(map(len, requests))
    require(longest > 0, f"--trace {plan.trace} has no hash_ids; a hit rate needs them.")
    require(
        min(plan.sizes, default=longest) >= longest,
        f"--blocks holds {min(plan.sizes)}, but a request of the trace has {longest} blocks and must fit.",
    )
    infinite = sum(map(len, requests))
    headings = [*(f"{size:,}" for size in plan.sizes), "infinite"]
    made = table(f"prefix hit rate by blocks of the cache, {plan.trace.name}", ["order", *headings])
    rows: list[Row] = []
    for order in plan.orders:
        own = [
            {"order": order, "num_blocks": size, **replay(requests, order, size or infinite)}
            for size in (*plan.sizes, None)
        ]
        made.add_row(order, *(f"{row['hit_rate']:.4f}" for row in own))
        rows += own
    publish(rows, [made], json_file, trace=plan.trace.name)


def replay(requests: Sequence[Sequence[Any]], order: str, num_blocks: int) -> Row:
    """Through a memory manager of one slot per block, as an engine would call it."""
    memory = MemoryManager(num_blocks, 1, eviction_policy=make_order(order, num_blocks))
    hits = 0
    for number, ids in enumerate(requests):
        # one slot more, which is never computed, because a hit always leaves one
        match = memory.match_prefix(memory.keys((*ids, BEYOND)))
        memory.admit(number, match)
        memory.grow(number, len(ids) - match.num_tokens)
        memory.commit(number, len(ids) - match.num_tokens)
        memory.free(number)
        hits += match.num_tokens
    memory.check()
    stats, queries = memory.stats(), sum(map(len, requests))
    misses = dict(stats.misses)
    misses["sub_block"] -= len(requests)
    assert hits + sum(misses.values()) == queries, f"{hits} hits, {misses}, {queries}"
    return {
        "hits": hits,
        "queries": queries,
        "hit_rate": hits / queries,
        "evictions": stats.prefix_evictions,
        "misses": {reason: blocks for reason, blocks in misses.items() if blocks},
    }
