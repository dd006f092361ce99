"""The worker's half of a pass: what is chosen, moved and reported, and in which order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from toy_caches import WRITERS, B, Book, D, K, L, make_layers

from kvreclaim.compression.compressor import Compressor, PassQuestion
from kvreclaim.compression.config import MAX_KEPT, CompressionConfig
from kvreclaim.integrations.vllm.scheduler.passes import StepMessage
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.worker.applier import Applier
from kvreclaim.integrations.vllm.worker.cells.positions import PassTrace, Positions
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.ops.facts import LayerFacts, ModelFacts, Softmax
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.schedule import EvictionMethod, Pass

SETTINGS = CompressionConfig(policy="knorm", budget=16, interval=8, sinks=2, recent=4)


class FakeRows:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.shifts: dict[str, int] = {}

    @property
    def num_shifted(self) -> int:
        return len(self.shifts)

    def rewrite(self, request_id: str, block_ids: Sequence[int], shift: int) -> None:
        self.calls.append((request_id, tuple(block_ids), shift))
        self.shifts[request_id] = shift

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.shifts.pop(request_id, None)


def make_facts(dtype: torch.dtype = torch.float32) -> ModelFacts:
    layer = LayerFacts(2 * K, K, D, D, Softmax(D**-0.5))
    return ModelFacts("toy", "", (layer,) * L, dtype, torch.device("cpu"), 4096)


def make_applier(views: CacheViews, settings: CompressionConfig = SETTINGS) -> tuple[Applier, FakeRows]:
    rows = FakeRows()
    return Applier(Options(settings), make_facts(), None, views, rows), rows


def chosen(book: Book, num_tokens: int, keep: int) -> Tensor:
    """Tokens that the policy keeps of a request that has never been compressed."""
    compressor = Compressor(SETTINGS, make_facts())
    return compressor.choose(lambda n: DenseSource(*book.tokens[n]), num_tokens, 0, num_tokens, keep=keep)


def output(*passes: Pass[str], **ids: Any) -> Any:
    step = SimpleNamespace(
        finished_req_ids=ids.get("finished", set()),
        preempted_req_ids=ids.get("preempted"),
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in ids.get("new", ())],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=ids.get("resumed", set())),
    )
    if passes:
        step.kvreclaim = StepMessage(passes, {done.seq_id: SETTINGS for done in passes})
    return step


def make_pass(
    name: str, source: tuple[int, ...], target: tuple[int, ...], tokens: int, **more: Any
) -> Pass[str]:
    values = {"keep": 16, "logical_len": tokens, "prompt_slots": 0, "first": True}
    return Pass(name, EvictionMethod.COMPACT, source, target, tokens, **{**values, **more})


@pytest.mark.parametrize("make", WRITERS)
def test_a_step_keeps_what_the_policy_chooses(make: str) -> None:
    """Two passes: the second request's survivors go into a block that the first has just given back."""
    layers = make_layers(make)
    views = CacheViews(layers, B)
    applier, rows = make_applier(views)
    books = Book.write(layers, (1, 2, 3), 24), Book.write(layers, (4, 5, 6, 7), 27)
    wanted = [chosen(books[0], 24, 16), chosen(books[1], 27, 19)]
    applier.begin(
        output(
            make_pass("a", (1, 2, 3), (1, 8), 24),
            make_pass("b", (4, 5, 6, 7), (3, 4, 5), 27, keep=19),
        )
    )
    for book, kept, target in zip(books, wanted, ((1, 8), (3, 4, 5)), strict=True):
        book.keep(kept)
        book.check(views, target)
    assert rows.calls == [("a", (1, 8), 8), ("b", (3, 4, 5), 8)]
    assert applier.figures.compactions == 2
    assert applier.figures.tokens_evicted == 16
    seconds = applier.take_seconds()
    assert seconds is not None
    assert applier.figures.seconds == seconds
    assert applier.take_seconds() is None


@pytest.mark.parametrize("first", [True, False])
def test_the_policy_gets_what_the_scheduler_knows(monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    applier, _ = make_applier(CacheViews(make_layers("plain"), B))
    seen: list[Any] = []

    class Recorder(Compressor):
        def choose_all(self, questions: Sequence[PassQuestion], **more: Any) -> list[Tensor]:
            seen.extend((q.num_tokens, q.num_prompt_slots, q.logical_len, q.first, q.keep) for q in questions)
            return super().choose_all(questions, **more)

    recorder = Recorder(SETTINGS, make_facts())
    monkeypatch.setattr(applier, "compressor", lambda settings: recorder)
    applier.begin(output(make_pass("a", (1, 2, 3), (1, 2), 24, prompt_slots=7, logical_len=56, first=first)))
    assert seen == [(24, 7, 56, first, 16)]


def test_requests_are_forgotten_before_passes() -> None:
    """Ended, preempted, resumed ones, and a new one of the same name as an old one."""
    applier, rows = make_applier(CacheViews(make_layers("plain"), B))
    for name in "abcde":
        rows.shifts[name] = 8
    applier.begin(
        output(
            make_pass("e", (1, 2, 3), (1, 2), 24),
            finished={"a"},
            preempted={"b"},
            new=["c"],
            resumed={"d", "x"},
        )
    )
    assert rows.shifts == {"e": 8}
    applier.begin(output(preempted=None, finished={"e"}))
    assert not rows.shifts


def test_a_trace_follows_positions_through_passes() -> None:
    layers = make_layers("plain")
    applier, _ = make_applier(CacheViews(layers, B))
    applier.trace = trace = PassTrace(Positions((L, K), torch.device("cpu")))
    Book.write(layers, (1, 2, 3), 24)
    applier.begin(output(make_pass("a", (1, 2, 3), (1, 2), 24)))
    first = trace.take()[0][2]
    assert first.shape == (L, K, 16)
    assert first.dtype == torch.int32
    Book.write(layers, (1, 2, 3), 22)  # six tokens more, and other keys: another choice
    more = make_pass("a", (1, 2, 3), (1, 2), 22, logical_len=30, first=False)
    applier.begin(output(replace(more, keep=16)))
    [(name, length, second)] = trace.take()
    assert (name, length) == ("a", 30)
    sinks, recent = {0, 1}, {26, 27, 28, 29}
    for layer in range(L):
        for head in range(K):
            before, after = set(first[layer, head].tolist()), second[layer, head].tolist()
            assert after == sorted(set(after))
            assert sinks | recent < set(after)
            assert set(after) <= before | set(range(24, 30))
    applier.begin(output(make_pass("late", (4, 5, 6), (4, 5), 24, first=False), finished={"a"}))
    assert not trace.take()
    assert not trace.positions.known


def test_a_nan_stops_no_request(caplog: pytest.LogCaptureFixture) -> None:
    layers = make_layers("plain")
    applier, rows = make_applier(CacheViews(layers, B))
    Book.write(layers, (1, 2, 3), 24)
    good = Book.write(layers, (4, 5, 6), 24)
    layers[1].cache[2, 0, 3, 5] = torch.nan
    kept = chosen(good, 24, 16)
    with caplog.at_level(logging.ERROR, logger="vllm.kvreclaim"):
        applier.begin(
            output(make_pass("bad", (1, 2, 3), (1, 2), 24), make_pass("good", (4, 5, 6), (4, 5), 24))
        )
        applier.take_seconds()
    good.keep(kept)
    good.check(applier.views, (4, 5))
    assert [record.args for record in caplog.records] == [("bad",)]
    assert [name for name, *_ in rows.calls] == ["bad", "good"]


def test_a_rehearsal_reads_what_a_pass_reads_and_moves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = make_layers("plain")
    views = CacheViews(layers, B)
    applier, rows = make_applier(views)
    before = [layer.cache.clone() for layer in layers]
    read: list[tuple[int, int, int]] = []

    def recording(layer: int, ids: Tensor, num_tokens: int, part: int) -> Tensor:
        read.append((layer, num_tokens, part))
        return CacheViews.read(views, layer, ids, num_tokens, part)

    monkeypatch.setattr(views, "read", recording)
    applier.rehearse()
    assert read == [(layer, SETTINGS.budget + SETTINGS.interval, 0) for layer in range(L)]
    assert all(torch.equal(layer.cache, cache) for layer, cache in zip(layers, before, strict=True))
    assert not rows.calls
    assert applier.take_seconds() is None


def test_settings_of_requests_have_their_own_compressors() -> None:
    applier, _ = make_applier(CacheViews(make_layers("plain"), B))
    own = [replace(SETTINGS, budget=17 + n) for n in range(MAX_KEPT)]
    found = [applier.compressor(settings) for settings in own]
    assert [one.budget for one in found] == [settings.budget for settings in own]
    assert applier.compressor(own[0]) is found[0]
    applier.compressor(replace(SETTINGS, budget=99))
    assert applier.compressor(own[0]) is found[0]
    assert applier.compressor(own[1]) is not found[1]
    assert applier.compressor.cache_info().currsize == MAX_KEPT


@pytest.mark.parametrize("policy", ["segments(knorm)", "ada_kv(knorm)"])
def test_a_rehearsal_of_policies_that_ask_for_positions_or_unequal_heads(policy: str) -> None:
    applier, rows = make_applier(CacheViews(make_layers("plain"), B), replace(SETTINGS, policy=policy))
    applier.rehearse()
    assert not rows.calls
