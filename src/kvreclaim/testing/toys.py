"""A model of made-up numbers: its facts, statistics, and views of its layers, alike on every machine."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvreclaim.compression.head_shares import FRACTIONS
from kvreclaim.compression.head_views import head_view
from kvreclaim.compression.policy import LayerSignals, LayerView
from kvreclaim.compression.stats import LayerStats, QueryStats
from kvreclaim.compression.stats_metadata import StatsMetadata
from kvreclaim.compression.surrogate import KNOTS, num_features
from kvreclaim.ops.facts import LayerFacts, ModelFacts, Softmax
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.ops.rope import RopeLayout

FINGERPRINT = "f" * 64
HIDDEN_SIZE = 6
HIDDEN_UNITS = 3


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that depend on seed and shape alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def layout(num_bands: int = 4, style: str = "half", start: int = 0, theta: float = 10_000.0) -> RopeLayout:
    """A rotation of num_bands bands from dim start on; style "half" or "interleaved"."""
    bands = torch.arange(num_bands, dtype=torch.float64)
    inv_freq = theta ** (-bands / max(1, num_bands))
    return RopeLayout(inv_freq, "half" if style == "half" else "interleaved", start)


def layer_facts(
    rope: RopeLayout | None = None, *, head_dim: int = 8, window: int | None = None
) -> LayerFacts:
    """4 query heads, 2 KV heads."""
    return LayerFacts(
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        v_head_dim=head_dim,
        softmax=Softmax(head_dim**-0.5, window=window),
        rope=layout(head_dim // 2) if rope is None else rope,
    )


def model_facts(
    layers: int = 3, windows: tuple[int | None, ...] = (), rope: RopeLayout | None = None
) -> ModelFacts:
    """Equal layers, each with its sliding window where windows are given."""
    built = tuple(layer_facts(rope, window=window) for window in windows or (None,) * layers)
    device = torch.device("cpu")
    return ModelFacts("toy", FINGERPRINT, built, torch.float32, device, 4096, hidden_size=HIDDEN_SIZE)


def query_stats(
    facts: ModelFacts,
    num_centers: int = 3,
    seed: int = 0,
    *,
    shared: bool = False,
    covariance: bool = True,
    surrogate: bool = True,
) -> QueryStats:
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
        shared_centers=shared,
        covariance=covariance,
        features=num_features(first) if surrogate else 0,
        ages=len(KNOTS) - 1 if surrogate else 0,
        kvzap_inputs=HIDDEN_SIZE if surrogate else 0,
        kvzap_units=HIDDEN_UNITS if surrogate else 0,
        fractions=FRACTIONS if surrogate else (),
        source="test",
    )
    kv_heads = (facts.num_layers, first.num_kv_heads)
    learnt: dict[str, Tensor] = {}
    if surrogate:
        learnt["surrogate"] = noise(seed + 5, *kv_heads, metadata.features)
        learnt["surrogate_age"] = noise(seed + 9, *kv_heads, metadata.ages)
        learnt["kvzap_out"] = noise(seed + 7, *kv_heads, HIDDEN_UNITS + 1)
        learnt["kvzap_in"] = noise(seed + 8, facts.num_layers, HIDDEN_UNITS, HIDDEN_SIZE + 1)
        learnt["head_shares"] = noise(seed + 6, *kv_heads, len(FRACTIONS)).sigmoid()
    root = noise(seed + 4, *grid, first.head_dim, first.head_dim)
    cov = root @ root.mT / first.head_dim if covariance else None
    if num_centers == 0:
        return QueryStats(mean, size, q_cov=cov, **learnt, metadata=metadata)
    owners = (facts.num_layers, metadata.center_heads)
    centers = noise(seed + 2, *owners, num_centers, first.head_dim)
    variances = noise(seed + 3, *owners, num_centers, first.head_dim).square()
    shares = torch.full((*owners, num_centers), 1 / num_centers)
    return QueryStats(mean, size, centers, variances, shares, cov, **learnt, metadata=metadata)


def layer_view(
    facts: LayerFacts, stats: LayerStats | None, *, num_tokens: int = 9, logical_len: int = 40, seed: int = 7
) -> LayerView:
    """Keys and values of any numbers, and every signal an engine could keep of them."""
    shape = (facts.num_kv_heads, num_tokens)
    keys, values = noise(seed, *shape, facts.head_dim), noise(seed + 1, *shape, facts.v_head_dim)
    return LayerView(
        0,
        DenseSource(keys, values),
        logical_len,
        facts,
        stats,
        slice(1, num_tokens - 2),
        signals=layer_signals(facts, num_tokens, logical_len, seed + 2),
        first=logical_len == num_tokens,
        budget=num_tokens - 3,
    )


def layer_signals(facts: LayerFacts, num_tokens: int, logical_len: int, seed: int = 9) -> LayerSignals:
    """Three recent queries (fewer where there are fewer tokens), five to come."""
    heads, kv_heads = facts.num_heads, facts.num_kv_heads
    recent = torch.arange(logical_len - num_tokens, logical_len, dtype=torch.int32)
    gaps = min(3, max(0, logical_len - num_tokens)) * (recent < logical_len - 3)
    positions = torch.stack([recent - gaps, *[recent] * (kv_heads - 1)])
    return LayerSignals(
        queries=noise(seed, heads, min(3, num_tokens), facts.head_dim),
        mass=noise(seed + 1, kv_heads, num_tokens).abs(),
        positions=positions,
        output_projection=noise(seed + 2, heads, facts.v_head_dim, 6),
        future_queries=noise(seed + 3, heads, 5, facts.head_dim),
        read_again=noise(seed + 4, kv_heads, num_tokens).sigmoid(),
        token_scores=noise(seed + 5, kv_heads, num_tokens),
    )


def kv_head_view(view: LayerView, head: int) -> LayerView:
    """The view of one KV head, as if the layer had no other."""
    keys, values = (x[head : head + 1] for x in view.source.tensors())
    return head_view(view, head, DenseSource(keys, values), view.candidates)


def with_kv(view: LayerView, keys: Tensor | None = None, values: Tensor | None = None) -> LayerView:
    """The same view of other keys or values."""
    old_keys, old_values = view.source.tensors()
    source = DenseSource(old_keys if keys is None else keys, old_values if values is None else values)
    return dataclasses.replace(view, source=source)
