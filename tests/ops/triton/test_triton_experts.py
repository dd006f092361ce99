"""Mixtures of experts: choices and sums against their formulas in fp64; other modules are left alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional
from triton_pair import DEVICE, DTYPES, random

from kvreclaim.model.fused_experts import FusedExperts, FusedRouter, use_fused_experts
from kvreclaim.model.loader import load_model
from kvreclaim.ops.layer_parts import ClampedGate, Gate
from kvreclaim.ops.triton import decoder
from kvreclaim.ops.triton.experts import (
    MOST_ROWS,
    ExpertWeights,
    RouterChoice,
    apply_experts,
    num_shared,
    route,
)


@DTYPES
@pytest.mark.parametrize("sums_to_one", [False, True])
@pytest.mark.parametrize(("count", "experts", "top"), [(1, 4, 2), (5, 128, 8), (3, 60, 4), (2, 8, 8)])
def test_choices(dtype: torch.dtype, sums_to_one: bool, count: int, experts: int, top: int) -> None:
    rows = [torch.randperm(experts, generator=torch.Generator().manual_seed(i)) for i in range(count)]
    logits = (torch.stack(rows) / 16).to(DEVICE, dtype)
    scores, ids = route(logits, RouterChoice(top, sums_to_one))
    want, chosen = logits.double().softmax(-1).topk(top)
    if sums_to_one:
        want = want / want.sum(-1, keepdim=True)
    assert torch.equal(ids, chosen)
    assert scores.dtype is dtype
    torch.testing.assert_close(scores.double(), want, rtol=max(torch.finfo(dtype).eps, 1e-6), atol=0)


@pytest.mark.parametrize(
    ("experts", "groups", "open_groups", "top"), [(256, 8, 4, 8), (60, 3, 1, 4), (8, 1, 1, 8)]
)
def test_choices_among_groups(experts: int, groups: int, open_groups: int, top: int) -> None:
    logits, shift = (
        random(i, *size, dtype=torch.float32) for i, size in enumerate([(5, experts), (experts,)])
    )
    choice = RouterChoice(top, True, True, groups, open_groups, 2.5)
    scores, ids = route(logits, choice, shift)
    made = logits.double().sigmoid()
    shifted = (made + shift).unflatten(1, (groups, -1))
    best = shifted.topk(2, dim=-1)[0].sum(-1).topk(open_groups)[1]
    is_open = torch.zeros(5, groups, dtype=torch.bool, device=DEVICE).scatter_(1, best, True)
    chosen = shifted.masked_fill(~is_open[..., None], -torch.inf).flatten(1).topk(top)[1]
    assert torch.equal(ids, chosen)
    want = made.gather(1, chosen)
    torch.testing.assert_close(scores.double(), 2.5 * want / want.sum(-1, keepdim=True), rtol=1e-5, atol=0)


def gated(kind: Gate | ClampedGate, gate: Tensor, up: Tensor) -> Tensor:
    if isinstance(kind, ClampedGate):
        gate, up = gate.clamp(max=kind.limit), up.clamp(-kind.limit, kind.limit)
        return gate * torch.sigmoid(kind.alpha * gate) * (up + 1)
    return (functional.silu(gate) if kind == "silu" else functional.gelu(gate, approximate="tanh")) * up


@DTYPES
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("", "silu"),
        ("transposed", "gelu_tanh"),
        ("interleaved", "silu"),
        ("transposed interleaved", ClampedGate(1.7, 0.9)),
    ],
)
@pytest.mark.parametrize(
    ("count", "experts", "top", "width", "inner"),
    [(1, 4, 2, 64, 32), (5, 3, 3, 80, 100), (33, 16, 2, 64, 72)],
)
def test_sums_of_experts(
    dtype: torch.dtype,
    layout: str,
    kind: Gate | ClampedGate,
    count: int,
    experts: int,
    top: int,
    width: int,
    inner: int,
) -> None:
    """Tokens of more than one tile, experts without any, sizes that are no multiple of a tile's; biases with
    the clamped gate."""
    x = random(1, count, width, dtype=dtype)
    gate_up = random(2, experts, 2 * inner, width, dtype=dtype, scale=0.2)
    down = random(3, experts, width, inner, dtype=dtype, scale=0.2)
    size = float(isinstance(kind, ClampedGate))
    biases = (random(6, experts, 2 * inner, dtype=dtype, scale=size), random(7, experts, width, dtype=dtype))
    biases[1].mul_(size)
    generator = torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top] for _ in range(count)]).to(DEVICE)
    scores = random(5, count, top, dtype=dtype)
    exact = torch.zeros(count, width, dtype=torch.float64, device=DEVICE)
    for t in range(count):
        for e, score in zip(ids[t].tolist(), scores[t].double(), strict=True):
            made = gate_up[e].double() @ x[t].double() + biases[0][e]
            halves = (made[::2], made[1::2]) if "interleaved" in layout else made.chunk(2)
            exact[t] += score * (down[e].double() @ gated(kind, *halves) + biases[1][e])
    both = [each.mT.contiguous() if "transposed" in layout else each for each in (gate_up, down)]
    how = {"is_transposed": "transposed" in layout, "is_interleaved": "interleaved" in layout}
    weights = ExpertWeights(*both, biases if size else None, **how)
    got = apply_experts(x, (ids, scores), weights, kind)
    assert got.dtype is dtype
    bound = max(2 * torch.finfo(dtype).eps, 3e-6) * float(exact.abs().max())
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=bound)


@DTYPES
@pytest.mark.parametrize(
    ("count", "pieces", "width", "inner"), [(1, 1, 64, 32), (5, 2, 80, 100), (33, 3, 96, 40)]
)
def test_an_mlp_of_all_tokens_and_the_residual(
    dtype: torch.dtype, count: int, pieces: int, width: int, inner: int
) -> None:
    """Against the same sums without them, and an MLP that is wider than an expert."""
    x, residual = (random(seed, count, width, dtype=dtype) for seed in (1, 2))
    gate_up, down = (
        random(seed, 4, *size, dtype=dtype, scale=0.2)
        for seed, size in ((3, (2 * inner, width)), (4, (width, inner)))
    )
    both = (
        random(5, 2 * pieces * inner, width, dtype=dtype, scale=0.2),
        random(6, width, pieces * inner, dtype=dtype, scale=0.2),
    )
    ids = torch.tensor([[3, 1]] * count, device=DEVICE)
    scores = random(7, count, 2, dtype=torch.float32)
    weights = ExpertWeights(gate_up, down)
    assert num_shared(weights, both) == pieces
    got = apply_experts(x, (ids, scores), weights, "silu", shared=both, residual=residual)
    exact = (
        residual.double()
        + gated("silu", *(x.double() @ both[0].double().T).chunk(2, -1)) @ both[1].double().T
    )
    for place, e in enumerate((3, 1)):
        halves = (x.double() @ gate_up[e].double().T).chunk(2, -1)
        exact += scores[:, place, None].double() * (gated("silu", *halves) @ down[e].double().T)
    assert got.dtype is dtype
    bound = max(2 * torch.finfo(dtype).eps, 3e-6) * float(exact.abs().max())
    torch.testing.assert_close(got.double(), exact, rtol=0, atol=bound)
    narrow = both[0], both[1][:, : inner - 1]
    assert not num_shared(weights, narrow)


def parts(model: Any) -> tuple[nn.Module, nn.Module]:
    """Router and experts of the last layer."""
    mlp = model.model.layers[-1].mlp
    return getattr(mlp, "gate", None) or mlp.router, mlp.experts


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3-moe", {"norm_topk_prob": False}),
        ("qwen3-moe", {"norm_topk_prob": True}),
        ("gpt-oss", {"swiglu_limit": 1.5}),
        ("deepseek-v3", {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "norm_topk_prob": False}),
        ("deepseek-v3", {"n_routed_experts": 12, "n_group": 3, "topk_group": 2}),
    ],
)
def test_modules_compute_what_transformers_code_computes(
    tmp_path: Path, family: str, how: dict[str, Any]
) -> None:
    tiny.save_model(family, tmp_path, **how)
    ours, plain = (load_model(tmp_path, device=str(DEVICE), kernels=name) for name in ("triton", "torch"))
    assert f"experts: triton ({1 if family == 'deepseek-v3' else 2})" in ours.modules
    pairs = list(zip(parts(ours.model), parts(plain.model), strict=True))
    assert [type(vars(own)["forward"]) for own, _ in pairs] == [FusedRouter, FusedExperts]
    for count in (0, 1, MOST_ROWS, MOST_ROWS + 1):
        x = random(count, count, 64, dtype=torch.float32)
        with torch.inference_mode():
            (_, scores, ids), (_, want, chosen) = (module(x) for module in pairs[0])
            dense = torch.zeros(count, pairs[0][0].weight.shape[0], device=DEVICE)  # in any order
            torch.testing.assert_close(dense.scatter(1, ids, scores), dense.scatter(1, chosen, want))
            torch.testing.assert_close(*(module(x, ids, scores) for module in pairs[1]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("limit", "is_known"), [(7.0, True), (5.0, False)])
def test_a_clamped_gate_is_tried_at_its_limit(
    tiny_dir: Callable[[str], Path], limit: float, is_known: bool
) -> None:
    loaded = load_model(tiny_dir("gpt-oss"), device=str(DEVICE), kernels="torch")
    for layer in loaded.model.model.layers:
        own = layer.mlp.experts
        own._apply_gate = partial(type(own)._apply_gate, SimpleNamespace(limit=limit, alpha=own.alpha))
    assert bool(use_fused_experts(loaded.model, decoder)) == is_known


def test_modules_that_compute_something_else_are_left(tiny_dir: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_dir("qwen3-moe"), device=str(DEVICE), kernels="torch")
    router, experts = parts(loaded.model)
    router.forward = lambda x, own=router: (*type(own).forward(own, x)[:2], 3 - type(own).forward(own, x)[2])
    experts.act_fn = nn.Tanh()
    kept = vars(router)["forward"]
    assert use_fused_experts(loaded.model, decoder) == "experts: triton (1)"
    assert vars(router)["forward"] is kept
    assert "forward" not in vars(experts)
