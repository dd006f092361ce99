"""Centre, scales and directions of the keys of a coded cache (ops/transformed_keys.py).

The range of a code is spent on what keys have in common: projections of Qwen2.5 have key biases of some
hundreds, which the rotation hardly moves in bands that turn slowly. The centre takes off the mean of the
rotated keys. A linear map B balances what is left: with K and Q the second moments of centred keys and of
their queries, the error of scores is least where tr(B K B^T) tr(B^-T Q B^-1) is, if codes are of rotated
vectors. That is B^T B = K^-1/2 (K^1/2 Q K^1/2)^1/2 K^-1/2. Of it

- the diagonal is d = (K / Q)^(1/4), the scale of each channel, of energies alone;
- of what is left, the DIRECTIONS that differ most from the others are kept. In most models one of them is
  that of a sequence's first key, the attention sink, which is far from all others: it counts as SINK of all.

Moments before rotation come from a calibration (compression/stats_builder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvreclaim.ops.rope import RopeLayout, from_bands, rotate, to_bands

FLOOR = 1 / 256
"""Energy that every channel has besides its own, in means of its head: a weight of a norm may be zero."""
SHORTEST, LONGEST, LENGTHS = 256, 32_768, 32
"""Lengths of sequences over which moments of rotated keys are taken: spaced evenly by their logarithm, up to
what the model has positions for."""
DIRECTIONS, SINK, DIRECTION_FLOOR = 4, 1 / 4, 1 / 64
"""Directions per KV head, the weight of first keys among all, and FLOOR for second moments."""
CHUNK_TOKENS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class KeyStats:
    """Keys of one layer before rotation, [K, D] each: their mean, the mean of their squares, and that of the
    squares of the queries that meet them; directions [K, R, D] and gains [K, R] as in KeyTransform."""

    mean: Tensor
    energy: Tensor
    query_energy: Tensor
    directions: Tensor | None = None
    gains: Tensor | None = None


RowMap = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Arguments of transform_rows after the rows, for all rows of a layer's keys or queries."""


def transform_rows(
    rows: Tensor, factor: Tensor, offset: Tensor | None, directions: Tensor | None, added: Tensor | None
) -> Tensor:
    """Multiply rows [T, H, D] of KV heads, H / K of each in turn, by factors and add an offset; then add, for
    the part along each direction, a multiple of a vector.

    factor, offset:    [K, D], of the rows' dtype
    directions, added: [K, R, D], of the rows' dtype: z becomes z + sum_r (z . directions_r) added_r

    Returns: [T, H, D], a contiguous copy.
    """
    rows = rows.unflatten(1, (len(factor), -1))
    factor = factor[:, None]
    rows = rows * factor if offset is None else torch.addcmul(offset[:, None], rows, factor)
    if directions is not None:
        assert added is not None
        tokens, heads, group, dim = rows.shape
        rows = rows.transpose(0, 1).reshape(heads, tokens * group, dim)
        rows = torch.baddbmm(rows, rows @ directions.transpose(1, 2), added)
        rows = rows.view(heads, tokens, group, dim).transpose(0, 1)
    return rows.contiguous().flatten(1, 2)


@dataclass(frozen=True, eq=False)
class KeyTransform:
    """Transform of a stored key: (key - center) / scale, [K, D] each, then its part along each of a few
    orthonormal directions [K, R, D] times a gain [K, R]."""

    scale: Tensor
    center: Tensor
    directions: Tensor | None = None
    gains: Tensor | None = None

    @cached_property
    def of_keys(self) -> RowMap:
        """The map of keys to stored keys."""
        return 1 / self.scale, -self.center / self.scale, self.directions, self._added(1)

    @cached_property
    def of_queries(self) -> RowMap:
        """The map of queries to those that meet stored keys."""
        return self.scale, None, self.directions, self._added(-1)

    def stored(self, keys: Tensor) -> Tensor:
        """Return keys [T, K, D] as the cache holds them."""
        return transform_rows(keys, *_in_dtype(self.of_keys, keys.dtype))

    def restored(self, stored: Tensor, transform: Callable[..., Tensor] = transform_rows) -> Tensor:
        """Return the keys [K, T, D] that are stored as these. transform: a back-end's own transform_rows"""
        scale, _, directions, added = self.of_queries
        if directions is not None and added is not None:  # of keys that are scaled before, not after
            directions, added = directions / scale[:, None], added * scale[:, None]
        parts = _in_dtype((scale, None, directions, added), stored.dtype)
        return transform(stored.transpose(0, 1), *parts).transpose(0, 1).add_(self.center[:, None])

    def rows(self, index: Tensor | slice) -> KeyTransform:
        """Return the transforms of some heads, in this order."""
        return self._changed(lambda part: part[index])

    def to(self, device: torch.device, dtype: torch.dtype) -> KeyTransform:
        return self._changed(lambda part: part.to(device, dtype))

    def _changed(self, change: Callable[[Tensor], Tensor]) -> KeyTransform:
        along = (None if part is None else change(part) for part in (self.directions, self.gains))
        return KeyTransform(change(self.scale), change(self.center), *along)

    @classmethod
    def joined(cls, parts: Sequence[KeyTransform]) -> KeyTransform:
        """Return the transforms of the heads of all parts, which have as many directions."""
        scale, center, directions, gains = zip(*(own.tensors for own in parts), strict=True)
        along = (_joined(directions), _joined(gains))
        return cls(torch.cat(scale), torch.cat(center), *along)

    @property
    def is_identity(self) -> bool:
        return self.directions is None and bool((self.scale == 1).all() and (self.center == 0).all())

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.scale, self.center, self.directions, self.gains

    def _added(self, power: int) -> Tensor | None:
        """[K, R, D]: what a vector gets added for its parts along the directions with gains of this power."""
        if self.directions is None:
            return None
        assert self.gains is not None
        return self.directions * (self.gains[..., None] ** power - 1)


def _in_dtype(own: RowMap, dtype: torch.dtype) -> RowMap:
    factor, *others = own
    offset, directions, added = (None if part is None else part.to(dtype) for part in others)
    return factor.to(dtype), offset, directions, added


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in parts if part is not None]
    return torch.cat(present) if present else None


def transform_of(own: KeyStats, rope: RopeLayout, max_position: int, *, is_centred: bool) -> KeyTransform:
    """Return the transform of a layer's keys, fp32, with scales of powers of two.

    is_centred: False where softmax is not alone: sinks, soft-capping
    """
    center = rotated_mean(own.mean, rope, max_position) if is_centred else torch.zeros_like(own.mean)
    key, query = (_in_bands(energy, rope) for energy in (own.energy, own.query_energy))
    key = (key - _in_bands(center.square(), rope)).clamp_min(0)
    key, query = (each + FLOOR * each.mean(-1, keepdim=True) for each in (key, query))
    exponents = (key / query).double().log2() / 4
    scale = (exponents - exponents.mean(-1, keepdim=True)).round().exp2().float()
    return KeyTransform(scale, center, own.directions, own.gains)


def directions_of(
    own: KeyTransform, keys: Tensor, queries: Tensor, most: int = DIRECTIONS
) -> tuple[Tensor, Tensor]:
    """Return directions [K, R, D] and gains [K, R], R <= most, that balance what a transform's scales leave.

    keys, queries: [K, D, D] second moments of centred keys and of their queries, rotated
    """
    k = _with_floor(keys / own.scale[:, :, None] / own.scale[:, None])
    q = _with_floor(queries * own.scale[:, :, None] * own.scale[:, None])
    root, inverse = _power(k, 0.5), _power(k, -0.5)
    squares, vectors = torch.linalg.eigh(inverse @ _power(root @ q @ root, 0.5) @ inverse)
    logs = squares.log() - squares.log().mean(-1, keepdim=True)
    found = logs.abs().argsort(-1, descending=True)[:, :most]
    directions = vectors.transpose(1, 2).gather(1, found[..., None].expand(-1, -1, vectors.shape[-1]))
    return directions.float(), (logs.gather(1, found) / 2).exp().float()


def rotated_mean(mean: Tensor, rope: RopeLayout, max_position: int) -> Tensor:
    """Return the mean of keys [K, D] over positions, from that before rotation."""
    if rope.num_bands == 0:
        return mean
    lengths = torch.logspace(0, 1, LENGTHS, _longest(max_position) / SHORTEST, dtype=torch.float64) * SHORTEST
    angle = lengths[:, None] * rope.inv_freq.cpu()  # [lengths, F]
    # e^{i w p}, averaged over positions p < length, then over lengths
    turn = torch.polar(torch.sinc(angle / (2 * torch.pi)), angle / 2).mean(0)
    rest = mean[:, rope.rest_dims(mean.shape[-1], mean.device)]
    return from_bands(to_bands(mean, rope) * turn.to(mean.device, torch.complex64), rest, rope)


def rotated_moment(rows: Tensor, rope: RopeLayout, max_position: int, center: Tensor | None = None) -> Tensor:
    """Return second moments [H, D, D] fp32 on the CPU of rows [H, T, D] over positions, from the rows before
    rotation: each row is at one position, and all are spread as those of rotated_mean.

    center: [H, D], taken off the rotated rows
    """
    count = rows.shape[1]
    order = torch.arange(1, count + 1, dtype=torch.float64, device=rows.device)
    length = SHORTEST * (_longest(max_position) / SHORTEST) ** (order * 0.7548776662466927 % 1)
    positions = (length * (order * 0.5698402909980532 % 1)).long()  # both: the R2 sequence, evenly spread
    total = rows.new_zeros(rows.shape[0], rows.shape[2], rows.shape[2], dtype=torch.float64)
    for part, at in zip(rows.split(CHUNK_TOKENS, 1), positions.split(CHUNK_TOKENS), strict=True):
        turned = rotate(part.float(), at, rope)
        turned = turned if center is None else turned - center.to(rows.device)[:, None]
        total += turned.transpose(1, 2) @ turned
    return (total / count).float().cpu()


def _longest(max_position: int) -> int:
    return max(SHORTEST, min(max_position, LONGEST))


def _in_bands(energy: Tensor, rope: RopeLayout) -> Tensor:
    """[K, D] with the mean of a rotary band in both of its dims: rotation mixes them."""
    first, second = rope.bands
    energy = energy.clone()
    energy[:, first] = energy[:, second] = (energy[:, first] + energy[:, second]) / 2
    return energy


def _with_floor(moment: Tensor) -> Tensor:
    moment = moment.double()
    mean = moment.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    return moment + DIRECTION_FLOOR * mean * torch.eye(moment.shape[-1], dtype=moment.dtype)


def _power(moment: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(moment)
    return vectors * values.clamp_min(1e-12)[:, None] ** exponent @ vectors.transpose(1, 2)
