"""Replayed decode steps give the logits of ordinary ones, over buffers that are filled anew each step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import tiny
import torch
from paged_batch import paged
from torch import Tensor

from kvreclaim.engine.execute.graphs import CudaCapture, DecodeGraphs, padded_sizes
from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.kv_cache import KVCache, LayerCache

S = 4
MAX_LEN = 40
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Replayed:
    """Keeps the function and calls it again; counts. Refuses sizes for which `fails` is true."""

    def __init__(self, fails: Callable[[int], bool] = lambda rows: False) -> None:
        self.tried: list[int] = []
        self.captured: list[int] = []
        self.replays = 0
        self._fails = fails

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        rows = run().shape[0]
        self.tried.append(rows)
        if self._fails(rows):
            raise RuntimeError("cannot be captured\nmore detail")
        self.captured.append(rows)

        def replay() -> Tensor:
            self.replays += 1
            return run()

        return replay


class ReferenceDecode:
    """decode_attention by the reference: reads its tables' tensors at every call, as kernels do."""

    def write_kv(self, layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        real = slot_mapping >= 0
        reference.write_kv(layer, k[real], v[real], slot_mapping[real])

    def static_tables(
        self, block_table: Tensor, seq_lens: Tensor, shifts: Tensor, *, num_kv_heads: int, max_seq_len: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert block_table.shape[1] * S >= max_seq_len
        assert num_kv_heads == 2
        return block_table, seq_lens, shifts

    def decode_attention(self, q: Tensor, layer: LayerCache, tables: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        rows = zip(*(x.tolist() for x in tables), strict=True)
        slots = [SequenceSlots(np.asarray(ids), 1, n, shift) for ids, n, shift in rows if n]
        out = torch.zeros_like(q)
        if slots:
            batch = AttentionBatch.build(tuple(slots), S, q.device)
            out[: len(slots)] = reference.paged_attention(q[: len(slots)], layer, batch)
        return out


@dataclass(slots=True, eq=False)
class World:
    """A tiny model and two equal caches: one for ordinary steps, one for graphs."""

    loaded: LoadedModel
    plain: KVCache
    ours: KVCache

    def graphs(self, capture: Replayed, max_num_seqs: int = 5) -> DecodeGraphs:
        return DecodeGraphs(
            self.loaded.model,
            self.ours,
            ReferenceDecode(),
            max_num_seqs=max_num_seqs,
            max_model_len=MAX_LEN,
            capture=capture,
        )

    @torch.inference_mode()
    def ordinary(self, tokens: list[int], positions: np.ndarray, slots: tuple[SequenceSlots, ...]) -> Tensor:
        batch = AttentionBatch.build(slots, S, torch.device("cpu"))
        return self.loaded.model(
            input_ids=torch.tensor([tokens]),
            position_ids=torch.from_numpy(positions)[None],
            use_cache=False,
            kv_batch=paged(reference, self.plain, batch),
        ).logits[0]


@pytest.fixture
def world(tiny_dir) -> Callable[[str], World]:
    def make(family: str = "llama") -> World:
        loaded = load_model(tiny_dir(family), dtype="float32", device="cpu")
        like = torch.empty(0)
        plain = reference.allocate(loaded.facts.layers, 60, S, like=like)
        for x in (plain.k, plain.v):
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
        return World(loaded, plain, KVCache.plain(plain.k.clone(), plain.v.clone(), plain.softmaxes))

    return make


def step(lengths: list[int], seed: int = 0, shift: int = 0) -> tuple[list[int], np.ndarray, tuple]:
    """The last tokens of sequences of these lengths, in blocks of their own in random order."""
    rng = np.random.default_rng(seed)
    needed = [-(-n // S) for n in lengths]
    tables = np.split(rng.permutation(60), np.cumsum(needed))
    slots = tuple(
        SequenceSlots(table.astype(np.int32), 1, n, shift)
        for n, table in zip(lengths, tables[: len(lengths)], strict=True)
    )
    return rng.integers(0, tiny.VOCAB_SIZE, len(lengths)).tolist(), np.asarray(lengths) + shift - 1, slots


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_steps_of_changing_size_and_content(world, family: str) -> None:
    """Rows come and go, tables change; logits and both caches stay equal."""
    w, capture = world(family), Replayed()
    graphs = w.graphs(capture)
    steps = [[9, 1, 30], [40], [4, 5, 17, 8, 23], [5, 6, 18, 9, 24], [2, 3], [12, 4, 9]]
    for seed, lengths in enumerate(steps):
        now = step(lengths, seed, shift=seed)
        logits = graphs.forward(*now)
        assert logits is not None
        torch.testing.assert_close(logits, w.ordinary(*now), **CLOSE)
        for x, y in ((w.ours.k, w.plain.k), (w.ours.v, w.plain.v)):
            torch.testing.assert_close(x, y, **CLOSE)
    assert capture.captured == [4, 1, 5, 2]
    assert capture.replays == len(steps)
    assert not graphs.refusals


def test_capturing_at_the_start_writes_nothing_and_leaves_nothing_to_capture(world) -> None:
    w, capture = world(), Replayed()
    graphs = w.graphs(capture)
    graphs.capture()
    assert capture.captured == [5, 4, 2, 1]
    for x, y in ((w.ours.k, w.plain.k), (w.ours.v, w.plain.v)):
        assert torch.equal(x, y)


def altered(**changes) -> tuple:
    tokens, positions, slots = step([5, 9])
    return tokens, positions, (slots[0], replace(slots[1], **changes))


REFUSED = {
    "prefill rows": altered(query_len=2),
    "other positions": altered(slot_positions=torch.zeros(2, 2, 9, dtype=torch.int32)),
    "no sequence": ([], np.zeros(0, dtype=np.int64), ()),
    "more than 5 sequences": step([1] * 6),
    "more than 10 blocks": step([44]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_replayed_is_refused_with_its_reason(
    world, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    capture = Replayed()
    graphs = world().graphs(capture)
    with caplog.at_level(logging.INFO, logger="kvreclaim.engine.execute.graphs"):
        assert graphs.forward(*REFUSED[reason]) is None
        assert graphs.forward(*REFUSED[reason]) is None
    assert [reason in text for text in graphs.refusals] == [True]
    assert graphs.refusals.total() == 2
    assert [reason in record.message for record in caplog.records] == [True]
    assert capture.replays == 0
    assert graphs.forward(*step([3])) is not None


def test_a_failed_capture_is_logged_once_and_other_sizes_are_tried(
    world, caplog: pytest.LogCaptureFixture
) -> None:
    capture = Replayed(fails=lambda rows: rows >= 4)
    graphs = world().graphs(capture)
    with caplog.at_level(logging.WARNING, logger="kvreclaim.engine.execute.graphs"):
        for lengths in ([3, 4, 5], [3, 4], [3, 4, 5], [1, 1, 1, 1, 1], [3]):
            assert (graphs.forward(*step(lengths)) is None) == (len(lengths) > 2)
    assert [record.message for record in caplog.records] == [
        "decode graphs: a step runs without a graph, because its capture failed: "
        "RuntimeError: cannot be captured"
    ]
    assert capture.captured == [2, 1]
    assert capture.tried == [4, 2, 5, 1]
    assert graphs.refusals.total() == 3


@pytest.mark.parametrize("most", [1, 2, 3, 8, 15, 16, 17, 32, 33, 64, 100])
def test_padded_sizes(most: int) -> None:
    sizes = padded_sizes(most)
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert list(sizes) == sorted(set(sizes))
    for rows in range(1, most + 1):
        size = next(size for size in sizes if size >= rows)
        assert size < 2 * rows
        assert size - rows < 16


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs_equal_ordinary_steps(tiny_dir) -> None:
    from kvreclaim.ops import triton as kernels

    if kernels.describe() == "triton (interpreter)":
        pytest.skip("needs TRITON_INTERPRET=0")
    loaded = load_model(tiny_dir("llama"), dtype="float32", device="cuda")
    like = torch.empty(0, device="cuda")
    plain = kernels.allocate(loaded.facts.layers, 60, S, like=like)
    plain.k.normal_()
    plain.v.normal_()
    ours = KVCache.plain(plain.k.clone(), plain.v.clone(), plain.softmaxes)
    graphs = DecodeGraphs(
        loaded.model, ours, kernels, max_num_seqs=5, max_model_len=MAX_LEN, capture=CudaCapture()
    )
    for seed, lengths in enumerate([[9, 1, 30], [40], [4, 5, 17, 8, 23], [12, 4]]):
        tokens, positions, slots = step(lengths, seed)
        batch = AttentionBatch.build(slots, S, torch.device("cuda"))
        with torch.inference_mode():
            want = loaded.model(
                input_ids=torch.tensor([tokens], device="cuda"),
                position_ids=torch.from_numpy(positions)[None].cuda(),
                use_cache=False,
                kv_batch=paged(kernels, plain, batch),
            ).logits[0]
        got = graphs.forward(tokens, positions, slots)
        assert got is not None
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert not graphs.refusals
