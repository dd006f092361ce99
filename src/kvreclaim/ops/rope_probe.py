"""Which rotation a layer applies, found out from what it makes of one token at several positions.

The caller runs the model with attention layers that return the values themselves. All tokens then carry the
same hidden state in every layer, so queries and keys differ between positions by their rotation alone, and
each candidate rotation can be checked by undoing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from kvreclaim.ops.rope import RopeLayout, RopeStyle, rotate, to_bands

POSITIONS = (0, 1, 2, 3, 5, 11, 47, 120)
STYLES: tuple[RopeStyle, ...] = ("half", "interleaved")
ROWS_AT_ONCE = 4096
"""Rows of embeddings that become fp32 at a time."""


def loudest(embeddings: Tensor) -> int:
    """The token to feed, given the embeddings [N, M] of those that may be: never the zero row of a padding
    token, in which no rotation shows."""
    norms = torch.empty(embeddings.shape[0], device=embeddings.device)  # first, or each would keep its rows
    for rows, own in zip(embeddings.split(ROWS_AT_ONCE), norms.split(ROWS_AT_ONCE), strict=True):
        own.copy_(rows.float().norm(dim=-1))
    return int(norms.argmax())


def find_rope(queries: Tensor | None, keys: Tensor, frequencies: Sequence[Tensor]) -> RopeLayout | None:
    """Return the layout under which queries and keys, un-rotated, are the same at every position.

    Args:
        queries:     [T, H, D] of one token at POSITIONS, rotated; None where there are only keys
        keys:        [T, K, D], also in the model's own dtype: it decides how exact they must be
        frequencies: [F] each, the inverse frequencies that may be the model's

    Returns: None if no candidate explains them. A layer without rotation has a layout of no bands.
    """
    dim = keys.shape[-1]
    layouts = [RopeLayout(torch.empty(0, dtype=torch.float64, device=keys.device))]
    fitting = [freq for freq in frequencies if 2 * freq.numel() <= dim]
    for freq, style in product(fitting, STYLES):
        layouts += [RopeLayout(freq, style, start) for start in sorted({0, dim - 2 * freq.numel()})]
    vectors = [keys] if queries is None else [queries, keys]
    changes = [max(_change(layout, x) for x in vectors) for layout in layouts]
    least = min(range(len(layouts)), key=changes.__getitem__)
    tolerance = 1e-3 if keys.dtype == torch.float32 else 2e-2
    return layouts[least] if changes[least] < tolerance else None


def _change(layout: RopeLayout, x: Tensor) -> float:
    """Measure how much un-rotated [T, H, D] still differ between positions: the mean, over heads, of each
    band's and each other dim's largest difference, relative to its own size.

    Relative to the whole vector, a head with a few massive dims (Qwen2's biases) would hide the
    rotation of all others, and pass for one without rotation in half precision.
    """
    positions = torch.tensor(POSITIONS, device=x.device)
    rest = layout.rest_dims(x.shape[-1], x.device)
    still = rotate(x.transpose(0, 1).float(), positions, layout, inverse=True)
    ratios = []
    for part in (to_bands(still, layout), still[..., rest]):
        size = part.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
        ratios.append((part - part[:, :1]).abs().amax(1) / size)
    return float(torch.cat(ratios, dim=-1).mean())
