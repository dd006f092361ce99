"""Sequences that may run at once if recomputing a preempted one has a time limit.

A preempted sequence is recomputed over its whole length, even if a budget had compressed it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import astuple, dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.plan.cost import Linear, StepLoad, WithExperts
from kvreclaim.plan.lengths import Lengths
from kvreclaim.plan.roofline import DATA_SHEET
from kvreclaim.schedule.budget.account import EvictionCounters
from kvreclaim.schedule.budget.footprint import Footprint

SHARE = 0.99
_NORMAL = 2.3263478740408408
"""Standard deviations below which 99 % of a normal distribution lie."""
Counts = NDArray[np.float64]


def per_token(time: Linear) -> float:
    """Seconds per token of a large step, without attention."""
    return time.token + (time.flop if isinstance(time, WithExperts) else time.beyond)


def prefill_seconds(time: Linear, num_tokens: int, chunk: int) -> float:
    """Seconds of a prompt alone, in chunks."""
    total = 0.0
    for start in range(0, num_tokens, chunk):
        size = min(chunk, num_tokens - start)
        total += time.step_s(StepLoad(size, 1, 0, size * (start + size / 2)))
    return total


def longest_recompute(time: Linear, seconds: float, chunk: int) -> int:
    """Return the maximum number of tokens that are recomputed in this time. By a data sheet
    it is (2 P n + 2 L H D n^2) / FLOP/s, P without the head; by a calibration the sum of steps."""
    if time.facts.get("kind") == DATA_SHEET:
        return most_tokens(per_token(time) / 2, time.pair / 2, seconds)
    low, high = 0, 1
    while prefill_seconds(time, high, chunk) <= seconds:
        low, high = high, 2 * high
    return low + bisect_right(range(low + 1, high), seconds, key=lambda n: prefill_seconds(time, n, chunk))


def most_tokens(params: float, square: float, products: float) -> int:
    """Largest n with 2 params n + square n^2 <= products."""
    return int((-2 * params + sqrt(4 * params**2 + 4 * square * products)) / (2 * square))


def blocks_while_decoding(lengths: Lengths, footprint: Footprint) -> Counts:
    """[b + 1] tokens that are decoded while their sequence holds b blocks."""
    if footprint.bounded:
        held = _held_under_budget(lengths, footprint)
    else:
        held = _spread(lengths.prompts + 1, lengths.prompts + lengths.outputs)
    tokens = np.arange(len(held))
    return np.bincount(-(-tokens // footprint.block_size), weights=held).astype(np.float64)


def _spread(first: NDArray[np.int64], last: NDArray[np.int64]) -> Counts:
    """Count for each number the ranges first ... last, both included, that contain it."""
    change = np.zeros(int(last.max(initial=0)) + 2)
    np.add.at(change, first, 1.0)
    np.add.at(change, last + 1, -1.0)
    return change.cumsum()[:-1]


def _held_under_budget(lengths: Lengths, footprint: Footprint) -> Counts:
    """Slots before each pass: from the prompt's up to the cap, then in teeth budget + 1 ... cap."""
    budget, cap = footprint.budget, footprint.decode_cap
    start = np.array([_after_prompt(int(n), footprint) for n in lengths.prompts], dtype=np.int64)
    first = np.minimum(lengths.outputs, np.maximum(0, cap - start))
    held = np.zeros(cap + 2)
    rising = _spread(start + 1, start + first)
    held[: len(rising)] += rising[: len(held)]
    teeth, rest = np.divmod(lengths.outputs - first, cap - budget)
    held[budget + 1 : cap + 1] += teeth.sum()
    last = _spread(np.full_like(rest, budget + 1), budget + rest)
    held[: len(last)] += last[: len(held)]
    return held


def _after_prompt(num_prompt: int, footprint: Footprint) -> int:
    """Slots of a computed prompt, in chunks, with a pass wherever one is due."""
    computed, account = 0, EvictionCounters()
    while computed < num_prompt:
        most = footprint.tokens_until_pass(computed, num_prompt, account)
        computed = min(num_prompt, computed + min(most, footprint.max_chunk))
        if footprint.is_due(computed, num_prompt, account):
            live = computed - account.num_evicted
            account.num_evicted += live - footprint.kept(live)
            account.last_computed = computed
    return num_prompt - account.num_evicted


@dataclass(frozen=True, slots=True)
class AtOnce:
    """Sequences at once.

    p99, normal: the pool is too small for them at a random moment at most once in a hundred; exact, and by a
                 normal distribution
    worst, mean: by the longest request of the trace (without any preemption under a budget), and by the mean
    """

    p99: int
    normal: int
    worst: int
    mean: int
    mean_blocks: float
    sd_blocks: float

    def steps(self, num_blocks: int) -> tuple[str, str]:
        """Lines of the arithmetic for a pool of num_blocks."""
        return (
            f"at a random moment of decoding a request holds {self.mean_blocks:.1f} blocks, standard "
            f"deviation {self.sd_blocks:.1f}",
            f"P(sum of N > {num_blocks:,}) <= 1 % up to N = {self.p99:,}, by exact convolution; as a normal "
            f"distribution {self.normal:,}",
        )

    def values(self) -> dict[str, float]:
        """Figures by their names in an answer."""
        names = ("max_num_seqs", *(f"max_num_seqs_{name}" for name in ("normal", "worst", "mean")))
        return dict(zip((*names, "mean_blocks", "sd_blocks"), astuple(self), strict=True))


def sequences_at_once(weights: Counts, num_blocks: int, longest_blocks: int) -> AtOnce:
    """weights: of blocks_while_decoding; longest_blocks: blocks of the largest request at its end."""
    share = weights / weights.sum()
    blocks = np.arange(len(share))
    mean = float(share @ blocks)
    deviation = sqrt(max(0.0, float(share @ blocks**2) - mean**2))
    spread = _NORMAL * deviation
    normal = ((-spread + sqrt(spread**2 + 4 * mean * num_blocks)) / (2 * mean)) ** 2
    return AtOnce(
        p99=_most_that_fit(share, num_blocks),
        normal=int(normal),
        worst=num_blocks // max(1, longest_blocks),
        mean=int(num_blocks / mean),
        mean_blocks=mean,
        sd_blocks=deviation,
    )


def _most_that_fit(share: Counts, num_blocks: int) -> int:
    """Largest N with P(b_1 + ... + b_N <= num_blocks) >= SHARE. Sums above num_blocks are cut off, which
    changes none below. Powers of two of the distribution are tried from the largest down."""
    size = num_blocks + 1
    power = _cut(share, size)
    powers = []
    while power.sum() >= SHARE:
        powers.append(power)
        power = _both(power, power, size)
    found, total = 0, _cut(np.ones(1), size)
    for exponent in reversed(range(len(powers))):
        tried = _both(total, powers[exponent], size)
        if tried.sum() >= SHARE:
            found, total = found + (1 << exponent), tried
    return found


def _cut(values: Counts, size: int) -> Counts:
    cut = np.zeros(size)
    cut[: min(size, len(values))] = values[:size]
    return cut


def _both(a: Counts, b: Counts, size: int) -> Counts:
    """The distribution of the sum of two, as far as it is below size."""
    length = 1 << (2 * size - 1).bit_length()
    return np.maximum(np.fft.irfft(np.fft.rfft(a, length) * np.fft.rfft(b, length), length)[:size], 0.0)


def longest_blocks(lengths: Lengths, footprint: Footprint) -> int:
    """Blocks of the largest request at its end; under a budget, between two passes."""
    longest = int((lengths.prompts + lengths.outputs).max())
    return blocks_for(footprint.slots_needed(1, longest), footprint.block_size)
