"""Cells of a host's cache against plain lists: what passes move, and the tables that steps attend by."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_applier import FakeRows, make_facts, output
from torch import Tensor
from toy_caches import WRITERS, D, K, L, S

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.uneven import choose_uneven
from kvreclaim.integrations.vllm.scheduler.passes import StepMessage
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.worker.applier import Applier
from kvreclaim.integrations.vllm.worker.cells.grid import find_grid
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables
from kvreclaim.integrations.vllm.worker.cells.positions import PassTrace, Positions
from kvreclaim.integrations.vllm.worker.layer_cache import VllmLayerCache
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.schedule import EvictionMethod, Pass

POOL = 24
SETTINGS = CompressionConfig(policy="shares(knorm)", budget=2 * S, interval=S, sinks=2, recent=3)


def make_layers(make: str, alternating: bool) -> list[VllmLayerCache]:
    """All layers in one allocation; alternating: KV heads slot by slot."""
    shape = (L, POOL, S, K, 2 * D) if alternating else (L, POOL, K, S, 2 * D)
    whole = torch.randn(shape)
    layers = []
    for n in range(L):
        cache = whole[n].transpose(1, 2) if alternating else whole[n]
        write, packed = WRITERS[make](cache), make != "plain"
        layers.append(
            VllmLayerCache(f"layer {n}", cache, D, cache.dtype, cache.dtype, 1.0, 1.0, write, packed)
        )
    return layers


class Request:
    """The expected tokens of one request, in lists, and where its tokens lie by the host's table."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.blocks: list[int] = []
        self.length = self.computed = 0
        self.tokens: list[list[list[tuple[Tensor, Tensor]]]] = [[[] for _ in range(K)] for _ in range(L)]
        self.passed = False


class Walk:
    def __init__(
        self, layers: list[VllmLayerCache], settings: CompressionConfig = SETTINGS, *limits: int
    ) -> None:
        self.layers = layers
        self.views = CacheViews(layers, POOL)
        self.grid = find_grid(self.views)
        self.heads = HeadTables(self.grid, 8, 64, *limits)
        self.settings = settings.in_blocks(S)
        self.applier = self.make_applier()
        self.applier.trace = self.trace = PassTrace(Positions((L, K), torch.device("cpu")))
        self.free = list(range(1, POOL))
        self.requests: list[Request] = []

    def make_applier(self) -> Applier:
        return Applier(
            Options(self.settings), make_facts(), None, self.views, FakeRows(), self.heads, 1 << 20
        )

    def grow(self, request: Request, count: int) -> None:
        needed = -(-(request.length + count) // S) - len(request.blocks)
        request.blocks += [self.free.pop() for _ in range(needed)]
        slots = [request.length + i for i in range(count)]
        where = torch.tensor([request.blocks[slot // S] * S + slot % S for slot in slots])
        for n, layer in enumerate(self.layers):
            keys, values = torch.randn(count, K, D), torch.randn(count, K, D)
            layer.write(keys, values, where)
            for h in range(K):
                request.tokens[n][h] += list(zip(keys[:, h], values[:, h], strict=True))
        request.length += count
        request.computed += count

    def compress(self, requests: list[Request], rng: random.Random) -> None:
        """Compress all of them in one step."""
        passes = [self.plan(request, rng) for request in requests]
        step = output(*passes)
        step.kvreclaim = StepMessage(tuple(passes), {one.seq_id: self.settings for one in passes})
        self.applier.begin(step)
        for request, one, (_, _, positions) in zip(requests, passes, self.trace.take(), strict=True):
            self.drop(request, positions)
            self.free += [block for block in request.blocks if block not in one.target_ids]
            request.blocks, request.length, request.passed = list(one.target_ids), one.keep, True

    def plan(self, request: Request, rng: random.Random) -> Pass[str]:
        budget, tail = self.settings.budget, request.length % S
        count = budget // S
        full = request.blocks[: len(request.blocks) - bool(tail)]
        fresh = rng.choice([0, 1]) if self.free else 0  # as where a block is shared
        targets = sorted(rng.sample(full, count - fresh), key=full.index) + [self.free.pop()] * fresh
        after = targets + request.blocks[len(full) :]
        return Pass(
            request.name,
            EvictionMethod.CELLS,
            tuple(request.blocks),
            tuple(after),
            request.length,
            keep=budget + tail,
            logical_len=request.computed,
            prompt_slots=0,
            first=not request.passed,
        )

    def drop(self, request: Request, positions: Tensor) -> None:
        if not hasattr(request, "positions"):
            request.positions = [[[] for _ in range(K)] for _ in range(L)]
            request.seen = 0
        for n in range(L):
            for h in range(K):
                held = request.positions[n][h] + list(range(request.seen, request.computed))
                kept = [p for p in positions[n, h].tolist() if p >= 0]
                at = dict(zip(held, request.tokens[n][h], strict=True))
                request.tokens[n][h] = [at[p] for p in kept]
                request.positions[n][h] = kept
        request.seen = request.computed

    def end(self, request: Request) -> None:
        self.requests.remove(request)
        self.free += request.blocks
        self.applier.begin(output(finished={request.name}))

    def step(self, number: int, rng: random.Random) -> int:
        """A request may come; each grows, after a pass if it is due; one may go. Returns: passes."""
        if len(self.requests) < 3 and rng.random() < 0.4 and len(self.free) > 8:
            self.requests.append(Request(f"r{number}"))
            self.grow(self.requests[-1], rng.randint(1, 2 * S))
        due = [request for request in self.requests if request.length >= self.settings.budget + S]
        if due:
            self.compress(due, rng)
        for request in self.requests:
            if len(self.free) > 3:
                self.grow(request, rng.randint(1, S))
        if self.requests and rng.random() < 0.1:
            self.end(rng.choice(self.requests))
        return len(due)

    def check(self, order: list[Request]) -> None:
        """Compare every head of every request, through the tables of a step with one query each."""
        self.heads.announce([request.name for request in order], [request.length for request in order])
        width = max(len(request.blocks) for request in order)
        table = torch.zeros(len(order), width, dtype=torch.int32)
        for row, request in enumerate(order):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks)
        lengths = torch.tensor([request.length for request in order], dtype=torch.int32)
        starts = torch.arange(len(order) + 1, dtype=torch.int32)
        step = self.heads.take(table, lengths, starts, len(order), 1, int(lengths.max()))
        assert (step is None) is not any(request.passed for request in order)
        for row, request in enumerate(order) if step is not None else ():
            for n in range(L):
                for h in range(K):
                    want = request.tokens[n][h]
                    length = int(step.lengths[n, row * K + h])
                    assert length == len(want)
                    cells = step.tables[n, row * K + h, : -(-length // S)].long()
                    for part in (0, 1):
                        found = self.grid.layout.gather(part, cells, length)[0]
                        assert torch.equal(found, torch.stack([token[part] for token in want]))


def replace_message(step, one, settings):
    step.kvreclaim = StepMessage((one,), {one.seq_id: settings})
    return step


@pytest.mark.parametrize(
    ("make", "alternating"), [("plain", False), ("plain", True), ("paired", False), ("transposed", False)]
)
@pytest.mark.parametrize("policy", ["shares(knorm)", "ada_kv(knorm, alpha=0)", "ada_kv(lagkv)"])
@pytest.mark.parametrize("change", [{}, {"budget": 1, "sinks": 0, "recent": 0}], ids=["", "one-block"])
def test_a_walk_against_lists(make: str, alternating: bool, policy: str, change: dict[str, int]) -> None:
    """Requests come, grow, are compressed into blocks of their own and fresh ones, and go."""
    rng = random.Random(f"{make} {alternating} {policy}")
    torch.manual_seed(1)
    walk = Walk(make_layers(make, alternating), replace(SETTINGS, policy=policy, **change))
    num_passes = 0
    for number in range(60):
        num_passes += walk.step(number, rng)
        if walk.requests:
            walk.check(rng.sample(walk.requests, len(walk.requests)))
    assert num_passes > 5
    for request in list(walk.requests):
        walk.end(request)
    assert not walk.heads.rows
    assert not walk.heads.held


def test_without_cells_heads_keep_equally_many() -> None:
    """The same pass, where attention takes one table: by the same ranking, in the same blocks."""
    layers = make_layers("plain", False)
    views = CacheViews(layers, POOL)
    rows = FakeRows()
    settings = replace(SETTINGS, policy="shares(knorm)", protect_prompt=True).in_blocks(S)
    applier = Applier(Options(settings), make_facts(), None, views, rows)
    applier.trace = trace = PassTrace(Positions((L, K), torch.device("cpu")))
    one = Pass(
        "a",
        EvictionMethod.CELLS,
        (1, 2, 3, 4, 5),
        (2, 3, 5),
        36,
        keep=20,
        logical_len=36,
        prompt_slots=12,
        first=True,
    )
    applier.begin(replace_message(output(one), one, settings))
    [(_, _, kept)] = trace.take()
    assert kept.shape == (L, K, 20)
    assert torch.equal(kept[..., :12], torch.arange(12).int().expand(L, K, -1)), "the prompt stays"
    again = replace(one, num_tokens=30, keep=22, logical_len=46, prompt_slots=0, first=False)
    applier.begin(replace_message(output(again), again, settings))
    [(_, _, kept)] = trace.take()
    assert torch.equal(kept[..., :12], torch.arange(12).int().expand(L, K, -1)), "and goes on to"
    assert [call[2] for call in rows.calls] == [16, 24]


@pytest.mark.parametrize("others", [0, 2])
def test_scores_that_are_no_numbers_are_reported_and_stop_no_other_pass(
    others: int, caplog: pytest.LogCaptureFixture
) -> None:
    walk = Walk(make_layers("plain", False))
    requests = [Request("bad"), *(Request(f"good{n}") for n in range(others))]
    for request in requests:
        walk.grow(request, 3 * S + 2)
    walk.layers[0].cache[requests[0].blocks[0]] = torch.nan
    walk.compress(requests, random.Random(0))
    assert walk.applier.take_seconds() is not None
    assert [record.args for record in caplog.records] == [("bad",)]
    if others:
        walk.check(requests[1:])


@pytest.mark.parametrize(("most", "batches"), [(0, [1, 1, 1]), (6 * S + 4, [2, 1]), (1 << 20, [3])])
def test_passes_of_a_step_choose_together(
    most: int, batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    walk, calls = Walk(make_layers("plain", False)), list[int]()

    def counted(compressor: Any, questions: Any, *args: Any) -> Any:
        calls.append(len(questions))
        return choose_uneven(compressor, questions, *args)

    monkeypatch.setattr("kvreclaim.integrations.vllm.worker.applier.choose_uneven", counted)
    walk.applier.max_tokens = most
    requests = [Request(name) for name in "abc"]
    for request in requests:
        walk.grow(request, 3 * S + 2)
    walk.compress(requests, random.Random(0))
    assert calls == batches
    walk.check(requests)
