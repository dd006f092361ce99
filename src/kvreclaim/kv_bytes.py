"""Bytes of a KV cache in every format, with scales and centres; integers only.

ops.formats adds what is stored (dtypes, codecs) to the same objects, so a plan and a pool cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Protocol

from kvreclaim.config import format_name

GROUP = 32
"""Dims of a key or a value that share a scale and a centre (int4)."""


class LayerDims(Protocol):
    """Sizes of a layer's keys and values. key_dims: of a key that is stored beside the value; of a latent
    cache (MLA) the rotary part, num_kv_heads 1 and v_head_dim the latent's."""

    @property
    def num_kv_heads(self) -> int: ...
    @property
    def key_dims(self) -> int: ...
    @property
    def v_head_dim(self) -> int: ...


def groups(dim: int) -> int:
    """Groups of 32 dims; the last may be shorter."""
    return -(-dim // GROUP)


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of one format.

    A *unit* is one block of one KV head in one layer: the keys, the values and their parameters (scales,
    centres) of S slots.

    bits:       of a stored number; 16 and more: stored as they are, without parameters
    is_rotated: codes are of rotated vectors (ops/formats/hadamard.py)
    version:    of the layout; part of the prefix hash, so that blocks of two layouts never meet
    """

    name: str
    bits: int
    is_rotated: bool = False
    version: int = 1

    @property
    def is_plain(self) -> bool:
        return self.bits >= 16

    @property
    def fingerprint(self) -> str:
        return f"{self.name}/{self.version}"

    def code_bytes(self, dim: int) -> int:
        """Bytes of one key or value of `dim` numbers, without its parameters."""
        return dim * self.bits // 8

    def slot_params(self, k_dim: int, v_dim: int) -> int:
        """Bytes of parameters beside one slot's key and value; 0 where there are none."""
        if self.is_plain:
            return 0
        if self.name == "int4":
            return 2 * (groups(k_dim) + groups(v_dim))
        return 3

    def unit_bytes(self, k_dim: int, v_dim: int, block_size: int) -> int:
        codes = self.code_bytes(k_dim) + self.code_bytes(v_dim)
        return block_size * (codes + self.slot_params(k_dim, v_dim))

    def bytes_per_block(self, layers: Iterable[LayerDims], block_size: int) -> int:
        """Bytes of one block over all layers, parameters included."""
        return sum(
            layer.num_kv_heads * self.unit_bytes(layer.key_dims, layer.v_head_dim, block_size)
            for layer in layers
        )

    def density(self, own: KVBytes, layers: Iterable[LayerDims]) -> Fraction:
        """How many tokens take the bytes of one token in the model's own format, parameters included."""
        dims = tuple(layers)
        return Fraction(own.bytes_per_block(dims, 1), self.bytes_per_block(dims, 1))

    def unsupported_reason(self, layers: Iterable[LayerDims]) -> str | None:
        """Why these layers' keys and values have no such format; None if they have."""
        dims = {dim for layer in layers for dim in (layer.key_dims, layer.v_head_dim)}
        if self.bits == 4 and any(dim % 2 for dim in dims):
            return f"{self.name} packs two numbers into a byte, and a head dim of {sorted(dims)} is odd"
        return None


KV_BYTES: Mapping[str, KVBytes] = MappingProxyType(
    {
        form.name: form
        for form in (
            KVBytes("fp32", 32),
            KVBytes("bf16", 16),
            KVBytes("fp16", 16),
            KVBytes("fp8_e4m3", 8),
            KVBytes("int8", 8),
            KVBytes("int4", 4, is_rotated=True, version=2),
            KVBytes("turboquant4", 4, is_rotated=True),
        )
    }
)
"""Every format by its name in config.KV_CACHE_DTYPES."""


def kv_bytes(name: str, model_dtype: str) -> KVBytes:
    """The format that --kv-cache-dtype names; "auto" is the model's dtype, by any of its names.

    Raises: InvalidArgumentError.
    """
    name = format_name(name)
    return KV_BYTES[format_name(model_dtype) if name == "auto" else name]
