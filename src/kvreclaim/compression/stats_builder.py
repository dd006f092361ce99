"""Query statistics from the queries of a calibration text, one layer at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.checks import check_bool, check_int
from kvreclaim.compression.kmeans import Clusters, kmeans
from kvreclaim.compression.stats import LayerStats, QueryStats
from kvreclaim.compression.stats_metadata import StatsMetadata
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.key_transform import (
    CHUNK_TOKENS,
    DIRECTIONS,
    SINK,
    KeyStats,
    directions_of,
    rotated_mean,
    rotated_moment,
    transform_of,
)
from kvreclaim.ops.rope import RopeLayout, to_bands

MAX_COVARIANCE_BYTES = 128 << 20
"""Limit of the covariance by default: an 8 B model (36 layers, 32 heads of 128) takes 72 MiB, a 70 B one
320."""


@dataclass(frozen=True)
class Clustering:
    """Settings of the clustering of a layer's queries.

    num_centers:  C per query head, or per KV head where they are shared; 0 for none
    shared:       one set of centres for all query heads of a KV head, from the queries of all of them
    seed:         of the k-means start
    max_points:   queries of a head, evenly over the text, that are clustered; None: all

    Raises: InvalidArgumentError.
    """

    num_centers: int = 16
    shared: bool = False
    seed: int = 0
    max_points: int | None = None

    def __post_init__(self) -> None:
        check_int("num_centers", self.num_centers, 0)
        check_bool("shared centres", self.shared)
        check_int("seed", self.seed, 0)
        if self.max_points is not None:
            check_int("max_points", self.max_points, 1)

    def find(self, points: Tensor, layer: int) -> Clusters:
        """Clusters of points [H, T, D], or [K, G T, D], of a layer."""
        count = points.shape[1]
        if self.max_points is not None and count > self.max_points:
            points = points[:, torch.arange(self.max_points, device=points.device) * count // self.max_points]
        return kmeans(points, self.num_centers, self.seed + layer)


def covariance_bytes(facts: ModelFacts) -> int:
    """Bytes of the covariance of all layers, in fp32."""
    return sum(4 * layer.num_heads * layer.head_dim**2 for layer in facts.layers)


class StatsBuilder:
    """Collects what QueryStats holds; the queries of one layer only are ever needed at once.

    Args:
        facts:      the model; every layer's rotation must have been verified
        clustering: how the centres are found; num_centers 0 computes the moments alone
        covariance: whether to keep the covariance of the queries; None: where all layers together
                    take at most MAX_COVARIANCE_BYTES

    Raises: InvalidArgumentError.
    """

    def __init__(
        self, facts: ModelFacts, clustering: Clustering | None = None, covariance: bool | None = None
    ) -> None:
        self._layouts = [layer.rope for layer in facts.layers if layer.rope is not None]
        if facts.rope_problem is not None or len(self._layouts) < facts.num_layers:
            raise InvalidArgumentError(
                f"queries of {facts.name!r} cannot be calibrated: "
                f"{facts.rope_problem or 'the rotation of some layers is not known'}; use a policy "
                "without query statistics, such as knorm or streaming_llm."
            )
        self.facts = facts
        self.clustering = Clustering() if clustering is None else clustering
        if covariance is not None:
            check_bool("covariance", covariance)
        self.covariance = (
            covariance_bytes(facts) <= MAX_COVARIANCE_BYTES if covariance is None else covariance
        )
        self._layers: dict[int, LayerStats] = {}
        self._keys: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        self._queries: dict[int, Tensor] = {}
        self._num_tokens = 0

    def add_layer(self, layer: int, queries: Tensor) -> None:
        """Take in one layer.

        Args:
            layer:   index; once each, in any order
            queries: [H, T, D] before rotation (after q_norm), any float dtype and device; not kept
        """
        self._check(layer, queries)
        layout = self._layouts[layer]
        mean, abs_mean = _moments(queries, layout)
        abs_mean = torch.nn.functional.pad(
            abs_mean, (0, max(x.num_bands for x in self._layouts) - layout.num_bands)
        )
        self._num_tokens = max(self._num_tokens, queries.shape[1])
        cov = _covariance(queries, mean) if self.covariance else None
        groups = self.facts.layers[layer].num_kv_heads
        energy = _energy(queries).unflatten(0, (groups, -1)).mean(1)
        if not self.facts.layers[layer].latent:
            moment = rotated_moment(queries, layout, self.facts.max_position)
            self._queries[layer] = moment.unflatten(0, (groups, -1)).mean(1)
        parts: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        if self.clustering.num_centers:
            points = queries.reshape(groups, -1, queries.shape[-1]) if self.clustering.shared else queries
            clusters = self.clustering.find(points, layer)
            variances = _per_band(clusters, layout)
            parts = (clusters.centers.cpu(), variances.cpu(), clusters.weights.cpu())
        self._layers[layer] = LayerStats(mean, abs_mean, *parts, q_cov=cov, q_energy=energy)

    def add_keys(self, layer: int, keys: Tensor, firsts: Sequence[int] = (0,)) -> None:
        """Take in the keys of one layer: [K, T, D] before rotation, any float dtype and device; not kept.

        firsts: places of the first tokens of all documents
        """
        mean = keys.mean(dim=1, dtype=torch.float64).float().cpu()
        layout, longest = self._layouts[layer], self.facts.max_position
        center = torch.zeros_like(mean)
        if self.facts.layers[layer].softmax.ignores_constants:
            center = rotated_mean(mean, layout, longest)
        sinks = keys[:, list(firsts)].float().cpu() - center[:, None]  # at position 0
        moment = (1 - SINK) * rotated_moment(keys, layout, longest, center)
        moment += SINK / len(firsts) * sinks.transpose(1, 2) @ sinks
        self._keys[layer] = mean, _energy(keys), moment

    def build(self) -> QueryStats:
        """Return the statistics. Raises: InvalidArgumentError if a layer is missing."""
        first, count = self.facts.layers[0], self.facts.num_layers
        if missing := [n for n in range(count) if n not in self._layers]:
            raise InvalidArgumentError(
                f"statistics need the queries of all {count} layers; {missing} were not added."
            )
        layers = [self._layers[n] for n in range(count)]
        style = next((x.style for x in self._layouts if x.num_bands), self._layouts[0].style)
        centers = self.clustering.num_centers
        keys = self._key_stats() if len(self._keys) == count else []
        metadata = StatsMetadata(
            model_name=self.facts.name,
            fingerprint=self.facts.fingerprint,
            config=None if self.facts.config is None else dict(self.facts.config),
            num_layers=count,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            rope_style=style,
            num_tokens=self._num_tokens,
            num_centers=centers,
            shared_centers=self.clustering.shared and centers > 0,
            covariance=self.covariance,
            keys=bool(keys),
            directions=min(DIRECTIONS, first.head_dim) if keys else 0,
            source="kvreclaim calibrate",
        )
        return QueryStats(
            torch.stack([x.q_mean for x in layers]),
            torch.stack([x.q_abs_mean for x in layers]),
            _stack([x.centers for x in layers]),
            _stack([x.center_var for x in layers]),
            _stack([x.center_weight for x in layers]),
            _stack([x.q_cov for x in layers]),
            k_mean=_stack([x.mean for x in keys]),
            k_energy=_stack([x.energy for x in keys]),
            q_energy=_stack([x.query_energy for x in keys]),
            k_directions=_stack([x.directions for x in keys]),
            k_gains=_stack([x.gains for x in keys]),
            metadata=metadata,
        )

    def _key_stats(self) -> list[KeyStats]:
        found = []
        for n, layer in enumerate(self.facts.layers):
            (mean, energy, moment), query_energy = self._keys[n], self._layers[n].q_energy
            assert query_energy is not None
            own = KeyStats(mean, energy, query_energy)
            is_centred = layer.softmax.ignores_constants
            scaled = transform_of(own, self._layouts[n], self.facts.max_position, is_centred=is_centred)
            along = directions_of(scaled, moment, self._queries[n])
            found.append(KeyStats(mean, energy, query_energy, *along))
        return found

    def _check(self, layer: int, queries: Tensor) -> None:
        if layer not in range(self.facts.num_layers) or layer in self._layers:
            raise InvalidArgumentError(
                f"layer {layer} is unknown or was added before; add each of the "
                f"{self.facts.num_layers} layers once."
            )
        facts = self.facts.layers[layer]
        if queries.ndim != 3 or (queries.shape[0], queries.shape[2]) != (facts.num_heads, facts.head_dim):
            raise InvalidArgumentError(
                f"queries of layer {layer} are {list(queries.shape)}; they must be "
                f"[{facts.num_heads}, tokens, {facts.head_dim}]."
            )
        if queries.shape[1] == 0 or not bool(queries.isfinite().all()):
            raise InvalidArgumentError(
                f"queries of layer {layer} are empty or not finite; calibrate on at least one token, in a "
                "dtype the model does not overflow in."
            )


def _energy(rows: Tensor) -> Tensor:
    """Mean of the squares of [H, T, D]: [H, D] fp32 on the CPU."""
    total = sum(part.double().square().sum(dim=1) for part in rows.split(CHUNK_TOKENS, dim=1))
    return (total / rows.shape[1]).float().cpu()


def _moments(queries: Tensor, layout: RopeLayout) -> tuple[Tensor, Tensor]:
    """E[q] [H, D] and E|q_f| [H, F], fp32 on the CPU; sums in fp64, a chunk of tokens at a time."""
    mean = queries.new_zeros(queries.shape[0], queries.shape[2], dtype=torch.float64)
    size = mean.new_zeros(queries.shape[0], layout.num_bands)
    for part in queries.split(CHUNK_TOKENS, dim=1):
        mean += part.sum(dim=1, dtype=torch.float64)
        size += to_bands(part, layout).abs().sum(dim=1, dtype=torch.float64)
    count = queries.shape[1]
    return (mean / count).float().cpu(), (size / count).float().cpu()


def _covariance(queries: Tensor, mean: Tensor) -> Tensor:
    """E[(q - mean)(q - mean)^T]: [H, D, D] fp32 on the CPU; products in fp32, their sum in fp64."""
    num_heads, count, dim = queries.shape
    total = torch.zeros(num_heads, dim, dim, dtype=torch.float64, device=queries.device)
    center = mean[:, None].to(queries.device)
    for part in queries.split(CHUNK_TOKENS, dim=1):
        away = part.float() - center
        total += away.transpose(1, 2) @ away
    return (total / count).float().cpu()


def _per_band(clusters: Clusters, layout: RopeLayout) -> Tensor:
    """Variances [H, C, D] with the two dims of a band set to their mean, E|q_f - mu_f|^2 / 2."""
    variances = clusters.variances.clone()
    real, imag = layout.bands
    shared = (variances[..., real] + variances[..., imag]) / 2
    variances[..., real] = shared
    variances[..., imag] = shared
    return variances


def _stack(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.stack(present) if present else None
