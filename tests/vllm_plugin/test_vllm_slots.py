"""KV dtypes whose slots hold scales beside the tokens: moved with them, byte for byte, against a list of
slots; read as vLLM's own kernels read them."""

from __future__ import annotations

import usable_triton  # noqa: F401 (before anything that imports vLLM)

# isort: split
from typing import Any

import pytest
import torch
from slot_worlds import PER_TOKEN_HEAD, SCALE, G, S, attend, expected, layers_of
from test_vllm_layouts import B, D, K, L
from torch import Tensor, nn
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.v0_32 import attention, cells_side
from kvreclaim.integrations.vllm.worker.cells.grid import find_grid
from kvreclaim.integrations.vllm.worker.cells.heads import StepCells
from kvreclaim.integrations.vllm.worker.cells.self_test import prove_cells
from kvreclaim.integrations.vllm.worker.centred_layer import CentredKeys, centre, transform_of
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.key_transform import KeyTransform

TOKENS = 43
TABLE, TARGET = (6, 1, 4), (1, 7)
CASES = [(PER_TOKEN_HEAD[0], KVCacheLayout.BLNHC), (PER_TOKEN_HEAD[1], KVCacheLayout.LHBNC)]
CASES += [(PER_TOKEN_HEAD[2], KVCacheLayout.LBHNC)]
CASES += [(dtype, KVCacheLayout.LBNHC) for dtype in ("turboquant_k8v4", "turboquant_3bit_nc")]
"""The other two of TurboQuant have the keys and values of these, or 4 bits where these have 3."""
NEAR = {"int8": 0.01, "fp8_": 0.08, "int4": 0.15, "turb": 0.3}
"""Mean error over the norm of a token, by the first letters of a dtype."""


def slots_in(cache: Tensor, table: tuple[int, ...], num_tokens: int) -> list[list[bytes]]:
    """Bytes of every token's slot in each KV head, in token order."""
    raw = cache.view(torch.uint8)
    places = [(block, place) for block in table for place in range(S)][:num_tokens]
    return [[bytes(raw[block, head, place].tolist()) for block, place in places] for head in range(K)]


@pytest.mark.parametrize(("dtype", "layout"), CASES, ids=lambda x: getattr(x, "name", x))
def test_slots_move_whole_and_are_read_as_vllm_reads_them(dtype: str, layout: KVCacheLayout) -> None:
    layers = layers_of(dtype, layout)
    caches = [attention.layer_cache(layer, torch.float32) for layer in layers]
    views = CacheViews(caches, B)
    views.prove()
    noise = torch.Generator().manual_seed(5)
    where = torch.tensor([block * S + place for block in TABLE for place in range(S)])[:TOKENS]
    kept = torch.stack([torch.randperm(TOKENS, generator=noise)[:21].sort().values for _ in range(L * K)])
    kept = kept.view(L, K, -1)
    shadows, others = [], []
    for n, cache in enumerate(caches):
        keys, values = (torch.randn(TOKENS, K, D, generator=noise) * 2 for _ in range(2))
        cache.write(keys, values, where)
        shadows.append(slots_in(layers[n].kv_cache, TABLE, TOKENS))
        others.append(layers[n].kv_cache[[0, 4, 5]].clone())
        for part, written in enumerate((keys, values)):
            found = views.read(n, views.block_ids(TABLE), TOKENS, part) - written.transpose(0, 1)
            error = torch.linalg.vector_norm(found, dim=-1) / torch.linalg.vector_norm(written, dim=-1).T
            assert float(error.mean()) < NEAR[dtype[:4]]
    before = [[views.read(n, views.block_ids(TABLE), TOKENS, part) for part in (0, 1)] for n in range(L)]
    views.compact(kept, views.block_ids(TABLE), views.block_ids(TARGET))
    for n, layer in enumerate(layers):
        survivors = [[shadows[n][head][slot] for slot in kept[n, head].tolist()] for head in range(K)]
        assert slots_in(layer.kv_cache, TARGET, 21) == survivors
        assert torch.equal(layer.kv_cache[[0, 4, 5]], others[n])
    queries = torch.randn(2 * K, D, generator=noise)
    keys, values = (tokens.take_along_dim(kept[n][..., None], 1) for tokens in before[n])
    found = attend(layers[n], queries, list(TARGET), 21)
    torch.testing.assert_close(found, expected(queries, keys, values), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("dtype", PER_TOKEN_HEAD)
def test_cells_with_scales_are_attended_over(dtype: str) -> None:
    """vLLM's kernel over cells of any layer and head, against softmax over what they hold."""
    layers = layers_of(dtype, KVCacheLayout.BLNHC if dtype == PER_TOKEN_HEAD[0] else KVCacheLayout.LBHNC)
    views = CacheViews([attention.layer_cache(layer, torch.float32) for layer in layers], B)
    grid = find_grid(views)

    def attend_cells(index: int, rows: Tensor, step: StepCells) -> Tensor:
        answers = torch.empty_like(rows)
        impl = layers[index].impl
        impl.reclaim = cells_side.LayerCells(index, grid.view)
        impl.attend_cells(layers[index], rows, answers, step)
        return answers

    prove_cells(views, grid, [LayerFacts(G * K, K, D, D, Softmax(SCALE))] * L, attend_cells)


class SlotAttention(nn.Module):
    """Stores tokens in a layer's cache and has the last one attend to all of them."""

    num_heads, num_kv_heads, head_size = G * K, K, D

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slots = torch.tensor([block * S + place for block in TABLE for place in range(S)])[: len(key)]
        attention.layer_cache(self.layer, torch.float32).write(key, value, slots)
        return attend(self.layer, query[-1], list(TABLE), len(key))


class CentredSlotAttention(CentredKeys, SlotAttention):
    pass


@pytest.mark.parametrize("dtype", [*PER_TOKEN_HEAD, "turboquant_k8v4", "turboquant_3bit_nc"])
def test_centred_keys_lose_less(dtype: str) -> None:
    """Keys far from zero lose less; and policies read them as they were."""
    noise = torch.Generator().manual_seed(7)
    center = 40 * torch.randn(K, D, generator=noise) * (torch.rand(K, D, generator=noise) < 0.25)
    keys = center + torch.randn(TOKENS, K, D, generator=noise)
    values = torch.randn(TOKENS, K, D, generator=noise)
    queries = torch.randn(TOKENS, G * K, D, generator=noise)
    exact = expected(queries[-1], keys.transpose(0, 1), values.transpose(0, 1))
    layers = layers_of(dtype, KVCacheLayout.LBNHC)
    plain, centred = SlotAttention(layers[0]), SlotAttention(layers[1])
    own = KeyTransform(2.0 ** torch.randint(-1, 2, (K, D), generator=noise), center)
    centre(centred, CentredSlotAttention, own, keys)
    lost, left = (
        float((each(queries, keys, values) - exact).square().mean().sqrt()) for each in (plain, centred)
    )
    assert left < lost / 2
    views = CacheViews([attention.layer_cache(layer, torch.float32) for layer in layers], B)
    views = views.restoring([None, transform_of(centred), None])
    errors = [views.read(n, views.block_ids(TABLE), TOKENS, 0) - keys.transpose(0, 1) for n in (0, 1)]
    assert float(errors[1].square().mean()) < float(errors[0].square().mean()) / 4


def test_a_format_that_is_another_one_is_refused() -> None:
    layers = layers_of("turboquant_3bit_nc", KVCacheLayout.LBNHC)
    for layer in layers:
        store = layer.impl.do_kv_cache_update

        def shifted(*args: Any, store: Any = store, cache: Tensor = layer.kv_cache) -> None:
            store(*args)
            cache.copy_(cache.roll(1, -1))

        layer.impl.do_kv_cache_update = shifted
    with pytest.raises(UnsupportedModelError, match="not where kvreclaim reads it"):
        CacheViews([attention.layer_cache(layer, torch.float32) for layer in layers], B).prove()
