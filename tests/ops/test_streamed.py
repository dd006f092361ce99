"""Layers of a cache in host memory as they come to the device, whatever brings them."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvreclaim.ops import reference, streamed
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats.format import plain_format
from kvreclaim.ops.link import DirectLink, StreamLink
from kvreclaim.ops.streamed import StreamedBlocks, StreamedLayers

NUM_LAYERS, NUM_BLOCKS = 3, 40
LAYERS = tuple(LayerFacts(2, 2, 8, 8, Softmax(float(n))) for n in range(NUM_LAYERS))
LIKE = torch.zeros(0)


class Slow:
    """Lanes of a device that is a CPU: all is over when it is queued. The order of calls is kept."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def copying(self):
        time.sleep(0.001)
        return nullcontext()

    def wait(self) -> None:
        self.calls.append(("wait", -1))

    def __getattr__(self, name):
        return lambda buffer: self.calls.append((name, buffer))


def ahead() -> StreamLink:
    return StreamLink(Slow(), pins=False)


def made(link) -> StreamedLayers:
    """Over a cache of random numbers."""
    host = reference.allocate(LAYERS, NUM_BLOCKS, 4, like=LIKE)
    for plane in host.planes:
        plane.normal_(generator=torch.Generator().manual_seed(1))
    counts = SimpleNamespace(streamed_bytes=0, written_bytes=0, stream_buffer_bytes=0)

    def allocate(num_blocks):
        return reference.allocate(LAYERS[:1], num_blocks, 4, like=LIKE, kv_format=plain_format(LIKE.dtype))

    return StreamedLayers(reference, host, allocate, host.layers, counts, link)


def pieces(*each: tuple[list[int], int, list[int]]) -> list[StreamedBlocks]:
    return [StreamedBlocks.of(np.array(ids), held, np.array(written)) for ids, held, written in each]


STEP = (([7, 3, 30, 9], 3, [2, 3]), ([1, 2, 4, 5, 6, 8], 6, [5]), ([20], 0, [0]))


@pytest.mark.parametrize("run_bytes", [1, 1 << 20], ids=["runs", "gathered"])
@pytest.mark.parametrize("make", [DirectLink, ahead])
def test_every_piece_of_every_layer_comes_and_goes_back(make, run_bytes, monkeypatch):
    monkeypatch.setattr(streamed, "RUN_BYTES", run_bytes)
    stream = made(make())
    for _ in range(3):
        before = [plane.clone() for plane in stream.host.planes]
        wanted = [plane.clone() for plane in before]
        stream.begin(pieces(*STEP))
        for layer in range(NUM_LAYERS):
            for number, (ids, held, written) in enumerate(STEP):
                buffer = stream.layer(layer, number)
                assert [each.softmax.scale for each in buffer] == [0.0, 1.0, 2.0]
                for plane, own, goal in zip(buffer[0].planes, before, wanted, strict=True):
                    assert plane[:held].equal(own[layer, ids[:held]])
                    assert not plane[held : len(ids)].any(), "blocks that hold nothing are prepared"
                    for place in written:
                        plane[place] = goal[layer, ids[place]] = float(layer * 100 + ids[place])
                    time.sleep(0.0005)
                    assert plane[0, 0, 0, 0] == (goal if 0 in written else own)[layer, ids[0], 0, 0, 0]
                stream.keep(layer, number, buffer)
        assert all(a.equal(b) for a, b in zip(before, stream.host.planes, strict=True))
        stream.commit()
        assert all(a.equal(b) for a, b in zip(wanted, stream.host.planes, strict=True))
    assert stream.counts.streamed_bytes == 3 * (3 + 6) * stream.host.bytes_per_block
    assert stream.counts.written_bytes == 3 * (2 + 1 + 1) * stream.host.bytes_per_block
    assert stream.counts.stream_buffer_bytes == stream.link.num_buffers * 6 * stream.bytes_per_layer


@pytest.mark.parametrize("make", [DirectLink, ahead])
def test_what_is_abandoned_leaves_nothing(make):
    stream = made(make())
    before = [plane.clone() for plane in stream.host.planes]
    for taken in range(1, 4):
        stream.begin(pieces(*STEP))
        for number in range(taken):
            buffer = stream.layer(0, number)
            for plane in buffer[0].planes:
                plane.zero_()
            stream.keep(0, number, buffer)
        stream.abandon()
        assert all(a.equal(b) for a, b in zip(before, stream.host.planes, strict=True))
    stream.begin(pieces(*STEP))
    assert stream.layer(0, 0)[0].planes[0][:3].equal(before[0][0, [7, 3, 30]])


@pytest.mark.parametrize("make", [DirectLink, ahead])
def test_a_layer_out_of_turn_is_a_mistake(make):
    stream = made(make())
    stream.begin(pieces(*STEP))
    with pytest.raises(AssertionError, match="turn 4 is asked for, but 0 is next"):
        stream.layer(1, 1)
    stream.abandon()


def test_what_a_fetch_raises_reaches_whoever_takes_it():
    link = ahead()

    def fetch(turn, buffer):
        if turn:
            raise RuntimeError(f"turn {turn}")

    link.begin(3, fetch)
    assert link.take(0) == 0
    with pytest.raises(RuntimeError, match="turn 1"):
        link.take(1)
    link.cancel()


def test_a_buffer_is_filled_only_behind_what_last_read_it():
    link = ahead()
    link.begin(5, lambda turn, buffer: None)
    for turn in range(5):
        assert link.take(turn) == turn % 2
    link.cancel()
    calls = link.lanes.calls
    for buffer in (0, 1):
        own = [name for name, which in calls if which == buffer]
        for i, name in enumerate(own):
            if name == "copied":
                before = own[:i]
                assert before.count("wait_computed") == before.count("free") == own[: i + 1].count("copied")
            if name == "wait_copied":
                assert own[:i].count("copied") == own[: i + 1].count("wait_copied")


def test_memory_for_what_is_gathered_grows_by_doubling():
    link = StreamLink(Slow(), pins=False)
    sizes = []

    def fetch(turn, buffer):
        source = torch.arange(60.0)[:, None]
        ids = torch.arange(10 + turn)
        target = torch.empty(len(ids), 1)
        link.gather(source, ids, target, buffer)
        assert target.equal(source[: len(ids)])
        sizes.append(link._staging[buffer][0].nbytes)

    link.begin(8, fetch)
    for turn in range(8):
        link.take(turn)
    assert sizes == [40, 44, 80, 88, 80, 88, 80, 88]


def test_buffers_grow_by_doubling_up_to_the_cache():
    stream = made(DirectLink())
    capacities = []
    for count in (3, 4, 7, 39):
        stream.begin(pieces((list(range(count)), count, [0])))
        capacities.append(stream.capacity)
        stream.abandon()
    assert capacities == [3, 6, 12, 39]
    stream.begin(pieces((list(range(40)), 40, [0])))
    assert stream.capacity == NUM_BLOCKS


def test_runs_of_blocks():
    runs = streamed._runs(torch.tensor([4, 5, 6, 9, 1, 2]), 2)
    assert runs == [(4, 0, 3), (9, 3, 1), (1, 4, 2)]
    assert streamed._runs(torch.tensor([4, 5, 6, 9, 1, 2]), 3) is None
    assert streamed._runs(torch.tensor([], dtype=torch.int64), 1) is None
