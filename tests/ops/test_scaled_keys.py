"""A back-end over scaled keys: it answers as if keys were stored as they are, and codes lose less."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from format_cases import (
    KINDS,
    SHAPES,
    SMALL,
    check_attention,
    check_cells,
    check_column_sums,
    check_compact,
    check_scores,
)
from format_fill import Rig, facts_of, fill
from paged_oracle import Ask, Shape, noise

from kvreclaim.ops import native, reference
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, BatchArrays, SequenceSlots
from kvreclaim.ops.cells import cell_batch, cell_layers, natural_cells
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.kv_cache import KVCache, PagedTokens
from kvreclaim.ops.scaled_keys import ScaledKeys

BACKENDS = [reference] if native.unavailable_reason() else [reference, native]
PLAIN_SHAPES = [shape for shape in SHAPES.values() if not shape.latent]


def scale_of(layer: int, facts: LayerFacts) -> torch.Tensor:
    """[K, D] powers of two. The last half of the dims is rotated (check_scores), in either style: there they
    are equal in 2i and 2i + 1, and in i and i + D / 4."""
    heads, dim = facts.num_kv_heads, facts.head_dim
    exponents = noise(layer, heads, dim // 2 + dim // 8).mul(3).round().clamp(-6, 6)
    rest, bands = exponents.exp2().split([dim // 2, dim // 8], -1)
    return torch.cat([rest, bands.repeat_interleave(2, -1).repeat(1, 2)], -1)


@dataclass(frozen=True, slots=True)
class Scaled(ScaledKeys):
    """With scales of its own for every layer."""

    def allocate(self, layers: tuple[LayerFacts, ...], *args: Any, **kwargs: Any) -> KVCache:
        own = [
            replace(layer, softmax=replace(layer.softmax, key_scale=scale_of(n, layer)))
            for n, layer in enumerate(layers)
        ]
        found: KVCache = self.backend.allocate(tuple(own), *args, **kwargs)
        return found


@pytest.fixture(params=["fp32", "int8", "fp8_e4m3", "int4", "turboquant4"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.NAME)
def rig(request: pytest.FixtureRequest, form: str) -> Rig:
    slack = 1e-6 if request.param is reference else 5e-4
    return Rig(Scaled(request.param), FORMATS[form], slack=slack)


def test_all_that_sees_a_key_or_a_query_scales_it() -> None:
    """What moves whole codes, or sees none, goes to the other back-end as it is."""
    unscaled = {
        "allocate",
        "plain_view",
        "unsupported_reason",
        "compact",
        "select_runs",
        "select_top",
        "copy_blocks",
        "prepare_blocks",
    }
    every = {name for name, member in vars(Backend).items() if callable(member) and name[0] != "_"}
    assert unscaled < every
    assert every - unscaled <= vars(ScaledKeys).keys()


@pytest.mark.parametrize("shape", PLAIN_SHAPES, ids=lambda s: f"d{s.dim}")
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_every_op_sees_keys_as_they_are(rig: Rig, shape: Shape, style: str) -> None:
    w = fill(rig, shape, KINDS["mixed"])
    check_attention(rig, w)
    check_column_sums(rig, w)
    check_scores(rig, w, style=style)


def test_moves_and_cells(rig: Rig) -> None:
    check_compact(rig, SMALL, 70, 33)
    check_compact(rig, SMALL, 70, 33, in_place=False)
    check_cells(rig, SMALL, 50)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.NAME)
def test_attention_over_exact_keys_is_the_same_to_the_bit(backend) -> None:
    asks = KINDS["mixed"]
    scaled, plain = (fill(Rig(ops, FORMATS["fp32"]), SMALL, asks) for ops in (Scaled(backend), backend))
    for layer in range(SMALL.layers):
        args = scaled.q[layer], scaled.cache.layers[layer], scaled.batch
        want = backend.paged_attention(plain.q[layer], plain.cache.layers[layer], plain.batch)
        assert torch.equal(Scaled(backend).paged_attention(*args), want)
        assert not torch.equal(backend.paged_attention(*args), want)  # the bytes do differ


@pytest.mark.parametrize("query_lens", [(1, 1), (3, 1)])
def test_heads_as_sequences(rig: Rig, query_lens: tuple[int, ...]) -> None:
    """Attention over cells is that over blocks, for each KV head."""
    w = fill(rig, SMALL, [Ask(n, 40 + n) for n in query_lens])
    heads, group = SMALL.kv_heads, SMALL.group
    for layer, own in enumerate(cell_layers(w.cache)):
        tables = np.concatenate([natural_cells(w.cache, s.block_ids)[layer] for s in w.batch.sequences])
        lengths = np.repeat([s.seq_len for s in w.batch.sequences], heads)
        lens = np.repeat(query_lens, heads)
        slots = zip(tables, lens.tolist(), lengths.tolist(), strict=True)
        given: BatchArrays = AttentionBatch.build(
            tuple(SequenceSlots(*each) for each in slots), SMALL.block_size, rig.device
        ).arrays
        batch = cell_batch(tables, lengths, lens, given, SMALL.block_size)
        by_sequence = [x.unflatten(1, (heads, group)) for x in w.q[layer].split(query_lens)]
        q = torch.cat([x.transpose(0, 1).flatten(0, 1) for x in by_sequence])
        found = rig.backend.paged_attention(q, own, batch)
        rows = found.split([n * heads for n in query_lens])
        parts = [x.unflatten(0, (heads, -1)).transpose(0, 1) for x in rows]
        want = rig.backend.paged_attention(w.q[layer], w.cache.layers[layer], w.batch)
        torch.testing.assert_close(torch.cat(parts).flatten(1, 2), want, rtol=1e-4, atol=1e-4)


def test_codes_of_small_channels_do_not_pay_for_large_ones() -> None:
    """Error of an int8 score <= sum over channels of |q_c| d_c s / 2 with s = max |k_c / d_c| / 127: where
    all d are one, s follows the largest channel."""
    q, k = noise(1, 32), noise(2, 512, 32)
    large = torch.ones(32)
    large[[3, 19]] = 256.0  # a rotary band
    k, q = k * large, q / large.sqrt()

    def errors(scale: torch.Tensor) -> torch.Tensor:
        (facts,) = facts_of(Shape(kv_heads=1, group=1, dim=32))
        own = replace(facts, softmax=replace(facts.softmax, key_scale=scale[None]))
        ops: Any = ScaledKeys(reference)
        cache = ops.allocate((own,), 32, 16, like=torch.empty(0), kv_format=FORMATS["int8"])
        ops.write_kv(cache.layers[0], k[:, None], k[:, None], torch.arange(512))
        got = ops.gather_tokens(PagedTokens(cache.layers[0], torch.arange(32), 512))[0][0]
        bound = (q.abs() * scale).sum() * (k / scale).abs().amax(-1) / 254
        off = ((got - k) @ q).abs()
        assert (off <= bound * 1.001).all()
        return off

    assert errors(large).max() < errors(torch.ones(32)).max() / 8
