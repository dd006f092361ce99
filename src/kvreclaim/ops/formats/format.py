"""KV formats: what a cache stores per number. kv_bytes.py has the bytes. No kernels here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from kvreclaim.config import format_name
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.kv_bytes import KV_BYTES, KVBytes


@dataclass(frozen=True, slots=True)
class KVFormat(KVBytes):
    """Format of keys and values in one engine's cache.

    dtype: what is stored, of a plain format; None: codes, which are dequantised inside the kernels
    transform: digest of the transforms of keys (ops/transformed_keys.py); "": they are stored as they are
    """

    dtype: torch.dtype | None = None
    transform: str = ""

    @property
    def number(self) -> torch.dtype:
        """Dtype of gather_tokens: a dequantised number rounded to 16 bits would be less exact than its
        code."""
        return self.dtype or torch.float32

    @property
    def fingerprint(self) -> str:
        sides = "+".join(dict.fromkeys(f"{side.name}/{side.version}" for side in (self.keys, self.values)))
        return "/".join(filter(None, [sides, self.transform]))


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS: Mapping[str, KVFormat] = MappingProxyType(
    {name: KVFormat(form.keys, form.values, _DTYPES.get(name)) for name, form in KV_BYTES.items()}
)


def plain_format(dtype: torch.dtype) -> KVFormat:
    """Return the format that stores this dtype as it is. Raises: InvalidArgumentError."""
    for form in FORMATS.values():
        if form.dtype == dtype:
            return form
    raise InvalidArgumentError(
        f"the dtype of K/V is {dtype}; allowed are float32, bfloat16 and float16; "
        "load the model in one of them."
    )


def kv_format(name: str, model_dtype: torch.dtype) -> KVFormat:
    """Return the format of --kv-cache-dtype; "auto" is the model's dtype. Raises: InvalidArgumentError."""
    name = format_name(name)
    return plain_format(model_dtype) if name == "auto" else FORMATS[name]
