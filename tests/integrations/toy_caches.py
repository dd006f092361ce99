"""Caches of several makes, small enough to be written token by token, and a book of what they should hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvreclaim.integrations.vllm.worker.layer_cache import VllmLayerCache
from kvreclaim.integrations.vllm.worker.layouts import CacheViews

L, B, K, S, D = 2, 9, 2, 8, 16


def plain_writer(cache: Tensor) -> Any:
    """Keys in [..., :D], values in [..., D:]."""

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            cache[slot // S, :, slot % S, :D] = keys[row]
            cache[slot // S, :, slot % S, D:] = values[row]

    return write


def paired_writer(cache: Tensor) -> Any:
    """Keys in pairs of dims, as processors with tiles want them; values in pairs of slots, and first."""
    raw = cache.view(-1, K, 2 * S * D)

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            block, place = divmod(slot, S)
            for dim in range(D):
                raw[block, :, S * D + (dim // 2) * 2 * S + place * 2 + dim % 2] = keys[row, :, dim]
                raw[block, :, (place // 2) * 2 * D + dim * 2 + place % 2] = values[row, :, dim]

    return write


def transposed_writer(cache: Tensor) -> Any:
    """Keys as [D, S], then values as [S, D]."""
    raw = cache.view(-1, K, 2 * S * D)

    def write(keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            block, place = divmod(slot, S)
            raw[block, :, place : S * D : S] = keys[row]
            raw[block, :, S * D + place * D : S * D + (place + 1) * D] = values[row]

    return write


WRITERS = {"plain": plain_writer, "paired": paired_writer, "transposed": transposed_writer}


def make_layers(make: str, dtype: torch.dtype = torch.float32) -> list[VllmLayerCache]:
    layers = []
    for n in range(L):
        cache = torch.randn(B, K, S, 2 * D).to(dtype)
        write = WRITERS[make](cache)
        layers.append(VllmLayerCache(f"layer {n}", cache, D, dtype, dtype, 1.0, 1.0, write, make != "plain"))
    return layers


@dataclass
class Book:
    """The expected tokens of a request: keys and values by layer, [K, T, D]."""

    tokens: list[tuple[Tensor, Tensor]]

    @classmethod
    def write(cls, layers: list[VllmLayerCache], blocks: Sequence[int], num_tokens: int) -> Book:
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
