"""A back-end over transformed keys: it answers as if keys were stored as they are, and codes lose less."""

from __future__ import annotations

from dataclasses import replace
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
from transformed_rig import Transformed

from kvreclaim.ops import native, reference
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, BatchArrays, SequenceSlots
from kvreclaim.ops.cells import cell_batch, cell_layers, natural_cells
from kvreclaim.ops.formats import FORMATS
from kvreclaim.ops.key_transform import KeyTransform
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.transformed_keys import TransformedKeys

BACKENDS = [reference] if native.unavailable_reason() else [reference, native]
PLAIN_SHAPES = [shape for shape in SHAPES.values() if not shape.latent]


@pytest.fixture(params=["fp32", "int8", "int8+int4", "fp8_e4m3", "int4", "turboquant4"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.NAME)
def rig(request: pytest.FixtureRequest, form: str) -> Rig:
    slack = 1e-6 if request.param is reference else 5e-4
    return Rig(Transformed(request.param), FORMATS[form], slack=slack)


def test_all_that_sees_a_key_or_a_query_transforms_it() -> None:
    """What moves whole codes, or sees none, goes to the other back-end as it is."""
    untouched = {
        "allocate",
        "plain_view",
        "unsupported_reason",
        "transform_rows",
        "compact",
        "select_runs",
        "select_top",
        "copy_blocks",
        "prepare_blocks",
    }
    every = {name for name, member in vars(Backend).items() if callable(member) and name[0] != "_"}
    assert untouched < every
    assert every - untouched <= vars(TransformedKeys).keys()


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
def test_attention_over_exact_scaled_keys_is_the_same_to_the_bit(backend) -> None:
    asks, own = KINDS["mixed"], Transformed(backend, centred=False)
    scaled, plain = (fill(Rig(ops, FORMATS["fp32"]), SMALL, asks) for ops in (own, backend))
    for layer in range(SMALL.layers):
        args = scaled.q[layer], scaled.cache.layers[layer], scaled.batch
        want = backend.paged_attention(plain.q[layer], plain.cache.layers[layer], plain.batch)
        assert torch.equal(own.paged_attention(*args), want)
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


def errors(transform: KeyTransform, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Errors of int8 scores, each at most the sum over channels of |q_c| d_c s / 2 with the step
    s = max |k'_c| / 127 of the stored key k'."""
    (facts,) = facts_of(Shape(kv_heads=1, group=1, dim=32))
    own = replace(facts, softmax=replace(facts.softmax, keys=transform))
    ops: Any = TransformedKeys(reference)
    cache = ops.allocate((own,), 32, 16, like=torch.empty(0), kv_format=FORMATS["int8"])
    ops.write_kv(cache.layers[0], k[:, None], k[:, None], torch.arange(512))
    got = ops.gather_tokens(PagedTokens(cache.layers[0], torch.arange(32), 512))[0][0]
    stored = (k - transform.center) / transform.scale
    bound = (q.abs() * transform.scale).sum() * stored.abs().amax(-1) / 254
    off = ((got - k) @ q).abs()
    assert (off <= bound * 1.01).all()
    return off


def test_codes_of_small_channels_do_not_pay_for_large_ones() -> None:
    q, k, none = noise(1, 32), noise(2, 512, 32), torch.zeros(1, 32)
    large = torch.ones(32)
    large[[3, 19]] = 256.0  # a rotary band
    k, q = k * large, q / large.sqrt()
    plain = errors(KeyTransform(torch.ones(1, 32), none), q, k)
    assert errors(KeyTransform(large[None], none), q, k).max() < plain.max() / 8


def test_codes_do_not_pay_for_what_all_keys_share() -> None:
    q, offset, ones = noise(1, 32), torch.zeros(1, 32), torch.ones(1, 32)
    offset[0, 3] = 256.0
    k = noise(2, 512, 32) + offset
    plain = errors(KeyTransform(ones, 0 * offset), q, k)
    assert errors(KeyTransform(ones, offset), q, k).max() < plain.max() / 8
