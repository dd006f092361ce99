"""The scores once more: float64 loops that follow the page, on the models of made-up numbers."""

from __future__ import annotations

import cmath
import math

import torch
from torch import Tensor

from kvreclaim.compression.policy import LayerView
from kvreclaim.compression.stats import QueryStats
from kvreclaim.ops.rope import RopeLayout
from kvreclaim.testing.toys import (  # noqa: F401  tests take both from here
    FINGERPRINT,
    kv_head_view,
    layer_facts,
    layer_signals,
    layer_view,
    layout,
    model_facts,
    noise,
    query_stats,
    with_kv,
)

TENSORS = (
    "q_mean",
    "q_abs_mean",
    "centers",
    "center_var",
    "center_weight",
    "q_cov",
    "surrogate",
    "surrogate_age",
    "head_shares",
    "kvzap_out",
    "kvzap_in",
)


def same_stats(ours: QueryStats, other: QueryStats) -> bool:
    pairs = [(getattr(ours, name), getattr(other, name)) for name in TENSORS]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def bands_of(vector: Tensor, rope: RopeLayout) -> list[complex]:
    real, imag = rope.band_dims()
    values = vector.tolist()
    return [complex(values[r], values[i]) for r, i in zip(real.tolist(), imag.tolist(), strict=True)]


def rest_of(vector: Tensor, rope: RopeLayout) -> list[float]:
    return [vector.tolist()[dim] for dim in rope.rest_dims(vector.numel()).tolist()]


def turned_product(query: Tensor, key: Tensor, rope: RopeLayout, time: int) -> float:
    """Re sum_f q_f e^{i w_f t} conj(K_f) + the plain product of the dims without position."""
    pairs = zip(bands_of(query, rope), bands_of(key, rope), rope.inv_freq.tolist(), strict=True)
    turned = sum((q * cmath.exp(1j * w * time) * k.conjugate()).real for q, k, w in pairs)
    return turned + sum(q * k for q, k in zip(rest_of(query, rope), rest_of(key, rope), strict=True))


def triattention_scores(
    keys: Tensor,
    q_mean: Tensor,
    q_abs: Tensor,
    rope: RopeLayout,
    logical_len: int,
    *,
    aggregate: str = "mean",
) -> Tensor:
    """[K, T, D], [H, D], [H, F] -> [H, T] float64, one number at a time."""
    heads, (kv_heads, tokens, _) = q_mean.shape[0], keys.shape
    out = torch.zeros(heads, tokens, dtype=torch.float64)
    for h in range(heads):
        for j in range(tokens):
            key = keys[h * kv_heads // heads, j]
            trig = [turned_product(q_mean[h], key, rope, logical_len + 2**n) for n in range(17)]
            sizes = zip(q_abs[h].tolist(), bands_of(q_mean[h], rope), bands_of(key, rope), strict=True)
            norm = sum((a - abs(c)) * abs(k) for a, c, k in sizes)
            out[h, j] = (max(trig) if aggregate == "max" else sum(trig) / 17) + norm
    return out


def mixture_scores(view: LayerView, offsets: tuple[int, ...], over: range) -> Tensor:
    """[K, T] float64, one number at a time; 0 outside `over`."""
    facts, stats = view.facts, view.stats
    assert stats is not None
    assert stats.centers is not None
    assert stats.center_var is not None
    assert facts.rope is not None
    out = torch.zeros(view.keys.shape[:2], dtype=torch.float64)
    for h in range(facts.num_heads):
        k, owner = h // facts.group_size, h * len(stats.centers) // facts.num_heads
        for c in range(stats.centers.shape[1]):
            kind = stats.centers[owner, c], stats.center_var[owner, c]
            total = dict.fromkeys(over, 0.0)
            for d in offsets:
                logits = [_mixture_logit(view, *kind, (k, j, d)) for j in over]
                weights = [math.exp(x - max(logits)) for x in logits]
                for j, weight in zip(over, weights, strict=True):
                    total[j] += weight / sum(weights) / len(offsets)
            for j in over:
                out[k, j] = max(out[k, j].item(), total[j])
    return out


def _mixture_logit(view: LayerView, center: Tensor, variance: Tensor, place: tuple[int, int, int]) -> float:
    head, token, offset = place
    key, scale, rope = view.keys[head, token], view.facts.softmax.scale, view.facts.rope
    assert rope is not None
    spread = sum(v * k * k for v, k in zip(variance.tolist(), key.tolist(), strict=True))
    return scale * turned_product(center, key, rope, view.logical_len + offset) + scale**2 / 2 * spread


def attention_rows(view: LayerView, queries: Tensor, first: int) -> Tensor:
    """[H, R, T] float64, one number at a time: what queries at first, first + 1, ... pay each key."""
    facts, (kv_heads, tokens, _) = view.facts, view.keys.shape
    out = torch.zeros(*queries.shape[:2], tokens, dtype=torch.float64)
    for h in range(queries.shape[0]):
        k = h * kv_heads // queries.shape[0]
        for r in range(queries.shape[1]):
            weights = {}
            for j in range(tokens):
                where = view.logical_len - tokens + j
                if view.signals.positions is not None:
                    where = int(view.signals.positions[k, j])
                ahead = first + r - where
                if ahead < 0 or (facts.softmax.window is not None and ahead >= facts.softmax.window):
                    continue
                logit = facts.softmax.scale * float(queries[h, r].double() @ view.keys[k, j].double())
                if facts.softmax.softcap is not None:
                    logit = facts.softmax.softcap * math.tanh(logit / facts.softmax.softcap)
                weights[j] = math.exp(logit)
            sink = 0.0 if facts.softmax.sinks is None else math.exp(float(facts.softmax.sinks[h]))
            for j, weight in weights.items():
                out[h, r, j] = weight / (sum(weights.values()) + sink)
    return out
