"""Sparse prefill beside dense, in one run: first a check of full reads, then seconds and shares.

python benchmarks/prefill.py --model MODEL --text FILE --lengths 8000,32000
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated

from rich.table import Table

from kvreclaim.bench.common import Row, alternate, sheet
from kvreclaim.bench.plans import KERNELS, ModelPlan
from kvreclaim.bench.systems.base import text_tokens
from kvreclaim.checks import require
from kvreclaim.cli.bench_options import Json, publish, ready, script
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.config import DENSE
from kvreclaim.engine.api.llm import LLM
from kvreclaim.model.overrides import yarn
from kvreclaim.options import option
from kvreclaim.sampling_params import SamplingParams

SAMPLING = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0)
CHECKED = "pooled(alpha=0.5, first=256, layers=0, local=1)"
LOGPROB, SHARE = 0.01, 0.01
"""Most by which kernels may differ there: a block as near to the threshold may be read or not."""


@dataclass(frozen=True, kw_only=True)
class PrefillPlan(ModelPlan):
    """Every method at every length beside dense, in turns, of which medians are taken."""

    methods: tuple[str, ...] = option(
        (
            "pooled",
            "pooled(alpha=0.3)",
            "a_shape(local=2048)",
            "vertical_slash(vertical=1000, slash=2048)",
            "block_sparse(top=32)",
        ),
        "Ways of sparse prefill, comma-separated.",
    )
    lengths: tuple[int, ...] = option((8192, 16384, 32768), "Tokens of the prompts, comma-separated.")
    text: Path | None = option(None, "UTF-8 text whose beginning is the prompt; else random tokens.")
    kernels: str = option("auto", KERNELS)
    rounds: int = option(3, "Timed rounds.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.methods), "--methods names none; pass for example pooled,a_shape.")
        require(
            bool(self.lengths) and min(self.lengths, default=0) >= 1,
            f"--lengths are {self.lengths}; pass tokens, such as 8192,16384.",
        )
        require(
            self.text is None or self.text.is_file(),
            f"--text is {str(self.text)!r}, which is no file; name one, or leave it out.",
        )


class Prompts:
    """One engine, and a prompt of each length. Raises: InvalidArgumentError for a text that is too short."""

    def __init__(self, plan: PrefillPlan) -> None:
        config = json.loads((plan.model / "config.json").read_text(encoding="utf-8"))
        overrides = yarn(config["max_position_embeddings"], max(plan.lengths) + 1)
        self.stretched = overrides["rope_parameters"]["factor"] if overrides else 1.0
        self.llm = LLM(
            plan.model,
            hf_overrides=overrides,
            dtype=plan.dtype,
            device="cpu",
            kernels=plan.kernels,
            max_num_seqs=1,
            max_model_len=max(plan.lengths) + 1,
            enable_prefix_caching=False,
        )
        self.tokens = text_tokens(plan.text, max(plan.lengths), self.llm.loaded)

    def run(self, length: int, method: str) -> tuple[float, float, int, float]:
        """Seconds, the share of the tokens that were read, the token that follows and its log-probability."""
        prompt = {"prompt_token_ids": self.tokens[:length], "sparse_prefill": method}
        started = perf_counter()
        (output,) = self.llm.generate(prompt, SAMPLING)
        elapsed_s = perf_counter() - started
        assert output.error is None, f"{method}: {output.error}"
        (token,), share = output.outputs[0].token_ids, output.metrics.prefill_share
        (told,) = output.outputs[0].logprobs or ({},)
        return elapsed_s, 1.0 if share is None else share, token, told[token].logprob


def run(plan: PrefillPlan) -> list[Row]:
    """A row per length and method. Raises: AssertionError where kernels differ."""
    check(plan)
    prompts, rows = Prompts(plan), []
    for length in plan.lengths:
        names = (DENSE, *plan.methods)
        runs: dict[str, Callable[[], tuple[float, float, int, float]]]
        runs = {name: partial(prompts.run, length, name) for name in names}
        found = alternate(runs, plan.rounds)
        for name in names:
            pairs = zip(found[DENSE], found[name], strict=True)
            seconds = median(each[0] for each in found[name])
            rows.append(
                {
                    **plan.facts(),
                    "stretched": prompts.stretched,
                    "length": length,
                    "method": name,
                    "seconds": seconds,
                    "tokens_per_s": length / seconds,
                    "ratio": median(dense[0] / own[0] for dense, own in pairs),
                    "ratios": [d[0] / own[0] for d, own in zip(found[DENSE], found[name], strict=True)],
                    "read": found[name][0][1],
                    "same_token": found[name][0][2] == found[DENSE][0][2],
                }
            )
    return rows


def check(plan: PrefillPlan) -> None:
    """In fp32, of 2,048 tokens: native kernels answer as the reference's do, and a method that leaves out
    nothing is dense attention, to the bit."""
    small = replace(plan, dtype="float32", lengths=(2048,))
    ours, oracle = Prompts(small), Prompts(replace(small, kernels="reference"))
    _, share, token, logprob = ours.run(2048, CHECKED)
    _, same_share, same, near = oracle.run(2048, CHECKED)
    assert token == same, f"{CHECKED}: token {token} instead of {same}"
    assert abs(near - logprob) <= LOGPROB, f"{CHECKED}: {logprob} instead of {near}"
    assert abs(share - same_share) <= SHARE, f"{CHECKED} reads {share} instead of {same_share}"
    assert ours.run(2048, "pooled(alpha=0)")[2:] == ours.run(2048, DENSE)[2:], "alpha=0 is not dense"


def prefill_table(rows: list[Row]) -> Table:
    columns = {
        "method": "{method}",
        "prompt": "{length:,}",
        "seconds": "{seconds:.2f}",
        "tokens/s": "{tokens_per_s:,.0f}",
        "dense / it": "{ratio:.2f}",
        "tokens read": "{read:.1%}",
    }
    return sheet("sparse prefill", columns, rows)


@script
def app(plan: Annotated[PrefillPlan, ConfigOptions(config=PrefillPlan)], json_file: Json = None) -> None:
    """Sparse prefill beside dense: what reads everything first, then tokens/s and the share that is read."""
    with ready(plan.threads):
        rows = run(plan)
        publish(rows, [prefill_table(rows)], json_file)


if __name__ == "__main__":
    app()
