"""How far rounding moves a GGUF model's logits: settings of the engine beside the same weights multiplied in
fp32 over fp32 keys and values, each after the same tokens of a text.

python benchmarks/rounding.py --model MODEL.gguf --text docs/tiers.md
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
from rich.table import Table
from torch import Tensor

from kvreclaim import LLM
from kvreclaim.bench.common import Row, sheet
from kvreclaim.bench.plans import ModelPlan
from kvreclaim.bench.systems.base import text_tokens
from kvreclaim.bench.verify import PackedReferee
from kvreclaim.checks import require
from kvreclaim.cli.bench_options import Json, publish, ready, script
from kvreclaim.cli.config_options import ConfigOptions
from kvreclaim.options import option

CONTEXT = 8
"""Tokens before the first whose logits count."""


@dataclass(frozen=True, kw_only=True)
class RoundingPlan(ModelPlan):
    """A GGUF file in one dtype, and all combinations of the other settings."""

    text: Path | None = option(None, "A text; random tokens where it is left out.")
    tokens: int = option(400, "Tokens of the text's beginning.", low=CONTEXT + 1)
    caches: tuple[str, ...] = option(("auto", "fp16"), "kv_cache_dtype, comma-separated.")
    activations: tuple[str, ...] = option(("auto", "int8"), "quantized_activations, comma-separated.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.model.suffix == ".gguf", f"--model is {str(self.model)!r}; name a .gguf file.")


def run(plan: RoundingPlan) -> list[Row]:
    """A row per setting."""
    judge = PackedReferee(plan.model).llm
    tokens = text_tokens(plan.text, plan.tokens, judge.loaded)
    exact, rows = log_probs(judge, tokens), []
    for cache, activations in product(plan.caches, plan.activations):
        llm = LLM(
            plan.model,
            dtype=plan.dtype,
            kv_cache_dtype=cache,
            quantized_activations=activations,
            device="cpu",
            max_model_len=plan.tokens,
        )
        row: Row = {"cache": cache, "activations": activations}
        rows.append(plan.facts() | row | compare(log_probs(llm, tokens), exact))
    return rows


def log_probs(llm: LLM, tokens: list[int]) -> Tensor:
    """[T - CONTEXT, V] fp32."""
    rows: list[Tensor] = []
    first, rest = tokens[:CONTEXT], tokens[CONTEXT:]
    llm.score([first], [rest], observers=[lambda _, told: rows.append(told.float().clone())])
    return torch.cat(rows).log_softmax(-1)


def compare(found: Tensor, exact: Tensor) -> Row:
    """Root mean square of deviations in standard deviations of a row; divergence in nats."""
    kl = (exact.exp() * (exact - found)).sum(-1)
    return {
        "rms": float(((found - exact) / exact.std(-1, keepdim=True)).square().mean().sqrt()),
        "kl": float(kl.mean()),
        "largest_kl": float(kl.max()),
        "other_first": int((found.argmax(-1) != exact.argmax(-1)).sum()),
        "num_tokens": len(exact),
    }


def rounding_table(rows: list[Row]) -> Table:
    columns = {
        "dtype": "{dtype}",
        "cache": "{cache}",
        "activations": "{activations}",
        "rms (σ)": "{rms:.4f}",
        "KL (nats)": "{kl:.5f}",
        "largest": "{largest_kl:.4f}",
        "other first choices": "{other_first} of {num_tokens}",
    }
    return sheet("rounding of logits", columns, rows, text_columns=3)


@script
def app(plan: Annotated[RoundingPlan, ConfigOptions(config=RoundingPlan)], json_file: Json = None) -> None:
    """Logits of a GGUF model beside those of exact arithmetic."""
    with ready(plan.threads):
        rows = run(plan)
        publish(rows, [rounding_table(rows)], json_file)


if __name__ == "__main__":
    app()
