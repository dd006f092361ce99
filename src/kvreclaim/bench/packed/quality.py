"""What rounding activations costs a packed model: KL of its logits to those of exact products."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from kvreclaim.bench.common import Row, sheet
from kvreclaim.bench.packed.plan import ACTIVATIONS, PackedPlan
from kvreclaim.bench.systems.base import text_tokens
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.model.quantized.layers import PackedLinear
from kvreclaim.ops.reference import causal_attention


class _Causal:
    """A KVBatch of one document, without a cache."""

    def attend(self, call: AttentionCall) -> Tensor:
        return causal_attention(call.q, call.k, call.v, call.softmax)


def run(plan: PackedPlan) -> list[Row]:
    """A row per packed model and kind of activations."""
    return [row for path in plan.packed for row in _rows(plan, path)]


def _rows(plan: PackedPlan, path: Path) -> list[Row]:
    loaded = load_model(path, dtype="float32", kernels="torch", quantized_activations="exact")
    ids = torch.tensor([text_tokens(plan.text, plan.tokens, loaded)])
    want = _logprobs(loaded, ids, "exact")
    rows = []
    for activations in ACTIVATIONS:
        got = _logprobs(loaded, ids, activations)
        kl = (want.exp() * (want - got)).sum(-1)
        same = (want.argmax(-1) == got.argmax(-1)).double().mean()
        rows.append(
            {
                "model": path.name,
                "text": None if plan.text is None else plan.text.name,
                "tokens": plan.tokens,
                "activations": activations,
                "kl": float(kl.mean()),
                "largest_kl": float(kl.max()),
                "same_top_1": float(same),
            }
        )
    return rows


@torch.inference_mode()
def _logprobs(loaded: LoadedModel, ids: Tensor, activations: str) -> Tensor:
    """[T, vocabulary] fp64, every packed product with such activations."""
    for module in loaded.model.modules():
        if isinstance(module, PackedLinear):
            module.products = replace(module.products, activations=activations)
    places = torch.arange(ids.shape[1])[None]
    logits: Tensor = loaded.model(
        input_ids=ids, position_ids=places, use_cache=False, kv_batch=_Causal()
    ).logits
    return logits[0].double().log_softmax(-1)


def quality_table(rows: list[Row]) -> Table:
    columns = {
        "model": "{model}",
        "activations": "{activations}",
        "tokens": "{tokens:,}",
        "KL": "{kl:.1e}",
        "largest": "{largest_kl:.1e}",
        "same top 1": "{same_top_1:.1%}",
    }
    return sheet("rounded activations against exact ones", columns, rows, text_columns=2)
