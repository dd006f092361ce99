"""The public statistics files of arXiv 2604.04921: read only, never unpickled freely."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.errors import StatsMismatchError
from kvreclaim.ops.rope import RopeLayout, from_bands

_HEAD = re.compile(r"layer(\d+)_head(\d+)")
_VECTORS = ("q_mean_real", "q_mean_imag", "q_abs_mean")


@dataclass(frozen=True, slots=True, eq=False)
class PublicStats:
    """q_mean: [L, H, D] fp32 in the model's arrangement; q_abs_mean: [L, H, F]."""

    q_mean: Tensor
    q_abs_mean: Tensor
    rope_style: str
    model_name: str


def read_public_stats(path: str | os.PathLike[str]) -> PublicStats:
    """Read a torch.save dict {"metadata": {...}, "stats": {"layer00_head00": {...}, ...}}.

    Raises: StatsMismatchError if the file is corrupt, incomplete, holds other than plain tensors, or
        describes a partially rotated head (such files lack the dims without position).
    """
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged archive can raise anything; it is one fault to the caller
        raise StatsMismatchError(
            f"{path} is no valid statistics file ({error}); get it again or run `kvreclaim calibrate`."
        ) from error
    metadata, heads = _sections(path, data)
    style, head_dim = metadata.get("rope_style"), metadata.get("head_dim")
    if style not in ("half", "interleaved"):
        raise StatsMismatchError(f"{path}: rope_style is {style!r}; it must be half or interleaved.")
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise StatsMismatchError(f"{path}: head_dim is {head_dim!r}; it must be a positive even number.")
    grid = _head_grid(path, metadata, heads)
    real, imag, magnitude = (_stacked(path, heads, grid, (vector, head_dim // 2)) for vector in _VECTORS)
    layout = RopeLayout(torch.zeros(head_dim // 2, dtype=torch.float64), style)
    bands = torch.complex(real, imag)
    mean = from_bands(bands, real[..., :0], layout)
    return PublicStats(mean, magnitude, style, str(metadata.get("model_name", "")))


def _sections(path: object, data: object) -> tuple[Mapping[str, object], Mapping[str, object]]:
    if isinstance(data, Mapping):
        metadata, heads = data.get("metadata"), data.get("stats")
        if isinstance(metadata, Mapping) and isinstance(heads, Mapping):
            return metadata, heads
    raise StatsMismatchError(f"{path} is no statistics file: it must hold the dicts 'metadata' and 'stats'.")


def _head_grid(path: object, metadata: Mapping[str, object], heads: Mapping[str, object]) -> tuple[int, int]:
    """(L, H); every one of the L x H heads must be there, in the list and in the dict."""
    found = set()
    for name in heads:
        match = _HEAD.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise StatsMismatchError(f"{path}: entry {name!r} is unknown; entries are named layer00_head00.")
        found.add((int(match[1]), int(match[2])))
    if not found:
        raise StatsMismatchError(f"{path} holds no heads.")
    num_layers, num_heads = (1 + max(axis) for axis in zip(*found, strict=True))
    if len(found) != num_layers * num_heads or len(found) != len(heads):
        raise StatsMismatchError(
            f"{path} holds {len(heads)} heads of {num_layers} layers x {num_heads}; every head is needed."
        )
    sampled = metadata.get("sampled_heads")
    if sampled is not None and not _same_heads(sampled, found):
        raise StatsMismatchError(f"{path}: sampled_heads does not list the {len(found)} heads of 'stats'.")
    return num_layers, num_heads


def _same_heads(sampled: object, found: set[tuple[int, int]]) -> bool:
    """Return whether sampled is a list of [layer, head] that holds exactly the found heads."""
    if not isinstance(sampled, list | tuple):
        return False
    pairs = [list(pair) for pair in sampled if isinstance(pair, list | tuple)]
    return len(pairs) == len(sampled) == len(found) and all([*head] in pairs for head in found)


def _stacked(
    path: object, heads: Mapping[str, object], grid: tuple[int, int], vector: tuple[str, int]
) -> Tensor:
    """One vector of every head: [L, H, F] fp32. vector: its name and F."""
    parts: dict[tuple[int, int], Tensor] = {}
    for name, entry in heads.items():
        value = entry.get(vector[0]) if isinstance(entry, Mapping) else None
        if not (isinstance(value, Tensor) and value.is_floating_point() and value.shape == (vector[1],)):
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise StatsMismatchError(
                f"{path}: {vector[0]} of {name} is {got}; it must be float [head_dim / 2 = {vector[1]}]."
            )
        match = _HEAD.fullmatch(name)
        assert match is not None, name
        parts[int(match[1]), int(match[2])] = value.float()
    order = [(layer, head) for layer in range(grid[0]) for head in range(grid[1])]
    return torch.stack([parts[place] for place in order]).view(*grid, vector[1])
