"""The scheduler's count of prompt slots, made from lengths alone, is what a worker's choice leaves."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from list_pool import FakeRequest, ListPool

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.integrations.vllm.scheduler.ledger import Ledger
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.schedule import Pass
from kvreclaim.testing.toys import model_facts, noise

FACTS = model_facts(2)
LAYERS, HEADS = 2, 2


class Worker:
    """Carries out passes on made-up keys, and knows of each slot of each head whether it is the prompt's."""

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        self.computed = 0
        self.is_prompt = torch.zeros(LAYERS, HEADS, 0, dtype=torch.bool)

    def grow(self, count: int) -> None:
        new = torch.arange(self.computed, self.computed + count) < self.num_prompt
        self.is_prompt = torch.cat([self.is_prompt, new.expand(LAYERS, HEADS, -1)], dim=-1)
        self.computed += count

    def carry_out(self, done: Pass[str], settings: CompressionConfig) -> None:
        size = (HEADS, done.num_tokens, 8)
        kept = Compressor(settings, FACTS).choose(
            lambda layer: DenseSource(noise(layer + self.computed, *size), noise(layer, *size)),
            done.num_tokens,
            done.prompt_slots,
            done.logical_len,
            first=done.first,
            keep=done.keep,
        )
        assert self.is_prompt.shape[-1] == done.num_tokens
        assert kept.shape[-1] == done.keep
        self.is_prompt = self.is_prompt.gather(-1, kept.expand(LAYERS, HEADS, -1))


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from([1, 4, 8]),
    st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(1, 20), st.integers(1, 12)),
    st.integers(1, 120),
    st.sampled_from(["knorm", "random", "streaming_llm"]),
)
def test_a_protected_prompt_leads_by_as_many_slots_as_the_scheduler_counts(
    data, size: int, lengths: tuple[int, int, int, int], prompt: int, policy: str
) -> None:
    """The counts agree over chunks of the prompt, decoding, and pass after pass."""
    sinks, recent, over, interval = lengths
    fields = {"sinks": sinks, "recent": recent, "budget": sinks + recent + over, "interval": interval}
    options = Options.read(fields | {"policy": policy, "protect_prompt": True}, "the test")
    ledger = Ledger(options, ListPool(200, size), size, 64)
    request, worker = FakeRequest("r", prompt), Worker(prompt)
    while request.num_computed_tokens < prompt + 50:
        left = prompt - request.num_computed_tokens
        count = data.draw(st.integers(1, min(left, 64))) if left > 0 else 1
        assert ledger.pool.grow("r", request.num_computed_tokens + count)
        request.grow(count)
        worker.grow(count)
        for done in ledger.compress([request]):
            worker.carry_out(done, options.settings)
            counted = ledger.records["r"].account.prompt_slots
            leading = torch.arange(done.keep) < counted
            assert torch.equal(worker.is_prompt, leading.expand(LAYERS, HEADS, -1))


def test_a_policy_that_keeps_everything_gets_no_pass() -> None:
    options = Options.read({"policy": "full", "budget": 8, "sinks": 1, "recent": 2}, "the test")
    ledger, request = Ledger(options, ListPool(99, 4), 4, 64), FakeRequest("r", 20)
    ledger.pool.grow("r", 90)
    request.grow(90)
    assert ledger.compress([request]) == []
