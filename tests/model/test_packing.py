"""Weights that several threads pack are those that one packs, and nothing is left of a start that fails."""

from __future__ import annotations

import _thread
import io
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import tiny_gguf
import torch
from gguf import GGMLQuantizationType as Form
from torch import Tensor
from tqdm import tqdm

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model import loader
from kvreclaim.model.loader import load_model
from kvreclaim.model.quantized import build, gguf_file, source
from kvreclaim.model.quantized.copy_file import copy_path
from kvreclaim.ops import extension
from kvreclaim.ops.packed import PackedMatrix
from kvreclaim.weights.ggml import FORMATS, ggml_rows
from kvreclaim.weights.packed import PackedRows

pytestmark = pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason="the native extension is not there"
)
THREADS = 3
FAILS_AT = 9


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A GGUF file with matrices of many pieces."""
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(source, "CODES_AT_ONCE", 2048)
    tiny_gguf.write(tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    assert torch.get_num_threads() == THREADS
    torch.set_num_threads(before)


def packs(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], object]) -> None:
    """before(i) is called ahead of the piece i that a thread packs."""
    count, lock = iter(range(1 << 30)), threading.Lock()

    def rows(kind: str, data: Tensor) -> PackedRows:
        if threading.current_thread() is not threading.main_thread():
            with lock:
                i = next(count)
            before(i)
        return ggml_rows(kind, data)

    monkeypatch.setattr(gguf_file, "ggml_rows", rows)


def check_nothing_is_left(file: Path) -> None:
    names = [each.name for each in threading.enumerate() if each.name.startswith("kvreclaim-")]
    assert names == []
    assert not copy_path(file).parent.exists() or list(copy_path(file).parent.iterdir()) == []


def test_copies_of_one_and_more_threads_are_the_same_bytes(file: Path, monkeypatch, threads: None) -> None:
    copies, together = [], threading.Barrier(THREADS, timeout=60)
    for count in (1, THREADS):
        torch.set_num_threads(count)
        if count > 1:  # so many pieces have to be in work at once
            packs(monkeypatch, lambda i: together.wait() if i < THREADS else None)
        load_model(file, cache_packed_weights=True)
        copies.append(copy_path(file).read_bytes())
        copy_path(file).unlink()
    assert copies[0] == copies[1]
    check_nothing_is_left(file)


@pytest.mark.parametrize("form", FORMATS)
def test_pieces_may_come_in_any_order(form: str) -> None:
    size = 512 // FORMATS[form].columns * FORMATS[form].num_bytes
    data = torch.randint(0, 120, (88, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    whole = PackedMatrix([ggml_rows(form, data)], 88)
    backwards = PackedMatrix.read(
        lambda first, last: ggml_rows(form, data[first:last]),
        88,
        32,
        lambda put, firsts: map(put, reversed(list(firsts))),
    )
    assert backwards.parts.keys() == whole.parts.keys()
    for name, part in whole.parts.items():
        assert torch.equal(backwards.parts[name].view(torch.uint8), part.view(torch.uint8)), name


def test_a_piece_that_fails_ends_the_start(file: Path, monkeypatch, threads: None) -> None:
    def fail(i: int) -> None:
        if i == FAILS_AT:
            raise MemoryError("no room for a piece")

    packs(monkeypatch, fail)
    with pytest.raises(MemoryError, match="no room for a piece"):
        load_model(file, cache_packed_weights=True)
    check_nothing_is_left(file)


def test_an_interrupt_ends_the_start(file: Path, monkeypatch, threads: None) -> None:
    packs(monkeypatch, lambda i: _thread.interrupt_main() if i == FAILS_AT else None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load_model(file, cache_packed_weights=True)
    finally:
        signal.signal(signal.SIGINT, before)
    check_nothing_is_left(file)


def test_a_tokenizer_that_fails_leaves_nothing(file: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise InvalidArgumentError("no tokenizer")

    monkeypatch.setattr(loader, "gguf_tokenizer", fail)
    with pytest.raises(InvalidArgumentError, match="no tokenizer"):
        load_model(file, cache_packed_weights=True)
    check_nothing_is_left(file)


def shown(file: Path, monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, after_s: float) -> str:
    """What a start writes to stderr, if every step were long enough to be shown."""
    monkeypatch.setattr(build, "SHOWN_AFTER_S", after_s)
    monkeypatch.setattr(build, "tqdm", partial(tqdm, mininterval=0, miniters=1))
    monkeypatch.setattr(sys, "stderr", stderr)
    load_model(file)
    return stderr.getvalue()


def test_a_terminal_shows_how_much_is_packed(file: Path, monkeypatch) -> None:
    text = shown(file, monkeypatch, Terminal(), after_s=0)
    shares = [int(share) for share in re.findall(r"Packing weights +(\d+) %", text)]
    assert len(shares) > 5
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 100)
    assert text.rsplit("\r", 2)[1].strip() == ""  # the line is empty afterwards


def test_a_short_start_and_a_pipe_show_nothing(file: Path, monkeypatch) -> None:
    assert shown(file, monkeypatch, Terminal(), after_s=1e6) == ""
    assert shown(file, monkeypatch, io.StringIO(), after_s=0) == ""


def test_rows_that_change_places_do_so_over_pieces(tmp_path: Path, monkeypatch, threads: None) -> None:
    """The rows of queries and keys of llama files change places."""
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(source, "CODES_AT_ONCE", 1024)
    want = tiny_gguf.write(tmp_path / "tiny.gguf", form=Form.Q8_0)
    found = load_model(tmp_path / "tiny.gguf").model
    for layer, source_layer in zip(found.model.layers, want.model.layers, strict=True):
        matrix = layer.self_attn.q_proj.matrix
        rows = torch.arange(matrix.out_features)
        numbers = layer.self_attn.q_proj.products.ops.unpack_rows(matrix, rows, torch.float32)
        assert torch.equal(numbers.bfloat16(), source_layer.self_attn.q_proj.weight.bfloat16())
