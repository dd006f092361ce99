"""Packed weights of a GGUF file, in the file's own layout."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from kvreclaim.errors import (
    FetchError,
    InvalidArgumentError,
    KVReclaimError,
    UnsupportedModelError,
    reason_of,
)
from kvreclaim.model.dense import DenseConfig, is_dense
from kvreclaim.model.gguf import as_in_llama_cpp, gguf_fields, refuse_rotation
from kvreclaim.model.gguf_index import GgufTensor, quoted, read_index
from kvreclaim.model.quantized.source import in_pieces
from kvreclaim.model_paths import gguf_home, moved
from kvreclaim.ops.packed import Each, PackedMatrix
from kvreclaim.temporary import temporary_directory
from kvreclaim.weights.ggml import FORMATS, ggml_rows
from kvreclaim.weights.packed import PackedRows

ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"})
"""Architectures with the tensors of transformers, except for llama's row order of queries and keys, and
for norms that hold weight + 1."""
NORMS_PLUS_ONE = frozenset({"gemma2", "gemma3"})
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Through = Callable[[str, Callable[[], PackedMatrix]], PackedMatrix]
PARTS_LAYOUT = 5
"""Version of the layout that gguf_parts writes."""
KEPT_CONFIG = "kvreclaim_config.json"
REMEDY = "`kvreclaim fetch FILE` makes a bf16 model of it, where transformers can."


def is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


class GgufSource:
    """A WeightSource over a GGUF file of llama.cpp."""

    def __init__(self, file: Path) -> None:
        """Read the file's header. Raises: InvalidArgumentError, UnsupportedModelError."""
        self.file, self.index = file, read_index(file)
        try:
            self.architecture, layers = self.index.architecture, self.index.num_layers()
        except ValueError as error:
            raise InvalidArgumentError(f"{file.name} holds no model ({error}); pass another file.") from error
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{file.name} is of the architecture {quoted(self.architecture)}; kvreclaim runs GGUF "
                f"files of {', '.join(sorted(ARCHITECTURES))} as they are; {REMEDY}"
            )
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        known = {name: key for key, name in MODEL_ARCH_NAMES.items()}
        self._names: Any = get_tensor_name_map(known[self.architecture], layers)
        self._taken: set[str] = set()

    @property
    def label(self) -> str:
        kinds = {tensor.kind for tensor in self.index.tensors.values()}
        return "gguf " + " ".join(sorted(kinds & FORMATS.keys()))

    @property
    def packs_every_matrix(self) -> bool:
        return not any(len(x.shape) > 1 and x.kind in PLAIN for x in self.index.tensors.values())

    def packed(
        self, name: str, shape: tuple[int, int], each: Each, through: Through | None = None
    ) -> PackedMatrix | None:
        """WeightSource.packed. through: returns a tensor's matrix, from a cache or from the given maker"""
        tensor = self._find(name)
        if tensor is None or tensor.kind in PLAIN:
            return None
        if tensor.kind not in FORMATS:
            raise UnsupportedModelError(
                f"{tensor.name} of {self.file.name} is {tensor.kind}; kvreclaim reads "
                f"{', '.join([*FORMATS, *PLAIN])}: pass a file with those; {REMEDY}"
            )
        if tensor.shape != shape:
            raise InvalidArgumentError(
                f"{tensor.name} of {self.file.name} is {list(tensor.shape)}, and its header asks for "
                f"{list(shape)}; download the file again."
            )
        make = partial(self._pack, tensor, shape, each)
        return make() if through is None else through(tensor.name, make)

    def _pack(self, tensor: GgufTensor, shape: tuple[int, int], each: Each) -> PackedMatrix:
        order, rows = self._order(tensor.name, shape[0]), self.index.rows(tensor)

        def read(first: int, last: int) -> PackedRows:
            return ggml_rows(tensor.kind, _copied(rows, order[first:last]))

        found = in_pieces(shape, read, each)
        self.index.forget(tensor)
        return found

    def dense(self, name: str) -> Tensor | None:
        tensor = self._find(name)
        if tensor is None:
            return None
        if tensor.kind not in PLAIN:
            raise UnsupportedModelError(
                f"{tensor.name} of {self.file.name} is {tensor.kind}, and no matrix of a linear layer; "
                f"{REMEDY}"
            )
        data = _copied(self.index.rows(tensor), self._order(tensor.name, tensor.shape[0]))
        self.index.forget(tensor)
        numbers = data.view(PLAIN[tensor.kind]).view(tensor.shape)
        is_more = self.architecture in NORMS_PLUS_ONE and tensor.name.endswith("norm.weight")
        return numbers.float() - 1 if is_more else numbers

    def unread(self) -> list[str]:
        left = self.index.tensors.keys() - self._taken
        return sorted(name for name in left if not name.startswith("rope_"))

    def _find(self, name: str) -> GgufTensor | None:
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        tensor = self.index.tensors.get(found)
        if tensor is not None:
            self._taken.add(tensor.name)
        return tensor

    def _order(self, name: str, rows: int) -> np.ndarray:
        """Return the file's rows in transformers' order: llama.cpp interleaves (x, y) of a head."""
        order = np.arange(rows)
        kind = name.split(".")[-2]
        if self.architecture != "llama" or kind not in ("attn_q", "attn_k"):
            return order
        which = "head_count" if kind == "attn_q" else "head_count_kv"
        heads = int(self.index.fields.get(f"llama.attention.{which}", 0))
        if heads < 1 or rows % (2 * heads):
            raise InvalidArgumentError(
                f"{quoted(name)} of {self.file.name} has {rows} rows, and {which} is {heads}; download the "
                "file again."
            )
        return order.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _copied(data: np.ndarray, rows: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(data[rows]))


def gguf_parts(source: GgufSource) -> Path:
    """Return the directory with transformers' config and tokenizer of a file, in the user's cache. It
    is made once, which takes seconds and hundreds of MB. Its name is the digest of the file's header.
    Raises: InvalidArgumentError where transformers does not read the header, or the cache cannot be written.
    """
    made_by = f"{source.index.digest} {transformers.__version__} {PARTS_LAYOUT}"
    target = gguf_home() / hashlib.sha256(made_by.encode()).hexdigest()
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with temporary_directory(target.parent, "gguf") as made:
            parts = made / "parts"
            _write_parts(source, made, parts)
            moved(parts, target)
    except OSError as error:
        raise InvalidArgumentError(
            f"the tokenizer of {source.file.name} cannot be kept in {str(target.parent)!r} ({error}); set "
            "KVRECLAIM_HOME to a directory that can be written."
        ) from error
    return target


def _write_parts(source: GgufSource, work: Path, parts: Path) -> None:
    alone = work / source.file.name  # transformers might read other files next to it
    alone.symlink_to(source.file.resolve())
    where: Any = {"pretrained_model_name_or_path": os.fspath(work), "gguf_file": source.file.name}
    try:
        transformers.AutoConfig.from_pretrained(**where).save_pretrained(parts)
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(parts)
        _read_faster(parts)
        _keep_config(source, parts)
    except OSError:
        raise
    except Exception as error:  # foreign code on foreign files raises any type
        raise InvalidArgumentError(
            f"{source.file.name} cannot be read as GGUF ({reason_of(error)}); download it again."
        ) from error


def _read_faster(parts: Path) -> None:
    """Rewrite transformers' files so that they load faster: without indentation, which doubles the bytes, and
    with the added tokens in the config, which saves transformers a second parse of the vocabulary."""
    file, config = parts / "tokenizer.json", parts / "tokenizer_config.json"
    words, about = (json.loads(each.read_text(encoding="utf-8")) for each in (file, config))
    if "added_tokens_decoder" not in about:
        tokens = [dict(token) for token in words["added_tokens"]]
        about["added_tokens_decoder"] = {str(token.pop("id")): token for token in tokens}
    for each, content in ((file, words), (config, about)):
        text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        each.write_text(text, encoding="utf-8")


def gguf_config(source: GgufSource, *, of_transformers: bool = False) -> Any:
    """Return the config of a GGUF file: a DenseConfig where one is kept, else transformers' own, which checks
    changes.

    Raises: UnsupportedModelError, InvalidArgumentError.
    """
    parts = gguf_parts(source)
    kept = parts / KEPT_CONFIG
    if not of_transformers and kept.is_file():
        return DenseConfig(**json.loads(kept.read_text(encoding="utf-8")))
    return _whole_config(source, parts)


def _keep_config(source: GgufSource, parts: Path) -> None:
    """Keep all fields of the config of a DenseModel. What is refused is refused again by gguf_config."""
    with suppress(KVReclaimError):
        config = _whole_config(source, parts)
        if is_dense(config) and config.rope_parameters["rope_type"] == "default":
            about = {"fields": config.to_dict(), "default_eos": getattr(type(config), "eos_token_id", None)}
            (parts / KEPT_CONFIG).write_text(json.dumps(about, default=str), encoding="utf-8")


def _whole_config(source: GgufSource, parts: Path) -> Any:
    """Return transformers' config of a GGUF file. Raises: UnsupportedModelError, InvalidArgumentError."""
    try:
        config = transformers.AutoConfig.from_pretrained(parts)
        config = type(config).from_dict({**config.to_dict(), **gguf_fields(source.index, config)})
    except KVReclaimError:
        raise
    except Exception as error:  # each model family raises its own type
        raise InvalidArgumentError(
            f"the header of {source.file.name} makes no {source.architecture} ({reason_of(error)}); download "
            "another file."
        ) from error
    try:
        refuse_rotation(source.file.name, source.index, config)
    except FetchError as error:
        raise UnsupportedModelError(str(error)) from error
    return config


def gguf_tokenizer(source: GgufSource, say: Any) -> Any:
    """Return the tokenizer of a GGUF file. Raises: InvalidArgumentError."""
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(gguf_parts(source))
    as_in_llama_cpp(tokenizer, source.index.fields, say)
    return tokenizer
