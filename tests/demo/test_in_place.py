"""The blocks that would be empty had nobody moved, beside a shadow of sets."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.demo.in_place import InPlace, emptied_blocks

GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def naive(heads: list[list[int]], num_tokens: int, size: int) -> int:
    blocks = [set(range(at, at + size)) for at in range(0, num_tokens - size + 1, size)]
    return sum(block.isdisjoint(place for head in heads for place in head) for block in blocks)


@pytest.mark.parametrize("seed", range(20))
def test_survivors_are_followed_through_all_passes(seed):
    """Heads that keep equal or unequal numbers, each a list of the positions that it still holds."""
    rng = random.Random(seed)
    size, uneven, count = rng.choice((1, 4, 8)), rng.random() < 0.5, InPlace(8)
    count.block_size = size
    held, length = [[[] for _ in range(2)] for _ in range(3)], 0
    for number in range(5):
        new = rng.randrange(1, 40)
        held = [[[*head, *range(length, length + new)] for head in rows] for rows in held]
        length += new
        most = rng.randrange(1, len(held[0][0]) + 1)
        slots = [
            [
                sorted(rng.sample(range(len(h)), min(len(h), rng.randrange(most) + 1 if uneven else most)))
                for h in rows
            ]
            for rows in held
        ]
        held = [
            [[h[i] for i in s] for h, s in zip(*rows, strict=True)] for rows in zip(held, slots, strict=True)
        ]
        kept = [[torch.tensor(s) for s in rows] for rows in slots]
        done = SimpleNamespace(first=number == 0, logical_len=length)
        count.compressed(
            SimpleNamespace(seq_id=7), done, kept if uneven else torch.stack([*map(torch.stack, kept)])
        )
        flat = [head for rows in held for head in rows]
        assert count.freed == {7: naive(flat, length, size)}


def test_a_block_that_is_not_full_is_not_counted():
    assert emptied_blocks([torch.tensor([0, 17])], 30, 8) == 1
    assert emptied_blocks([torch.tensor([0, 17])], 32, 8) == 2
    assert emptied_blocks([torch.arange(4), torch.arange(28, 32)], 32, 8) == 2


class Noted(InPlace):
    """Remembers how long the text was at the last pass."""

    last = 0

    def compressed(self, seq, done, kept):
        self.last = done.logical_len
        super().compressed(seq, done, kept)


def test_recency_empties_the_blocks_between_its_ends():
    """streaming_llm keeps 4 tokens at the start and the newest ones: what it empties is known."""
    llm = LLM(demo_model(), num_blocks=100, block_size=16)
    count = llm.engine.extensions.add(Noted(16))
    prompt = llm.tokenizer.encode("star mist vale " * 100)[:300]
    config = CompressionConfig("streaming_llm", budget=100, sinks=4, recent=32, interval=20)
    (out,) = llm.generate([prompt], GREEDY, config)
    assert out.metrics.compactions >= 3
    assert list(count.freed.values()) == [(count.last - 96) // 16 - 1]
    assert out.metrics.blocks_freed >= sum(count.freed.values())
