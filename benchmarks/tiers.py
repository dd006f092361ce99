"""Time to the first token of a long prompt, by where its keys and values are found.

computed:    by an engine without tiers
and stored:  computed by one with a host and a disk, which keep it
device:      in the pool
host:        other prompts have taken the pool since
disk:        by an engine that was started over a directory that another one has left; the file is in the
             page cache, so the disk itself is not waited for

    python benchmarks/tiers.py --model MODEL --prompt 8144 --rounds 3
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import median
from time import monotonic, perf_counter
from typing import Annotated, Any

from rich.table import Table

from kvreclaim.bench.common import Row, sheet
from kvreclaim.bench.plans import ModelPlan
from kvreclaim.bench.systems.base import BLOCK_SIZE, CHUNK, random_prompts
from kvreclaim.cli.bench_options import Json, publish, ready, script
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import RequestOutput
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.options import option
from kvreclaim.sampling_params import SamplingParams

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
        answer(self.plain, self.prompt(), 1)

    def load(self, **options: Any) -> LLM:
        """An engine whose pool holds one prompt and its answer, and little else."""
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
        """One that nobody has seen."""
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
        said: dict[str, list[int]] = {}

        def ask(case: str, llm: LLM) -> None:
            before, started = _from_below(llm), perf_counter()
            output = answer(llm, prompt, self.num_tokens)
            spent[case], said[case] = perf_counter() - started, output.outputs[0].token_ids
            below = [after - was for after, was in zip(_from_below(llm), before, strict=True)]
            self._check_place(case, [output.metrics.num_cached_tokens, *below])

        ask("computed", self.plain)
        with tempfile.TemporaryDirectory(prefix="kvreclaim-bench-") as directory:
            self._with_tiers(directory, prompt, ask)
        return spent, said

    def _with_tiers(self, directory: str, prompt: list[int], ask: Callable[[str, LLM], None]) -> None:
        other = self.prompt()
        with closing(self.tiered(directory)) as llm:
            answer(llm, other[: len(other) // 2], 1)
            ask("computed and stored", llm)
            ask("device", llm)
            for filler in (other, self.prompt()):
                answer(llm, filler, 1)
            ask("host", llm)
            drain(llm)
        with closing(self.tiered(directory)) as llm:
            answer(llm, self.prompt()[: len(other) // 2], 1)
            ask("disk", llm)

    def _check_place(self, case: str, found: Sequence[int]) -> None:
        """found: hit anywhere, in host memory or below, on disk: all full blocks, or none."""
        size = self.plain.engine.config.block_size
        most = (self.plan.prompt - 1) // size * size
        expected = {"device": (most, 0, 0), "host": (most, most, 0), "disk": (most, most, most)}
        assert tuple(found) == expected.get(case, (0, 0, 0)), f"{case}: {found} tokens, prompt {most}"


def run(plan: TiersPlan) -> list[Row]:
    """Compares answers, in fp32, then measures. Returns: a row for each of CASES: ms (median), times_ms,
    ratio to computing. Raises: AssertionError where a tier's answer is another."""
    _, said = Places(plan, "float32", plan.answer).round()
    for case in CASES[1:]:
        assert said[case] == said["computed"], f"{case}: {said[case]}, computed {said['computed']}"
    places = Places(plan, plan.dtype, 1)
    rounds = [places.round()[0] for _ in range(plan.rounds)]
    computed = median(times["computed"] for times in rounds)
    return [
        {
            **plan.facts(),
            "tokens": plan.prompt,
            "block_size": BLOCK_SIZE,
            "case": case,
            "ms": 1e3 * median(times[case] for times in rounds),
            "times_ms": [1e3 * times[case] for times in rounds],
            "ratio": computed / median(times[case] for times in rounds),
            "kernels": places.plain.engine.kernels,
        }
        for case in CASES
    ]


def answer(llm: LLM, prompt: list[int], num_tokens: int) -> RequestOutput:
    """Greedy."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    (output,) = llm.generate([prompt], params)
    assert output.error is None, f"a request failed: {output.error}"
    return output


def drain(llm: LLM) -> None:
    """Wait until all that is on its way to disk is there."""
    tiers = llm.engine.tiers
    assert tiers is not None, "there are tiers"
    assert tiers.disk is not None, "there is a disk"
    patience = monotonic() + DRAIN_S
    while tiers.disk.tier.num_storing:
        assert monotonic() < patience, f"still under way after {DRAIN_S:.0f} s: {tiers.disk.stats()}"
        tiers.disk.wait()
        tiers.disk.poll()


def _from_below(llm: LLM) -> tuple[int, int]:
    """Tokens hit in host memory, those read from disk included, and read from disk, since the start."""
    stats = llm.engine.tier_stats()
    if stats is None:
        return 0, 0
    return stats.host_hit_tokens + stats.disk_hit_tokens, stats.disk_hit_tokens


def first_token_table(rows: Sequence[Row]) -> Table:
    """For people."""
    columns = {"prompt is": "{case}", "ms": "{ms:,.1f}", "computed / this": "{ratio:,.1f} x"}
    return sheet(f"first token of {rows[0]['tokens']:,} tokens, {rows[0]['model']}", columns, rows)


@script
def app(plan: Annotated[TiersPlan, ConfigOptions(config=TiersPlan)], json_file: Json = None) -> None:
    """Time to the first token of a prompt that is computed, or found on the device, the host or the disk."""
    with ready(plan.threads):
        rows = run(plan)
        publish(rows, [first_token_table(rows)], json_file)


if __name__ == "__main__":
    app()
