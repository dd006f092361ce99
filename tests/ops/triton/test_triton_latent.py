"""Layers with multi-head latent attention: kernels against formulas in fp64, models against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_triton_decoder import EPS, close, norm_of, random
from test_triton_layers import close as near
from test_triton_layers import layers, load, logits
from torch import Tensor
from triton_pair import DEVICE, DTYPES

from kvreclaim import LLM, SamplingParams
from kvreclaim.model.fast_layers import use_fast_layers
from kvreclaim.model.latent import use_latent_cache
from kvreclaim.model.latent_layer import LatentLayer
from kvreclaim.model.native_modules import use_fast_norms
from kvreclaim.ops import reference
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.latent import UpProjection
from kvreclaim.ops.layer_parts import LatentHeads, Norm
from kvreclaim.ops.triton import decoder
from kvreclaim.ops.triton.latent import MOST_ROWS, absorb, can_store, rotate_queries, split_rows, values_of
from kvreclaim.ops.triton.support import is_interpreted

DIMS = pytest.mark.parametrize(
    ("count", "rank", "rotary"), [(1, 16, 8), (3, 96, 64), (MOST_ROWS + 3, 40, 10)]
)


def turned(x: Tensor, cos: Tensor, sin: Tensor, neighbours: bool) -> Tensor:
    """[.., dr] fp64, by cos and sin [.., dr] or [.., dr / 2]."""
    half = x.shape[-1] // 2
    low, high = (x[..., ::2], x[..., 1::2]) if neighbours else (x[..., :half], x[..., half:])
    c, s = cos[..., :half].double(), sin[..., :half].double()
    return torch.cat([low.double() * c - high.double() * s, high.double() * c + low.double() * s], -1)


def angles_of(count: int, dims: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = (random(seed, count, dims, dtype=dtype).clamp(-1, 1) for seed in (8, 9))
    return cos, sin


@DTYPES
@DIMS
@pytest.mark.parametrize(("columns", "neighbours"), [(0, True), (48, False)])
def test_rows_become_queries_and_latents(
    dtype: torch.dtype, count: int, rank: int, rotary: int, columns: int, neighbours: bool
) -> None:
    """columns: of normed latents of queries; with 0 the rows begin with 32 numbers that stay as they are."""
    rows = random(1, count, (columns or 32) + rank + rotary, dtype=dtype)
    norms = [Norm(random(seed, width, dtype=dtype), EPS) for seed, width in ((2, rank), (3, columns))]
    heads = LatentHeads(16, rotary, rank, norms[0], norms[1] if columns else None, neighbours)
    angles = angles_of(count, rotary // 2 if columns else rotary, dtype)
    q, latents = split_rows(rows, angles, heads)
    first, latent, key = rows.split([columns or 32, rank, rotary], 1)
    close(latents[:, :rank], norm_of(latent, norms[0].weight))
    close(latents[:, rank:], turned(key, *angles, neighbours), steps=2)
    if columns:
        close(q, norm_of(first, norms[1].weight))
    else:
        assert torch.equal(q, first)


def test_latents_are_stored_in_their_slots() -> None:
    """A token with a negative slot nowhere."""
    dtype = torch.float32 if is_interpreted() else torch.bfloat16
    facts = LayerFacts(2, 1, 40, 32, Softmax(1.0), latent=True)
    cache = reference.allocate((facts,) * 2, 3, 16, like=torch.empty(0, dtype=dtype, device=DEVICE))
    for plane in cache.planes:
        plane.normal_()
    layer = cache.layers[1]
    before = [plane.clone() for plane in cache.planes]
    heads = LatentHeads(16, 8, 32, Norm(random(2, 32, dtype=dtype), EPS))
    slots = torch.tensor([5, -1, 33], device=DEVICE)
    assert can_store(layer)
    _, latents = split_rows(random(1, 3, 20 + 40, dtype=dtype), angles_of(3, 8, dtype), heads, (layer, slots))
    for plane, old, part in zip(cache.planes, before, (latents[:, 32:], latents[:, :32]), strict=True):
        old[1].view(-1, part.shape[1])[slots[[0, 2]]] = part[[0, 2]]
        assert torch.equal(plane, old)


@DTYPES
@DIMS
def test_queries_are_absorbed_and_rotated(dtype: torch.dtype, count: int, rank: int, rotary: int) -> None:
    num_heads, nope, value = 3, 24, 20
    weight = random(1, num_heads, nope + value, rank, dtype=dtype, scale=0.2)
    weights = UpProjection(*weight.split([nope, value], 1))
    rows = random(2, count, 7 + num_heads * (nope + rotary), dtype=dtype)
    q = rows[:, : num_heads * (nope + rotary)].view(count, num_heads, -1)
    norm = Norm(random(3, rank, dtype=dtype), EPS)
    for neighbours in (False, True):
        heads, angles = (
            LatentHeads(nope, rotary, rank, norm, None, neighbours),
            angles_of(count, rotary, dtype),
        )
        tail = turned(q[..., nope:], *(each[:, None] for each in angles), neighbours)
        exact = torch.einsum("thn,hnr->thr", q[..., :nope].double(), weights.w_uk.double())
        found = absorb(q, angles, heads, weights.w_uk)
        close(found[..., rank:], tail, steps=2)
        eps = max(torch.finfo(dtype).eps, 3e-6)
        torch.testing.assert_close(found[..., :rank].double(), exact, rtol=eps, atol=eps)
        plain = rotate_queries(q, angles, heads)
        assert torch.equal(plain[..., :nope], q[..., :nope])
        close(plain[..., nope:], tail, steps=2)
    attended = random(4, count, num_heads, rank, dtype=dtype)
    values = values_of(attended, weights)
    assert values.is_contiguous() or dtype != torch.float32
    torch.testing.assert_close(values, weights.finish(attended), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "how",
    [
        {"q_lora_rank": None},
        {"attention_bias": True},
        {"rope_interleave": False},
        {"n_shared_experts": 3},
        {"num_experts_per_tok": 1, "qk_rope_head_dim": 4, "v_head_dim": 24},
    ],
)
def test_variants_compute_what_transformers_code_computes(tmp_path: Path, how: dict[str, Any]) -> None:
    directory = tiny.save_model("deepseek-v3", tmp_path, **how)
    ours, plain = (load(directory, kernels) for kernels in ("triton", "torch"))
    assert [type(layer.forward) for layer in layers(ours.model)] == [LatentLayer] * 2
    assert layers(ours.model)[1].forward.parts.fused is not None
    for tokens in (2, 67):
        near(logits(ours, tokens), logits(plain, tokens))


def test_attention_that_computes_something_else_is_left(tmp_path: Path) -> None:
    loaded = load(tiny.save_model("deepseek-v3", tmp_path), "torch")
    loaded.model.model.layers[1].self_attn.q_b_proj.register_forward_hook(lambda _, args, out: 2 * out)
    want = logits(loaded)
    assert use_latent_cache(loaded.model)
    use_fast_norms(loaded.model, decoder)
    assert use_fast_layers(loaded.model, decoder).startswith("decoder layers: transformers")
    near(logits(loaded), want)


def test_prompts_with_expanded_latents(tmp_path: Path) -> None:
    """A step with one sequence that attends expanded keys, and one with absorbed queries."""
    directory = tiny.save_model("deepseek-v3", tmp_path, kv_lora_rank=32)
    llm = LLM(directory, num_blocks=40, dtype="float32", device=str(DEVICE), kernels="triton")
    assert "decoder layers: triton (2)" in llm.loaded.modules
    prompts = tiny.prompts((60, 9), seed=1)
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert [answer.outputs[0].token_ids for answer in answers] == tiny.greedy(directory, prompts, 4)
