"""Packed weights of a GGUF file, as they lie in it."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from kvreclaim.errors import FetchError, InvalidArgumentError, UnsupportedModelError
from kvreclaim.model.gguf import Header, check_packages, cut_as_trained, header_of, refuse_rotation
from kvreclaim.model.quantized.source import in_pieces
from kvreclaim.ops.native.packed import PackedMatrix
from kvreclaim.weights.ggml import FORMATS, ggml_rows

ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3"})
"""Whose tensors are transformers' weights, but for the order of rows in llama's queries and keys."""
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
REMEDY = "`kvreclaim fetch FILE` makes a bf16 model of it, where transformers can."


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


class GgufSource:
    """A WeightSource over a GGUF file of llama.cpp."""

    def __init__(self, file: Path) -> None:
        """Raises: InvalidArgumentError, UnsupportedModelError."""
        self.file = file
        if not file.is_file():
            raise InvalidArgumentError(
                f"model {os.fspath(file)!r} is no file; pass the path of a .gguf file."
            )
        try:
            check_packages()
            self._open()
        except FetchError as error:
            raise InvalidArgumentError(str(error)) from error
        except (ValueError, OSError, KeyError, IndexError) as error:
            raise InvalidArgumentError(
                f"{file.name} cannot be read as GGUF ({type(error).__name__}: {error}); download it again."
            ) from error
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file.name} is of the architecture {self.architecture!r}; kvreclaim runs GGUF files of "
                f"{', '.join(sorted(ARCHITECTURES))} as they are; {REMEDY}"
            )
        self._taken: set[str] = set()

    def _open(self) -> None:
        from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map

        self.reader = GGUFReader(self.file)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.architecture = str(self._value("general.architecture"))
        layers = int(self._value(f"{self.architecture}.block_count"))
        architectures = {name: key for key, name in MODEL_ARCH_NAMES.items()}
        known = architectures.get(self.architecture)
        self._names: Any = None if known is None else get_tensor_name_map(known, layers)

    def _value(self, key: str) -> Any:
        found = self.reader.get_field(key)
        if found is None:
            raise ValueError(f"the file does not say {key}")
        return found.contents()

    @property
    def label(self) -> str:
        kinds = {tensor.tensor_type.name for tensor in self.tensors.values()}
        return "gguf " + " ".join(sorted(kinds & FORMATS.keys()))

    def header(self) -> Header:
        return header_of(self.reader)

    def packed(self, name: str, shape: tuple[int, int]) -> PackedMatrix | None:
        tensor = self._find(name)
        if tensor is None or tensor.tensor_type.name in PLAIN:
            return None
        kind = tensor.tensor_type.name
        if kind not in FORMATS:
            raise UnsupportedModelError(
                f"{tensor.name} of {self.file.name} is {kind}; kvreclaim reads "
                f"{', '.join([*FORMATS, *PLAIN])}: pass a file with those; {REMEDY}"
            )
        if tuple(reversed(tensor.shape.tolist())) != shape:
            raise InvalidArgumentError(
                f"{tensor.name} of {self.file.name} is {tensor.shape.tolist()[::-1]}, and its header asks "
                f"for {list(shape)}; download the file again."
            )
        order = self._order(tensor.name, shape[0])
        found = in_pieces(shape, lambda first, last: ggml_rows(kind, _copied(tensor.data, order[first:last])))
        self._forget(tensor)
        return found

    def dense(self, name: str) -> Tensor | None:
        tensor = self._find(name)
        if tensor is None:
            return None
        kind = tensor.tensor_type.name
        if kind not in PLAIN:
            raise UnsupportedModelError(
                f"{tensor.name} of {self.file.name} is {kind}, and no matrix of a linear layer; {REMEDY}"
            )
        rows = tensor.shape.tolist()[::-1]
        data = _copied(tensor.data, self._order(tensor.name, rows[0]))
        self._forget(tensor)
        return (data.contiguous().view(torch.bfloat16) if kind == "BF16" else data).view(rows)

    def unread(self) -> list[str]:
        return sorted(name for name in self.tensors.keys() - self._taken if not name.startswith("rope_"))

    def _find(self, name: str) -> Any:
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = self.tensors.get(found)
        if tensor is not None:
            self._taken.add(found)
        return tensor

    def _order(self, name: str, rows: int) -> np.ndarray:
        """Which rows of the file are those of transformers: llama.cpp has (x, y) of a head side by side."""
        order = np.arange(rows)
        kind = name.split(".")[-2]
        if self.architecture != "llama" or kind not in ("attn_q", "attn_k"):
            return order
        which = "head_count" if kind == "attn_q" else "head_count_kv"
        heads = int(self._value(f"{self.architecture}.attention.{which}"))
        return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def _forget(self, tensor: Any) -> None:
        """Let the pages of the file go, which count as this process's memory as long as they are mapped."""
        mapped: Any = self.reader.data._mmap  # type: ignore[attr-defined]
        page = mmap.PAGESIZE
        first = int(tensor.data_offset) // page * page
        mapped.madvise(mmap.MADV_DONTNEED, first, int(tensor.data_offset) + int(tensor.n_bytes) - first)


def _copied(data: np.ndarray, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(data[rows]))


@contextmanager
def _alone(file: Path) -> Iterator[dict[str, Any]]:
    """The file with nothing beside it that transformers might read instead."""
    with TemporaryDirectory(prefix="kvreclaim-gguf-") as made:
        Path(made, file.name).symlink_to(file.resolve())
        yield {"pretrained_model_name_or_path": made, "gguf_file": file.name}


def gguf_config(source: GgufSource) -> Any:
    """transformers' config of a GGUF file. Raises: UnsupportedModelError."""
    with _alone(source.file) as where:
        config = AutoConfig.from_pretrained(**where)
    try:
        refuse_rotation(source.file.name, source.header(), config)
    except FetchError as error:
        raise UnsupportedModelError(str(error)) from error
    return config


def gguf_tokenizer(source: GgufSource, say: Any) -> Any:
    """The tokenizer of a GGUF file, cutting text as the model has learned."""
    with _alone(source.file) as where:
        tokenizer = AutoTokenizer.from_pretrained(**where)
    cut_as_trained(tokenizer, source.header().rule, say)
    return tokenizer
