"""Bits of weights, scales and zero points included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from kvreclaim.checks import require
from kvreclaim.config import KV_CACHE_DTYPE_ALIASES
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.plan.quantization import UNKNOWN
from kvreclaim.plan.shapes import ModelShape, StoredWeights

Scope = Literal["linear", "experts", "all", "file"]
PLAIN_BITS: Mapping[str, int] = MappingProxyType({"fp32": 32, "bf16": 16, "fp16": 16})


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Storage of a checkpoint's weights.

    bits:  of a linear weight, with its share of scales and zero points
    scope: weights in these bits: linear weights and experts, experts alone, all; file: as its tensors,
           in different bits
    """

    name: str
    bits: float
    scope: Scope = "linear"
    why: str = ""
    leaves_out: bool = False
    """Whether the linear weights that the config leaves out (LayerShape.kept) keep the model's dtype."""


def grouped(name: str, bits: int, group: int, *, zeros: bool = True) -> WeightFormat:
    """Groups of weights that share a 16-bit scale and a zero point of as many bits as a weight."""
    why = f"{bits} + 16/{group}" + (f" + {bits}/{group}" if zeros else "")
    return WeightFormat(name, bits + (16 + bits * zeros) / group, why=why)


WEIGHTS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        form.name: form
        for form in (
            *(WeightFormat(name, bits, "all") for name, bits in PLAIN_BITS.items()),
            WeightFormat("fp8", 8 + 32 / 128**2, why="8 + 32 per 128 x 128"),
            WeightFormat("int8", 8, why="8, a scale per row apart"),
            grouped("awq4", 4, 128),
            grouped("gptq4", 4, 128),
            grouped("gptq8", 8, 128),
            WeightFormat("nf4", 4.5, why="4 + 32/64"),
            WeightFormat("nvfp4", 4.5, why="4 + 8/16"),
            WeightFormat("mxfp4", 4.25, "experts", "4 + 8/32"),
            WeightFormat("mxfp4-all", 4.25, why="4 + 8/32"),
        )
    }
)


def weight_format(given: str, shape: ModelShape) -> WeightFormat:
    """Parse --weights: auto (by the config), a name of WEIGHTS, or bits per linear weight.

    Raises: InvalidArgumentError.
    """
    if given == "auto" and shape.quantization is not None and any(layer.kept for layer in shape.layers):
        return replace(weight_format(shape.quantization, shape), leaves_out=True)
    name = KV_CACHE_DTYPE_ALIASES.get(given, given) if given != "fp8" else given
    if name == "auto" and shape.stored is not None:
        return _as_in_file(shape.stored)
    if name == "auto":
        name = shape.quantization or dtype_of(shape)
    require(
        not name.startswith(UNKNOWN),
        f"config.json of {shape.name} has a quantization_config {name.removeprefix(UNKNOWN)}, so its bytes "
        f"are not known here; say --weights: {', '.join(WEIGHTS)}, or the bits of a weight.",
        "weights",
    )
    if name in WEIGHTS:
        return WEIGHTS[name]
    try:
        kind, *sizes = name.split(":")
        if kind in ("group", "scaled"):
            width, group = map(int, sizes)
            if 1 <= width <= 32 and group >= 1:
                return grouped(f"{width} bits in groups of {group}", width, group, zeros=kind == "group")
        bits = 0.0 if sizes else float(name)
    except ValueError:
        bits = 0.0
    require(
        1 <= bits <= 32,
        f"--weights is {given!r}; pass auto, {', '.join(WEIGHTS)}, or the bits of a linear weight with its "
        "scales, from 1 to 32, such as 4.15625.",
        "weights",
    )
    return WeightFormat(f"{bits:g} bits", bits)


def _as_in_file(stored: StoredWeights) -> WeightFormat:
    """Named after the kind of most tensors with few bits."""
    named = [kind for kind, _ in stored.kinds if kind not in ("F32", "F16", "BF16")]
    why = ", ".join(f"{count} {kind}" for kind, count in stored.kinds)
    return WeightFormat(" + ".join(named) or stored.kinds[0][0], 0.0, "file", why)


def dtype_of(shape: ModelShape) -> str:
    """The dtype of the checkpoint's plain weights. Raises: InvalidArgumentError if it is not stated."""
    if shape.dtype not in PLAIN_BITS:
        raise InvalidArgumentError(
            f"config.json of {shape.name} says {shape.dtype} for its dtype; write bfloat16, "
            "float16 or float32 there.",
            field="model",
        )
    return shape.dtype


def state_bytes(shape: ModelShape) -> int:
    """Return the bytes of recurrent states per sequence of any length; 0 without recurrent layers."""
    return shape.state_bytes(PLAIN_BITS[dtype_of(shape)]) if shape.has_states else 0


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """total: in memory; dense, routed: what a step reads whatever it computes, and all routed experts
    (active parameters of the dense part: no row of the embedding); embedding, linear, plain: of total, for
    explanations."""

    total: int
    dense: int
    routed: int
    linear_params: int
    plain_params: int


def weight_bytes(shape: ModelShape, form: WeightFormat) -> WeightBytes:
    """Embedding, head, norms and routers in the model's dtype, the rest as the format stores it."""
    linear = sum(layer.linear for layer in shape.layers)
    routed = sum(x.experts.count * x.experts.linear for x in shape.layers if x.experts)
    routed_plain = sum(x.experts.count * x.experts.plain for x in shape.layers if x.experts)
    tables = shape.embedding if shape.tied else 2 * shape.embedding
    plain = shape.final_plain + sum(layer.plain for layer in shape.layers) + tables
    if form.scope == "file":
        assert shape.stored is not None, "a format of a file's tensors is made of them"
        stored = shape.stored
        return WeightBytes(
            total=stored.total,
            dense=stored.total - stored.routed - stored.looked_up,
            routed=stored.routed,
            linear_params=linear + routed,
            plain_params=plain + routed_plain,
        )
    plain_bits = form.bits if form.scope == "all" else PLAIN_BITS[dtype_of(shape)]
    linear_bits = plain_bits if form.scope == "experts" else form.bits
    routed_bytes = (routed * form.bits + routed_plain * plain_bits) / 8
    kept = sum(layer.kept for layer in shape.layers) if form.leaves_out else 0
    dense = ((linear - kept) * linear_bits + (plain + kept) * plain_bits) / 8
    read = dense - (0 if shape.tied else shape.embedding * plain_bits / 8)
    return WeightBytes(
        total=round(dense + routed_bytes),
        dense=round(read),
        routed=round(routed_bytes),
        linear_params=linear + routed,
        plain_params=plain + routed_plain,
    )
