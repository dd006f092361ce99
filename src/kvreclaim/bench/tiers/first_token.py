"""Time to the first token of a long prompt, by where its keys and values are found.

computed:    by an engine without tiers
and stored:  computed by one with a host and a disk, which keep it
device:      in the pool
host:        other prompts have taken the pool since
disk:        by an engine that was started over a directory that another one has left; the file is in the
             page cache, so the disk itself is not waited for
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from statistics import median
from time import perf_counter

from rich.table import Table

from kvreclaim.bench.common import Row, sheet
from kvreclaim.bench.systems.base import random_prompts
from kvreclaim.bench.tiers.engines import answer, drain, facts, host_gib, load, require_equal
from kvreclaim.bench.tiers.plan import TiersPlan
from kvreclaim.engine.api.llm import LLM

DISK_SHARE = 1.5
"""Size of the disk tier over the host's: headers and padding have room, too."""
LEAST_DISK_GIB = 0.01
CASES = ("computed", "computed and stored", "device", "host", "disk")


class Places:
    """A plain engine, and in each round two with tiers, one after the other over a new directory.

    num_tokens: of each answer
    """

    def __init__(self, plan: TiersPlan, dtype: str, num_tokens: int) -> None:
        self.plan, self.dtype, self.num_tokens = plan, dtype, num_tokens
        self.plain = load(plan, dtype, enable_prefix_caching=False)
        self.host_gib = host_gib(self.plain, plan)
        self.vocab_size = self.plain.loaded.vocab_size
        self.rng = random.Random(0)
        answer(self.plain, self.prompt(), 1)

    def prompt(self) -> list[int]:
        """One that nobody has seen."""
        seed = self.rng.randrange(1 << 30)
        return random_prompts(1, self.plan.prompt, self.vocab_size, seed)[0]

    def tiered(self, directory: str) -> LLM:
        return load(
            self.plan,
            self.dtype,
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
    ratio to computing. Raises: WrongAnswerError."""
    _, said = Places(plan, "float32", plan.answer).round()
    for case in CASES[1:]:
        require_equal(said[case], said["computed"], case)
    places = Places(plan, plan.dtype, 1)
    rounds = [places.round()[0] for _ in range(plan.rounds)]
    computed = median(times["computed"] for times in rounds)
    return [
        {
            **facts(plan),
            "case": case,
            "ms": 1e3 * median(times[case] for times in rounds),
            "times_ms": [1e3 * times[case] for times in rounds],
            "ratio": computed / median(times[case] for times in rounds),
            "kernels": places.plain.engine.kernels,
        }
        for case in CASES
    ]


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
