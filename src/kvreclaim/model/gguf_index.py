"""The header of a GGUF file (llama.cpp's format, versions 2 and 3), read without its arrays.

gguf's own GGUFReader makes objects of every word of a vocabulary: 155 MB and 2 s for 49,152 words, more
than the packed weights of such a model themselves.

A file may come from anywhere. Every count, length and offset is compared with the bytes that are there before
anything is read or allocated by it.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvreclaim.checks import is_int, require
from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError

if TYPE_CHECKING:
    import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters of the value types; 8 is a string, 9 an array."""
BYTES = {kind: struct.calcsize(f"<{letter}") for kind, letter in SCALARS.items()}
STRING, ARRAY = 8, 9
ALIGNMENT = 32
"""Default alignment of tensors."""
MAX_HEADER = 1 << 27
"""Bytes before the tensors' data; vocabularies of 260,000 tokens take 20 MB."""
MAX_FIELDS, MAX_TENSORS = 1 << 16, 1 << 17
MAX_ITEMS = 1 << 22
"""Items of an array."""
MAX_DEPTH = 4
"""Arrays within arrays."""
MAX_NAME, MAX_TEXT, MAX_WORD = (1 << 16) - 1, 1 << 24, 1 << 16
"""Bytes of a key or tensor name, of a string, and of a string in an array."""
MAX_DIMS = 4
EMBEDDING = "token_embd.weight"
MAX_NUMBER = (1 << 31) - 1
SHOWN = 60
"""Characters of the file's text that an error quotes."""
TEXTS = frozenset({"general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre", "rope.scaling.type"})
SIZES = frozenset(
    {
        *("embedding_length", "feed_forward_length", "vocab_size", "block_count", "rope.dimension_count"),
        *(f"attention.{key}" for key in ("head_count", "head_count_kv", "key_length", "value_length")),
    }
)
COUNTS = SIZES | {
    *("context_length", "attention.sliding_window", "rope.scaling.original_context_length"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
}
NUMBERS = frozenset(
    {
        *("rope.freq_base", "rope.freq_base_swa", "rope.scale_linear", "attention.layer_norm_rms_epsilon"),
        *("attn_logit_softcapping", "final_logit_softcapping", "rope.scaling.factor"),
        *("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
)
"""Fields of an architecture that are integers (COUNTS) or numbers: finite, not negative."""
TEMPLATE_NAME = re.compile(r"tokenizer\.chat_template\.[\w-]{1,64}", re.ASCII)
BETAS = ("beta_fast", "beta_slow")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: slowest dimension first; kind: ggml's name of the type; offset: in the file"""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


def has_gguf() -> bool:
    """Return whether the package that knows ggml's types is installed."""
    return find_spec("gguf") is not None


def read_index(file: Path) -> GgufIndex:
    """Read the header of a GGUF file. Raises: InvalidArgumentError if it cannot be read."""
    require(
        has_gguf(),
        "reading GGUF files needs gguf, which this environment lacks; run pip install 'kvreclaim[gguf]'.",
        "model",
    )
    require(file.is_file(), f"{str(file)!r} is no file; pass the path of a .gguf file.", "model")
    try:
        return GgufIndex(file)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"{str(file)!r} cannot be read as GGUF ({error}); download it again.", field="model"
        ) from error


class GgufIndex:
    """The fields and tensors of a file.

    fields:  by key; strings and numbers
    lengths: of arrays, by key
    tensors: by name
    digest:  sha256 of the header: config, tokenizer, names and types

    Raises: OSError; ValueError for what is no such file, ends too early, or is larger than any model needs.
    """

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            self._mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._at, self._end = 0, min(len(self._mapped), MAX_HEADER)
        self._read()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture. Raises: ValueError without one."""
        return str(self.value("general.architecture"))

    def value(self, key: str) -> Any:
        """Return a field. Raises: ValueError if the file lacks it."""
        if key not in self.fields:
            raise ValueError(f"the file does not say {quoted(key)}")
        return self.fields[key]

    @property
    def weights(self) -> list[GgufTensor]:
        """All tensors but those that scale rotary positions."""
        return [tensor for name, tensor in self.tensors.items() if not name.startswith("rope_")]

    @property
    def num_weights(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.weights)

    def num_layers(self) -> int:
        """Return the number of layers. Sizes that memory is allocated by are compared with the tensors.

        Raises: ValueError where one is missing, or larger than any tensor.
        """
        embedding = self.tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError(f"it has no matrix {EMBEDDING}")
        rows, columns = embedding.shape
        words = self.lengths.get("tokenizer.ggml.tokens", 0)
        if words > rows:
            raise ValueError(f"it has {words:,} tokens and {rows:,} rows of {EMBEDDING}")
        largest = max(size for tensor in self.tensors.values() for size in tensor.shape)
        limits = dict.fromkeys(SIZES, largest)
        limits |= {"embedding_length": columns, "block_count": len(self.tensors)}
        for key, most in limits.items():
            name = f"{self.architecture}.{key}"
            size = self.fields.get(name, 1)
            if not 1 <= size <= most:
                raise ValueError(
                    f"{quoted(name)} is {size:,}; with these tensors it must be from 1 to {most:,}"
                )
        return int(self.value(f"{self.architecture}.block_count"))

    def _read(self) -> None:
        magic, version, num_tensors, num_fields = self._take("4sIQQ")
        if magic != MAGIC or version not in VERSIONS:
            raise ValueError(f"it begins with {magic!r} and version {version}, not GGUF and 2 or 3")
        _check_count("fields", num_fields, MAX_FIELDS)
        _check_count("tensors", num_tensors, MAX_TENSORS)
        self.fields: dict[str, Any] = {}
        self.lengths: dict[str, int] = {}
        for _ in range(num_fields):
            key, kind = self._string("a key", MAX_NAME), self._take("I")[0]
            if key in self.fields or key in self.lengths:
                raise ValueError(f"it has two fields {quoted(key)}")
            if kind == ARRAY:
                self.lengths[key] = self._pass_array()
            else:
                self.fields[key] = self._value(kind, key)
        infos = [self._info() for _ in range(num_tensors)]
        self.digest = hashlib.sha256(memoryview(self._mapped)[: self._at]).hexdigest()
        check_fields(self.fields)
        alignment = self.fields.get("general.alignment", ALIGNMENT)
        self.tensors: dict[str, GgufTensor] = {}
        for tensor in self._placed(infos, -(-self._at // alignment) * alignment):
            if tensor.name in self.tensors:
                raise ValueError(f"it has two tensors {quoted(tensor.name)}")
            self.tensors[tensor.name] = tensor

    def _take(self, form: str) -> tuple[Any, ...]:
        start = self._at
        self._pass(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._mapped, start)

    def _pass(self, num_bytes: int) -> None:
        if num_bytes > self._end - self._at:
            is_long = self._end == MAX_HEADER
            raise ValueError(
                f"its header has more than {MAX_HEADER:,} bytes"
                if is_long
                else "the file ends within its header"
            )
        self._at += num_bytes

    def _string(self, what: str, longest: int) -> str:
        (size,) = self._take("Q")
        start = self._at
        self._pass(size)
        if size > longest:
            raise ValueError(f"{what} has {size:,} bytes; at most {longest:,} are read")
        try:
            return str(self._mapped[start : self._at], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is no UTF-8 ({error.reason} at byte {error.start})") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string(f"the text of {quoted(key)}", MAX_TEXT)
        if kind not in SCALARS:
            raise ValueError(f"{quoted(key)} has the type {kind}, which GGUF does not know")
        return self._take(SCALARS[kind])[0]

    def _pass_array(self, depth: int = 1) -> int:
        """Returns: how many items it has."""
        kind, count = self._take("IQ")
        _check_count("items of an array", count, MAX_ITEMS)
        if depth > MAX_DEPTH:
            raise ValueError(f"it has arrays within arrays, more than {MAX_DEPTH} deep")
        if kind in BYTES:
            self._pass(BYTES[kind] * count)
        elif kind == STRING:
            self._pass_strings(count)
        elif kind == ARRAY:
            for _ in range(count):
                self._pass_array(depth + 1)
        else:
            raise ValueError(f"an array has items of the type {kind}, which GGUF does not know")
        return int(count)

    def _pass_strings(self, count: int) -> None:
        """A vocabulary has hundreds of thousands."""
        mapped, at, last, size_at = self._mapped, self._at, self._end - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            size = size_at(mapped, at)[0] if at <= last else MAX_HEADER
            if size > MAX_WORD:
                self._pass(size)
                raise ValueError(f"an array has a string of {size:,} bytes; at most {MAX_WORD:,} are read")
            at += 8 + size
        self._pass(at - self._at)

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, (dims,) = self._string("a tensor's name", MAX_NAME), self._take("I")
        _check_count(f"dimensions of {quoted(name)}", dims, MAX_DIMS)
        shape = tuple(reversed(self._take(f"{dims}Q")))
        return (name, shape, *self._take("IQ"))

    def _placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int) -> Iterator[GgufTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        names = {kind.value: kind for kind in GGMLQuantizationType}
        for name, shape, kind, offset in infos:
            if kind not in names:
                raise ValueError(f"the tensor {quoted(name)} is of ggml's type {kind}, which is not known")
            columns, num_bytes = GGML_QUANT_SIZES[names[kind]]
            size, rest = divmod(math.prod(shape), columns)
            if size == 0 or rest or (shape and shape[-1] % columns):
                raise ValueError(
                    f"{names[kind].name} holds no tensor {quoted(name)} of the shape {list(shape)}"
                )
            if start + offset + size * num_bytes > len(self._mapped):
                raise ValueError(f"it ends within the tensor {quoted(name)}")
            yield GgufTensor(name, shape, names[kind].name, start + offset, size * num_bytes)

    def rows(self, tensor: GgufTensor) -> np.ndarray:
        """Return its bytes, uint8 [slowest dimension, bytes of a row]: pages of the file until forgotten."""
        import numpy as np

        found = np.frombuffer(self._mapped, np.uint8, tensor.num_bytes, tensor.offset)
        return found.reshape(tensor.shape[0] if tensor.shape else 1, -1)

    def forget(self, tensor: GgufTensor) -> None:
        """Release the tensor's pages, which count as this process's memory while they are mapped."""
        first = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapped.madvise(mmap.MADV_DONTNEED, first, tensor.offset + tensor.num_bytes - first)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"it has {count:,} {what}; at most {most:,} are read")


def quoted(text: str) -> str:
    """Quote text of a file for an error: its beginning, on one line, without control characters."""
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises: ValueError for a field that is of another type than its readers need."""
    own = f"{fields.get('general.architecture')}."
    for key, value in fields.items():
        needed = _needed(key.replace(own, "", 1) if key.startswith(own) else key, value, key.startswith(own))
        if needed is not None:
            shown = quoted(value) if isinstance(value, str) else value
            raise ValueError(f"{quoted(key)} is {shown}; it must be {needed}")


def _needed(key: str, value: object, is_own: bool) -> str | None:
    """Return what a field has to be if its value is something else. is_own: a field of the architecture"""
    if is_own and isinstance(value, float) and key not in COUNTS:
        fits = math.isfinite(value) and (value >= 0 or key not in NUMBERS)
        return None if fits else "a finite number"
    if is_own and is_int(value):
        return None if 0 <= int(value) <= MAX_NUMBER else f"from 0 to {MAX_NUMBER}"  # type: ignore[call-overload]
    if is_own and (key in COUNTS or key in NUMBERS):
        return "an integer" if key in COUNTS else "a number"
    if key.startswith("tokenizer.chat_template.") and not TEMPLATE_NAME.fullmatch(key):
        return "under a name of letters, digits, _ and -"  # files are named so
    if key in TEXTS or key.startswith("tokenizer.chat_template"):
        return None if isinstance(value, str) else "text"
    if key.startswith("tokenizer.ggml.add_"):
        return None if isinstance(value, bool) else "true or false"
    number = value if isinstance(value, int) and is_int(value) else -1
    if key == "general.alignment":
        return None if 0 < number <= MAX_NUMBER and number & number - 1 == 0 else "a power of two"
    if key.startswith("tokenizer.ggml.") and key.endswith("_token_id"):
        return None if 0 <= number <= MAX_NUMBER else "a token id"
    return None


def rope_scaling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling as entries of transformers' rope_parameters; empty where positions are not scaled.

    As in llama.cpp a factor without a type is linear, and a factor of 0 or 1 is none.

    Raises: UnsupportedModelError for a scaling that transformers does not have.
    """
    own = f"{fields.get('general.architecture')}."
    scaling = {
        key.removeprefix(f"{own}rope.scaling."): value for key, value in fields.items() if key.startswith(own)
    }
    kind = scaling.get("type", "linear")
    factor = float(scaling.get("factor", scaling.get(f"{own}rope.scale_linear", 0.0)))
    original = scaling.get("original_context_length", scaling.get(f"{own}context_length"))
    if kind == "longrope":
        return {"rope_type": kind, "original_max_position_embeddings": original}
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    unread = [key for key in ("yarn_ext_factor", "yarn_attn_factor") if scaling.get(key, 1.0) != 1.0]
    unread += ["yarn_log_multiplier"] if scaling.get("yarn_log_multiplier") else []
    if kind != "yarn" or unread:
        raise UnsupportedModelError(
            f"the file scales rotary positions by {' '.join([quoted(kind), *unread])}, which is not read "
            "from GGUF; pass the model's hub id, or another file."
        )
    found = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    found |= {beta: float(scaling[f"yarn_{beta}"]) for beta in BETAS if f"yarn_{beta}" in scaling}
    if scaling.get("attn_factor", 1.0) != 1.0:
        found["attention_factor"] = scaling["attn_factor"] * (0.1 * math.log(factor) + 1.0)
    return found
