"""Attention probabilities over the live keys of one layer, for policies that read queries."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvreclaim.compression.policy import LayerView
from kvreclaim.ops.dense import probabilities
from kvreclaim.ops.key_source import PagedSource, column_sums


def attention(view: LayerView, keys: Tensor, queries: Tensor, first: int) -> Tensor:
    """Compute the attention of queries to each live key: rows of softmax(scale * q.K) in fp32.

    Args:
        keys:    [K, T, D] of the view, any float dtype
        queries: [H, R, D] rotated, at the consecutive positions first, first + 1, ...

    Returns: [H, R, T]; soft-capping, attention sinks and a sliding window as the layer has them. A query
        does not see later keys; a row without any visible key is zero. Positions of keys are those of
        the signals, else slots count back from the end, which is exact for the tokens since the last
        compression and for all of them before the first.
    """
    num_heads, num_rows, _ = queries.shape
    softmax = view.facts.softmax
    at = torch.arange(first, first + num_rows, device=keys.device)[:, None]
    ahead = at - _positions(view, keys.device)[:, None, :]
    mask = ahead >= 0
    if softmax.window is not None:
        mask &= ahead < softmax.window
    rows = probabilities(
        queries.to(keys.device).float().transpose(0, 1)[None],
        keys.float()[None],
        mask[None],
        softmax,
    )
    return rows.view(num_heads, num_rows, keys.shape[1])


def window_attention(view: LayerView) -> Tensor:
    """[H, w, T] fp32: attention of the last w queries (Signal.RECENT_QUERIES), oldest first."""
    queries = _queries(view)
    return attention(view, view.keys, queries, view.logical_len - queries.shape[1])


def window_sums(views: Sequence[LayerView]) -> list[Tensor]:
    """[K, T] fp32 of each: window_attention summed over the queries, the mean over the query heads of a KV
    head. Views that the back-end can read inside the cache share one call."""
    blocks, found = {i: view for i, view in enumerate(views) if _fits_kernel(view)}, {}
    if blocks:
        sources = [view.source for view in blocks.values() if isinstance(view.source, PagedSource)]
        shifts = [view.logical_len - view.source.shape[1] for view in blocks.values()]
        sums = column_sums(sources, [_queries(view) for view in blocks.values()], shifts)
        found = {i: own / views[i].facts.group_size for i, own in zip(blocks, sums, strict=True)}
    for i, view in enumerate(views):
        if i not in found:
            found[i] = over_group(window_attention(view).sum(dim=1), view.source.shape[0], "mean")
    return [found[i] for i in range(len(views))]


def _fits_kernel(view: LayerView) -> bool:
    """Return whether column_sums can read the view: positions follow from slots, and the kernels are native.
    Native sums are bit-exact per sequence, and native block tables are on this device."""
    source, count = view.source, _queries(view).shape[1]
    native = isinstance(source, PagedSource) and source.backend.NAME == "native"
    return native and view.signals.positions is None and 1 <= count <= source.shape[1]


def _queries(view: LayerView) -> Tensor:
    assert view.signals.queries is not None, f"layer {view.layer}: no recent queries"
    return view.signals.queries


def over_group(scores: Tensor, num_kv_heads: int, how: str) -> Tensor:
    """[H, ...] -> [K, ...]: the mean or the maximum over the query heads of each KV head."""
    grouped = scores.unflatten(0, (num_kv_heads, -1))
    return grouped.mean(dim=1) if how == "mean" else grouped.amax(dim=1)


def with_window(scores: Tensor, num_window: int, bound: float) -> Tensor:
    """Append scores of the window's tokens to scores [K, n], all <= bound: above all others, the newest
    highest. Returns: [K, n + num_window]."""
    steps = torch.arange(1, num_window + 1, dtype=torch.float32, device=scores.device)
    return torch.cat([scores, (bound + steps).expand(len(scores), -1)], dim=1)


def _positions(view: LayerView, device: torch.device) -> Tensor:
    """Return the keys' logical positions, [K | 1, T] int64."""
    if view.signals.positions is not None:
        return view.signals.positions.to(device, torch.int64)
    num_tokens = view.source.shape[1]
    return torch.arange(view.logical_len - num_tokens, view.logical_len, device=device)[None]
