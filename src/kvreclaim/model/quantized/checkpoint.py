"""Packed weights in a directory of safetensors files, read by the config's quantisation scheme."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils import cached_file

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.model.quantized.source import in_pieces
from kvreclaim.ops.packed import Each, PackedMatrix
from kvreclaim.weights.checkpoints import awq_rows, compressed_rows, gptq_rows, nf4_rows
from kvreclaim.weights.packed import PackedRows

WORD = 8
LEAST_GROUP = 32
NF4_STATE = "weight.quant_state.bitsandbytes__"
Rows = Callable[[int, int], PackedRows]


class SafetensorsFiles:
    """Tensors of a directory's safetensors files, by name. A file is open only while it is read, so that its
    pages leave memory afterwards."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.places: dict[str, str] = {}
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self.places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return
        for file in sorted(directory.glob("*.safetensors")):
            if file.name.startswith("kvreclaim"):
                continue
            with safe_open(file, framework="pt") as opened:
                self.places |= dict.fromkeys(opened.keys(), file.name)

    @contextmanager
    def reading(self, name: str) -> Iterator[Any]:
        """Open a tensor for slicing. Raises: InvalidArgumentError."""
        try:
            with safe_open(self.directory / self.places[name], framework="pt") as opened:
                yield opened.get_slice(name)
        except (OSError, SafetensorError) as error:
            raise InvalidArgumentError(
                f"{self.places[name]} of {str(self.directory)!r} cannot be read ({error}); download the "
                "checkpoint again."
            ) from error

    def whole(self, name: str) -> Tensor:
        with self.reading(name) as tensor:
            found: Tensor = tensor[...] if not tensor.get_shape() else tensor[:]
            return found.clone()

    def dense(self, name: str) -> Tensor | None:
        """Return a tensor; None if it is missing."""
        return self.whole(name) if name in self.places else None

    def shape(self, name: str) -> tuple[int, ...]:
        with self.reading(name) as tensor:
            return tuple(tensor.get_shape())


@dataclass(frozen=True)
class _Slices:
    """A tensor that is read from its file when it is sliced."""

    files: SafetensorsFiles
    name: str

    def __getitem__(self, index: Any) -> Tensor:
        with self.files.reading(self.name) as tensor:
            found: Tensor = tensor[index]
            return found.clone()


@dataclass(frozen=True)
class Layer:
    """A linear layer of a checkpoint: `stem` is the name of the module."""

    files: SafetensorsFiles
    stem: str
    shape: tuple[int, int]

    def read(self, end: str) -> _Slices:
        """Return one of the layer's tensors. Raises: InvalidArgumentError if it is missing."""
        name = f"{self.stem}.{end}"
        if name not in self.files.places:
            raise InvalidArgumentError(
                f"layer {self.stem} of {str(self.files.directory)!r} lacks {end}; download the checkpoint "
                "again."
            )
        return _Slices(self.files, name)

    def check(self, end: str, want: tuple[int, ...]) -> None:
        """Check the shape of a tensor. Raises: InvalidArgumentError."""
        found = self.files.shape(self.read(end).name)
        if found != want:
            raise InvalidArgumentError(
                f"{self.stem}.{end} is {list(found)}, where a layer of {self.shape[0]} rows and "
                f"{self.shape[1]} columns has {list(want)}; download the checkpoint again."
            )

    def check_groups(self, end: str, *, is_last: bool) -> None:
        """Check the scales: [N, K / G], or [K / G, N]. Raises: UnsupportedModelError for groups below 32."""
        found = self.files.shape(self.read(end).name)
        out, columns = self.shape
        groups = found[-1 if is_last else 0] if len(found) == 2 else 0
        if groups == 0 or columns % groups or found[0 if is_last else 1] != out:
            raise InvalidArgumentError(
                f"{self.stem}.{end} is {list(found)}, which are no scales of {out} rows and {columns} "
                "columns; download the checkpoint again."
            )
        _check_group(columns // groups)


class Scheme:
    """A packing scheme. mark: the tensor that identifies a packed layer."""

    label: str
    mark: str

    def rows(self, layer: Layer) -> Rows:
        """Return read(first, last) of a layer. Raises: InvalidArgumentError, UnsupportedModelError."""
        raise NotImplementedError


@dataclass(frozen=True)
class Awq(Scheme):
    label: str = "awq"
    mark: str = "qweight"

    def rows(self, layer: Layer) -> Rows:
        out, columns = layer.shape
        layer.check("qweight", (columns, out // WORD))
        layer.check_groups("scales", is_last=False)
        return partial(awq_rows, layer.read)


@dataclass(frozen=True)
class Gptq(Scheme):
    is_v1: bool
    label: str = "gptq"
    mark: str = "qweight"

    def rows(self, layer: Layer) -> Rows:
        out, columns = layer.shape
        layer.check("qweight", (columns // WORD, out))
        layer.check_groups("scales", is_last=False)
        groups = layer.files.shape(layer.read("scales").name)[0]
        _check_order(layer, "g_idx", columns // groups)
        return partial(gptq_rows, layer.read, is_v1=self.is_v1)


@dataclass(frozen=True)
class CompressedTensors(Scheme):
    is_symmetric: bool
    label: str = "compressed-tensors"
    mark: str = "weight_packed"

    def rows(self, layer: Layer) -> Rows:
        out, columns = layer.shape
        layer.check("weight_packed", (out, -(-columns // WORD)))
        layer.check_groups("weight_scale", is_last=True)
        groups = layer.files.shape(layer.read("weight_scale").name)[1]
        _check_order(layer, "weight_g_idx", columns // groups)
        return partial(compressed_rows, layer.read, is_symmetric=self.is_symmetric)


@dataclass(frozen=True)
class BitsAndBytes(Scheme):
    label: str = "bitsandbytes"
    mark: str = "weight.absmax"

    def rows(self, layer: Layer) -> Rows:
        out, columns = layer.shape
        layer.check("weight", (out * columns // 2, 1))
        states = [name for name in layer.files.places if name.startswith(f"{layer.stem}.{NF4_STATE}")]
        if not states:
            raise InvalidArgumentError(
                f"layer {layer.stem} lacks weight.quant_state.bitsandbytes__nf4; download the checkpoint "
                "again."
            )
        state = json.loads(bytes(layer.files.whole(states[0]).tolist()))
        _check_group(int(state["blocksize"]))
        return partial(nf4_rows, layer.read, state=state, columns=columns)


def scheme_of(settings: Mapping[str, Any], name: str) -> Scheme:
    """Return the scheme of a config's quantization_config.

    Raises: UnsupportedModelError for schemes other than AWQ, GPTQ, compressed-tensors' pack-quantized and
        bitsandbytes' 4 bits, and for variants of them that kvreclaim does not read.
    """
    method = str(settings.get("quant_method", "not named"))
    makers = {
        "awq": _awq,
        "gptq": _gptq,
        "compressed-tensors": _compressed_tensors,
        "bitsandbytes": _bitsandbytes,
    }
    if method not in makers:
        raise _refused(name, f"is quantised with {method!r}", f"{', '.join(makers)} and GGUF files")
    return makers[method](settings, name)


def _awq(settings: Mapping[str, Any], name: str) -> Scheme:
    _check_bits(settings.get("bits", settings.get("w_bit")), name)
    version = str(settings.get("version", "gemm")).lower()
    if version != "gemm":
        raise _refused(name, f"is AWQ in the layout {version!r}", "'gemm'")
    _check_group(int(settings.get("group_size", settings.get("q_group_size", 128))))
    return Awq()


def _gptq(settings: Mapping[str, Any], name: str) -> Scheme:
    _check_bits(settings.get("bits"), name)
    form = str(settings.get("checkpoint_format", "gptq"))
    if form not in ("gptq", "gptq_v2"):
        raise _refused(name, f"is GPTQ in the layout {form!r}", "'gptq' and 'gptq_v2'")
    _check_group(int(settings.get("group_size", 128)))
    return Gptq(is_v1=form == "gptq")


def _compressed_tensors(settings: Mapping[str, Any], name: str) -> Scheme:
    form = str(settings.get("format"))
    if form != "pack-quantized":
        raise _refused(name, f"has compressed-tensors of the format {form!r}", "'pack-quantized'")
    groups = [group for group in settings.get("config_groups", {}).values() if group.get("weights")]
    symmetric = {bool(group["weights"].get("symmetric", True)) for group in groups}
    if len(symmetric) != 1:
        raise _refused(name, "has config groups with different schemes", "groups of one scheme")
    for group in groups:
        weights = group["weights"]
        _check_bits(weights.get("num_bits"), name)
        if weights.get("type", "int") != "int":
            raise _refused(name, f"has weights of type {weights['type']!r}", "'int'")
        if group.get("input_activations"):
            raise _refused(name, "has quantised input_activations", "weights alone")
        _check_group(int(weights.get("group_size") or -1))
    return CompressedTensors(is_symmetric=symmetric.pop())


def _bitsandbytes(settings: Mapping[str, Any], name: str) -> Scheme:
    if not settings.get("load_in_4bit", settings.get("_load_in_4bit")):
        raise _refused(name, "is bitsandbytes of 8 bits", "4 bits")
    return BitsAndBytes()


def _check_bits(bits: Any, name: str) -> None:
    if bits != 4:
        raise _refused(name, f"has weights of {bits} bits", "4 bits")


def _check_group(group: int) -> None:
    """Check a group size; -1 is a whole row. Raises: UnsupportedModelError."""
    if group > 0 and group % LEAST_GROUP:
        raise UnsupportedModelError(
            f"the checkpoint has groups of {group} columns; kvreclaim reads groups of {LEAST_GROUP} and its "
            "multiples: quantise it with group_size 32, 64 or 128."
        )


def _check_order(layer: Layer, end: str, group: int) -> None:
    """Check that columns are in ascending order. Raises: UnsupportedModelError."""
    if f"{layer.stem}.{end}" not in layer.files.places:
        return
    places = layer.read(end)[:]
    if not torch.equal(places.long(), torch.arange(layer.shape[1]) // group):
        raise UnsupportedModelError(
            f"layer {layer.stem} has its columns in the order of their activations (desc_act, act-order), "
            "which kvreclaim does not read; quantise with desc_act=False."
        )


def _refused(name: str, what: str, allowed: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} {what}; kvreclaim reads {allowed}: pass such a checkpoint, or one that is not quantised."
    )


@dataclass
class CheckpointSource:
    """A WeightSource over safetensors."""

    files: SafetensorsFiles
    scheme: Scheme
    _taken: set[str] = field(default_factory=set)

    @property
    def label(self) -> str:
        return self.scheme.label

    @property
    def packs_every_matrix(self) -> bool:
        return False  # none of the schemes packs embeddings

    def packed(self, name: str, shape: tuple[int, int], each: Each) -> PackedMatrix | None:
        stem = name.removesuffix(".weight")
        if f"{stem}.{self.scheme.mark}" not in self.files.places:
            return None
        out, columns = shape
        if out % WORD or columns % LEAST_GROUP:
            raise UnsupportedModelError(
                f"layer {stem} has {out} rows and {columns} columns; kvreclaim packs rows by 8 and columns "
                "by 32: leave the layer out when quantising."
            )
        self._taken.add(stem)
        return in_pieces(shape, self.scheme.rows(Layer(self.files, stem, shape)), each)

    def dense(self, name: str) -> Tensor | None:
        return self.files.dense(name)

    @cached_property
    def _marked(self) -> list[str]:
        end = f".{self.scheme.mark}"
        return [name.removesuffix(end) for name in self.files.places if name.endswith(end)]

    def unread(self) -> list[str]:
        return sorted(set(self._marked) - self._taken)


def checkpoint_source(name: str, settings: Mapping[str, Any]) -> CheckpointSource:
    """Open a checkpoint. name: a directory, or a hub id with its files in the local cache.

    Raises: UnsupportedModelError, InvalidArgumentError.
    """
    scheme = scheme_of(settings, name)
    config = cached_file(name, "config.json")
    files = SafetensorsFiles(Path(str(config)).parent)
    if not files.places:
        raise InvalidArgumentError(
            f"model {name!r} has no loadable safetensors weights; convert the checkpoint to safetensors."
        )
    return CheckpointSource(files, scheme)
