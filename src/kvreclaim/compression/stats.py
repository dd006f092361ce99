"""Statistics of a model's queries before rotation: made once by calibration, read by policies."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Self

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvreclaim.compression.loss_curve import STATS_HEADER, LossCurve
from kvreclaim.compression.public_kvzap import KVzapWeights
from kvreclaim.compression.stats_metadata import RECALIBRATE, REMEASURE, StatsMetadata, check_tensor
from kvreclaim.compression.trial import Trial
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.key_transform import KeyStats
from kvreclaim.ops.rope import RopeLayout, to_bands
from kvreclaim.temporary import temporary_directory

CENTER_TENSORS = ("centers", "center_var", "center_weight")
_HALVED = ("centers", "center_var")  # fp16 in the file of SmolLM2 in assets/
KEY_TENSORS = ("k_mean", "k_energy", "q_energy", "k_directions", "k_gains")
KV_TENSORS = ("surrogate", "surrogate_age", "head_shares", "kvzap_out", *KEY_TENSORS)
TENSORS = ("q_mean", "q_abs_mean", *CENTER_TENSORS, "q_cov", *KV_TENSORS, "kvzap_in")
"""Rows of all are heads, of KV_TENSORS KV heads, but for kvzap_in, which is of no head."""


@dataclass(frozen=True, slots=True, eq=False)
class StatsTensors:
    """Statistics of queries, and weights fitted to them. None: absent."""

    q_mean: Tensor
    q_abs_mean: Tensor
    centers: Tensor | None = None
    center_var: Tensor | None = None
    center_weight: Tensor | None = None
    q_cov: Tensor | None = None
    surrogate: Tensor | None = None
    surrogate_age: Tensor | None = None
    head_shares: Tensor | None = None
    kvzap_out: Tensor | None = None
    kvzap_in: Tensor | None = None
    k_mean: Tensor | None = None
    k_energy: Tensor | None = None
    q_energy: Tensor | None = None
    k_directions: Tensor | None = None
    k_gains: Tensor | None = None

    def present(self) -> dict[str, Tensor]:
        """Return the present tensors by name."""
        return {name: tensor for name in TENSORS if (tensor := getattr(self, name)) is not None}

    def to(self, device: torch.device) -> Self:
        """Return a copy on a device; tensors that are on it already are shared."""
        return replace(self, **{name: tensor.to(device) for name, tensor in self.present().items()})


@dataclass(frozen=True, slots=True, eq=False)
class LayerStats(StatsTensors):
    """One layer of QueryStats: q_mean [H, D], q_abs_mean [H, F], centers and center_var [H | K, C, D],
    center_weight [H | K, C], None together; q_cov [H, D, D] or None; surrogate [K, P] and
    surrogate_age [K, A], None together; head_shares [K, S] or None, at `fractions`; kvzap_in [U, M + 1] or
    None, kvzap_out [K, M + 1 | U + 1] or None; k_mean, k_energy and q_energy [K, D], None together;
    k_directions [K, R, D] and k_gains [K, R], None together. F may exceed the layer's own bands, P the
    layer's own features."""

    fractions: tuple[float, ...] = ()

    def kv_head(self, head: int, num_kv_heads: int) -> LayerStats:
        """Return views of one KV head: its group of query heads and its centres."""
        own = {
            name: tensor.unflatten(0, (num_kv_heads, -1))[head]
            for name, tensor in self.present().items()
            if name != "kvzap_in"
        }
        return replace(self, **own)


@dataclass(frozen=True, slots=True, eq=False)
class QueryStats(StatsTensors):
    """Moments, and clusters where calibrated, of every layer's queries before rotation, fp32.

    q_mean:        [L, H, D], in the arrangement of dims that the model itself uses
    q_abs_mean:    [L, H, F], E|q_f|; F the most bands of any layer, zeros where one has fewer
    centers:       [L, H, C, D] | None; [L, K, C, D] where a KV head's query heads share them
    center_var:    like centers, variance per real dim; E|q_f - mu_f|^2 / 2 in both dims of a band
    center_weight: [L, H | K, C], share of the queries; 0 for a centre that repeats another
    q_cov:         [L, H, D, D] | None, covariance about q_mean
    surrogate:     [L, K, P] | None, weights of a cached token's features (ops.scoring.surrogate_features)
    surrogate_age: [L, K, A] | None, of its age (surrogate.age_features)
    head_shares:   [L, K, S] | None, share of its tokens that a head keeps at each of metadata's fractions
    kvzap_out:     [L, K, X + 1] | None, weights of a hidden state (X = M), or of hidden units (X = U), and a
                   bias (kvzap.token_scores)
    kvzap_in:      [L, U, M + 1] | None, weights and bias of hidden units
    k_mean:        [L, K, D] | None, mean of the keys before rotation
    k_energy:      [L, K, D] | None, mean of their squares
    q_energy:      [L, K, D] | None, mean of the squares of the queries of a KV head's query heads
    k_directions:  [L, K, R, D] | None, along which stored keys are stretched (ops/key_transform.py)
    k_gains:       [L, K, R] | None, by how much

    Raises: StatsMismatchError if a tensor is missing, not finite or of another shape than in metadata.
    """

    metadata: StatsMetadata = field(kw_only=True)

    def __post_init__(self) -> None:
        shapes = self.metadata.shapes(self.q_abs_mean.shape[-1] if self.q_abs_mean.ndim == 3 else 0)
        for name in TENSORS:
            check_tensor(name, getattr(self, name), shapes.get(name))
        if self.k_gains is not None and not bool((self.k_gains > 0).all()):
            raise StatsMismatchError(f"k_gains in the query statistics must be above 0; {RECALIBRATE}.")

    def shard(self, heads: slice, kv_heads: slice) -> QueryStats:
        """Return views of some query heads and their KV heads.

        kv_heads: may hold a KV head with only some of its query heads in `heads`
        """
        meta = self.metadata
        num_heads = len(range(meta.num_heads)[heads])
        num_kv_heads = None if meta.num_kv_heads is None else len(range(meta.num_kv_heads)[kv_heads])
        of_centers = kv_heads if meta.shared_centers else heads
        own = dict.fromkeys(CENTER_TENSORS, of_centers) | dict.fromkeys(KV_TENSORS, kv_heads)
        own["kvzap_in"] = slice(None)
        return QueryStats(
            metadata=meta.model_copy(update={"num_heads": num_heads, "num_kv_heads": num_kv_heads}),
            **{name: tensor[:, own.get(name, heads)] for name, tensor in self.present().items()},
        )

    def with_trial(self, trial: Trial) -> QueryStats:
        """Return a copy with the results of a trial."""
        return replace(self, metadata=self.metadata.model_copy(update={"trial": trial}))

    def with_curve(self, curve: LossCurve) -> QueryStats:
        """Return a copy with a loss curve."""
        return replace(self, metadata=self.metadata.model_copy(update={"curve": curve}))

    def with_read(self, read: tuple[str, ...]) -> QueryStats:
        """Return a copy with digests of the calibration text."""
        return replace(self, metadata=self.metadata.model_copy(update={"read": read}))

    def keys(self) -> list[KeyStats] | None:
        """Key statistics of each layer; None if absent."""
        if self.k_mean is None or self.k_energy is None or self.q_energy is None:
            return None
        rows = zip(self.k_mean, self.k_energy, self.q_energy, strict=True)
        if self.k_directions is None or self.k_gains is None:
            return [KeyStats(*row) for row in rows]
        along = zip(self.k_directions, self.k_gains, strict=True)
        return [KeyStats(*row, *own) for row, own in zip(rows, along, strict=True)]

    def with_kvzap(self, weights: KVzapWeights) -> QueryStats:
        """Return a copy with weights of hidden states."""
        sizes = {"kvzap_inputs": weights.num_inputs, "kvzap_units": weights.num_units}
        metadata = self.metadata.model_copy(update=sizes)
        return replace(self, metadata=metadata, kvzap_in=weights.inner, kvzap_out=weights.outer)

    def layer(self, layer: int) -> LayerStats:
        """Return views of one layer."""
        tensors = {name: tensor[layer] for name, tensor in self.present().items()}
        return LayerStats(**tensors, fractions=self.metadata.fractions)

    def concentration(self, layouts: Sequence[RopeLayout | None]) -> Tensor:
        """R = |E q_f| / E|q_f| in [0, 1]: [L, H, F] fp32; 0 for bands a layer lacks or never uses."""
        ratio = torch.zeros_like(self.q_abs_mean)
        for layer, layout in enumerate(layouts):
            if layout is not None and layout.num_bands:
                mean = to_bands(self.q_mean[layer], layout).abs()
                size = self.q_abs_mean[layer, :, : layout.num_bands]
                ratio[layer, :, : layout.num_bands] = torch.where(size > 0, mean / size, 0.0).clamp_max(1.0)
        return ratio

    def mean_concentration(self, layouts: Sequence[RopeLayout | None]) -> Tensor:
        """R averaged over the heads and bands of each layer: [L]; 0 for a layer without bands."""
        bands = torch.tensor([0 if layout is None else layout.num_bands for layout in layouts])
        return self.concentration(layouts).sum(dim=(1, 2)) / (self.metadata.num_heads * bands).clamp_min(1)

    def check_model(self, facts: ModelFacts) -> None:
        """Check the model. Raises: StatsMismatchError with the differences to another model."""
        meta, first = self.metadata, facts.layers[0]
        layouts = [layer.rope for layer in facts.layers if layer.rope is not None and layer.rope.num_bands]
        pairs: list[tuple[str, object, object]] = [
            ("layers", meta.num_layers, facts.num_model_layers or facts.num_layers),
            ("query heads", meta.num_heads, first.num_heads),
            ("KV heads", meta.num_kv_heads, first.num_kv_heads),
            ("head_dim", meta.head_dim, first.head_dim),
            ("config fingerprint", meta.fingerprint, facts.fingerprint),
        ]
        if layouts:
            pairs.append(("rope_style", meta.rope_style, layouts[0].style))
            pairs.append(("rotary bands", self.q_abs_mean.shape[-1], max(x.num_bands for x in layouts)))
        differ = [
            f"{what} {ours}, the model has {its}" for what, ours, its in pairs if ours not in (None, its)
        ]
        differ += meta.differing(facts)
        if differ:
            raise StatsMismatchError(
                f"query statistics of {meta.model_name!r} ({meta.source}) do not fit the model "
                f"{facts.name!r}: {'; '.join(differ)}; {RECALIBRATE if not facts.overridden else REMEASURE}."
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a .safetensors file, whole or not at all."""
        target = Path(path)
        self.check_target(target)
        with temporary_directory(target.parent, "stats") as made:
            written = made / target.name
            header = {STATS_HEADER: self.metadata.model_dump_json()}
            tensors = {name: tensor.contiguous() for name, tensor in self.present().items()}
            save_file(tensors, written, metadata=header)
            written.chmod(0o644)  # safetensors creates it for its owner alone
            os.replace(written, target)

    @staticmethod
    def check_target(path: Path) -> None:
        """Raises InvalidArgumentError if save could not write there."""
        if path.suffix != ".safetensors":
            raise InvalidArgumentError(f"statistics file {str(path)!r} must end in .safetensors to be saved.")
        if not path.parent.is_dir():
            raise InvalidArgumentError(
                f"directory {str(path.parent)!r} of the statistics does not exist; make it."
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> QueryStats:
        """Read a .safetensors file.

        Raises: InvalidArgumentError for a missing file or another suffix; StatsMismatchError for a
            file that is corrupt or incomplete.
        """
        file = Path(path)
        if file.suffix != ".safetensors":
            raise InvalidArgumentError(
                f"statistics file {str(path)!r} must end in .safetensors; {RECALIBRATE}."
            )
        if not file.is_file():
            raise InvalidArgumentError(f"statistics file {str(path)!r} does not exist; {RECALIBRATE}.")
        return _load(file)


def _load(path: Path) -> QueryStats:
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(STATS_HEADER)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            tensors |= {
                n: tensors[n].float() for n in _HALVED if n in tensors and tensors[n].dtype is torch.half
            }
        if header is None:
            raise StatsMismatchError(f"{path} has no {STATS_HEADER!r} metadata; it is no statistics file.")
        metadata = StatsMetadata.model_validate(json.loads(header))
    except ValidationError as error:
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r}"[:200]
        raise StatsMismatchError(f"{path} is no valid statistics file ({why}); {RECALIBRATE}.") from error
    except (SafetensorError, json.JSONDecodeError) as error:
        raise StatsMismatchError(f"{path} is no valid statistics file ({error}); {RECALIBRATE}.") from error
    if unknown := sorted(set(tensors) - set(TENSORS)):
        raise StatsMismatchError(f"{path} holds unknown tensors {', '.join(unknown)}; {RECALIBRATE}.")
    if missing := [name for name in TENSORS[:2] if name not in tensors]:
        raise StatsMismatchError(f"{path} lacks {', '.join(missing)}; {RECALIBRATE}.")
    return QueryStats(metadata=metadata, **tensors)


def stats_digest(layers: Iterable[LayerStats]) -> str:
    """Return the sha256 of every number, with names, dtypes and shapes."""
    digest = sha256()
    for layer in layers:
        for each in fields(layer):
            value = getattr(layer, each.name)
            if isinstance(value, Tensor):
                digest.update(f"{each.name} {value.dtype} {tuple(value.shape)} ".encode())
                digest.update(value.contiguous().cpu().numpy().tobytes())
            else:
                digest.update(f"{each.name} {value} ".encode())
    return digest.hexdigest()
