"""What a KV cache stores per number, and how many bytes that takes. No kernels here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvreclaim.config import format_name
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import LayerFacts

GROUP = 32
"""Dims of a key or a value that share a scale and a centre (int4; values of kivi4)."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Where the parameters of a unit of kivi4 lie (kivi_codec.py). key_bytes: of the keys and the state."""

    k_dim: int
    v_dim: int
    block_size: int

    @property
    def key_bytes(self) -> int:
        return max(2 * self.k_dim, 2 * self.block_size * groups(self.k_dim) + 1)

    @property
    def state(self) -> int:
        """The byte that says how the keys lie."""
        return self.key_bytes - 1

    @property
    def num_values(self) -> int:
        """Value groups of all slots."""
        return self.block_size * groups(self.v_dim)

    @property
    def low_bits(self) -> int:
        """Where the low bits of the values' centres begin."""
        return self.key_bytes + self.num_values

    @property
    def high_bits(self) -> int:
        return self.low_bits + -(-self.num_values // 2)

    @property
    def total(self) -> int:
        return self.high_bits + -(-self.num_values // 8)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """How keys and values lie in the cache of one engine.

    A *unit* is one block of one KV head in one layer: the keys, the values and their parameters (scales,
    centres) of S slots.

    bits:    of a stored number
    dtype:   what is stored, of a plain format; None: codes, which are dequantised inside the kernels
    has_open_blocks: tokens of a block that is not full lie beside the pool, in bf16 (kivi4)
    is_rotated:      codes are of rotated vectors (hadamard.py)
    version: of the layout; part of the prefix hash, so that blocks of two layouts never meet
    """

    name: str
    bits: int
    dtype: torch.dtype | None = None
    has_open_blocks: bool = False
    is_rotated: bool = False
    version: int = 1

    @property
    def is_plain(self) -> bool:
        return self.dtype is not None

    @property
    def number(self) -> torch.dtype:
        """What gather_tokens gives: a dequantised number rounded to 16 bits would be less exact than its
        code."""
        return self.dtype or torch.float32

    @property
    def fingerprint(self) -> str:
        return f"{self.name}/{self.version}"

    def code_bytes(self, dim: int) -> int:
        """Bytes of one key or value of `dim` numbers, without its parameters."""
        return dim * self.bits // 8

    def slot_params(self, k_dim: int, v_dim: int) -> int:
        """Bytes of parameters beside one slot's key and value; 0 where they are none or not per slot."""
        if self.is_plain or self.has_open_blocks:
            return 0
        if self.name == "int4":
            return 2 * (groups(k_dim) + groups(v_dim))
        return 3

    def unit_params(self, k_dim: int, v_dim: int, block_size: int) -> int:
        """Bytes of all parameters of a unit."""
        if not self.has_open_blocks:
            return block_size * self.slot_params(k_dim, v_dim)
        return Geometry(k_dim, v_dim, block_size).total

    def unit_bytes(self, k_dim: int, v_dim: int, block_size: int) -> int:
        codes = block_size * (self.code_bytes(k_dim) + self.code_bytes(v_dim))
        return codes + self.unit_params(k_dim, v_dim, block_size)

    def bytes_per_block(self, layers: Sequence[LayerFacts], block_size: int) -> int:
        """Bytes of one block over all layers, parameters included."""
        return sum(
            layer.num_kv_heads * self.unit_bytes(layer.key_dims, layer.v_head_dim, block_size)
            for layer in layers
        )

    def open_row_bytes(self, layers: Sequence[LayerFacts], block_size: int) -> int:
        """Bytes of one row for a block that is not full, beside the pool; 0 where there are none."""
        return FORMATS["bf16"].bytes_per_block(layers, block_size) if self.has_open_blocks else 0

    def unsupported_reason(self, layers: Sequence[LayerFacts]) -> str | None:
        """Why these layers' keys and values have no such format; None if they have."""
        dims = {dim for layer in layers for dim in (layer.key_dims, layer.v_head_dim)}
        if self.bits == 4 and any(dim % 2 for dim in dims):
            return f"{self.name} packs two numbers into a byte, and a head dim of {sorted(dims)} is odd"
        return None


def groups(dim: int) -> int:
    """Groups of 32 dims; the last may be shorter."""
    return -(-dim // GROUP)


FORMATS: Mapping[str, KVFormat] = MappingProxyType(
    {
        form.name: form
        for form in (
            KVFormat("fp32", 32, torch.float32),
            KVFormat("bf16", 16, torch.bfloat16),
            KVFormat("fp16", 16, torch.float16),
            KVFormat("fp8_e4m3", 8),
            KVFormat("int8", 8),
            KVFormat("int4", 4, is_rotated=True, version=2),
            KVFormat("kivi4", 4, has_open_blocks=True),
            KVFormat("turboquant4", 4, is_rotated=True),
        )
    }
)


def plain_format(dtype: torch.dtype) -> KVFormat:
    """The format that stores this dtype as it is. Raises: InvalidArgumentError."""
    for form in FORMATS.values():
        if form.dtype == dtype:
            return form
    raise InvalidArgumentError(
        f"the dtype of K/V is {dtype}; allowed are float32, bfloat16 and float16; "
        "load the model in one of them."
    )


def kv_format(name: str, model_dtype: torch.dtype) -> KVFormat:
    """The format that --kv-cache-dtype names; "auto" is the model's dtype. Raises: InvalidArgumentError."""
    name = format_name(name)
    return plain_format(model_dtype) if name == "auto" else FORMATS[name]
