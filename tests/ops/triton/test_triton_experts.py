"""Mixtures of experts: choices and sums against their formulas in fp64; other modules are left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional
from triton_pair import DEVICE, DTYPES

from kvreclaim.model.fused_experts import FusedExperts, FusedRouter, use_fused_experts
from kvreclaim.model.loader import load_model
from kvreclaim.ops.layer_parts import Gate
from kvreclaim.ops.triton import decoder
from kvreclaim.ops.triton.experts import MOST_ROWS, apply_experts, route


def random(seed: int, *size: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    numbers = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
    return numbers.to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize("sums_to_one", [False, True])
@pytest.mark.parametrize(("count", "experts", "top"), [(1, 4, 2), (5, 128, 8), (3, 60, 4), (2, 8, 8)])
def test_choices(dtype: torch.dtype, sums_to_one: bool, count: int, experts: int, top: int) -> None:
    rows = [torch.randperm(experts, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    logits = (torch.stack(rows) / 16).to(DEVICE, dtype)
    scores, ids = route(logits, top, sums_to_one=sums_to_one)
    want, chosen = logits.double().softmax(-1).topk(top)
    if sums_to_one:
        want = want / want.sum(-1, keepdim=True)
    assert torch.equal(ids, chosen)
    assert scores.dtype is dtype
    torch.testing.assert_close(scores.double(), want, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=0)


@DTYPES
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("count", "experts", "top", "width", "inner"),
    [(1, 4, 2, 64, 32), (5, 3, 3, 80, 100), (33, 16, 2, 64, 72)],
)
def test_sums_of_experts(
    dtype: torch.dtype, kind: Gate, count: int, experts: int, top: int, width: int, inner: int
) -> None:
    """Tokens of more than one tile, experts without any, sizes that are no multiple of a tile's."""
    x = random(1, count, width, dtype=dtype)
    gate_up = random(2, experts, 2 * inner, width, dtype=dtype, scale=0.2)
    down = random(3, experts, width, inner, dtype=dtype, scale=0.2)
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top] for _ in range(count)]).to(DEVICE)
    scores = random(5, count, top, dtype=dtype)
    exact = torch.zeros(count, width, dtype=torch.float64, device=DEVICE)
    for t in range(count):
        for e, score in zip(ids[t].tolist(), scores[t].double(), strict=True):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            made = functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")
            exact[t] += score * (down[e].double() @ (made * up))
    got = apply_experts(x, (ids, scores), (gate_up, down), kind)
    assert got.dtype is dtype
    bound = max(2 * torch.finfo(dtype).eps, 3e-6) * float(exact.abs().max())
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=bound)


def parts(model: Any) -> tuple[nn.Module, nn.Module]:
    """Router and experts of the first layer."""
    mlp = model.model.layers[0].mlp
    return mlp.gate, mlp.experts


@pytest.mark.parametrize("sums_to_one", [False, True])
def test_modules_compute_what_transformers_code_computes(tmp_path: Path, sums_to_one: bool) -> None:
    tiny.save_model("qwen3-moe", tmp_path, norm_topk_prob=sums_to_one)
    ours, plain = (load_model(tmp_path, device=str(DEVICE), kernels=name) for name in ("triton", "torch"))
    assert "experts: triton (2)" in ours.modules
    pairs = list(zip(parts(ours.model), parts(plain.model), strict=True))
    assert [type(vars(own)["forward"]) for own, _ in pairs] == [FusedRouter, FusedExperts]
    for count in (0, 1, MOST_ROWS, MOST_ROWS + 1):
        x = random(count, count, 64, dtype=torch.float32)
        with torch.inference_mode():
            (_, scores, ids), (_, want, chosen) = (module(x) for module in pairs[0])
            torch.testing.assert_close(scores, want)
            assert torch.equal(ids, chosen)
            torch.testing.assert_close(*(module(x, ids, scores) for module in pairs[1]), rtol=1e-4, atol=1e-4)


def test_modules_that_compute_something_else_are_left(tiny_dir: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_dir("qwen3-moe"), device=str(DEVICE), kernels="torch")
    router, experts = parts(loaded.model)
    router.forward = lambda x, own=router: (*type(own).forward(own, x)[:2], 3 - type(own).forward(own, x)[2])
    experts.act_fn = nn.Tanh()
    kept = vars(router)["forward"]
    assert use_fused_experts(loaded.model, decoder) == "experts: triton (1)"
    assert vars(router)["forward"] is kept
    assert "forward" not in vars(experts)
