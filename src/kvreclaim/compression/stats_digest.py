"""A digest of statistics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from hashlib import sha256

from torch import Tensor

from kvreclaim.compression.stats import LayerStats


def stats_digest(layers: Iterable[LayerStats]) -> str:
    """sha256 over every number, with names, dtypes and shapes."""
    digest = sha256()
    for layer in layers:
        for field in fields(layer):
            value = getattr(layer, field.name)
            if isinstance(value, Tensor):
                digest.update(f"{field.name} {value.dtype} {tuple(value.shape)} ".encode())
                digest.update(value.contiguous().cpu().numpy().tobytes())
            else:
                digest.update(f"{field.name} {value} ".encode())
    return digest.hexdigest()
