"""Replayed decode steps give the logits of ordinary ones, over buffers that are filled anew each step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from paged_batch import paged
from replaying import ReferenceDecode, Replayed, use_graphs
from settings import small
from torch import Tensor
from verifying import GREEDY, PROMPTS, drafting

from kvreclaim import LLM, SamplingParams
from kvreclaim.config import EngineConfig
from kvreclaim.engine.execute import graph_buffers
from kvreclaim.engine.execute.graph_buffers import SentCells, TableRows
from kvreclaim.engine.execute.graphs import (
    Capture,
    CudaCapture,
    DecodeGraphs,
    DecodeStep,
    GraphKind,
    padded_sizes,
)
from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.cell_tables import CellTable, grown_cells, head_lengths
from kvreclaim.ops.cells import natural_cells
from kvreclaim.ops.groups import LayerGroups, layer_groups
from kvreclaim.ops.kv_cache import KVCache

S = 4
MAX_LEN = 40
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def one_table(loaded: LoadedModel) -> LayerGroups:
    """All layers share a table, windows or not."""
    return layer_groups(loaded.facts, EngineConfig(disable_hybrid_kv_cache_manager=True))


def limits(max_num_seqs: int, capture: Capture) -> dict[str, Any]:
    return {"max_num_seqs": max_num_seqs, "max_model_len": MAX_LEN, "max_chunk": MAX_LEN, "capture": capture}


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
            one_table(self.loaded),
            **limits(max_num_seqs, capture),
        )

    @torch.inference_mode()
    def ordinary(self, step: DecodeStep) -> Tensor:
        tokens, positions = step.tokens, step.positions
        batch = AttentionBatch.build(slots(step), S, torch.device("cpu"))
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


def step(lengths: list[int], seed: int = 0, shift: int = 0) -> DecodeStep:
    """The last tokens of sequences of these lengths, in blocks of their own in random order."""
    rng = np.random.default_rng(seed)
    needed = [-(-n // S) for n in lengths]
    tables = np.split(rng.permutation(60), np.cumsum(needed))
    ids = [table.astype(np.int32) for table in tables[: len(lengths)]]
    rows = TableRows(ids, np.array(lengths), np.full(len(lengths), shift))
    tokens = rng.integers(0, tiny.VOCAB_SIZE, len(lengths)).tolist()
    return DecodeStep(tokens, np.asarray(lengths) + shift - 1, [rows])


def slots(step: DecodeStep) -> tuple[SequenceSlots, ...]:
    """The rows of a step, each as a sequence of one query."""
    rows = step.tables[0]
    columns = rows.block_ids, rows.lengths.tolist(), rows.shifts.tolist()
    return tuple(SequenceSlots(ids, 1, n, shift) for ids, n, shift in zip(*columns, strict=True))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_steps_of_changing_size_and_content(world, family: str) -> None:
    """Rows come and go, tables change; logits and both caches stay equal."""
    w, capture = world(family), Replayed()
    graphs = w.graphs(capture)
    steps = [[9, 1, 30], [40], [4, 5, 17, 8, 23], [5, 6, 18, 9, 24], [2, 3], [12, 4, 9]]
    for seed, lengths in enumerate(steps):
        now = step(lengths, seed, shift=seed)
        logits = graphs.forward(now)
        assert logits is not None
        torch.testing.assert_close(logits, w.ordinary(now), **CLOSE)
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


REFUSED = {
    "no sequence": DecodeStep([], np.zeros(0, dtype=np.int64), []),
    "more than 5 rows": step([1] * 6),
    "more than 10 blocks": step([44]),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_replayed_is_refused_with_its_reason(
    world, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    capture = Replayed()
    graphs = world().graphs(capture)
    with caplog.at_level(logging.INFO, logger="kvreclaim.engine.execute.graphs"):
        assert graphs.forward(REFUSED[reason]) is None
        assert graphs.forward(REFUSED[reason]) is None
    assert [reason in text for text in graphs.refusals] == [True]
    assert graphs.refusals.total() == 2
    assert [reason in record.message for record in caplog.records] == [True]
    assert capture.replays == 0
    assert graphs.forward(step([3])) is not None


def test_a_failed_capture_is_logged_once_and_other_sizes_are_tried(
    world, caplog: pytest.LogCaptureFixture
) -> None:
    capture = Replayed(fails=lambda rows: rows >= 4)
    graphs = world().graphs(capture)
    with caplog.at_level(logging.WARNING, logger="kvreclaim.engine.execute.graphs"):
        for lengths in ([3, 4, 5], [3, 4], [3, 4, 5], [1, 1, 1, 1, 1], [3]):
            assert (graphs.forward(step(lengths)) is None) == (len(lengths) > 2)
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


def answers(llm: LLM, policy: str | None, **more: Any) -> list[Any]:
    """Three requests, two of which are compressed, and long enough for several passes."""
    params = SamplingParams(temperature=0, max_tokens=30, logprobs=0, ignore_eos=True)
    compression = None if policy is None else small(policy, budget=32, interval=8)
    outputs = llm.generate(tiny.prompts((70, 9, 45), seed=3), params, [compression, None, compression])
    assert [out.error for out in outputs] == [None] * 3
    return [out.outputs[0] for out in outputs]


def assert_same(got: list[Any], want: list[Any], atol: float = 1e-4) -> None:
    assert [out.token_ids for out in got] == [out.token_ids for out in want]
    for ours, theirs in zip(got, want, strict=True):
        pairs = [
            (a[token].logprob, b[token].logprob)
            for token, a, b in zip(ours.token_ids, ours.logprobs, theirs.logprobs, strict=True)
        ]
        torch.testing.assert_close(*torch.tensor(pairs).unbind(1), atol=atol, rtol=0)


UNEQUAL = ("ada_kv(knorm)", "pyramidkv(knorm)")
EQUAL = (None, "knorm", "streaming_llm(positions=cache)", "paged_eviction")
FAMILIES = [name for name in tiny.FAMILIES if name not in (*tiny.WINDOWED, "llama")]
REPLAYED = [("llama", policy) for policy in (*EQUAL, *UNEQUAL)] + [(name, UNEQUAL[0]) for name in FAMILIES]


@pytest.mark.parametrize(("family", "policy"), REPLAYED)
def test_every_decode_step_of_an_engine_is_replayed(family: str, policy: str | None, make_llm) -> None:
    """Prompts in chunks beside decoding, several passes, requests that end one after the other."""
    given = {"enable_prefix_caching": False, "block_size": 8, "max_num_batched_tokens": 32}
    want = answers(make_llm(family, **given), policy)
    llm = make_llm(family, **given)
    graphs, capture = use_graphs(llm)
    assert_same(answers(llm, policy), want)
    assert not graphs.refusals
    assert capture.replays > 25
    assert any(kind.unequal for _, kind in graphs._replays) == (policy in UNEQUAL)


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "tova", "ada_kv(snapkv)"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("drafted", [False, True])
def test_steps_whose_policies_keep_queries_are_replayed(
    family: str, policy: str, drafted: bool, make_llm
) -> None:
    """Passes while decoding choose by queries and attention of every step: one that missed some would keep
    other tokens."""
    given = {"enable_prefix_caching": False, "block_size": 8, "max_num_batched_tokens": 128}
    want = answers(make_llm(family, **given), policy)
    drafts = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'} if drafted else {}
    llm = make_llm(family, **given, **drafts)
    if drafted:
        draft_answers(llm, want, tiny.prompts((70, 9, 45), seed=3))
    graphs, capture = use_graphs(llm, 3 if drafted else 0)
    assert_same(answers(llm, policy), want)
    assert not graphs.refusals
    assert any(kind.queries for _, kind in graphs._replays)
    assert capture.replays == llm.engine.totals.steps - 1, "all but the one with the prompts"


@pytest.mark.parametrize("policy", [None, "knorm", "ada_kv(knorm)"])
@pytest.mark.parametrize("family", tiny.GROUPED)
def test_layers_with_windows_have_tables_in_the_graph(family: str, policy: str | None, make_llm) -> None:
    given = {"enable_prefix_caching": False, "block_size": 8, "max_num_batched_tokens": 32}
    want = answers(make_llm(family, **given), policy)
    llm = make_llm(family, **given)
    graphs, capture = use_graphs(llm)
    assert len(graphs._buffers.tables) > 1
    assert_same(answers(llm, policy), want)
    assert not graphs.refusals
    assert capture.replays > 25


@pytest.mark.parametrize("kv_format", ["int8", "int4", "turboquant4"])
def test_unequal_heads_of_coded_caches_are_replayed(kv_format: str, make_llm) -> None:
    """qwen3's keys have scales by channel, which queries of a head's cells are multiplied by. Rows of a
    padded batch may be rounded in another way, and a key at a boundary then gets the next code."""
    given = {"block_size": 8, "kv_cache_dtype": kv_format, "enable_prefix_caching": False}
    want = answers(make_llm("qwen3", **given), "ada_kv(knorm)")
    llm = make_llm("qwen3", **given)
    graphs, _ = use_graphs(llm)
    assert_same(answers(llm, "ada_kv(knorm)"), want, atol=5e-3)
    assert not graphs.refusals


def test_unequal_heads_through_preemption(make_llm) -> None:
    """A pool that holds two of three requests: they are preempted, come back to other rows, and are computed
    again."""
    given = {"enable_prefix_caching": False, "block_size": 8, "max_num_batched_tokens": 32}
    want = answers(make_llm("llama", **given), "ada_kv(knorm)")
    llm = make_llm("llama", **given, num_blocks=13)
    graphs, _ = use_graphs(llm)
    assert_same(answers(llm, "ada_kv(knorm)"), want)
    assert sum(llm.engine.totals.preemptions.values()) > 0
    assert not graphs.refusals


def test_a_step_sends_its_numbers_and_the_tables_that_changed(make_llm, monkeypatch) -> None:
    """One copy for the numbers of all layers, one for the cells that have changed: in most steps none."""
    llm = make_llm("llama", enable_prefix_caching=False, block_size=8)
    graphs, _ = use_graphs(llm)
    sent: Counter[str] = Counter()
    for name in ("to_device", "fill"):
        send = getattr(graph_buffers, name)

        def counted(*args: Any, send=send, name=name) -> Any:
            sent[name] += 1
            return send(*args)

        monkeypatch.setattr(graph_buffers, name, counted)
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    llm.generate(tiny.prompts((64,), seed=3), params, small("ada_kv(knorm)", budget=32, interval=99))
    assert not graphs.refusals
    assert sent["fill"] == 16 + len(graphs._replays)
    assert sent["to_device"] == 2 * 2, "block table and cells, when the 1st and the 9th token take a block"


def test_cells_beyond_the_tables_are_refused(make_llm, monkeypatch) -> None:
    monkeypatch.setattr(graph_buffers, "LEAST_CELL_BYTES", 0)
    monkeypatch.setattr(graph_buffers, "CELL_SHARE", 1 << 20)
    llm = make_llm("llama", enable_prefix_caching=False, block_size=8)
    graphs, _ = use_graphs(llm)
    answers(llm, "ada_kv(knorm)")
    assert list(graphs.refusals) == ["a head has more than 1 blocks"]


def test_a_device_without_room_for_queries_runs_steps_without_graphs(make_llm, monkeypatch) -> None:
    want = answers(make_llm("llama", block_size=8), "h2o")
    llm = make_llm("llama", block_size=8)
    graphs, _ = use_graphs(llm)

    def full(self: DecodeGraphs) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(DecodeGraphs, "queries", property(full))
    assert_same(answers(llm, "h2o"), want)
    assert list(graphs.refusals) == ["its capture failed: OutOfMemoryError: no room"]


def test_graphs_of_a_kind_are_captured_when_the_first_such_request_comes(make_llm) -> None:
    llm = make_llm("llama", max_num_seqs=4)
    graphs, _ = use_graphs(llm)
    graphs.capture()
    params = SamplingParams(max_tokens=1)
    llm.engine.add_request("equal", [1, 2, 3], params, llm.compressor(small("knorm")))
    assert {kind for _, kind in graphs._replays} == {GraphKind()}
    llm.engine.add_request("unequal", [1, 2, 3], params, llm.compressor(small("ada_kv(knorm)", interval=16)))
    assert [size for size, kind in graphs._replays if kind.unequal] == [4, 2, 1]
    llm.engine.add_request("queries", [1, 2, 3], params, llm.compressor(small("h2o")))
    assert [size for size, kind in graphs._replays if kind == GraphKind(queries=True)] == [4, 2, 1]


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
    graphs = DecodeGraphs(loaded.model, ours, kernels, one_table(loaded), **limits(5, CudaCapture()))
    for seed, lengths in enumerate([[9, 1, 30], [40], [4, 5, 17, 8, 23], [12, 4]]):
        now = step(lengths, seed)
        batch = AttentionBatch.build(slots(now), S, torch.device("cuda"))
        with torch.inference_mode():
            want = loaded.model(
                input_ids=torch.tensor([now.tokens], device="cuda"),
                position_ids=torch.from_numpy(now.positions)[None].cuda(),
                use_cache=False,
                kv_batch=paged(kernels, plain, batch),
            ).logits[0]
        got = graphs.forward(now)
        assert got is not None
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert not graphs.refusals


def draft_answers(llm: LLM, want: list[Any], prompts: list[list[int]]) -> None:
    """Let an engine draft what it is going to answer, the last draft often wrong."""
    known = {tuple(prompt): out.token_ids for prompt, out in zip(prompts, want, strict=True)}

    def draft(requested: list[tuple[Any, int]]) -> None:
        for seq, most in requested:
            first = seq.num_generated
            seq.draft_ids = known[tuple(seq.token_ids[: seq.num_prompt])][first : first + most]
            if seq.draft_ids and first % 3:
                seq.draft_ids[-1] = seq.draft_ids[-1] % 100 + 2

    assert llm.engine.drafter is not None
    llm.engine.drafter.draft = draft


@pytest.mark.parametrize("policy", [None, "knorm", "ada_kv(knorm)"])
@pytest.mark.parametrize("family", ["llama", *tiny.GROUPED])
def test_steps_with_drafts_are_replayed(family: str, policy: str | None, make_llm) -> None:
    """Three drafts, fewer and none in one step, layers with windows, and passes: the answers are those of an
    engine without drafts and graphs."""
    given = {"enable_prefix_caching": False, "block_size": 8, "max_num_batched_tokens": 128}
    want = answers(make_llm(family, **given), policy)
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    llm = make_llm(family, **given, speculative_config=drafts)
    draft_answers(llm, want, tiny.prompts((70, 9, 45), seed=3))
    graphs, capture = use_graphs(llm, 3)
    assert_same(answers(llm, policy), want)
    found = llm.engine.totals.speculation
    assert 20 < found.num_accepted_tokens < found.num_draft_tokens
    assert not graphs.refusals
    assert capture.replays == llm.engine.totals.steps - 1, "all but the one with the prompts"
    assert any(size > 3 for size, _ in graphs._replays)


@pytest.mark.parametrize("policy", ["knorm", "ada_kv(knorm)", "snapkv"])
def test_verification_is_replayed(policy: str, make_llm) -> None:
    """Drafts of compressed caches: graphs for them are captured when the first such request comes. A policy
    that needs the queries of every step keeps steps from being replayed."""
    given = {"enable_prefix_caching": False, "block_size": 8, "num_blocks": 400, "max_num_seqs": 4}
    want = make_llm(**given).generate(PROMPTS, GREEDY, drafting(policy))
    llm = make_llm(**given)
    graphs, _ = use_graphs(llm)
    before = graphs.sizes
    got = llm.generate(PROMPTS, GREEDY, drafting(policy))
    assert_same([out.outputs[0] for out in got], [out.outputs[0] for out in want])
    assert (before[-1], graphs.sizes[-1]) == (4, 36)
    assert llm.engine.totals.steps < GREEDY.max_tokens, "drafts were accepted"
    assert not any(kind.queries for _, kind in graphs._replays)
    if policy == "snapkv":
        assert list(graphs.refusals) == ["a companion's policy keeps queries, attention or scores of tokens"]
    else:
        assert not graphs.refusals
        assert any(size > len(PROMPTS) for size, _ in graphs._replays)


def test_graphs_are_captured_anew_where_requests_bring_more_drafts(world) -> None:
    w, capture = world(), Replayed()
    graphs = w.graphs(capture, max_num_seqs=4)
    graphs.capture()
    graphs.capture(GraphKind(unequal=True))
    assert graphs.sizes == (1, 2, 4)
    graphs.expect_drafts(3)
    assert graphs.sizes == (1, 2, 4, 5, 10, 20)
    assert graphs._replays.keys() == {
        (size, GraphKind(unequal)) for size in graphs.sizes for unequal in (False, True)
    }
    tried = len(capture.tried)
    graphs.expect_drafts(4)
    assert len(capture.tried) == tried
    now = step([9] * 18)
    logits = graphs.forward(now)
    assert logits is not None
    torch.testing.assert_close(logits, w.ordinary(now), **CLOSE)


def test_positions_of_heads_are_refused(make_llm) -> None:
    """Layers with windows in the table of the others, whose heads hold tokens of unequal places."""
    given = {"enable_prefix_caching": False, "block_size": 8, "disable_hybrid_kv_cache_manager": True}
    want = answers(make_llm("gemma2", **given), "knorm")
    llm = make_llm("gemma2", **given)
    graphs, _ = use_graphs(llm)
    assert_same(answers(llm, "knorm"), want)
    assert list(graphs.refusals) == ["heads hold other positions"]


def test_cells_that_are_sent_bit_by_bit_are_those_of_whole_tables(world) -> None:
    """Rows get other sequences, sequences get blocks, passes give their heads other cells."""
    cache, rng = world().plain, np.random.default_rng(0)
    shape = cache.num_layers, cache.num_kv_heads
    sent = SentCells(3, 40, cache)

    def table(blocks: int) -> CellTable:
        counts = rng.integers(1, 2 * blocks, shape)
        cells = rng.integers(0, 99, (*shape, counts.max())).astype(np.int32)
        return CellTable(cells, counts, blocks, np.zeros_like(counts))

    def ids(count: int) -> np.ndarray:
        return rng.integers(0, 60, count).astype(np.int32)

    rows: list[tuple[CellTable | None, np.ndarray]] = [(None, ids(3)), (table(4), ids(4)), (None, ids(1))]
    for _ in range(60):
        place = int(rng.integers(3))
        own, blocks = rows[place]
        change = rng.integers(5)
        if change < 3:
            rows[place] = own, np.append(blocks, ids(int(change)))[:12]
        elif change == 3:
            rows[place] = table(len(blocks)), blocks.copy()
        else:
            rows.reverse()
        used = rows[: int(rng.integers(1, 4))]
        sent.send([own for own, _ in used], [blocks for _, blocks in used])
        for i, (own, blocks) in enumerate(used):
            whole = grown_cells(own, blocks, partial(natural_cells, cache))
            lengths = head_lengths(own, len(blocks) * S, cache)
            real = np.arange(whole.shape[-1]) < lengths[..., None] // S
            found = sent.device[:, i, :, : whole.shape[-1]].numpy()
            assert np.array_equal(found[real], whole[real])
            assert np.array_equal(sent.offsets[:, i].numpy() + len(blocks) * S, lengths)
