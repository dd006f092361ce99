"""Time of a prompt that is compressed, over that of the same prompt with the full cache, in turns of one run.

    python benchmarks/prompt_time.py --model DIR --lengths 4096 --policies "auto,shares(kvzip)"

A request computes two tokens: the pass at a prompt's end runs before the second. Prefix caching is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

from rich.table import Table

from kvreclaim.bench.common import Row, alternate, sheet
from kvreclaim.bench.plans import ModelPlan
from kvreclaim.bench.systems.base import text_tokens
from kvreclaim.checks import require
from kvreclaim.cli.bench_options import Json, publish, ready, script
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression_settings import AUTO, FULL
from kvreclaim.engine.api.llm import LLM
from kvreclaim.options import option
from kvreclaim.sampling_params import SamplingParams

SAMPLING = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
SINKS, RECENT = 4, 64


@dataclass(frozen=True, kw_only=True)
class PromptTimePlan(ModelPlan):
    """Every policy at every budget and length beside the full cache."""

    policies: tuple[str, ...] = option((AUTO,), "Policies, comma-separated.")
    budgets: tuple[float, ...] = option((0.2, 0.1), "Shares of the prompt that stay, comma-separated.")
    lengths: tuple[int, ...] = option((4096,), "Tokens of the prompts, comma-separated.")
    text: Path | None = option(None, "UTF-8 text whose beginning is the prompt; else random tokens.")
    chunk: int = option(2048, "Tokens of a prompt that one step computes.", low=1)
    rounds: int = option(3, "Timed rounds.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for length, share in product(self.lengths, self.budgets):
            require(
                share * length > SINKS + RECENT and share < 1,
                f"--budgets has {share:g} of {length:,} tokens; pass shares below 1 of more than "
                f"{SINKS + RECENT} tokens.",
            )


def run(plan: PromptTimePlan) -> list[Row]:
    """A row per length, policy and budget. Raises: AssertionError where a pass did not run."""
    longest = max(plan.lengths)
    llm = LLM(
        plan.model,
        dtype=plan.dtype,
        max_num_seqs=1,
        max_model_len=longest + 2,
        max_num_batched_tokens=plan.chunk,
        enable_prefix_caching=False,
    )
    tokens = text_tokens(plan.text, longest, llm.loaded)
    cells = tuple(product(plan.policies, plan.budgets))
    rows = []
    for length in plan.lengths:
        prompt = tokens[:length]
        runs: dict[tuple[str, float], Callable[[], float]] = {
            (FULL, 1.0): partial(_seconds, llm, prompt, None)
        }
        for policy, share in cells:
            settings = CompressionConfig(policy, int(share * length), sinks=SINKS, recent=RECENT)
            runs[policy, share] = partial(_seconds, llm, prompt, settings)
        alternate(runs, 1)
        found = alternate(runs, plan.rounds)
        full = found[FULL, 1.0]
        rows += [
            {
                **plan.facts(),
                "length": length,
                "policy": policy,
                "budget": share,
                "full_s": median(full),
                "seconds": median(found[policy, share]),
                "ratio": median(own / other for own, other in zip(found[policy, share], full, strict=True)),
            }
            for policy, share in cells
        ]
    return rows


def _seconds(llm: LLM, prompt: list[int], settings: CompressionConfig | None) -> float:
    passes = llm.engine.totals.compactions
    started = perf_counter()
    (output,) = llm.generate({"prompt_token_ids": prompt}, SAMPLING, settings)
    elapsed_s = perf_counter() - started
    assert output.error is None, output.error
    assert (llm.engine.totals.compactions > passes) == (settings is not None), "passes ran, or did not run"
    return elapsed_s


def prompt_time_table(rows: list[Row]) -> Table:
    columns = {
        "policy": "{policy}",
        "prompt": "{length:,}",
        "stays": "{budget:.0%}",
        "full cache, s": "{full_s:.2f}",
        "compressed, s": "{seconds:.2f}",
        "compressed / full": "{ratio:.2f}",
    }
    return sheet("time of a prompt", columns, rows)


@script
def app(
    plan: Annotated[PromptTimePlan, ConfigOptions(config=PromptTimePlan)], json_file: Json = None
) -> None:
    """Time of a compressed prompt over that of the same prompt with the full cache."""
    with ready(plan.threads):
        rows = run(plan)
        publish(rows, [prompt_time_table(rows)], json_file)


if __name__ == "__main__":
    app()
