"""Damaged GGUF headers: each is read, or refused by one sentence, by everything that reads one."""

from __future__ import annotations

import random
import resource
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny_gguf

from kvreclaim import LLM, SamplingParams
from kvreclaim.errors import FetchError, InvalidArgumentError, KVReclaimError
from kvreclaim.model.gguf import convert_gguf
from kvreclaim.model.gguf_index import read_index
from kvreclaim.model.loader import load_tokenizer
from kvreclaim.plan.configs import load_shape

NUMBERS = (0, 1, 2, 3, 7, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
FLOATS = (0.0, -1.0, 1e-30, 1e30, 3.0, float("nan"), float("inf"))
LONG = (0, 1, 5, 2**31, 2**63, 2**64 - 1)
MOST_BYTES = 8 << 30
"""What reading may add to the address space of the process: less than the numbers of a header name."""
FAMILIES = {
    "llama": {"pre": "llama-bpe", "scaling": "yarn", **tiny_gguf.YARN},
    "gemma3": {"family": "gemma3"},
    "phi3": {
        "family": "phi3",
        "scaling": "longrope",
        "is_sentencepiece": True,
        "ends": {"bos": 1, "eos": 2},
        **tiny_gguf.LONGROPE,
    },
}


@contextmanager
def bounded_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def place_of(data: bytes, key: str) -> int:
    """Where the type of a field stands, and its value behind it."""
    text = key.encode()
    return data.index(struct.pack("<Q", len(text)) + text) + 8 + len(text)


def changed(data: bytes, keys: list[str], rng: random.Random) -> bytes:
    """Flipped bits, numbers without sense, a field with another value, or a file that ends too early."""
    header, made = data.index(b"output_norm.weight"), bytearray(data)
    how = rng.choice(("bits", "long", "short", "end", "field", "field"))
    if how == "bits":
        for _ in range(rng.choice((1, 1, 2, 8))):
            made[rng.randrange(24, header)] ^= 1 << rng.randrange(8)
    elif how == "long":
        struct.pack_into("<Q", made, rng.randrange(4, header), rng.choice(LONG))
    elif how == "short":
        struct.pack_into("<I", made, rng.randrange(4, header), rng.choice(NUMBERS))
    elif how == "end":
        return bytes(made[: rng.randrange(header)])
    else:
        at = place_of(data, rng.choice(keys))
        kind = struct.unpack_from("<I", made, at)[0]
        if kind == 4:
            struct.pack_into("<I", made, at + 4, rng.choice(NUMBERS))
        elif kind == 6:
            struct.pack_into("<f", made, at + 4, rng.choice(FLOATS))
        elif size := struct.unpack_from("<Q", made, at + 4)[0]:
            made[at + 12 + rng.randrange(size)] = rng.choice(b"\x00\x1b\xff{%A")
    return bytes(made)


def run(file: Path) -> None:
    with LLM(file, num_blocks=16, cache_packed_weights=False) as llm:
        llm.generate(["the"], SamplingParams(max_tokens=1))


def convert(file: Path) -> None:
    convert_gguf(file, file.parent / f"made-{len(list(file.parent.iterdir()))}", lambda line: None)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.filterwarnings("ignore")  # numpy's and transformers', of numbers without sense
def test_a_damaged_header_is_read_or_refused(family: str, seed: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    file, rng = tmp_path / "tiny.gguf", random.Random(seed)
    tiny_gguf.write(file, **FAMILIES[family])
    data, keys = file.read_bytes(), sorted(read_index(file).fields)
    num_read, refused = 0, []
    for number in range(12):
        file.write_bytes(changed(data, keys, rng))
        for reads in (read_index, load_shape, load_tokenizer, run, convert):
            try:
                with bounded_memory():
                    reads(file)
                num_read += 1
            except KVReclaimError as error:
                refused.append((number, str(error)))
    assert [each for each in refused if not each[1].isprintable()] == []
    assert min(num_read, len(refused)) > 0, "the changes are of one kind"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.block_count", 2**30, "'llama.block_count' is 1,073,741,824"),
        ("llama.embedding_length", 2**20, "'llama.embedding_length' is"),
        ("llama.feed_forward_length", 2**30, "'llama.feed_forward_length' is"),
        ("llama.attention.head_count", 2**30, "'llama.attention.head_count' is"),
        ("llama.attention.head_count", 0, "'llama.attention.head_count' is 0"),
        ("llama.vocab_size", 2**30, "'llama.vocab_size' is"),
    ],
)
def test_sizes_are_those_of_the_tensors(key: str, value: int, words: str, tmp_path: Path) -> None:
    """Before transformers makes a list of layers, or a matrix."""
    file = tmp_path / "tiny.gguf"
    tiny_gguf.write(file)
    data = bytearray(file.read_bytes())
    struct.pack_into("<I", data, place_of(bytes(data), key) + 4, value)
    file.write_bytes(data)
    with bounded_memory():
        with pytest.raises(InvalidArgumentError, match=words):
            load_tokenizer(file)
        with pytest.raises(FetchError, match=words):
            convert(file)
