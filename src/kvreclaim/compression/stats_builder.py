"""From the queries of a calibration text to query statistics, one layer at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.checks import check_int
from kvreclaim.compression.kmeans import Clusters, kmeans
from kvreclaim.compression.stats import LayerStats, QueryStats, StatsMetadata
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.rope import RopeLayout, to_bands

CHUNK_TOKENS = 2048


class StatsBuilder:
    """Collects what QueryStats holds; the queries of one layer only are ever needed at once.

    Args:
        facts:       the model; every layer's rotation must have been verified
        num_centers: C per query head; 0 computes the moments alone
        seed:        of the k-means start

    Raises: InvalidArgumentError.
    """

    def __init__(self, facts: ModelFacts, num_centers: int = 16, seed: int = 0) -> None:
        check_int("num_centers", num_centers, 0)
        check_int("seed", seed, 0)
        self._layouts = [layer.rope for layer in facts.layers if layer.rope is not None]
        if facts.rope_problem is not None or len(self._layouts) < facts.num_layers:
            raise InvalidArgumentError(
                f"queries of {facts.name!r} cannot be calibrated: "
                f"{facts.rope_problem or 'the rotation of some layers is not known'}; use a policy "
                "without query statistics, such as knorm or streaming_llm."
            )
        self.facts = facts
        self.num_centers = num_centers
        self.seed = seed
        self._layers: dict[int, LayerStats] = {}
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
        if self.num_centers == 0:
            self._layers[layer] = LayerStats(mean, abs_mean)
            return
        clusters = kmeans(queries, self.num_centers, self.seed + layer)
        variances = _per_band(clusters, layout)
        parts = (clusters.centers, variances, clusters.weights)
        self._layers[layer] = LayerStats(mean, abs_mean, *(part.cpu() for part in parts))

    def build(self) -> QueryStats:
        """Raises InvalidArgumentError if a layer is missing."""
        first, count = self.facts.layers[0], self.facts.num_layers
        if missing := [n for n in range(count) if n not in self._layers]:
            raise InvalidArgumentError(
                f"statistics need the queries of all {count} layers; {missing} were not added."
            )
        layers = [self._layers[n] for n in range(count)]
        style = next((x.style for x in self._layouts if x.num_bands), self._layouts[0].style)
        metadata = StatsMetadata(
            model_name=self.facts.name,
            fingerprint=self.facts.fingerprint,
            num_layers=count,
            num_heads=first.num_heads,
            num_kv_heads=first.num_kv_heads,
            head_dim=first.head_dim,
            rope_style=style,
            num_tokens=self._num_tokens,
            num_centers=self.num_centers,
            source="kvreclaim calibrate",
        )
        return QueryStats(
            metadata,
            torch.stack([x.q_mean for x in layers]),
            torch.stack([x.q_abs_mean for x in layers]),
            _stack([x.centers for x in layers]),
            _stack([x.center_var for x in layers]),
            _stack([x.center_weight for x in layers]),
        )

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


def _moments(queries: Tensor, layout: RopeLayout) -> tuple[Tensor, Tensor]:
    """E[q] [H, D] and E|q_f| [H, F], fp32 on the CPU; sums in fp64, a chunk of tokens at a time."""
    mean = queries.new_zeros(queries.shape[0], queries.shape[2], dtype=torch.float64)
    size = mean.new_zeros(queries.shape[0], layout.num_bands)
    for part in queries.split(CHUNK_TOKENS, dim=1):
        mean += part.sum(dim=1, dtype=torch.float64)
        size += to_bands(part, layout).abs().sum(dim=1, dtype=torch.float64)
    count = queries.shape[1]
    return (mean / count).float().cpu(), (size / count).float().cpu()


def _per_band(clusters: Clusters, layout: RopeLayout) -> Tensor:
    """Variances [H, C, D] with the two dims of a band set to their mean, E|q_f - mu_f|^2 / 2."""
    variances = clusters.variances.clone()
    real, imag = (dims.to(variances.device) for dims in layout.band_dims())
    shared = (variances[..., real] + variances[..., imag]) / 2
    variances[..., real] = shared
    variances[..., imag] = shared
    return variances


def _stack(parts: list[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.stack(present) if present else None
