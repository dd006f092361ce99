"""The index of a GGUF file beside gguf's own reader."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_gguf
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from kvreclaim.model.gguf_index import GgufIndex


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
