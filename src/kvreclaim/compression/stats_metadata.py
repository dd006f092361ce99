"""Metadata of a file of query statistics, and the shapes of its tensors."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from torch import Tensor

from kvreclaim.compression.loss_curve import LossCurve
from kvreclaim.compression.trial import Trial
from kvreclaim.errors import StatsMismatchError
from kvreclaim.ops.facts import ModelFacts

RECALIBRATE = "run `kvreclaim calibrate` for this model"
REMEASURE = "leave hf_overrides out, or name no statistics and start with --kv-compression-calibrate"


class StatsMetadata(BaseModel):
    """Model and contents of query statistics. None: not recorded in the source, and not checked.

    shared_centers: the centres are those of a KV head's whole group of query heads
    covariance:     True if the covariance of the queries is present
    keys:           True if means and energies of the keys are present
    features:       number of a cached token's features that the surrogate weighs; 0: no surrogate
    ages:           number of age features that it weighs
    kvzap_inputs:   size of the hidden state that kvzap weighs; 0: no kvzap weights
    kvzap_units:    hidden units of kvzap; 0: scores are linear
    fractions:      descending fractions of a text with measured head shares; empty: no shares
    config:         fields of the model's config that its queries depend on (model/config_fields.py)
    trial:          results of candidate policies on held-out documents; "auto" is the best of them
    curve:          loss of the best policy at several budgets, from which max_loss chooses one
    read:           digests of the calibration text, by pieces (calibrate/held_out.py); None: not recorded
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    format_version: Literal[2] = 2
    model_name: str
    fingerprint: str | None = None
    config: dict[str, Any] | None = None
    num_layers: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt | None = None
    head_dim: PositiveInt
    rope_style: Literal["half", "interleaved"]
    num_tokens: PositiveInt | None = None
    num_centers: NonNegativeInt = 0
    shared_centers: bool = False
    covariance: bool = False
    keys: bool = False
    directions: NonNegativeInt = 0
    features: NonNegativeInt = 0
    ages: NonNegativeInt = 0
    kvzap_inputs: NonNegativeInt = 0
    kvzap_units: NonNegativeInt = 0
    fractions: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    trial: Trial | None = None
    curve: LossCurve | None = None
    read: tuple[str, ...] | None = None
    source: str

    def differing(self, facts: ModelFacts) -> list[str]:
        """Return what differs between this config and the model's. A file without a config was measured
        without hf_overrides.

        A field in only one of them was added or removed by another version of transformers; its default
        computes the same.
        """
        if facts.config is None:
            return []
        if self.config is None:
            return [f"{name} as in the model's files, hf_overrides changes it" for name in facts.overridden]
        both = sorted(self.config.keys() & facts.config.keys())
        pairs = [(name, self.config[name], facts.config[name]) for name in both]
        return [f"{name} {ours}, the model has {its}" for name, ours, its in pairs if ours != its]

    @property
    def center_heads(self) -> int:
        """Return the rows of the centres: KV heads if shared, else query heads."""
        return (self.num_kv_heads or 0) if self.shared_centers else self.num_heads

    def shapes(self, num_bands: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors' shapes for queries with this many bands; other tensors must be absent. Raises:
        StatsMismatchError."""
        heads = (self.num_layers, self.num_heads)
        kv_heads = (self.num_layers, self.num_kv_heads or 0)
        shapes: dict[str, tuple[int, ...]] = {
            "q_mean": (*heads, self.head_dim),
            "q_abs_mean": (*heads, min(num_bands, self.head_dim // 2)),
        }
        if self.num_centers:
            self._check_sharing()
            clusters = (self.num_layers, self.center_heads, self.num_centers)
            shapes |= {"centers": (*clusters, self.head_dim), "center_var": (*clusters, self.head_dim)}
            shapes["center_weight"] = clusters
        if self.covariance:
            shapes["q_cov"] = (*heads, self.head_dim, self.head_dim)
        if self.keys:
            shapes |= dict.fromkeys(("k_mean", "k_energy", "q_energy"), (*kv_heads, self.head_dim))
        if self.directions:
            shapes |= {"k_directions": (*kv_heads, self.directions, self.head_dim)}
            shapes |= {"k_gains": (*kv_heads, self.directions)}
        if self.features:
            shapes |= {"surrogate": (*kv_heads, self.features), "surrogate_age": (*kv_heads, self.ages)}
        if self.kvzap_inputs:
            last = (self.kvzap_units or self.kvzap_inputs) + 1
            shapes["kvzap_out"] = (*kv_heads, last)
            if self.kvzap_units:
                shapes["kvzap_in"] = (self.num_layers, self.kvzap_units, self.kvzap_inputs + 1)
        if self.fractions:
            self._check_fractions()
            shapes["head_shares"] = (*kv_heads, len(self.fractions))
        return shapes

    def _check_sharing(self) -> None:
        if self.shared_centers and (not self.num_kv_heads or self.num_heads % self.num_kv_heads):
            raise StatsMismatchError(
                f"centres in the query statistics are shared by the {self.num_heads} query heads of "
                f"{self.num_kv_heads} KV heads; KV heads must divide query heads: {RECALIBRATE}."
            )

    def _check_fractions(self) -> None:
        if any(low >= high for high, low in itertools.pairwise(self.fractions)):
            raise StatsMismatchError(
                f"the query statistics have shares of heads at {list(self.fractions)}, which must fall; "
                f"{RECALIBRATE}."
            )


def check_tensor(name: str, tensor: Tensor | None, shape: tuple[int, ...] | None) -> None:
    """Raises StatsMismatchError unless the tensor is there, finite and of this shape, or neither is."""
    if tensor is None and shape is None:
        return
    if tensor is None:
        raise StatsMismatchError(f"query statistics lack {name} {list(shape or ())}; {RECALIBRATE}.")
    if shape is None or tensor.shape != shape or tensor.dtype != torch.float32:
        expected = "absent (metadata says it is)" if shape is None else f"float32 {list(shape)}"
        raise StatsMismatchError(
            f"{name} in the query statistics is {tensor.dtype} {list(tensor.shape)}; it must be {expected}."
        )
    if not bool(tensor.isfinite().all()):
        raise StatsMismatchError(
            f"{name} in the query statistics has entries that are not finite; {RECALIBRATE}."
        )
