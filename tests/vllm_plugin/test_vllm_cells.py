"""Attention over cells by vLLM's own kernels, in every layout that vLLM allocates: on CPUs the kernel itself,
for GPUs Triton's under its interpreter (in float32: it takes the bits of bf16 for integers), and
FlashAttention's call by a stand-in that computes the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import usable_triton  # noqa: F401 (before anything that imports vLLM)

# isort: split
import pytest
import torch
from test_vllm_layouts import FP8, B, D, K, L, cpu_layer, flash_layer, gpu_caches, plain_spec
from torch import Tensor
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.refusals.loaded import BACKENDS
from kvreclaim.integrations.vllm.refusals.predicates import CACHE_DTYPES
from kvreclaim.integrations.vllm.v0_32 import attention, cells_side
from kvreclaim.integrations.vllm.worker.cells import self_test
from kvreclaim.integrations.vllm.worker.cells.grid import CellGrid, find_grid
from kvreclaim.integrations.vllm.worker.cells.heads import StepCells
from kvreclaim.integrations.vllm.worker.cells.self_test import prove_cells
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.ops.facts import LayerFacts, Softmax

G = 2
SCALE = 0.11
SOFTCAP = 30.0
FLASHINFER = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
LAYOUTS = pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
Make = Callable[[CellGrid, int], Any]
"""An implementation of attention with the cells of one layer."""


def facts(softcap: float | None = None) -> list[LayerFacts]:
    return [LayerFacts(G * K, K, D, D, Softmax(SCALE, softcap)) for _ in range(L)]


def prove(views: CacheViews, make: Make, softcap: float | None = None, layer: Any = None) -> CellGrid:
    """prove_cells with attend_cells of what make returns."""
    grid = find_grid(views)

    def attend(index: int, rows: Tensor, step: StepCells) -> Tensor:
        answers = torch.empty_like(rows)
        impl = make(grid, index)
        impl.attend(impl, layer, rows, answers, step)
        return answers

    before = [cache.cache.clone() for cache in views.layers]
    prove_cells(views, grid, facts(softcap), attend)
    assert all(torch.equal(a.cache, b) for a, b in zip(views.layers, before, strict=True)), "not restored"
    return grid


def gpu_views(layout: KVCacheLayout, dtype: torch.dtype = torch.bfloat16, kernel: int | None = None) -> Any:
    size = 32 if kernel else 16
    return CacheViews(
        [flash_layer(cache, dtype) for cache in gpu_caches(layout, plain_spec(size, dtype), kernel)], B
    )


def scaled_layer(k_scale: float = 1.0, v_scale: float = 1.0) -> Any:
    return SimpleNamespace(
        _q_scale=torch.ones(()), _k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale)
    )


def triton_impl(grid: CellGrid, index: int) -> Any:
    from kvreclaim.integrations.vllm.v0_32.cells_triton import CellsTritonImpl

    return SimpleNamespace(
        attend=CellsTritonImpl.attend_cells,
        reclaim=SimpleNamespace(view=grid.view, index=index),
        head_size=D,
        kv_cache_dtype="auto",
        fp8_dtype=torch.float8_e4m3fn,
        _kv_quant_mode=KVQuantMode.NONE,
        scale=SCALE,
        logits_soft_cap=0.0,
        use_td=False,
    )


@LAYOUTS
def test_triton_in_every_layout(layout: KVCacheLayout) -> None:
    grid = prove(gpu_views(layout, torch.float32), triton_impl, layer=scaled_layer())
    assert grid.natural(torch.arange(B).numpy()).size == len(set(grid.natural(torch.arange(B).numpy()).flat))


def test_triton_splits_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one query per row, in the buffers that vLLM has made for its own kernels."""
    monkeypatch.setattr(self_test, "QUERIES", (1, 1, 1))
    parts = 16
    metadata = SimpleNamespace(
        seq_threshold_3D=2,
        num_par_softmax_segments=parts,
        softmax_segm_output=torch.full((2, K * G, parts, D), torch.nan),
        softmax_segm_max=torch.full((2, K * G, parts), torch.nan),
        softmax_segm_expsum=torch.full((2, K * G, parts), torch.nan),
    )

    def make(grid: CellGrid, index: int) -> Any:
        def attend(impl: Any, layer: Any, rows: Tensor, answers: Tensor, step: StepCells) -> None:
            CellsTritonImpl.attend_cells(impl, layer, rows, answers, step, metadata)

        from kvreclaim.integrations.vllm.v0_32.cells_triton import CellsTritonImpl

        return SimpleNamespace(**{**vars(triton_impl(grid, index)), "attend": attend})

    prove(gpu_views(KVCacheLayout.LBNHC, torch.float32), make, layer=scaled_layer())
    used = metadata.softmax_segm_max.view(2 * K, G, parts).isfinite().any(-1).any(-1)
    assert used.tolist() == [True] * 3 + [False] * (2 * K - 3)


def test_triton_in_blocks_of_the_kernel() -> None:
    views = gpu_views(KVCacheLayout.LBNHC, torch.float32, kernel=16)
    assert prove(views, triton_impl, layer=scaled_layer()).block_size == 16


def test_triton_with_a_softcap() -> None:
    def make(grid: CellGrid, index: int) -> Any:
        return SimpleNamespace(**{**vars(triton_impl(grid, index)), "logits_soft_cap": SOFTCAP})

    views = gpu_views(KVCacheLayout.LBNHC, torch.float32)
    prove(views, make, SOFTCAP, scaled_layer())
    with pytest.raises(UnsupportedModelError, match="differs from what they hold"):
        prove(views, make, 1.0, scaled_layer())


def varlen(q: Tensor, k: Tensor, v: Tensor, out: Tensor, **call: Any) -> None:
    """Computes what flash_attn_varlen_func does with a block table, causal: K [blocks, S, heads, D]."""
    assert set(call) == {
        *("cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k", "softmax_scale", "causal"),
        *("window_size", "block_table", "softcap", "fa_version", "q_descale", "k_descale", "v_descale"),
        "num_splits",
    }
    assert call["causal"] is True
    assert call["window_size"] == [-1, -1]
    starts, lengths = call["cu_seqlens_q"].tolist(), call["seqused_k"].tolist()
    assert max(lengths) <= call["max_seqlen_k"]
    assert max(b - a for a, b in pairwise(starts)) <= call["max_seqlen_q"]
    for row, length in enumerate(lengths):
        blocks = call["block_table"][row, : -(-length // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:length, 0].float() for x in (k, v))
        queries = q[starts[row] : starts[row + 1]].float()
        logits = torch.einsum("qgd,td->qgt", queries, keys) * call["softmax_scale"]
        last = length - len(queries) + torch.arange(len(queries))
        hidden = torch.arange(length) > last[:, None, None]
        out[starts[row] : starts[row + 1]] = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values


def flash_impl(grid: CellGrid, index: int) -> Any:
    from kvreclaim.integrations.vllm.v0_32.cells_flash import CellsFlashImpl

    return SimpleNamespace(
        attend=CellsFlashImpl.attend_cells,
        reclaim=SimpleNamespace(view=grid.view, index=index),
        head_size=D,
        kv_cache_dtype="auto",
        scale=SCALE,
        logits_soft_cap=0.0,
        vllm_flash_attn_version=3,
        supports_quant_query_input=False,
    )


@pytest.mark.parametrize(
    ("rows", "bound", "expected"), [(992, 32, 32), (993, 32, 1), (993, 0, 0), (8, None, 0)]
)
def test_flash_attention_splits_keys(
    rows: int, bound: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Splits by vLLM's bound in a graph, else by the kernel's own choice; many rows fill a GPU unsplit."""
    from vllm.v1.attention.backends import flash_attn

    calls = list[int]()
    grid = find_grid(gpu_views(KVCacheLayout.LBNHC))
    lengths, starts = torch.ones(L, rows, dtype=torch.int32), torch.arange(rows + 1).int()
    step = StepCells(torch.zeros(L, rows, 1, dtype=torch.int32), lengths, starts, None, K, 1, 16)
    monkeypatch.setattr(
        flash_attn, "flash_attn_varlen_func", lambda **call: calls.append(call["num_splits"]), raising=False
    )
    impl, queries = flash_impl(grid, 0), torch.zeros(rows, G, D)
    metadata = None if bound is None else SimpleNamespace(max_num_splits=bound)
    impl.attend(impl, scaled_layer(), queries, queries, step, metadata)
    assert calls == [expected]


@LAYOUTS
def test_the_call_of_flash_attention(layout: KVCacheLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", varlen, raising=False)
    prove(gpu_views(layout), flash_impl, layer=scaled_layer())


def test_a_kernel_that_reads_elsewhere_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off by one cell, deaf to lengths, or blind to the mask."""
    from vllm.v1.attention.backends import flash_attn

    def wrong(change: Callable[[dict[str, Any]], None]) -> Any:
        def attend(**call: Any) -> None:
            change(call)
            varlen(**call)

        return attend

    changes: list[Callable[[dict[str, Any]], None]] = [
        lambda call: call.update(block_table=(call["block_table"] - 1).clamp(min=0)),
        lambda call: call.update(block_table=call["block_table"].flip(0)),
        lambda call: call.update(seqused_k=(call["seqused_k"] - 1)),
        lambda call: call.update(k=call["v"]),
    ]
    for change in changes:
        monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", wrong(change), raising=False)
        with pytest.raises(UnsupportedModelError, match="attention over cells differs"):
            prove(gpu_views(KVCacheLayout.LBNHC), flash_impl, layer=scaled_layer())


def test_flashinfers_layouts_by_tritons_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer itself is not here; what of it the back-end imports is stood in for."""
    for name in FLASHINFER:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    from kvreclaim.integrations.vllm.v0_32.cells_flashinfer import CellsFlashInferImpl

    def make(grid: CellGrid, index: int) -> Any:
        reclaim = SimpleNamespace(view=grid.view, index=index)
        return SimpleNamespace(
            attend=CellsFlashInferImpl.attend_cells,
            reclaim=reclaim,
            head_size=D,
            scale=SCALE,
            logits_soft_cap=None,
        )

    for layout in (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC):
        prove(gpu_views(layout, torch.float32), make)
    fp8 = CellsFlashInferImpl.without_cells.fget
    assert fp8 is not None
    assert fp8(SimpleNamespace(kv_cache_dtype="fp8_e4m3")) == "the cache is fp8"
    assert fp8(SimpleNamespace(kv_cache_dtype="auto")) is None


def cpu_views(isa: str, size: int, dtype: torch.dtype, cache_dtype: str = "auto") -> tuple[CacheViews, Any]:
    """Layers in one allocation, as vLLM makes it."""
    layers = [cpu_layer(isa, size, dtype, cache_dtype) for _ in range(L)]
    whole = torch.zeros(L, *layers[0].kv_cache.shape, dtype=layers[0].kv_cache.dtype)
    for n, layer in enumerate(layers):
        layer.kv_cache = whole[n]
    return CacheViews([attention.layer_cache(layer, dtype) for layer in layers], B), layers[0]


def cpu_impl(cache_dtype: str) -> Make:
    def make(grid: CellGrid, index: int) -> Any:
        from kvreclaim.integrations.vllm.v0_32.cells_cpu import CellsCPUImpl

        return SimpleNamespace(
            attend=CellsCPUImpl.attend_cells,
            reclaim=SimpleNamespace(view=grid.view, index=index),
            head_size=D,
            kv_cache_dtype=cache_dtype,
            scale=SCALE,
            logits_soft_cap=0.0,
        )

    return make


@pytest.mark.parametrize(("isa", "size"), [("vec", 32), ("vec", 64), ("vec16", 16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_kernel_of_cpus(isa: str, size: int, dtype: torch.dtype) -> None:
    views, layer = cpu_views(isa, size, dtype)
    prove(views, cpu_impl("auto"), layer=layer)


@pytest.mark.parametrize("cache_dtype", FP8)
def test_the_kernel_of_cpus_on_fp8(cache_dtype: str) -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM stores fp8 on CPUs with AVX-512 only")
    views, layer = cpu_views("vec", 32, torch.bfloat16, cache_dtype)
    prove(views, cpu_impl(cache_dtype), layer=layer)


def test_caches_that_are_no_cells() -> None:
    apart = [torch.zeros(B, K, 16, 2 * D) for _ in range(L)]
    with pytest.raises(UnsupportedModelError, match="several allocations"):
        find_grid(CacheViews([flash_layer(cache, torch.float32) for cache in apart], B))
    one = torch.zeros(L * B * K * 16 * 2 * D)
    turned = [one.view(L, B, K, 16, 2 * D)[0], one.view(L, B, 16, K, 2 * D)[1].transpose(1, 2)]
    with pytest.raises(UnsupportedModelError, match="several strides"):
        find_grid(CacheViews([flash_layer(cache, torch.float32) for cache in turned], B))


def over_cells(name: str, theirs: type, dtypes: list[str]) -> tuple[str, str]:
    """KV dtypes with unequal heads, and what attends."""
    if name not in cells_side.CELL_BACKENDS:
        return "none", "nothing"
    backend = resolve_obj_by_qualname(cells_side.CELL_BACKENDS[name])
    assert [base for base in backend.__bases__ if base.__module__.startswith("vllm")] == [theirs]
    assert backend.get_name() == name
    impl = backend.get_impl_cls()
    without = impl.without_cells.fget
    assert without is not None
    unequal = [d for d in dtypes if without(SimpleNamespace(kv_cache_dtype=d)) is None]
    return ", ".join(unequal), impl.kernel


@pytest.mark.parametrize("name", BACKENDS)
def test_the_table_of_the_docs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-end, layouts, dtypes with equal heads and with unequal ones, and what attends."""
    for module in FLASHINFER:
        monkeypatch.setitem(sys.modules, module, MagicMock())
    theirs = resolve_obj_by_qualname(AttentionBackendEnum[name].value)
    dtypes = [d for d in CACHE_DTYPES if d in theirs.supported_kv_cache_dtypes]
    layouts = [layout.name for layout in theirs.supported_kv_cache_layouts() or ()]
    row = [f"`{name}`", ", ".join(layouts) or "all", ", ".join(dtypes), *over_cells(name, theirs, dtypes)]
    page = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert f"| {' | '.join(row)} |" in page.splitlines()
    names = [layout.name for layout in KVCacheLayout]
    assert f"*all* are {', '.join(names[:-1])} and {names[-1]}." in page
    assert set(cells_side.CELL_BACKENDS) < set(BACKENDS)
