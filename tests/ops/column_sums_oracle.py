"""Column sums of attention once more: float64, query by query; and batches that try them."""

from __future__ import annotations

from enum import Enum

import torch
from paged_oracle import Ask, Shape, World, is_seen, noise, world
from torch import Tensor

MIXED = [(1, 260), (20, 20), (1, 1), (6, 38), (0, 5), (1, 16), (2, 270)]


class Case(Enum):
    """What a batch of two layers has besides plain sequences."""

    PLAIN = "plain"
    MOVED = "moved"


def case(which: Case, dtype: torch.dtype, shape: Shape | None = None) -> World:
    """A batch of mixed lengths: slots at their own positions, or holding other ones."""
    if which is Case.PLAIN:
        return full_batch(dtype, shape)
    shape = _shape(dtype, shape)
    asks = [
        Ask(1, 30, shift=9, slot_positions=random_positions(1, shape, 25, 9)),
        Ask(1, 30),
        Ask(3, 30, shift=4, slot_positions=random_positions(2, shape, 27, 4)),
        Ask(1, 21, shift=100),
        Ask(12, 12),
        Ask(5, 40, shift=13, slot_positions=random_positions(3, shape, 20, 13)),
    ]
    return world(shape, asks)


def full_batch(dtype: torch.dtype, shape: Shape | None = None) -> World:
    return world(_shape(dtype, shape), [Ask(*lengths) for lengths in MIXED])


def _shape(dtype: torch.dtype, shape: Shape | None) -> Shape:
    return shape if shape is not None else Shape(layers=2, dtype=dtype)


def random_positions(seed: int, shape: Shape, slots: int, shift: int) -> Tensor:
    """[L, K, slots] int32: ascending positions of the survivors among slots + shift tokens."""
    order = noise(seed, shape.layers, shape.kv_heads, slots + shift).argsort(-1)[..., :slots]
    return order.sort(-1).values.to(torch.int32)


def expected_sums(w: World, layer: int = 0, *, sinks: Tensor | None = None, **how) -> Tensor:
    """[N, K, C] float64: each query's softmax by the definition, added up."""
    out = torch.zeros(len(w.asks), w.shape.kv_heads, max(ask.seq_len for ask in w.asks), dtype=torch.float64)
    scale, softcap = how.get("scale", w.shape.dim**-0.5), how.get("softcap")
    first = 0
    for n, (ask, keys) in enumerate(zip(w.asks, w.keys, strict=True)):
        for i in range(ask.query_len):
            slot = ask.seq_len - ask.query_len + i
            for head in range(w.shape.heads):
                kv_head = head // w.shape.group
                seen = [
                    s for s in range(slot + 1) if is_seen(ask, layer, kv_head, s, slot, how.get("window"))
                ]
                sink = None if sinks is None else sinks[head].item()
                probs = _softmax(
                    w.q[layer, first + i, head], keys[layer, kv_head, seen], scale, softcap, sink
                )
                out[n, kv_head, seen] += probs
        first += ask.query_len
    return out


def _softmax(q: Tensor, k: Tensor, scale: float, softcap: float | None, sink: float | None) -> Tensor:
    """[seen] float64."""
    scores = (k.double() @ q.double()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sink is not None:
        scores = torch.cat([scores, scores.new_tensor([sink])])
    return scores.softmax(-1)[: len(k)]
