"""Cells as bytes: what is read and written back, and tokens gathered from anywhere, are the same numbers."""

from __future__ import annotations

import pytest
import torch

from kvreclaim.ops import native, reference
from kvreclaim.ops.cells import cell_view
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import kv_format
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.units import gather_units, read_units, unit_bytes, unit_tokens, write_units

L, B, K, S, D = 2, 6, 3, 16, 32
FORMATS = ("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4", "turboquant4", "int8+int4")


def filled(backend, name):
    """A cache of random tokens."""
    layers = (LayerFacts(K, K, D, D, Softmax(1.0)),) * L
    cache = backend.allocate(layers, B, S, like=torch.empty(0), kv_format=kv_format(name, torch.float32))
    draw = torch.Generator().manual_seed(3)
    for layer in cache.layers:
        k, v = (torch.randn((B * S, K, D), generator=draw) for _ in range(2))
        backend.write_kv(layer, k, v, torch.arange(B * S))
    return cache


def tokens_of(backend, cache, layer, head):
    """[B * S, D] keys and values of one head."""
    k, v = backend.gather_tokens(PagedTokens(cache.layers[layer], torch.arange(B), B * S))
    return k[head], v[head]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", [reference, native], ids=lambda module: module.NAME)
def test_a_unit_is_a_cell(backend, name):
    cache = filled(backend, name)
    size, form = unit_bytes(cache), cache.format
    assert size * L * K == cache.bytes_per_block
    assert form.is_plain or size == form.unit_bytes(D, D, S)
    cells = torch.tensor([(0 * B + 4) * K + 1, (1 * B + 2) * K + 2])
    units = torch.empty((2, size), dtype=torch.uint8)
    read_units(cache, cells, units)
    before = [tokens_of(backend, cache, *at) for at in ((0, 1), (1, 2))]
    targets = torch.tensor([(1 * B + 0) * K + 0, (0 * B + 5) * K + 2])
    write_units(cache, units, targets)
    found = unit_tokens(backend, cache, targets, torch.zeros(len(targets), 2, dtype=torch.int64))
    for part in range(2):
        assert torch.equal(found[part][0], before[0][part][4 * S : 5 * S])
        assert torch.equal(found[part][1], before[1][part][2 * S : 3 * S])
    assert torch.equal(tokens_of(backend, cache, 1, 0)[0][:S], before[0][0][4 * S : 5 * S])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", [reference, native], ids=lambda module: module.NAME)
def test_tokens_come_from_anywhere_in_any_order(backend, name):
    cache = filled(backend, name)
    draw = torch.Generator().manual_seed(5)
    targets = torch.tensor([(0 * B + 5) * K + 0, (1 * B + 5) * K + 1])
    sources = torch.randint(0, (B - 1) * K, (2 * S,), generator=draw)
    slots = torch.randint(0, S, (2 * S,), generator=draw)
    view = cell_view(cache).layers[0]
    every = backend.gather_tokens(PagedTokens(view, torch.arange(L * B * K), L * B * K * S))
    gather_units(backend, cache, sources, slots, targets)
    found = unit_tokens(backend, cache, targets, torch.zeros(len(targets), 2, dtype=torch.int64))
    for part in range(2):
        assert torch.equal(found[part].flatten(0, 1), every[part][0][sources * S + slots])
