"""Bytes of a KV cache in every format, with scales and centres; integers only.

ops.formats adds what is stored (dtypes, codecs) to the same objects, so a plan and a pool cannot disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Protocol

from kvreclaim.config import KV_CACHE_DTYPES, format_name

GROUP = 32
"""Dims of a key or a value that share a scale and a centre (int4)."""


class LayerDims(Protocol):
    """Sizes of a layer's keys and values. key_dims: stored dims of a key, apart from the value; of a latent
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
class VectorBytes:
    """Bytes of a *vector*, the key or the value of one token in one KV head, in one format.

    bits:       of a stored number; 16 and more: stored as they are, without parameters
    is_rotated: codes are of rotated vectors (ops/formats/hadamard.py)
    has_groups: each group of 32 dims has a scale and a centre of a byte each; else the vector has one scale
                of 12 bits
    version:    of the layout; part of the prefix hash, so that blocks of two layouts never meet
    """

    name: str
    bits: int
    is_rotated: bool = False
    has_groups: bool = False
    version: int = 1

    @property
    def is_plain(self) -> bool:
        return self.bits >= 16

    def code_bytes(self, dim: int) -> int:
        """Bytes of a vector of `dim` numbers, without its parameters."""
        return dim * self.bits // 8

    def param_bytes(self, dim: int) -> int:
        """Bytes of the vector's parameters: scales and centres of groups, or the low 8 bits of its scale."""
        if self.is_plain:
            return 0
        return 2 * groups(dim) if self.has_groups else 1


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of keys in one format and values in the same or another.

    A *unit* is one block of one KV head in one layer: the keys, the values and their parameters (scales,
    centres) of S slots.
    """

    keys: VectorBytes
    values: VectorBytes

    @property
    def name(self) -> str:
        return "+".join(dict.fromkeys((self.keys.name, self.values.name)))

    @property
    def is_plain(self) -> bool:
        return self.keys.is_plain

    @property
    def is_rotated(self) -> bool:
        """Return whether the codes of keys or of values are of rotated vectors."""
        return self.keys.is_rotated or self.values.is_rotated

    def slot_params(self, k_dim: int, v_dim: int) -> int:
        """Bytes of parameters per slot, in addition to key and value; 0 where there are none. Scales of 12
        bits share the last byte."""
        if self.is_plain:
            return 0
        is_shared = not (self.keys.has_groups and self.values.has_groups)
        return self.keys.param_bytes(k_dim) + self.values.param_bytes(v_dim) + is_shared

    def unit_bytes(self, k_dim: int, v_dim: int, block_size: int) -> int:
        codes = self.keys.code_bytes(k_dim) + self.values.code_bytes(v_dim)
        return block_size * (codes + self.slot_params(k_dim, v_dim))

    def dtype_name(self, own: KVBytes) -> str:
        """Return the format's name as a KV cache dtype of a model in the format `own`, which is "auto"."""
        return "auto" if self.name == own.name else self.name

    def bytes_per_block(self, layers: Iterable[LayerDims], block_size: int) -> int:
        """Bytes of one block over all layers, parameters included."""
        return sum(
            layer.num_kv_heads * self.unit_bytes(layer.key_dims, layer.v_head_dim, block_size)
            for layer in layers
        )

    def density(self, own: KVBytes, layers: Iterable[LayerDims]) -> Fraction:
        """Tokens that take the bytes of one token in the model's own format, parameters included."""
        dims = tuple(layers)
        return Fraction(own.bytes_per_block(dims, 1), self.bytes_per_block(dims, 1))

    def unsupported_reason(self, layers: Iterable[LayerDims]) -> str | None:
        """Why these layers' keys and values have no such format; None if they have."""
        pairs = {(layer.key_dims, layer.v_head_dim) for layer in layers}
        odd = {
            dim
            for pair in pairs
            for form, dim in zip((self.keys, self.values), pair, strict=True)
            if form.bits == 4 and dim % 2
        }
        if odd:
            return f"{self.name} packs two numbers into a byte, and a head dim of {sorted(odd)} is odd"
        return None


VECTOR_BYTES: Mapping[str, VectorBytes] = MappingProxyType(
    {
        form.name: form
        for form in (
            VectorBytes("fp32", 32),
            VectorBytes("bf16", 16),
            VectorBytes("fp16", 16),
            VectorBytes("fp8_e4m3", 8),
            VectorBytes("int8", 8),
            VectorBytes("int4", 4, is_rotated=True, has_groups=True, version=2),
            VectorBytes("turboquant4", 4, is_rotated=True),
        )
    }
)
"""Every format of keys or values by its name."""


def _pair(name: str) -> KVBytes:
    keys, _, values = name.partition("+")
    return KVBytes(VECTOR_BYTES[keys], VECTOR_BYTES[values or keys])


KV_BYTES: Mapping[str, KVBytes] = MappingProxyType(
    {name: _pair(name) for name in KV_CACHE_DTYPES if name != "auto"}
)
"""Every format by its name in config.KV_CACHE_DTYPES."""


def kv_bytes(name: str, model_dtype: str) -> KVBytes:
    """Return the format that --kv-cache-dtype names; "auto" is the model's dtype, by any of its names.

    Raises: InvalidArgumentError.
    """
    name = format_name(name)
    return KV_BYTES[format_name(model_dtype) if name == "auto" else name]
