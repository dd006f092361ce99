"""How many sequences run at once: against slow sums, against budgets walked token by token, and goldens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.kv_bytes import KV_BYTES
from kvreclaim.plan.cards import find_card
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.cost import Linear
from kvreclaim.plan.lengths import Lengths
from kvreclaim.plan.recompute import (
    blocks_while_decoding,
    longest_recompute,
    most_tokens,
    prefill_seconds,
    sequences_at_once,
)
from kvreclaim.plan.roofline import roofline
from kvreclaim.plan.weights import WEIGHTS
from kvreclaim.schedule.budget.account import EvictionCounters
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import Footprint

requests = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 120)), min_size=1, max_size=6)


def lengths(pairs: list[tuple[int, int]]) -> Lengths:
    prompts, outputs = (np.array(part, dtype=np.int64) for part in zip(*pairs, strict=True))
    return Lengths(prompts, outputs)


def walked(pairs: list[tuple[int, int]], rules: Footprint) -> list[float]:
    """Decoded tokens by blocks held: every sequence goes its way step by step, as the scheduler has it."""
    found: dict[int, int] = {}
    for prompt, output in pairs:
        done, account = 0, EvictionCounters()
        while done < prompt + output:
            left = prompt - done if done < prompt else 1
            done += min(left, rules.tokens_until_pass(done, prompt, account), rules.max_chunk)
            live = done - account.num_evicted
            if done > prompt:
                blocks = -(-live // rules.block_size)
                found[blocks] = found.get(blocks, 0) + 1
            if rules.is_due(done, prompt, account):
                account.num_evicted += live - rules.kept(live)
                account.last_computed = done
    return [float(found.get(b, 0)) for b in range(max(found) + 1)]


@given(requests, st.integers(1, 8), st.integers(1, 64))
def test_blocks_without_a_budget(pairs, size: int, chunk: int) -> None:
    rules = Footprint(block_size=size, max_chunk=chunk)
    assert blocks_while_decoding(lengths(pairs), rules).tolist() == walked(pairs, rules)


@given(requests, st.integers(1, 8), st.integers(1, 64), st.integers(8, 64), st.integers(1, 20))
def test_blocks_under_a_budget(pairs, size: int, chunk: int, budget: int, interval: int) -> None:
    rules = Footprint(EvictionMethod.COMPACT, budget, interval, block_size=size, max_chunk=chunk)
    found = blocks_while_decoding(lengths(pairs), rules).tolist()
    want = walked(pairs, rules)
    assert found[: len(want)] == want
    assert not any(found[len(want) :])


@given(st.lists(st.integers(0, 5), min_size=2, max_size=6), st.integers(1, 60))
def test_the_largest_number_by_plain_convolution(weights: list[int], num_blocks: int) -> None:
    share = np.array([0.0, *weights[1:], weights[0] + 1.0])
    found = sequences_at_once(share, num_blocks, 1).p99
    total, best = np.ones(1), 0
    for n in range(1, num_blocks + 2):
        total = np.convolve(total, share / share.sum())
        chance = total[: num_blocks + 1].sum()
        if abs(chance - 0.99) < 1e-9:
            return  # decided by rounding
        best = n if chance > 0.99 else best
    assert found == best


M = 27_157
"""Blocks of an 8B model on an H100 at .9 with 4 GiB of other things; a 4090 has 2,588."""
HELD = json.loads((Path(__file__).parent / "data" / "decoding_blocks.json").read_text())


@pytest.mark.parametrize(
    ("trace", "mean", "deviation", "most", "on_4090"),
    [
        ("azure_conv", 77.2, 44.6, (326, 327, 30, 351), 25),
        ("azure_code", 133.7, 122.0, (174, 175, 55, 203), 11),
        ("mooncake", 820.9, 1032.3, (17, 20, 3, 33), 0),
    ],
)
def test_real_traces(trace: str, mean: float, deviation: float, most: tuple[int, ...], on_4090: int) -> None:
    """At 99 %, as a normal distribution has it, by the longest, by the mean."""
    weights, longest = np.array(HELD[trace]["whole"]), HELD[trace]["whole_longest"]
    found = sequences_at_once(weights, M, longest)
    assert (round(found.mean_blocks, 1), round(found.sd_blocks, 1)) == (mean, deviation)
    assert (found.p99, found.normal, found.worst, found.mean) == most
    assert sequences_at_once(weights, 2588, longest).p99 == on_4090


@pytest.mark.parametrize(("trace", "most"), [("azure_conv", 357), ("azure_code", 295), ("mooncake", 214)])
def test_real_traces_under_a_budget(trace: str, most: int) -> None:
    """2048/128: 199 sequences are never preempted. Prompts leave exactly the budget behind, so that short
    answers of `code` hold less than teeth at random places would say (293)."""
    weights, longest = np.array(HELD[trace]["budget"]), HELD[trace]["budget_longest"]
    assert longest == 136
    found = sequences_at_once(weights, M, longest)
    assert (found.worst, found.p99) == (199, most)


def test_seconds_of_recompute() -> None:
    """8B: on an H100 at .6, half of that, on a 4090 at .95, an L4 at .5; 70B on four H100, 32B on one."""
    shape = load_shape("Llama-3.1-8B")
    h100, square = 989e12, shape.pair_flops / 2
    assert most_tokens(7.5e9, square, 0.5 * 0.6 * h100) == 15_552
    assert most_tokens(7.5e9, square, 0.5 * 0.3 * h100) == 8_598
    assert most_tokens(7.5e9, square, 0.5 * 0.95 * 165.2e12) == 4_824
    assert most_tokens(7.5e9, square, 0.5 * 0.5 * 121e12) == 1_950
    assert most_tokens(69.5e9, load_shape("Llama-3.1-70B").pair_flops / 2, 0.5 * 0.5 * 4 * h100) == 6_692
    assert most_tokens(31.2e9, load_shape("Qwen3-32B").pair_flops / 2, 0.5 * 0.6 * h100) == 4_425
    assert M // -(-15_552 // 16) == 27


def test_a_data_sheet_and_a_calibration() -> None:
    shape = load_shape("Llama-3.1-8B")
    time = roofline(shape, find_card("h100"), WEIGHTS["bf16"], KV_BYTES["bf16"])
    longest = longest_recompute(time, 0.5, 2048)
    assert longest == most_tokens(shape.active_linear, shape.pair_flops / 2, 0.5 * 0.6 * 989e12) == 16_278
    assert prefill_seconds(time, longest, 2048) == pytest.approx(0.5 + 8 * 0.5e-3, rel=1e-3)
    fitted = Linear(16.79e-3, 58.9e-6, 174.8e-9, 1.617e-9, -23.3e-6, 33e-6, 128)
    most = longest_recompute(fitted, 0.5, 2048)
    assert prefill_seconds(fitted, most, 2048) <= 0.5 < prefill_seconds(fitted, most + 1, 2048)
