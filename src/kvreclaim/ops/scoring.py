"""Scores of cached keys from statistics of the queries: pure functions of tensors, nothing decided.

Every function here is the slow twin of a fused kernel and its oracle. Keys are rotated, [K, T, D];
query head h reads KV head h // G. Results are fp32, or fp64 when the keys are fp64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvreclaim.ops.moving import to_device
from kvreclaim.ops.rope import RopeLayout, to_bands

MAX_LOGITS = 1 << 25  # elements of one batch of mixture logits: 128 MiB in fp32
ENERGY = 1e-6
"""Added by surrogate_features before a logarithm."""


def as_real(x: Tensor) -> Tensor:
    """x in fp64 if it is, else in fp32."""
    return x if x.dtype == torch.float64 else x.float()


def offset_phases(logical_lens: Sequence[int], offsets: Sequence[int], layout: RopeLayout) -> Tensor:
    """e^{i w_f (L + d)} for each length L and offset d: [N, O, F] complex128, where layout.inv_freq is.

    fp64 throughout: an fp32 angle is off by up to 6e-3 at L = 131,072.
    """
    frequencies = layout.inv_freq.to(torch.float64)
    lens, ahead = (torch.tensor(list(x), dtype=torch.float64) for x in (logical_lens, offsets))
    angle = to_device(lens[:, None] + ahead, frequencies.device)[..., None] * frequencies
    return torch.polar(torch.ones_like(angle), angle)


def turned_queries(queries: Tensor, turns: Tensor, layout: RopeLayout) -> Tensor:
    """Queries [..., D] before rotation, each multiplied by every turn [..., O, F]: [..., O, D], the leading
    dims broadcast.

    The dims without position are repeated as they are. Real: the product with a rotated key is then
    an ordinary dot product, Re sum_f q_f turn_f conj(K_f) + rest. Products and sums are those of real
    numbers, each rounded by itself, so that a result depends on its own query and turn alone.
    """
    queries, turns = as_real(queries)[..., None, :], to_device(turns, queries.device)
    real, imag = (queries[..., part].double() for part in layout.bands)
    cos, sin = turns.real.contiguous(), turns.imag.contiguous()
    turned = (real * cos).sub_(imag * sin)
    out = queries.new_empty((*turned.shape[:-1], queries.shape[-1]))
    first, second = layout.bands
    out[..., first] = turned
    out[..., second] = torch.mul(real, sin, out=turned).add_(imag * cos)
    end = layout.start + 2 * layout.num_bands
    out[..., : layout.start] = queries[..., : layout.start]
    out[..., end:] = queries[..., end:]
    return out


def band_power(keys: Tensor, layout: RopeLayout) -> Tensor:
    """|K_f|^2: keys [..., D] -> [..., F]. Slices only: no index tensor, no complex copy."""
    first, bands = layout.start, layout.num_bands
    squares = as_real(keys[..., first : first + 2 * bands]).square()
    if layout.style == "half":
        return squares[..., :bands] + squares[..., bands:]
    return squares[..., 0::2] + squares[..., 1::2]


def grouped_products(queries: Tensor, keys: Tensor) -> Tensor:
    """Dot products of each query head with the keys of its KV head.

    Args:
        queries: [H, R, D], R vectors per query head
        keys:    [K, T, D], H a multiple of K

    Returns: [H, R, T].
    """
    keys = as_real(keys)
    heads, rows, dim = queries.shape
    kv_heads = keys.shape[0]
    stacked = queries.to(keys.dtype).reshape(kv_heads, heads // kv_heads * rows, dim)
    return (stacked @ keys.transpose(1, 2)).view(heads, rows, keys.shape[1])


def trig_norm_scores(keys: Tensor, queries: Tensor, weights: Tensor | None, layout: RopeLayout) -> Tensor:
    """Return the two products of TriAttention: with turned queries, and of band norms with weights.

        max_r queries[h, r] . K[t]  +  sum_f weights[h, f] |K_f[t]|

    Args:
        keys:    [K, T, D]
        queries: [H, R, D], turned already (turned_queries); R = 0 leaves the norm term alone
        weights: [H, F], or None for no norm term

    Returns: [H, T]. Source: arXiv 2604.04921 (S_trig, S_norm).
    """
    scores = as_real(keys).new_zeros(queries.shape[0], keys.shape[1])
    if queries.shape[1]:
        scores = scores + grouped_products(queries.to(keys.device), keys).amax(dim=1)
    if weights is not None:
        norms = band_power(keys, layout).sqrt()
        scores = scores + grouped_products(weights[:, None, :].to(keys.device), norms)[:, 0]
    return scores


def z_scores(scores: Tensor, over: slice, eps: float = 1e-6) -> Tensor:
    """Scores [H, T] less the row's mean, over its population standard deviation, both taken over
    the columns `over`. fp32 [H, T]; a constant (or empty) row gives zeros, never NaN.

    fp64 inside, where the mean of equal fp32 numbers is exactly that number.
    """
    wide = scores.double()
    part = wide[:, over]
    if part.shape[-1] == 0:
        return torch.zeros_like(scores, dtype=torch.float32)
    std = part.std(dim=-1, correction=0, keepdim=True)
    return ((wide - part.mean(dim=-1, keepdim=True)) / std.clamp_min(eps)).float()


def group_z_scores(scores: Sequence[Tensor], over: Sequence[slice], num_kv_heads: int) -> list[Tensor]:
    """group_max of the z_scores of several sequences, [H, T] -> [K, T] each; equal lengths in one go."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for i, (rows, columns) in enumerate(zip(scores, over, strict=True)):
        alike.setdefault((rows.shape[1], columns.start, columns.stop), []).append(i)
    found: dict[int, Tensor] = {}
    for places in alike.values():
        rows = z_scores(torch.cat([scores[i] for i in places]), over[places[0]])
        best = group_max(rows, len(places) * num_kv_heads).split(num_kv_heads)
        found.update(zip(places, best, strict=True))
    return [found[i] for i in range(len(scores))]


def group_max(scores: Tensor, num_kv_heads: int) -> Tensor:
    """[H, T] -> [K, T]: each KV head gets the maximum over its query heads."""
    return scores.unflatten(0, (num_kv_heads, -1)).amax(dim=1)


def mixture_scores(keys: Tensor, centers: Tensor, variances: Tensor, scale: float, over: slice) -> Tensor:
    """mixture_attention among the keys `over`, fp32 [K, T]; the others score 0."""
    scores = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
    scores[:, over] = mixture_attention(keys[:, over], centers, variances, scale).float()
    return scores


def mixture_attention(keys: Tensor, centers: Tensor, variances: Tensor, scale: float) -> Tensor:
    """Return each key's largest expected attention over kinds of queries.

        l_{c,o}(j) = s mu_{c,o}.K_j + s^2/2 sum_d v_{c,d} K_{j,d}^2
        S(j) = max over query heads and c of mean over o of softmax_j l_{c,o}(j)

    Args:
        keys:      [K, T, D] any float dtype
        centers:   [H, C, O, D], each centre turned to O offsets (turned_queries)
        variances: [H, C, D], per real dim; equal in the two dims of a band
        scale:     s, the model's softmax scale

    Returns: [K, T] in [0, 1]. The centres go in one batch unless its logits exceed MAX_LOGITS.
    """
    keys_t = as_real(keys).transpose(1, 2)
    squares_t = keys_t.square()
    (kv_heads, dim, tokens), (heads, count, offsets) = keys_t.shape, centers.shape[:3]
    best = keys_t.new_zeros(kv_heads, tokens)
    if tokens == 0:
        return best
    centers = (centers.to(keys_t) * scale).reshape(kv_heads, -1, count, offsets, dim)
    variances = (variances.to(keys_t) * (scale * scale / 2)).reshape(kv_heads, -1, count, dim)
    step = max(1, MAX_LOGITS // (heads * offsets * tokens))
    for mu, var in zip(centers.split(step, dim=2), variances.split(step, dim=2), strict=True):
        logits = (mu.flatten(1, 3) @ keys_t).view(*mu.shape[:4], tokens)
        logits += (var.flatten(1, 2) @ squares_t).view(*var.shape[:3], 1, tokens)
        best = torch.maximum(best, logits.softmax(dim=-1).mean(dim=3).amax(dim=(1, 2)))
    return best


def summed_mixture(
    keys: Tensor, centers: Tensor, variances: Tensor, weights: Tensor, scale: float, over: slice
) -> Tensor:
    """Score like mixture_scores, with a head's centres summed by their weights [H, C] instead of the maximum:
    [K, T] fp32."""
    scores = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
    part = as_real(keys[:, over])
    if part.shape[1] == 0:
        return scores
    total = part.new_zeros(centers.shape[0], part.shape[1])
    for mu, var, weight in zip(centers.unbind(1), variances.unbind(1), weights.unbind(1), strict=True):
        logits = grouped_products(mu * scale, part)
        logits += grouped_products(var[:, None] * (scale * scale / 2), part.square())
        total += weight[:, None].to(total) * logits.softmax(dim=-1).mean(dim=1)
    scores[:, over] = group_max(total, keys.shape[0]).float()
    return scores


def collapsed_mixture(keys: Tensor, centers: Tensor, variances: Tensor, scale: float, over: slice) -> Tensor:
    """A cheap variant of mixture_attention: one product per centre, z-scores instead of the softmax.

        l_c(j) = s mu_c.K_j + s^2/2 sum_d v_{c,d} K_{j,d}^2
        S(j) = max over query heads and c of zscore_j l_c(j), less the least of the head's

    Args:
        keys:      [K, T, D] any float dtype
        centers:   [H, C, D], each turned by the mean of its offsets' turns
        variances: [H, C, D]

    Returns: [K, T] fp32, >= 0; keys outside of `over` score 0.
    """
    scores = torch.zeros(keys.shape[:2], dtype=torch.float32, device=keys.device)
    part = as_real(keys[:, over])
    if part.shape[1]:
        logits = grouped_products(centers * scale, part)
        logits += grouped_products(variances * (scale * scale / 2), part.square())
        best = group_max(z_scores(logits.flatten(0, 1), slice(None)), keys.shape[0])
        scores[:, over] = best - best.amin(dim=-1, keepdim=True)
    return scores


def surrogate_features(keys: Tensor, values: Tensor, layout: RopeLayout | None) -> Tensor:
    """[K, T, P]: ln(|K_f|^2 + 1e-6) of each rotary band, the dims of the key that carry no position, the
    value, |k|, ln(|v| + 1e-6), and 1.

    Args:
        keys:   [K, T, D] rotated, any float dtype; values: [K, T, Dv]
        layout: of the rotation; None: keys carry no position
    """
    keys, values = as_real(keys), as_real(values)
    parts = [keys]
    if layout is not None:
        rest = layout.rest_dims(keys.shape[-1], keys.device)
        parts = [(to_bands(keys, layout).abs().square() + ENERGY).log(), keys[..., rest]]
    norm = torch.linalg.vector_norm
    lengths = norm(keys, dim=-1, keepdim=True), (norm(values, dim=-1, keepdim=True) + ENERGY).log()
    return torch.cat([*parts, values, *lengths, torch.ones_like(lengths[0])], dim=-1)


def surrogate_scores(keys: Tensor, values: Tensor, weights: Tensor, layout: RopeLayout | None) -> Tensor:
    """surrogate_features times weights: [K, T].

    Args:
        keys, values, layout: as for surrogate_features
        weights:              [K, P] of each head, or [1, T, P] of each token of one head
    """
    rows = weights if weights.ndim == 3 else weights[:, None]
    found = surrogate_features(keys, values, layout)
    return (found * rows.to(found)).sum(dim=-1)
