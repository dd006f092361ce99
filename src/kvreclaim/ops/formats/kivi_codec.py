"""kivi4's codes: one unit (a block of one head in one layer) as bytes, and back. Pure functions.

Keys lie *by channel* in a block that tokens were written to in order: a scale and a centre for each dim over
the block's S tokens (arXiv 2402.02750). After a compaction they lie *by token*, as int4's: a scale and a
centre for each token and 32 dims, so that a token can move alone. Values always lie by token, 13 bits for 32
dims.

The parameters of a unit, gk = groups(D), gv = groups(Dv):

    keys    max(2 D, 2 S gk + 1) bytes: by channel z[D], s[D]; by token s[S], z[S] of each group
    state   the last of these bytes: 255 by token, 254 open (the numbers lie in a row of open_blocks.py), else
            by channel
    values  s[gv][S] bytes; then z of group g and slot i at index g S + i: bits 0 ... 3 of two in a byte, the
            even index low; then bit 4 of eight in a byte
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvreclaim.kv_bytes import Geometry, groups
from kvreclaim.ops.formats.affine import CHANNEL_GRID, KEY_GRID, VALUE_GRID, Groups
from kvreclaim.ops.formats.codecs import pack, unpack

BY_TOKEN = 255
OPEN = 254


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Bytes of units in the reference's order; back-ends lay them out as they like.

    k: [..., S, D / 2], v: [..., S, Dv / 2] uint8, codes of two dims in a byte
    params: [..., U] uint8
    """

    k: Tensor
    v: Tensor
    params: Tensor


def seal(k: Tensor, v: Tensor) -> Units:
    """Full blocks as they were written: keys by channel.

    k: [..., S, D], v: [..., S, Dv] any float dtype.
    """
    geometry = Geometry(k.shape[-1], v.shape[-1], k.shape[-2])
    n, s, z = CHANNEL_GRID.encode(k.transpose(-1, -2))
    keys = torch.cat((z, s), -1).to(torch.uint8)
    keys = torch.nn.functional.pad(keys, (0, geometry.key_bytes - keys.shape[-1]))
    values = Groups.encode(v, VALUE_GRID)
    params = torch.cat((keys, _join_values(values)), -1)
    return Units(pack(n.transpose(-1, -2)), pack(values.n), params)


def join(keys: Groups, values: Groups) -> Units:
    """Full blocks of tokens that were moved: keys [..., S, *] and values [..., S, *] by token."""
    geometry = Geometry(keys.n.shape[-1], values.n.shape[-1], keys.n.shape[-2])
    pairs = torch.stack((keys.s, keys.z), -1).flatten(-2)  # [..., S, 2 gk]
    params = pairs.transpose(-1, -2).flatten(-2)
    params = torch.nn.functional.pad(params, (0, geometry.key_bytes - params.shape[-1]))
    params[..., geometry.state] = BY_TOKEN
    return Units(pack(keys.n), pack(values.n), torch.cat((params, _join_values(values)), -1))


def decode_keys(codes: Tensor, params: Tensor, k_dim: int, v_dim: int) -> Tensor:
    """Codes [..., S, D / 2] and parameters [..., U] of units -> keys [..., S, D] fp32.

    Of an open unit, whatever: the caller lays its row over it.
    """
    geometry = Geometry(k_dim, v_dim, codes.shape[-2])
    by_token = params[..., geometry.state] == BY_TOKEN
    centres, steps = params[..., :k_dim], params[..., k_dim : 2 * k_dim]
    steps = steps.clamp_max(CHANNEL_GRID.scale.last)
    by_channel = CHANNEL_GRID.decode(unpack(codes).transpose(-1, -2), steps, centres).transpose(-1, -2)
    if not by_token.any():
        return by_channel
    moved = token_keys(codes, params, k_dim, v_dim).decode(KEY_GRID)
    return torch.where(by_token[..., None, None], moved, by_channel)


def decode_values(codes: Tensor, params: Tensor, k_dim: int, v_dim: int) -> Tensor:
    """Codes [..., S, Dv / 2] and parameters [..., U] of units -> values [..., S, Dv] fp32."""
    return token_values(codes, params, k_dim, v_dim).decode(VALUE_GRID)


def token_keys(codes: Tensor, params: Tensor, k_dim: int, v_dim: int) -> Groups:
    """The keys of units that lie by token: [..., S, *]. Of others, whatever."""
    size = codes.shape[-2]
    pairs = params[..., : 2 * size * groups(k_dim)].unflatten(-1, (-1, 2, size))  # [..., gk, 2, S]
    s, z = pairs.unbind(-2)
    return Groups(unpack(codes), s.transpose(-1, -2), z.transpose(-1, -2))


def token_values(codes: Tensor, params: Tensor, k_dim: int, v_dim: int) -> Groups:
    """The values of units: [..., S, *]."""
    geometry = Geometry(k_dim, v_dim, codes.shape[-2])
    count = geometry.num_values
    low = unpack(params[..., geometry.low_bits : geometry.high_bits])[..., :count]
    bits = params[..., geometry.high_bits : geometry.total, None] >> _bit_places(params.device) & 1
    z = low | bits.flatten(-2)[..., :count] << 4
    s = params[..., geometry.key_bytes : geometry.low_bits]
    s, z = (x.unflatten(-1, (-1, geometry.block_size)).transpose(-1, -2) for x in (s, z))
    return Groups(unpack(codes), s, z)


def _join_values(values: Groups) -> Tensor:
    """The bytes of values' parameters, [..., S, gv] each -> [..., S gv + ...]."""
    s, z = (x.transpose(-1, -2).flatten(-2) for x in (values.s, values.z))
    padded = torch.nn.functional.pad(z, (0, -z.shape[-1] % 8))
    high = (padded >> 4).unflatten(-1, (-1, 8)) << _bit_places(z.device)
    low = pack(padded & 15)[..., : -(-z.shape[-1] // 2)]
    return torch.cat((s, low, high.sum(-1, dtype=torch.uint8)), -1)


@cache
def _bit_places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
