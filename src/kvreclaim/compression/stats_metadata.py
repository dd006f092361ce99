"""What a file of query statistics says of itself, and the tensors that it promises."""

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
    """The model whose queries these are. None: the source does not say, and it is not checked.

    shared_centers: the centres are those of a KV head's whole group of query heads
    covariance:     the covariance of the queries is there
    keys:           means and energies of the keys are there
    features:       numbers of a cached token that the surrogate weighs; 0: it is not there
    ages:           numbers of a token's age that it weighs
    kvzap_inputs:   numbers of a hidden state that kvzap weighs; 0: its weights are not there
    kvzap_units:    hidden units between them and the scores; 0: the scores are linear
    fractions:      of a text, falling, for which shares of heads are there; empty: they are not
    config:         fields of the model's config that its queries depend on (model/config_fields.py)
    trial:          what candidate policies have made of held-out documents; the policy "auto" is its best
    curve:          what the best lost at several budgets, from which max_loss chooses one
    read:           digests of the text that was read, by pieces (calibrate/held_out.py); None: not recorded
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

        A field that only one of them has is new or gone in another version of transformers, whose default
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
        """Rows of the centres: KV heads where they are shared, else query heads."""
        return (self.num_kv_heads or 0) if self.shared_centers else self.num_heads

    def shapes(self, num_bands: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of queries with so many bands; one that is not named must be absent. Raises:
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
        wanted = "absent (metadata says it is)" if shape is None else f"float32 {list(shape)}"
        raise StatsMismatchError(
            f"{name} in the query statistics is {tensor.dtype} {list(tensor.shape)}; it must be {wanted}."
        )
    if not bool(tensor.isfinite().all()):
        raise StatsMismatchError(
            f"{name} in the query statistics has entries that are not finite; {RECALIBRATE}."
        )
