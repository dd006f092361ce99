"""What the rounding of packed weights does to logits.

python -m benchmarks rounding --model MODEL.gguf --text docs/tiers.md
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from benchmarks.runner import TextPlan, case
from kvreclaim.bench.common import Row
from kvreclaim.bench.systems.base import text_tokens
from kvreclaim.bench.verify import PackedReferee
from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.options import option

CONTEXT = 8
"""Leading tokens, after which logits count."""


@dataclass(frozen=True, kw_only=True)
class RoundingPlan(TextPlan):
    """A GGUF file in one dtype, and all combinations of the other settings."""

    tokens: int = option(400, "Tokens of the text's beginning.", low=CONTEXT + 1)
    caches: tuple[str, ...] = option(("auto", "fp16"), "kv_cache_dtype, comma-separated.")
    activations: tuple[str, ...] = option(("auto", "int8"), "quantized_activations, comma-separated.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.model.suffix == ".gguf", f"--model is {str(self.model)!r}; name a .gguf file.")


@case(
    "rounding of logits",
    {
        "dtype": "{dtype}",
        "cache": "{cache}",
        "activations": "{activations}",
        "rms (σ)": "{rms:.4f}",
        "KL (nats)": "{kl:.5f}",
        "largest": "{largest_kl:.4f}",
        "other first choices": "{other_first} of {num_tokens}",
    },
    text_columns=3,
)
def rounding(plan: RoundingPlan) -> Iterator[Row]:
    """Logits of a GGUF model, by settings of the engine, beside those of the same weights multiplied in fp32
    over fp32 keys and values, each after the same tokens of a text."""
    judge = PackedReferee(plan.model).llm
    tokens = text_tokens(plan.text, plan.tokens, judge.loaded)
    exact = log_probs(judge, tokens)
    for cache, activations in product(plan.caches, plan.activations):
        llm = LLM(
            plan.model,
            dtype=plan.dtype,
            kv_cache_dtype=cache,
            quantized_activations=activations,
            device="cpu",
            max_model_len=plan.tokens,
        )
        yield {"cache": cache, "activations": activations} | compare(log_probs(llm, tokens), exact)


def log_probs(llm: LLM, tokens: list[int]) -> Tensor:
    """[T - CONTEXT, V] fp32."""
    rows: list[Tensor] = []
    first, rest = tokens[:CONTEXT], tokens[CONTEXT:]
    llm.score([first], [rest], observers=[lambda _, logits: rows.append(logits.float().clone())])
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
