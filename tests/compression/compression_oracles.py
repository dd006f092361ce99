"""Small models of made-up numbers, and the scores once more: float64 loops that follow the page."""

from __future__ import annotations

import cmath
import dataclasses
import math

import torch
from torch import Tensor

from kvreclaim.compression import LayerStats, LayerView, QueryStats, StatsMetadata
from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.ops.rope import RopeLayout

FINGERPRINT = "f" * 64
TENSORS = ("q_mean", "q_abs_mean", "centers", "center_var", "center_weight")


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def layout(num_bands: int = 4, style: str = "half", start: int = 0, theta: float = 10_000.0) -> RopeLayout:
    bands = torch.arange(num_bands, dtype=torch.float64)
    inv_freq = theta ** (-bands / max(1, num_bands))
    return RopeLayout(inv_freq, "half" if style == "half" else "interleaved", start)


def layer_facts(
    rope: RopeLayout | None = None, *, head_dim: int = 8, window: int | None = None
) -> LayerFacts:
    """4 query heads, 2 KV heads."""
    return LayerFacts(
        4, 2, head_dim, head_dim, head_dim**-0.5, window, layout(head_dim // 2) if rope is None else rope
    )


def model_facts(
    layers: int = 3, windows: tuple[int | None, ...] = (), rope: RopeLayout | None = None
) -> ModelFacts:
    built = tuple(layer_facts(rope, window=window) for window in windows or (None,) * layers)
    return ModelFacts("toy", FINGERPRINT, built, torch.float32, torch.device("cpu"), 4096)


def query_stats(facts: ModelFacts, num_centers: int = 3, seed: int = 0) -> QueryStats:
    """Any numbers that a calibration could have found: |mean| <= E|q|, variances >= 0."""
    first = facts.layers[0]
    assert first.rope is not None
    grid = (facts.num_layers, first.num_heads)
    mean = noise(seed, *grid, first.head_dim)
    size = 4 + noise(seed + 1, *grid, first.rope.num_bands).abs()
    metadata = StatsMetadata(
        model_name=facts.name,
        fingerprint=facts.fingerprint,
        num_layers=grid[0],
        num_heads=grid[1],
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        rope_style=first.rope.style,
        num_tokens=100,
        num_centers=num_centers,
        source="test",
    )
    if num_centers == 0:
        return QueryStats(metadata, mean, size)
    centers = noise(seed + 2, *grid, num_centers, first.head_dim)
    variances = noise(seed + 3, *grid, num_centers, first.head_dim).square()
    weights = torch.full((*grid, num_centers), 1 / num_centers)
    return QueryStats(metadata, mean, size, centers, variances, weights)


def same_stats(ours: QueryStats, other: QueryStats) -> bool:
    pairs = [(getattr(ours, name), getattr(other, name)) for name in TENSORS]
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def layer_view(
    facts: LayerFacts, stats: LayerStats | None, *, num_tokens: int = 9, logical_len: int = 40, seed: int = 7
) -> LayerView:
    shape = (facts.num_kv_heads, num_tokens)
    keys, values = noise(seed, *shape, facts.head_dim), noise(seed + 1, *shape, facts.v_head_dim)
    return LayerView(0, DenseSource(keys, values), logical_len, facts, stats, slice(1, num_tokens - 2))


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
        k = h // facts.group_size
        for c in range(stats.centers.shape[1]):
            total = dict.fromkeys(over, 0.0)
            for d in offsets:
                logits = [
                    _mixture_logit(view, stats.centers[h, c], stats.center_var[h, c], (k, j, d)) for j in over
                ]
                weights = [math.exp(x - max(logits)) for x in logits]
                for j, weight in zip(over, weights, strict=True):
                    total[j] += weight / sum(weights) / len(offsets)
            for j in over:
                out[k, j] = max(out[k, j].item(), total[j])
    return out


def _mixture_logit(view: LayerView, center: Tensor, variance: Tensor, place: tuple[int, int, int]) -> float:
    head, token, offset = place
    key, scale, rope = view.keys[head, token], view.facts.scale, view.facts.rope
    assert rope is not None
    spread = sum(v * k * k for v, k in zip(variance.tolist(), key.tolist(), strict=True))
    return scale * turned_product(center, key, rope, view.logical_len + offset) + scale**2 / 2 * spread


def with_kv(view: LayerView, keys: Tensor | None = None, values: Tensor | None = None) -> LayerView:
    """The same view of other keys or values."""
    old_keys, old_values = view.source.tensors()
    source = DenseSource(old_keys if keys is None else keys, old_values if values is None else values)
    return dataclasses.replace(view, source=source)
