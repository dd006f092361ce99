"""The worker's half of a pass, over caches of several makes: against copies kept in plain lists."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvreclaim.compression import Compressor
from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.applier import MAX_COMPRESSORS, Applier
from kvreclaim.integrations.vllm.layouts import CacheViews, LayerCache, PackedLayout, StridedLayout
from kvreclaim.integrations.vllm.options import Options
from kvreclaim.integrations.vllm.passes import Pass, StepMessage
from kvreclaim.integrations.vllm.settings import Settings
from kvreclaim.integrations.vllm.tracing import Trace
from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.key_source import DenseSource

L, B, K, S, D = 2, 9, 2, 8, 16
SETTINGS = Settings(policy="knorm", budget=16, interval=8, sinks=2, recent=4)


def plain_writer(cache: Tensor) -> Any:
    """Keys in [..., :D], values in [..., D:]."""

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            cache[slot // S, :, slot % S, :D] = keys[row]
            cache[slot // S, :, slot % S, D:] = values[row]

    return write


def paired_writer(cache: Tensor) -> Any:
    """Keys in pairs of dims, as processors with tiles want them; values in pairs of slots, and first."""
    raw = cache.view(B, K, 2 * S * D)

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            block, place = divmod(slot, S)
            for dim in range(D):
                raw[block, :, S * D + (dim // 2) * 2 * S + place * 2 + dim % 2] = keys[row, :, dim]
                raw[block, :, (place // 2) * 2 * D + dim * 2 + place % 2] = values[row, :, dim]

    return write


def transposed_writer(cache: Tensor) -> Any:
    """Keys as [D, S], then values as [S, D]."""
    raw = cache.view(B, K, 2 * S * D)

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            block, place = divmod(slot, S)
            raw[block, :, place : S * D : S] = keys[row]
            raw[block, :, S * D + place * D : S * D + (place + 1) * D] = values[row]

    return write


WRITERS = {"plain": plain_writer, "paired": paired_writer, "transposed": transposed_writer}


def make_layers(make: str, dtype: torch.dtype = torch.float32) -> list[LayerCache]:
    layers = []
    for n in range(L):
        cache = torch.randn(B, K, S, 2 * D).to(dtype)
        write = WRITERS[make](cache)
        layers.append(LayerCache(f"layer {n}", cache, D, dtype, dtype, 1.0, 1.0, write, make != "plain"))
    return layers


@dataclass
class Book:
    """What a request's tokens ought to be: keys and values by layer, [K, T, D], and each slot's position."""

    tokens: list[tuple[Tensor, Tensor]]
    positions: list[list[list[int]]] = field(default_factory=list)

    @classmethod
    def write(cls, layers: list[LayerCache], blocks: Sequence[int], num_tokens: int) -> Book:
        """Fill the first num_tokens slots of these blocks with random tokens."""
        slots = torch.tensor([block * S + place for block in blocks for place in range(S)])[:num_tokens]
        book = cls([])
        for layer in layers:
            keys, values = (torch.randn(num_tokens, K, D).to(layer.compute) for _ in range(2))
            layer.write(keys, values, slots)
            book.tokens.append((keys.transpose(0, 1).clone(), values.transpose(0, 1).clone()))
        return book

    def keep(self, kept: Tensor) -> None:
        """kept: [L | 1, K | 1, M]."""
        rows = kept.expand(L, K, -1)
        self.tokens = [
            tuple(torch.stack([x[head, rows[n, head]] for head in range(K)]) for x in pair)  # type: ignore[misc]
            for n, pair in enumerate(self.tokens)
        ]

    def check(self, views: CacheViews, blocks: Sequence[int]) -> None:
        for n, pair in enumerate(self.tokens):
            for part, want in enumerate(pair):
                assert torch.equal(views.read(n, views.block_ids(blocks), want.shape[1], part), want)


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
    layer = LayerFacts(2 * K, K, D, D, D**-0.5)
    return ModelFacts("toy", "", (layer,) * L, dtype, torch.device("cpu"), 4096)


def make_applier(views: CacheViews, settings: Settings = SETTINGS) -> tuple[Applier, FakeRows]:
    rows = FakeRows()
    return Applier(Options(settings), make_facts(), None, views, rows), rows


def output(*passes: Pass, **ids: Any) -> Any:
    step = SimpleNamespace(
        finished_req_ids=ids.get("finished", set()),
        preempted_req_ids=ids.get("preempted"),
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in ids.get("new", ())],
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=ids.get("resumed", set())),
    )
    if passes:
        step.kvreclaim = StepMessage(passes)
    return step


def make_pass(name: str, source: tuple[int, ...], target: tuple[int, ...], tokens: int, **more: Any) -> Pass:
    values = {"keep": 16, "logical_len": tokens, "prompt_slots": 0, "first": True, "shift": 8}
    return Pass(name, SETTINGS, source, target, tokens, **{**values, **more})


@pytest.mark.parametrize("make", WRITERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_order_is_found_and_proved(make: str, dtype: torch.dtype) -> None:
    layers = make_layers(make, dtype)
    before = [layer.cache.clone() for layer in layers]
    views = CacheViews(layers, B)
    views.prove()
    for layer, cache in zip(layers, before, strict=True):
        assert torch.equal(layer.cache, cache)
    kind = PackedLayout if make == "paired" else StridedLayout
    assert all(isinstance(layout, kind) for layout in views.layouts)
    Book.write(layers, (5, 2, 7), 19).check(views, (5, 2, 7))


@pytest.mark.parametrize("make", WRITERS)
@pytest.mark.parametrize("target", [(5, 2), (2, 5), (7, 4), (3, 8)], ids=str)
def test_survivors_move_and_nothing_else(make: str, target: tuple[int, ...]) -> None:
    """Also where targets are sources, in any order."""
    layers = make_layers(make)
    views = CacheViews(layers, B)
    book, source = Book.write(layers, (5, 2, 7, 4), 27), (5, 2, 7, 4)
    others = {
        block: [layer.cache[block].clone() for layer in layers] for block in range(B) if block not in target
    }
    kept = torch.stack(
        [torch.stack([torch.randperm(27)[:13].sort().values for _ in range(K)]) for _ in range(L)]
    )
    views.compact(kept, views.block_ids(source), views.block_ids(target))
    book.keep(kept)
    book.check(views, target)
    for block, before in others.items():
        assert all(torch.equal(layer.cache[block], x) for layer, x in zip(layers, before, strict=True))


def test_kernel_blocks_are_parts_of_table_blocks() -> None:
    """The backend counts blocks of S slots, the tables blocks of 3 S."""
    layers = make_layers("plain")
    views = CacheViews(layers, B // 3)
    assert views.block_size == 3 * S
    views.prove()
    book = Book.write(layers, (6, 7, 8, 0, 1, 2), 40)
    book.check(views, (2, 0))
    kept = torch.arange(0, 40, 2)[None, None]
    views.compact(kept, views.block_ids((2, 0)), views.block_ids((1,)))
    book.keep(kept)
    book.check(views, (1,))


def test_fp8_is_moved_as_bytes_and_read_with_its_scale() -> None:
    scale = torch.tensor([0.5, 0.03125])

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        rows = [(keys / scale[:, None]), values / 2.0]
        plain_writer(cache)(*(x.to(torch.float8_e4m3fn).view(torch.uint8) for x in rows), slots)

    cache = torch.zeros(B, K, S, 2 * D, dtype=torch.uint8)
    layer = LayerCache("fp8", cache, D, torch.float8_e4m3fn, torch.bfloat16, scale, 2.0, write, False)
    views = CacheViews([layer], B)
    views.prove()
    keys, values = (torch.randn(11, K, D) for _ in range(2))
    layer.write(keys, values, torch.arange(11) + 3 * S)
    ids = views.block_ids((3, 4))
    want = (keys / scale[:, None]).to(torch.float8_e4m3fn).float() * scale[:, None]
    assert torch.equal(views.read(0, ids, 11, 0), want.transpose(0, 1))
    assert torch.equal(
        views.read(0, ids, 11, 1), ((values / 2).to(torch.float8_e4m3fn).float() * 2).transpose(0, 1)
    )
    kept = torch.tensor([[[1, 4, 9]]])
    views.compact(kept, ids, views.block_ids((4,)))
    assert torch.equal(views.read(0, views.block_ids((4,)), 3, 0), want.transpose(0, 1)[:, kept[0, 0]])


def test_an_order_that_nobody_knows_is_refused() -> None:
    def scrambling(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        plain_writer(layer.cache)(keys.flip(1), values, slots)  # the heads in each other's place

    def losing(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        paired_writer(lost.cache)(keys, keys, slots)

    layer = replace(make_layers("plain")[0], write=scrambling)
    with pytest.raises(UnsupportedModelError, match="not where kvreclaim reads it"):
        CacheViews([layer], B).prove()
    lost = replace(make_layers("paired")[0], write=losing)
    with pytest.raises(UnsupportedModelError, match="could not be learned"):
        CacheViews([lost], B)
    with pytest.raises(UnsupportedModelError, match="9.* blocks for a pool of 4"):
        CacheViews(make_layers("plain"), 4)


@pytest.mark.parametrize("make", WRITERS)
def test_a_step_keeps_what_the_policy_chooses(make: str) -> None:
    """Two passes: the second request's survivors go into a block that the first has just given back."""
    layers = make_layers(make)
    views = CacheViews(layers, B)
    applier, rows = make_applier(views)
    books = Book.write(layers, (1, 2, 3), 24), Book.write(layers, (4, 5, 6, 7), 27)
    chooser = Compressor(SETTINGS.make_config(), make_facts())
    wanted = [
        chooser.choose(lambda n, book=book: DenseSource(*book.tokens[n]), tokens, 0, tokens, keep=keep)
        for book, tokens, keep in ((books[0], 24, 16), (books[1], 27, 19))
    ]
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
    applier.trace = trace = Trace()
    Book.write(layers, (1, 2, 3), 24)
    applier.begin(output(make_pass("a", (1, 2, 3), (1, 2), 24)))
    first = trace.take()[0][2]
    assert first.shape == (L, K, 16)
    assert first.dtype == torch.int32
    Book.write(layers, (1, 2, 3), 22)  # six tokens more, and other keys: another choice
    more = make_pass("a", (1, 2, 3), (1, 2), 22, logical_len=30, first=False, shift=16)
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
    assert not trace.live


def test_a_nan_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    layers = make_layers("plain")
    applier, rows = make_applier(CacheViews(layers, B))
    Book.write(layers, (1, 2, 3), 24)
    good = Book.write(layers, (4, 5, 6), 24)
    layers[1].cache[2, 0, 3, 5] = torch.nan
    kept = Compressor(SETTINGS.make_config(), make_facts()).choose(
        lambda n: DenseSource(*good.tokens[n]), 24, 0, 24, keep=16
    )
    with caplog.at_level(logging.ERROR, logger="vllm.kvreclaim"):
        applier.begin(
            output(make_pass("bad", (1, 2, 3), (1, 2), 24), make_pass("good", (4, 5, 6), (4, 5), 24))
        )
        applier.take_seconds()
    good.keep(kept)
    good.check(applier.views, (4, 5))
    assert [record.args for record in caplog.records] == [("bad",)]
    assert [name for name, *_ in rows.calls] == ["bad", "good"]


def test_settings_of_requests_have_their_own_compressors() -> None:
    applier, _ = make_applier(CacheViews(make_layers("plain"), B))
    own = [replace(SETTINGS, budget=17 + n) for n in range(MAX_COMPRESSORS)]
    found = [applier.compressor(settings) for settings in own]
    assert [one.budget for one in found] == [settings.budget for settings in own]
    assert applier.compressor(own[0]) is found[0]
    applier.compressor(replace(SETTINGS, budget=99))
    assert applier.compressor(own[0]) is found[0]
    assert applier.compressor(own[1]) is not found[1]
    assert len(applier.compressors) == MAX_COMPRESSORS
