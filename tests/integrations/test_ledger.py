"""The ledger against a pool made of lists, and against a model of every request's slots."""

from __future__ import annotations

import pickle
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from list_pool import FakeRequest, ListPool, computed, make_ledger

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.integrations.vllm.scheduler.ledger import Ledger
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.schedule import Pass

BASE = {"policy": "streaming_llm", "sinks": 2, "recent": 3}


class LedgerMachine(RuleBasedStateMachine):
    """Random arrivals, chunks, sharing, preemptions and ends."""

    @initialize(
        size=st.sampled_from([1, 4, 8]),
        budget=st.integers(6, 40),
        interval=st.integers(1, 20),
        chunk=st.integers(1, 40),
        blocks=st.integers(4, 60),
        protect=st.booleans(),
    )
    def start(self, size: int, budget: int, interval: int, chunk: int, blocks: int, protect: bool) -> None:
        fields = BASE | {"budget": budget, "interval": interval, "protect_prompt": protect}
        self.options = Options.read(fields, "the test")
        self.pool = ListPool(blocks, size)
        self.ledger = Ledger(self.options, self.pool, size, chunk)
        self.requests: list[FakeRequest] = []
        self.made = 0

    @rule(prompt=st.integers(1, 150), wanted=st.sampled_from([None, None, None, "on", "off", {"budget": 6}]))
    def arrive(self, prompt: int, wanted: Any) -> None:
        self.requests.append(FakeRequest(f"r{self.made}", prompt, wanted))
        self.made += 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        """A new request takes the indexed head of an uncompressed one."""
        source = data.draw(st.sampled_from(self.requests))
        full = source.num_computed_tokens // self.pool.block_size
        if len(source.slots) < source.num_computed_tokens or not full:
            return
        head = self.pool.held(source.request_id)[:full]
        twin = FakeRequest(f"r{self.made}", source.num_prompt_tokens)
        self.made += 1
        twin.grow(full * self.pool.block_size)
        self.pool.tables[twin.request_id] = list(head)
        for block in head:
            self.pool.refs[block] += 1
            self.pool.indexed[block] = True
        self.requests.append(twin)

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """One schedule: passes, then growth; one that does not fit preempts the last, perhaps itself."""
        before = {r.request_id: (self.pool.held(r.request_id), list(r.slots)) for r in self.requests}
        passes = self.ledger.compress(self.requests)
        num_checked = 0
        preempted: list[str] = []
        for request in list(self.requests):
            if request.request_id in preempted:
                continue
            left = request.num_prompt_tokens - request.num_computed_tokens
            count = data.draw(st.integers(1, min(left, self.ledger.max_chunk))) if left > 0 else 1
            while True:
                may_go_on = self.ledger.may_go_on(request)
                for done in passes[num_checked:]:
                    self.check_pass(done, *before[done.seq_id])
                num_checked = len(passes)
                grown = request.num_computed_tokens + count
                if may_go_on and self.pool.grow(request.request_id, grown):
                    break
                victim = next(r for r in reversed(self.requests) if r.request_id not in preempted)
                self.preempt(victim)
                preempted.append(victim.request_id)
                if victim is request:
                    break
            if request.request_id not in preempted:
                assert not self.is_overdue(request)
                in_prompt = request.num_computed_tokens < request.num_prompt_tokens
                request.grow(count)
                self.check_cap(request, in_prompt)
        assert len({done.seq_id for done in passes}) == len(passes)
        current = [done for done in passes if done.seq_id not in preempted]
        assert [done for done in passes if self.ledger.is_current(done)] == current
        message = self.ledger.message(passes)
        assert (message is None) == (not current)
        if message is not None:
            assert list(message.passes) == current
            assert message.settings == {done.seq_id: self.settings_of(done) for done in current}
            assert pickle.loads(pickle.dumps(message)) == message

    def preempt(self, request: FakeRequest) -> None:
        self.ledger.forget(request.request_id)
        self.pool.drop(request.request_id)
        request.num_computed_tokens, request.slots = 0, []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        figures = self.ledger.figures(request)
        assert (figures is None) == (request.wanted == "off")
        if figures is not None:
            assert figures["kv_tokens"] == len(request.slots)
        self.ledger.forget(request.request_id)
        self.pool.drop(request.request_id)
        self.ledger.close(request.request_id)
        self.requests.remove(request)

    def check_pass(self, done: Pass[str], held: list[int], slots: list[bool]) -> None:
        request = next(r for r in self.requests if r.request_id == done.seq_id)
        size, own = self.pool.block_size, self.settings_of(done)
        assert request.wanted != "off"
        assert done.source_ids == tuple(held)
        assert (done.num_tokens, done.logical_len) == (len(slots), request.num_computed_tokens)
        assert own.budget <= done.keep < own.budget + size
        assert (done.num_tokens - done.keep) % size == 0 < done.num_tokens - done.keep
        assert done.shift == request.num_computed_tokens - done.keep
        assert done.first == (len(slots) == request.num_computed_tokens)
        assert done.target_ids == tuple(self.pool.held(done.seq_id))
        assert len(done.target_ids) == -(-done.keep // size)
        if own.protect_prompt:
            assert slots == [place < done.prompt_slots for place in range(len(slots))]
        request.slots = self.survivors(done, slots)

    def settings_of(self, done: Pass[str]) -> CompressionConfig:
        request = next(r for r in self.requests if r.request_id == done.seq_id)
        settings = self.options.of_request(request.sampling_params.extra_args)
        assert settings is not None
        return settings

    def survivors(self, done: Pass[str], slots: list[bool]) -> list[bool]:
        """Slots that a worker keeps: sinks and recent slots, then a protected prompt, then others."""
        own = self.settings_of(done)
        edge = len(slots) - own.recent
        rank = [
            (sink_or_recent, own.protect_prompt and prompt, -place)
            for place, prompt in enumerate(slots)
            for sink_or_recent in [place < own.sinks or place >= edge]
        ]
        kept = sorted(sorted(range(len(slots)), key=rank.__getitem__, reverse=True)[: done.keep])
        return [slots[place] for place in kept]

    def is_overdue(self, request: FakeRequest) -> bool:
        own = self.options.of_request(request.sampling_params.extra_args)
        return own is not None and len(request.slots) - own.budget >= max(own.interval, self.pool.block_size)

    def check_cap(self, request: FakeRequest, in_prompt: bool) -> None:
        caps = self.ledger.caps(request)
        if caps is None:
            return
        shared = any(self.pool.indexed[block] for block in self.pool.held(request.request_id))
        if not shared:
            held = len(self.pool.held(request.request_id))
            assert held <= (caps.prefill if in_prompt else caps.settled)

    @invariant()
    def every_block_is_counted(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check()
            for request in self.requests:
                held = self.pool.held(request.request_id)
                assert len(held) == -(-len(request.slots) // self.pool.block_size)


TestLedger = LedgerMachine.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_decode_pass_brings_a_request_to_exactly_its_budget() -> None:
    ledger = make_ledger()
    request = computed(ledger, "a", 100, 383)
    assert ledger.compress([request]) == []
    ledger.pool.grow("a", 384)
    request.grow(1)
    (done,) = ledger.compress([request])
    assert (done.num_tokens, done.keep, done.shift, done.logical_len) == (384, 256, 128, 384)
    assert ledger.figures(request) == {
        "promised": "budget 256",
        "budget": 256,
        "tokens_evicted": 128,
        "blocks_freed": 4,
        "compactions": 1,
        "kv_tokens": 256,
    }
    assert (ledger.totals.tokens_evicted, ledger.totals.blocks_freed, ledger.totals.compactions) == (
        128,
        4,
        1,
    )


@given(
    prompt=st.integers(1, 300),
    length=st.integers(2, 300),
    budget=st.integers(6, 64),
    interval=st.integers(1, 40),
    chunk=st.integers(1, 64),
)
def test_a_request_is_compressed_only_if_it_outgrows_budget_and_interval(
    prompt: int, length: int, budget: int, interval: int, chunk: int
) -> None:
    """However its prompt is cut: a pass saves nothing for one that ends before."""
    ledger = make_ledger(**BASE, budget=budget, interval=interval)
    request = FakeRequest("a", min(prompt, length - 1))
    num_passes = 0
    while request.num_computed_tokens < length - 1:  # the last token is never computed
        passes = ledger.compress([request])
        num_passes += len(passes)
        del request.slots[: sum(done.num_tokens - done.keep for done in passes)]
        left = request.num_prompt_tokens - request.num_computed_tokens
        count = min(chunk, left) if left > 0 else 1
        assert ledger.pool.grow("a", request.num_computed_tokens + count)
        request.grow(count)
    due = budget + max(interval, 32)
    if length - 1 <= due:
        assert num_passes == 0
    elif prompt <= due:
        assert num_passes > 0


def test_sessions_that_resume_are_left_alone() -> None:
    ledger = make_ledger()
    request = computed(ledger, "a", 100, 1000)
    request.resumable = True
    assert ledger.compress([request]) == []
    assert ledger.caps(request) is None


def test_figures_outlive_a_preemption_and_end_with_the_request() -> None:
    ledger = make_ledger()
    request = computed(ledger, "a", 100, 384)
    (done,) = ledger.compress([request])
    ledger.forget("a")
    assert not ledger.is_current(done)
    figures = ledger.figures(request)
    assert figures is not None
    assert figures["compactions"] == 1
    ledger.close("a")
    assert ledger.records == {}


def test_a_request_whose_pass_lacks_blocks_computes_nothing_before_it() -> None:
    ledger = make_ledger(num_blocks=12)
    request = computed(ledger, "a", 100, 384)
    for block in ledger.pool.held("a"):
        ledger.pool.refs[block] += 1
    before = list(ledger.pool.tables["a"])
    passes = ledger.compress([request])
    assert not ledger.may_go_on(request)
    assert (passes, ledger.totals.compactions, ledger.pool.tables["a"]) == ([], 0, before)
    for block in ledger.pool.held("a"):
        ledger.pool.refs[block] -= 1
    assert ledger.may_go_on(request)
    assert [done.seq_id for done in passes] == ["a"]
    assert ledger.may_go_on(request)
    assert ledger.totals.compactions == 1


def test_settings_that_cannot_be_read_leave_the_request_whole(caplog: pytest.LogCaptureFixture) -> None:
    ledger = make_ledger()
    request = computed(ledger, "a", 100, 1000, "nonsense")
    assert ledger.compress([request]) == []
    assert "request a is not compressed: kv_compression is 'nonsense'" in caplog.text
    assert len(caplog.records) == 1
