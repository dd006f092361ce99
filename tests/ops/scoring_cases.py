"""Score kernels against ops.scoring in fp64, within fp32 rounding of their terms."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvreclaim.ops import scoring
from kvreclaim.ops.rope import RopeLayout

LAYOUTS = {  # dim, bands, start
    "whole32": (32, 16, 0),
    "whole64": (64, 32, 0),
    "whole80": (80, 40, 0),
    "whole96": (96, 48, 0),
    "whole128": (128, 64, 0),
    "whole256": (256, 128, 0),
    "partial": (80, 16, 0),
    "odd both": (64, 7, 3),
    "one band": (32, 1, 30),
    "none": (64, 0, 0),
}
STYLES = pytest.mark.parametrize("style", ["half", "interleaved"])


def layout_of(bands: int, start: int = 0, style: str = "half") -> RopeLayout:
    return RopeLayout(torch.linspace(1, 0.01, bands, dtype=torch.float64), style, start)  # type: ignore[arg-type]


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_trig(
    got: Tensor, keys: Tensor, queries: Tensor, weights: Tensor | None, layout: RopeLayout, error: float
) -> None:
    """error: of a sum of products, relative to the sum of their magnitudes; keys: [K, T, D] fp64"""
    wide = None if weights is None else weights.double()
    want = scoring.trig_norm_scores(keys, queries.double(), wide, layout)
    size = scoring.trig_norm_scores(keys.abs(), queries.double().abs(), None, layout)
    if wide is not None:
        size = size + scoring.trig_norm_scores(keys, queries[:, :0].double(), wide.abs(), layout)
    assert got.shape == want.shape
    assert got.dtype == torch.float32
    assert not got.isnan().any()
    assert ((got.cpu() - want).abs() <= error * size + 1e-14).all()
