"""Kernels of every back-end over a copy of another engine's keys against PyTorch over the keys themselves."""

from __future__ import annotations

import importlib

import pytest
import torch

from kvreclaim.integrations.vllm.worker.staging import CacheSource, Stage
from kvreclaim.ops.backend import BACKENDS
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.rope import RopeLayout


@pytest.mark.parametrize("name", ["native", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "dim", "lengths"), [(2, 64, (100, 130)), (1, 128, (65, 3))])
def test_scores_of_a_copy(
    name: str, dtype: torch.dtype, heads: int, dim: int, lengths: tuple[int, ...]
) -> None:
    backend = importlib.import_module(BACKENDS[name])
    if (reason := backend.unavailable_reason()) is not None:
        pytest.skip(reason)
    rng = torch.Generator().manual_seed(0)
    stage = Stage(backend, LayerFacts(2 * heads, heads, dim, dim, Softmax(dim**-0.5)), dtype)
    layout = RopeLayout(torch.rand(dim // 2, generator=rng))
    for num_tokens in lengths:
        keys = torch.randn((heads, num_tokens, dim), generator=rng).to(dtype)
        queries = torch.randn((2 * heads, 3, dim), generator=rng)
        weights = torch.rand((2 * heads, dim // 2), generator=rng)
        staged, plain = (
            CacheSource((heads, num_tokens), keys.device, lambda _, keys=keys: keys, each)
            for each in (stage, None)
        )
        found, expected = (each.trig_norm_scores(queries, weights, layout) for each in (staged, plain))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
