"""The index of a GGUF file beside gguf's own reader."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model import gguf_index
from kvreclaim.model.gguf_index import GgufIndex, read_index


@pytest.mark.parametrize("alignment", [32, 64])
def test_fields_and_tensors(tmp_path: Path, alignment: int) -> None:
    file, rng = tmp_path / "x.gguf", np.random.default_rng(3)
    writer = GGUFWriter(file, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_uint8("a.u8", 200)
    writer.add_int64("a.i64", -(2**40))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "ä\n")
    writer.add_array("a.words", ["", "b" * 300, "ü"])
    writer.add_array("a.numbers", [1.5, 2.5])
    writer.add_array("a.nested", [[1, 2], [3]])
    writer.add_tensor("plain", rng.standard_normal((3, 5), dtype=np.float32))
    writer.add_tensor("halfs", rng.standard_normal(7).astype(np.float16))
    packed = rng.integers(0, 256, (4, 2 * 144), dtype=np.uint8)
    writer.add_tensor("packed", packed, raw_dtype=GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    index, reader = GgufIndex(file), GGUFReader(file)
    assert index.fields["a.i64"] == -(2**40)
    assert [key for key in reader.fields if key.startswith("a.")][:5] == [
        k for k in index.fields if "a." in k
    ]
    for key, value in index.fields.items():
        assert value == reader.get_field(key).contents(), key
    assert list(index.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        own = index.tensors[tensor.name]
        assert own.kind == tensor.tensor_type.name
        assert list(own.shape) == tensor.shape.tolist()[::-1]
        assert (own.offset, own.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert index.rows(own).tobytes() == tensor.data.tobytes()
        index.forget(own)
        assert index.rows(own).tobytes() == tensor.data.tobytes()


def test_the_digest_is_of_the_header_alone(tmp_path: Path) -> None:
    for seed in (1, 2):
        tiny_gguf.write(tmp_path / f"{seed}.gguf")
    data = bytearray((tmp_path / "2.gguf").read_bytes())
    data[-1] ^= 1
    (tmp_path / "2.gguf").write_bytes(data)
    tiny_gguf.write(tmp_path / "3.gguf", pre="default")
    same, weights, words = (GgufIndex(tmp_path / f"{n}.gguf").digest for n in (1, 2, 3))
    assert same == weights != words


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "empty"), (3, "within its header"), (200, "within its header"), (-64, "within the tensor")],
)
def test_what_ends_too_early(tmp_path: Path, size: int, words: str) -> None:
    """So many bytes of the file, or all but so many."""
    file = tmp_path / "tiny.gguf"
    tiny_gguf.write(file)
    data = file.read_bytes()
    file.write_bytes(data[: size if size >= 0 else len(data) + size])
    with pytest.raises(ValueError, match=words):
        GgufIndex(file)


def test_what_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK" * 100)
    with pytest.raises(ValueError, match="begins with b'PKPK'"):
        GgufIndex(tmp_path / "x.gguf")


def packed(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def field(key: str | bytes, kind: int, body: bytes) -> bytes:
    return packed(key) + struct.pack("<I", kind) + body


def text(key: str, value: str | bytes) -> bytes:
    return field(key, 8, packed(value))


def u32(key: str, value: int) -> bytes:
    return field(key, 4, struct.pack("<I", value))


def array(kind: int, count: int, body: bytes = b"") -> bytes:
    return field("a", 9, struct.pack("<IQ", kind, count) + body)


def tensor(shape: Sequence[int] = (8,), kind: int = 0, offset: int = 0, name: str | bytes = "t") -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return packed(name) + dims + struct.pack("<IQ", kind, offset)


ARCHITECTURE, HUGE = text("general.architecture", "llama"), 2**63
DEEP = b"".join(struct.pack("<IQ", 9, 1) for _ in range(3000)) + struct.pack("<IQ", 4, 0)
REFUSED = {
    "a nest of arrays": ([field("a", 9, DEEP)], [], "arrays within arrays"),
    "an array of too many numbers": ([array(4, 2**62)], [], "items of an array"),
    "an array beyond the end": ([array(12, 2**20)], [], "within its header"),
    "an array of too many texts": ([array(8, HUGE)], [], "items of an array"),
    "a long text in an array": ([array(8, 1, struct.pack("<Q", HUGE))], [], "within its header"),
    "an array of what": ([array(99, 1)], [], "type 99"),
    "a long text": ([field("a", 8, struct.pack("<Q", 2**64 - 1))], [], "within its header"),
    "a value of what": ([field("a", 13, b"1234")], [], "type 13"),
    "a key in another code": ([field(b"\xff\xfe", 4, b"1234")], [], "a key is no UTF-8"),
    "a text in another code": ([text("a", b"\xff")], [], "the text of 'a' is no UTF-8"),
    "a field twice": ([u32("a", 1), u32("a", 1)], [], "two fields 'a'"),
    "an array and a number": ([array(4, 0), u32("a", 1)], [], "two fields 'a'"),
    "no alignment": ([u32("general.alignment", 0)], [], "'general.alignment' is 0"),
    "an odd alignment": ([u32("general.alignment", 33)], [], "power of two"),
    "an alignment of text": ([text("general.alignment", "x")], [], "power of two"),
    "an alignment without end": (
        [field("general.alignment", 6, struct.pack("<f", float("inf")))],
        [],
        "power of two",
    ),
    "an architecture of 5": ([u32("general.architecture", 5)], [], "must be text"),
    "layers of text": ([ARCHITECTURE, text("llama.block_count", "x")], [], "must be an integer"),
    "too many layers": ([ARCHITECTURE, u32("llama.block_count", 2**31)], [], "from 0 to 2147483647"),
    "a context that a terminal obeys": (
        [ARCHITECTURE, text("llama.context_length", "\x1b[31m")],
        [],
        r"'\x1b[31m'",
    ),
    "a base of no number": (
        [ARCHITECTURE, field("llama.rope.freq_base", 6, struct.pack("<f", float("nan")))],
        [],
        "a finite number",
    ),
    "an end of text": ([text("tokenizer.ggml.eos_token_id", "</s>")], [], "a token id"),
    "a template of 5": ([u32("tokenizer.chat_template", 5)], [], "must be text"),
    "a beginning of 5": ([u32("tokenizer.ggml.add_bos_token", 5)], [], "true or false"),
    "a template above its folder": ([text("tokenizer.chat_template.../x", "")], [], "under a name of"),
    "a tensor twice": ([], [tensor(), tensor()], "two tensors 't'"),
    "a tensor in another code": ([], [tensor(name=b"\xff")], "a tensor's name is no UTF-8"),
    "a tensor of what": ([], [tensor(kind=9999)], "type 9999"),
    "a tensor of five dimensions": ([], [tensor((1,) * 5)], "dimensions of 't'"),
    "a product that overflows": ([], [tensor((2**32, 2**32))], "within the tensor"),
    "a product that is negative": ([], [tensor((2**62, 3), offset=2**40)], "within the tensor"),
    "a tensor without numbers": ([], [tensor((2**62, 0))], "F32 holds no tensor"),
    "a part of a block": ([], [tensor((16,), kind=2)], "Q4_0 holds no tensor"),
    "a tensor behind the end": ([], [tensor(offset=2**63)], "within the tensor"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_header_may_not_say(name: str, tmp_path: Path) -> None:
    fields, tensors, words = REFUSED[name]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields))
    (tmp_path / "x.gguf").write_bytes(head + b"".join([*fields, *tensors]) + bytes(64))
    with pytest.raises(InvalidArgumentError) as refused:
        read_index(tmp_path / "x.gguf")
    assert words in str(refused.value)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("counts", [(0, HUGE), (HUGE, 0), (2**16, 2**16)])
def test_counts_beyond_the_file(counts: tuple[int, int], tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts))
    with pytest.raises(InvalidArgumentError, match="cannot be read as GGUF"):
        read_index(tmp_path / "x.gguf")


def test_a_header_has_an_end(tmp_path: Path, monkeypatch) -> None:
    """A file may say more before its weights than any vocabulary takes."""
    tiny_gguf.write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf_index, "MAX_HEADER", 5000)
    with pytest.raises(InvalidArgumentError, match="more than 5,000 bytes"):
        read_index(tmp_path / "tiny.gguf")
