"""Packed weights: their decode speed, and what rounding does to logits.

python -m benchmarks packed --model bench_models/qwen3-0.6b --packed bench_models/qwen3-0.6b-awq
python -m benchmarks rounding --model MODEL.gguf --text docs/tiers.md
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.runner import TextPlan, case
from kvreclaim.bench.common import Row, alternate
from kvreclaim.bench.kernels import measure
from kvreclaim.bench.plans import ModelPlan
from kvreclaim.bench.systems.base import Point, text_tokens
from kvreclaim.bench.systems.ours import KvreclaimSystem
from kvreclaim.bench.verify import PackedReferee
from kvreclaim.checks import require
from kvreclaim.engine.api.llm import LLM
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.extension import native
from kvreclaim.options import option

WARM_STEPS = 4
CONTEXT = 8
"""Leading tokens, after which logits count."""


@dataclass(frozen=True, kw_only=True)
class PackedPlan(ModelPlan):
    """A model, and packed ones of the same shape."""

    packed: tuple[Path, ...] = option(
        (), "Packed models, comma-separated; `make bench-model` makes two of Qwen3-0.6B's."
    )
    contexts: tuple[int, ...] = option((1024,), "Tokens in each cache, comma-separated.")
    batches: tuple[int, ...] = option((1, 8), "Sequences, comma-separated.")
    steps: int = option(16, "Steps of a timed slice.", low=1)
    rounds: int = option(5, "Timed rounds.", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for path in self.packed:
            require(path.exists(), f"--packed names {str(path)!r}, which is missing; run `make bench-model`.")
        positive = min((*self.contexts, *self.batches), default=0) > 0
        require(positive, "--contexts and --batches take positive numbers.")


@case(
    "decode, {isa}",
    {
        "model": "{model}",
        "context x batch": "{context:,} x {batch}",
        "weights, MB": "{weight_mb:,.0f}",
        "tokens/s": "{tokens_per_s:,.1f}",
        "weights, GB/s": "{weights_gb_s:,.1f}",
        "of read": "{read_share:.0%}",
        "x bf16": "{times_bf16:.2f}",
    },
)
def packed(plan: PackedPlan) -> list[Row]:
    """Decode with weights of 4, 6 and 8 bits beside bf16; ratios are of the same round, by median."""
    points = [
        Point(context, batch, WARM_STEPS + plan.steps * plan.rounds)
        for context, batch in product(plan.contexts, plan.batches)
    ]
    systems = {
        path.name: KvreclaimSystem("kvreclaim-full", replace(plan.setup, model=path), points)
        for path in (plan.model, *plan.packed)
    }
    before, rows = measure(), []
    for point in points:
        with ExitStack() as opened:
            sessions = {
                name: opened.enter_context(closing(system.open(point))) for name, system in systems.items()
            }
            for session in sessions.values():
                session.run(WARM_STEPS)
            runs = {name: partial(session.run, plan.steps) for name, session in sessions.items()}
            found = alternate(runs, plan.rounds)
        base = found[plan.model.name]
        for name, system in systems.items():
            own, nbytes = found[name], step_bytes(system.llm.loaded)
            rows.append(
                {
                    "model": name,
                    "isa": native().isa(),
                    "context": point.context,
                    "batch": point.batch,
                    "weight_mb": nbytes / 1e6,
                    "tokens_per_s": median(each.tokens_per_s for each in own),
                    "weights_gb_s": median(nbytes * each.steps / each.elapsed_s for each in own) / 1e9,
                    "times_bf16": median(b.elapsed_s / o.elapsed_s for b, o in zip(base, own, strict=True)),
                }
            )
    best = before.better(measure())
    return [row | {"read_share": row["weights_gb_s"] / best.read_gb_s} for row in rows]


def step_bytes(loaded: LoadedModel) -> int:
    """Bytes of weights that a step reads: all, less embeddings that are not the output layer's too."""
    embeddings, head = loaded.model.get_input_embeddings(), loaded.model.get_output_embeddings()
    own = {each.data_ptr(): each.nbytes for each in (*embeddings.parameters(), *embeddings.buffers())}
    shared = {each.data_ptr() for each in (*head.parameters(), *head.buffers())}
    return loaded.weight_bytes - sum(nbytes for at, nbytes in own.items() if at not in shared)


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
