"""The ops of any back-end over any format, each compared with its definition in fp64 over what gather_tokens
returns of the same cache: check_* for tests of all back-ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from column_sums_oracle import expected_sums, random_positions
from format_fill import CPU, Filled, Rig, fill, ids_on, inputs_of, read, write, written
from paged_oracle import Ask, Shape, expected, noise, under
from torch import Tensor

from kvreclaim.ops import scoring
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.cells import cell_view, head_tokens, natural_cells
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.rope import RopeLayout

__all__ = ["Rig", "fill"]

NAMES = tuple(FORMATS)
CODED = tuple(name for name in NAMES if not FORMATS[name].is_plain)
SHAPES = {
    "d8": Shape(kv_heads=1, group=1, dim=8),
    "d24 v40 g7": Shape(kv_heads=2, group=7, dim=24, v_dim=40),
    "d32 g2": Shape(kv_heads=2, group=2, dim=32, layers=2),
    "d64 g4": Shape(kv_heads=2, group=4, dim=64),
    "d80 v40 g3 s32": Shape(kv_heads=1, group=3, dim=80, v_dim=40, block_size=32),
    "d128 g8": Shape(kv_heads=1, group=8, dim=128),
    "latent": Shape(kv_heads=1, group=5, dim=48, v_dim=32, latent=True, layers=2),
}
SMALL = SHAPES["d32 g2"]
KINDS = {
    "decode": [Ask(1, 1), Ask(1, 2), Ask(1, 16), Ask(1, 17), Ask(1, 100), Ask(1, 64)],
    "prefill": [Ask(1, 1), Ask(3, 3), Ask(16, 16), Ask(37, 37)],
    "chunks": [Ask(1, 40), Ask(2, 17), Ask(8, 24), Ask(9, 70)],
    "mixed": [Ask(1, 70), Ask(20, 20), Ask(0, 5), Ask(1, 1), Ask(6, 38), Ask(1, 16)],
}
HOW = {
    "softcap+window": {"softcap": 1.5, "window": 7},
    "sinks": {"sinks": True},
    "sinks+window": {"sinks": True, "window": 20},
    "scale": {"scale": 1.3},
}
"""Arguments of attention; sinks: True stands for a logit per query head."""


def check_written(rig: Rig, w: Filled) -> None:
    """gather_tokens returns what the codecs say; a tie of two codes may fall the other way."""
    for ask, (k, v) in enumerate(w.inputs):
        for got, want in zip((w.keys[ask], w.values[ask]), written(rig.fmt, k, v, w.shape), strict=True):
            assert got.shape == want.shape
            assert got.isfinite().all()
            off = (got.double() - want.double()).abs() > 1e-5 * want.double().abs() + 1e-6
            assert off.sum() <= 1e-3 * off.numel(), f"{int(off.sum())} of {off.numel()} numbers differ"
            assert ((got.double() - want.double()).abs() <= 0.2 * want.abs().amax() + 1e-6).all()


def on_device(rig: Rig, w: Filled, how: dict[str, Any]) -> tuple[AttentionBatch, dict[str, Any]]:
    def there(x: Any) -> Any:
        return x.to(rig.device) if isinstance(x, Tensor) else x

    sequences = tuple(replace(seq, slot_positions=there(seq.slot_positions)) for seq in w.batch.sequences)
    batch = AttentionBatch.build(sequences, w.shape.block_size, rig.device)
    return batch, {name: there(x) for name, x in {"scale": w.shape.dim**-0.5, **how}.items()}


def with_sinks(shape: Shape, how: dict[str, Any]) -> dict[str, Any]:
    return {**how, "sinks": torch.linspace(-2, 3, shape.heads)} if how.get("sinks") else how


def check_attention(rig: Rig, w: Filled, **how: Any) -> None:
    how = with_sinks(w.shape, how)
    batch, there = on_device(rig, w, how)
    for layer in range(w.shape.layers):
        got = rig.backend.paged_attention(w.q[layer].to(rig.device), under(w.cache, layer, **there), batch)
        assert got.dtype == rig.dtype
        largest = max((v.abs().max().item() for v in w.values), default=0.0)
        tolerance = {**rig.tolerance, "atol": rig.tolerance["atol"] * max(1, largest) + rig.slack * largest}
        torch.testing.assert_close(got.cpu().double(), expected(w, layer, **how), **tolerance)


def check_column_sums(rig: Rig, w: Filled, **how: Any) -> None:
    how = with_sinks(w.shape, how)
    batch, there = on_device(rig, w, how)
    for layer in range(w.shape.layers):
        got = rig.backend.column_sums(w.q[layer].to(rig.device), under(w.cache, layer, **there), batch)
        assert got.dtype == torch.float32
        want = expected_sums(w, layer, **how)
        most = max(1.0, want.max().item())
        close = {"rtol": 1e-5, "atol": (1e-5 + rig.slack) * most}
        torch.testing.assert_close(got.cpu().double(), want, **close)


def check_scores(rig: Rig, w: Filled, ask: int = 0, *, style: str = "half") -> None:
    """trig_norm_scores, mixture_scores, surrogate_scores and token_norms."""
    shape, dim = w.shape, w.shape.dim
    turned = dim - shape.v_dim if shape.latent else dim // 2
    bands = turned // 2
    frequencies = torch.linspace(1, 0.01, bands, dtype=torch.float64)
    layout = RopeLayout(frequencies, style, dim - 2 * bands)  # type: ignore[arg-type]
    queries, weights = noise(1, shape.heads, 3, dim), noise(2, shape.heads, bands)
    centers, variances = noise(3, shape.heads, 3, 2, dim), noise(4, shape.heads, 3, dim).square()
    length = w.asks[ask].seq_len
    over, scale = slice(min(4, length - 1), length), dim**-0.5
    for layer in range(shape.layers):
        tokens = w.tokens(ask, layer)
        k, v = w.keys[ask][layer].double(), w.values[ask][layer].double()
        there = [x.to(rig.device) for x in (queries, weights, centers, variances)]
        trig = rig.backend.trig_norm_scores(tokens, there[0], there[1], layout)
        size = scoring.trig_norm_scores(k.abs(), queries.double().abs(), weights.double().abs(), layout)
        want = scoring.trig_norm_scores(k, queries.double(), weights.double(), layout)
        assert ((trig.cpu() - want).abs() <= (2e-6 + rig.slack) * size.amax()).all()
        mixture = rig.backend.mixture_scores(tokens, there[2], there[3], scale, over)
        want = scoring.mixture_scores(k, centers.double(), variances.double(), scale, over)
        most = want.abs().amax().item()
        close = {"rtol": 1e-4, "atol": rig.slack * most + 1e-30}
        torch.testing.assert_close(mixture.cpu(), want, **close)
        check_surrogate(rig, tokens, (k, v), layout)
        check_surrogate(rig, tokens, (k, v), None)
        for values, x in ((False, k), (True, v)):
            got = rig.backend.token_norms(tokens, values=values)
            torch.testing.assert_close(got.cpu().double(), x.norm(dim=-1), rtol=1e-5, atol=1e-6)
    if rig.backend.NAME != "native":
        check_stacked(rig, w, ask, layout)


def check_stacked(rig: Rig, w: Filled, ask: int, layout: RopeLayout) -> None:
    """Scores, keys and values of several layers as one are those of each, with queries of its own."""
    layers, shape, dim = tuple(range(w.shape.layers))[::-1], w.shape, w.shape.dim
    slots, count = w.batch.sequences[ask], len(layers)
    stacked = PagedTokens.of_layers(w.cache, layers, ids_on(w.cache, slots.block_ids), slots.seq_len)
    assert stacked.num_heads == count * shape.kv_heads
    over, scale = slice(min(4, slots.seq_len - 1), slots.seq_len), dim**-0.5
    features = scoring.surrogate_features(w.keys[ask][0], w.values[ask][0], layout).shape[-1]
    rows = (
        noise(1, count, shape.heads, 3, dim),
        noise(2, count, shape.heads, layout.num_bands),
        noise(3, count, shape.heads, 3, 2, dim),
        noise(4, count, shape.heads, 3, dim).square(),
        noise(7, count, shape.kv_heads, features),
    )

    def scores(tokens: PagedTokens, queries: Tensor, weights: Tensor, *rest: Tensor) -> list[Tensor]:
        backend = rig.backend
        return [
            *backend.gather_tokens(tokens),
            backend.trig_norm_scores(tokens, queries, weights, layout),
            backend.mixture_scores(tokens, rest[0], rest[1], scale, over),
            backend.surrogate_scores(tokens, rest[2], layout),
            *(backend.token_norms(tokens, values=values) for values in (False, True)),
        ]

    found = scores(stacked, *(x.flatten(0, 1).to(rig.device) for x in rows))
    parts = [scores(w.tokens(ask, n), *(x[i].to(rig.device) for x in rows)) for i, n in enumerate(layers)]
    for got, own in zip(found, zip(*parts, strict=True), strict=True):
        want = torch.cat(own)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6 * want.abs().amax().item())


def check_surrogate(
    rig: Rig, tokens: PagedTokens, held: tuple[Tensor, Tensor], layout: RopeLayout | None
) -> None:
    """surrogate_scores of the tokens, whose keys and values are `held` in fp64."""
    rows = scoring.surrogate_features(*held, layout)
    weights = noise(7, rows.shape[0], rows.shape[-1])
    got = rig.backend.surrogate_scores(tokens, weights.to(rig.device), layout)
    assert got.dtype == torch.float32
    want = (rows @ weights.double()[..., None])[..., 0]
    size = (rows.abs() @ weights.double().abs()[..., None])[..., 0]
    assert ((got.cpu() - want).abs() <= (2e-6 + rig.slack) * size.amax()).all()


def random_kept(heads: tuple[int, int], num_tokens: int, num_kept: int, seed: int = 3) -> Tensor:
    """[L, K, M] ascending; every one of heads [L, K] keeps others."""
    order = noise(seed, *heads, num_tokens).argsort(-1)
    return order[..., :num_kept].sort(-1).values


def check_compact(rig: Rig, shape: Shape, num_tokens: int, num_kept: int, *, in_place: bool = True) -> Filled:
    """Kept tokens keep their numbers, bit for bit; other blocks their bytes. Then more tokens are written and
    attended."""
    w = fill(rig, shape, [Ask(1, num_tokens), Ask(1, 21)])
    kept = random_kept((w.shape.layers, w.shape.kv_heads), num_tokens, num_kept)
    table, blocks = w.batch.sequences[0].block_ids, -(-num_kept // shape.block_size)
    target = table[:blocks] if in_place else np.array(w.spare[:blocks], dtype=np.int32)
    others = [b for b in range(w.cache.num_blocks) if b not in target.tolist()]
    if not in_place:
        rig.backend.prepare_blocks(w.cache, target.tolist())
    before = [plane[:, others].clone() for plane in w.cache.planes]
    old = w.keys[0], w.values[0]
    ids = ids_on(w.cache, table), ids_on(w.cache, target)
    rig.backend.compact(w.cache, kept.to(rig.device), *ids)
    for plane, bytes_ in zip(w.cache.planes, before, strict=True):
        assert same_bits(plane[:, others], bytes_)
    grown = np.concatenate([target, np.array(w.spare[blocks : blocks + 2], dtype=np.int32)])
    rig.backend.prepare_blocks(w.cache, grown[blocks:].tolist())
    w.asks[0] = Ask(1, num_kept)
    moved(rig, w, grown, num_kept)
    for got, was in zip((w.keys[0], w.values[0]), old, strict=True):
        want = was.gather(2, kept[..., None].expand(-1, -1, -1, was.shape[-1]))
        assert same_bits(got, want)
    more = inputs_of(w.shape, Ask(5, 5), 77)
    write(rig, w.cache, grown, num_kept, more)
    w.asks[0] = Ask(1, num_kept + 5)
    moved(rig, w, grown, num_kept + 5)
    check_attention(rig, w)
    return w


def moved(rig: Rig, w: Filled, table: np.ndarray, length: int) -> None:
    """The first sequence has another table and length."""
    slots = (SequenceSlots(table, 1, length), *w.batch.sequences[1:])
    w.batch = AttentionBatch.build(slots, w.shape.block_size, CPU)
    read(rig, w)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def check_copy_blocks(rig: Rig, shape: Shape, num_tokens: int) -> None:
    """A copy holds the same tokens, what is written to it later is not in the original; other bytes stay."""
    w = fill(rig, shape, [Ask(1, num_tokens), Ask(1, 7)])
    table = w.batch.sequences[0].block_ids
    copy = np.array(w.spare[: len(table)], dtype=np.int32)
    pairs = list(zip(table.tolist(), copy.tolist(), strict=True))
    rig.backend.prepare_blocks(w.cache, copy.tolist())
    others = [b for b in range(w.cache.num_blocks) if b not in copy.tolist()]
    before = [plane[:, others].clone() for plane in w.cache.planes]
    rig.backend.copy_blocks(w.cache, pairs)
    for plane, bytes_ in zip(w.cache.planes, before, strict=True):
        assert same_bits(plane[:, others], bytes_)
    old = w.keys[0], w.values[0]
    moved(rig, w, copy, num_tokens)
    assert all(same_bits(x, y) for x, y in zip((w.keys[0], w.values[0]), old, strict=True))
    room = -num_tokens % shape.block_size
    if room:
        write(rig, w.cache, copy, num_tokens, inputs_of(w.shape, Ask(room, room), 99))
    moved(rig, w, table, num_tokens)
    assert all(same_bits(x, y) for x, y in zip((w.keys[0], w.values[0]), old, strict=True))


def check_copies_at_once(rig: Rig, shape: Shape, num_tokens: int) -> None:
    """Blocks that are sources and targets of one call: all are read before one is written."""
    w = fill(rig, shape, [Ask(1, num_tokens), Ask(1, num_tokens)])
    one, two = (seq.block_ids for seq in w.batch.sequences)
    spare = np.array(w.spare[: len(one)], dtype=np.int32)
    rig.backend.prepare_blocks(w.cache, spare.tolist())
    chain = [*zip(two, one, strict=True), *zip(one, spare, strict=True)]
    rig.backend.copy_blocks(w.cache, [(int(source), int(target)) for source, target in chain])
    old = [w.keys[1], w.values[1], w.keys[0], w.values[0]]
    slots = tuple(SequenceSlots(table, 1, num_tokens) for table in (one, spare))
    w.batch = AttentionBatch.build(slots, shape.block_size, CPU)
    read(rig, w)
    got = [w.keys[0], w.values[0], w.keys[1], w.values[1]]
    assert all(same_bits(x, y) for x, y in zip(got, old, strict=True))


def check_cells(rig: Rig, shape: Shape, num_tokens: int) -> None:
    """Blocks of one head as a cache of their own: the same tokens, and heads that keep different numbers."""
    w = fill(rig, shape, [Ask(1, num_tokens)])
    view = cell_view(w.cache)
    cells = natural_cells(w.cache, w.batch.sequences[0].block_ids)
    for layer in range(shape.layers):
        for head in range(shape.kv_heads):
            ids = ids_on(view, cells[layer, head])
            whose = torch.full_like(ids, head)
            k, v = rig.backend.gather_tokens(head_tokens(w.cache, layer, ids, num_tokens, whose))
            old = w.keys[0][layer, head], w.values[0][layer, head]
            assert same_bits(k[0].cpu(), old[0])
            assert same_bits(v[0].cpu(), old[1])
            count = num_tokens - (3 * head + layer + 1)
            kept = random_kept((1, 1), num_tokens, count, seed=head)
            target = ids[: -(-count // shape.block_size)]
            rig.backend.compact(view, kept.to(rig.device), ids, target)
            k, v = rig.backend.gather_tokens(head_tokens(w.cache, layer, target, count, whose[: len(target)]))
            for got, was in ((k[0].cpu(), old[0]), (v[0].cpu(), old[1])):
                assert same_bits(got, was[kept[0, 0]])


def relocated(shape: Shape) -> list[Ask]:
    """Sequences whose heads hold other positions, as after a compaction; for windows."""
    return [
        Ask(1, 30, shift=9, slot_positions=random_positions(1, shape, 25, 9)),
        Ask(1, 30),
        Ask(3, 30, shift=4, slot_positions=random_positions(2, shape, 27, 4)),
        Ask(5, 40, shift=13, slot_positions=random_positions(3, shape, 20, 13)),
    ]
