"""Published KVzap weights (arXiv 2601.07891): read only."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from kvreclaim.errors import StatsMismatchError
from kvreclaim.ops.facts import ModelFacts

_FILE = "model.safetensors"
_NAME = re.compile(r"module_list\.(\d+)\.(?:([02])\.)?(weight|bias)")


@dataclass(frozen=True, slots=True, eq=False)
class KVzapWeights:
    """inner: [L, U, M + 1] fp32, None where scores are linear; outer: [L, K, U + 1 | M + 1] fp32."""

    inner: Tensor | None
    outer: Tensor

    @property
    def num_inputs(self) -> int:
        """M."""
        return (self.outer if self.inner is None else self.inner).shape[-1] - 1

    @property
    def num_units(self) -> int:
        """U; 0 where scores are linear."""
        return 0 if self.inner is None else self.inner.shape[1]


def read_kvzap(path: str | os.PathLike[str], facts: ModelFacts) -> KVzapWeights:
    """Read a directory, or its model.safetensors: of each layer one linear map, or two around a GELU, named
    module_list.0.weight or module_list.0.0.weight, from what attention is given to the KV heads.

    Raises: StatsMismatchError for a file that is missing, corrupt or of another form, or weights of another
        model.
    """
    file = Path(path) / _FILE if os.path.isdir(path) else Path(path)
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise StatsMismatchError(
            f"{os.fspath(path)!r} holds no KVzap weights that can be read ({error}); name linear, mlp, or a "
            f"directory with {_FILE}."
        ) from error
    found = _weights(file, tensors)
    pairs = [
        ("layers", len(found.outer), facts.num_layers),
        ("KV heads", found.outer.shape[1], facts.layers[0].num_kv_heads),
        ("hidden size", found.num_inputs, facts.hidden_size),
    ]
    if differ := [f"{what} {ours}, the model has {its}" for what, ours, its in pairs if ours != its]:
        raise StatsMismatchError(
            f"the KVzap weights in {os.fspath(path)!r} do not fit {facts.name!r}: {'; '.join(differ)}."
        )
    return found


def _weights(file: Path, tensors: dict[str, Tensor]) -> KVzapWeights:
    parts: dict[tuple[str | None, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None or not tensor.is_floating_point():
            raise StatsMismatchError(f"{file}: {name} is no weight or bias of a KVzap module.")
        parts.setdefault((match[2], int(match[1])), {})[match[3]] = tensor.float()
    places = {place for place, _ in parts}
    layers = len(parts) // max(1, len(places))
    whole = all(set(part) == {"weight", "bias"} for part in parts.values())
    known = {(place, layer) for place in places for layer in range(layers)}
    if not whole or set(parts) != known or places not in ({None}, {"0", "2"}):
        raise StatsMismatchError(
            f"{file} holds {len(tensors)} tensors; every layer needs a weight and a bias of one linear map, "
            "or of two (0 and 2)."
        )
    first, last = (_stacked(file, parts, place, layers) if place in places else None for place in ("0", "2"))
    if last is None:
        return KVzapWeights(None, _stacked(file, parts, None, layers))
    if first is None or first.shape[1] != last.shape[-1] - 1:
        raise StatsMismatchError(f"{file}: the two maps of a layer do not follow each other.")
    return KVzapWeights(first, last)


def _stacked(
    file: Path, parts: dict[tuple[str | None, int], dict[str, Tensor]], place: str | None, layers: int
) -> Tensor:
    """[L, N, M + 1], the bias last."""
    maps = [parts[place, layer] for layer in range(layers)]
    shapes = {(part["weight"].shape, part["bias"].shape) for part in maps}
    weight, bias = next(iter(shapes))
    if len(shapes) > 1 or len(weight) != 2 or bias != weight[:1]:
        raise StatsMismatchError(f"{file}: layers are of different shapes, or a bias is not its weight's.")
    return torch.stack([torch.cat([part["weight"], part["bias"][:, None]], dim=1) for part in maps])
