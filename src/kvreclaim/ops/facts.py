"""Facts about a model's attention for the rest of the engine: shapes, scales, rotation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvreclaim.ops.key_transform import KeyTransform
from kvreclaim.ops.rope import RopeLayout
from kvreclaim.ops.states import StateShape


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """Softmax of a layer's logits.

    scale:   multiplies q.k
    softcap: scores become softcap * tanh(score / softcap)
    window:  a key is seen while query position - key position < window (logical positions)
    chunk:   a key is seen from queries of its own chunk of so many positions; no kernel knows of it: tables
             of such layers begin at a chunk's first token
    sinks:   [H] fp32 logits that join the softmax's denominator and carry no value; where the sequences of
             a batch are KV heads with their H query heads each, of n such in turn: [n * H]
    keys:    how the cache stores keys, if not as they are; of tokens in cells with the rows that
             PagedTokens.heads names

    Sources: sinks as in GPT-OSS; soft-capping as in Gemma 2.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    chunk: int | None = None
    keys: KeyTransform | None = None

    @property
    def ignores_constants(self) -> bool:
        """True if a number added to all logits of a query changes nothing."""
        return self.sinks is None and self.softcap is None

    def __str__(self) -> str:
        sinks = "no sinks" if self.sinks is None else "sinks"
        chunk = "" if self.chunk is None else f", chunk {self.chunk}"
        return f"scale {self.scale:g}, softcap {self.softcap}, window {self.window}{chunk}, {sinks}"


def joined_softmax(parts: Sequence[Softmax]) -> Softmax:
    """Return the softmax of the heads of all parts, which differ in sinks and keys alone."""
    if len(parts) == 1:
        return parts[0]
    sinks = [part.sinks for part in parts if part.sinks is not None]
    keys = [part.keys for part in parts if part.keys is not None]
    every = KeyTransform.joined(keys) if keys else None
    return replace(parts[0], sinks=torch.cat(sinks) if sinks else None, keys=every)


@dataclass(frozen=True, slots=True, eq=False)
class LayerFacts:
    """One attention layer. rope is None where no rotation could be verified (the reason is in
    ModelFacts.rope_problem); a layer that truly has no rotation has a layout with F = 0.

    latent: the key is the value (the latent) followed by the rotary key (MLA), and stored once
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    softmax: Softmax
    rope: RopeLayout | None = None
    latent: bool = False

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def key_dims(self) -> int:
        """Dims of a key that the cache stores in addition to the value."""
        return self.head_dim - self.v_head_dim if self.latent else self.head_dim

    def kv_head(self, head: int) -> LayerFacts:
        """Facts of one KV head and its query heads alone."""
        sinks = self.softmax.sinks
        own = None if sinks is None else sinks.unflatten(0, (self.num_kv_heads, -1))[head]
        keys = self.softmax.keys
        keys = None if keys is None else keys.rows(slice(head, head + 1))
        softmax = replace(self.softmax, sinks=own, keys=keys)
        return replace(self, num_heads=self.group_size, num_kv_heads=1, softmax=softmax)


@dataclass(frozen=True, slots=True, eq=False)
class ModelFacts:
    """All attention layers (equal in heads and dims), and what identifies the model.

    fingerprint: sha256 hex digest over what decides the meaning of K/V and queries
    dtype:       of queries, keys and values; hidden states may be fp32 with bf16 (model/attention.Narrowed)
    hidden_size: numbers of what an attention layer is given of a token; None where layers do not hand it out
    states:      of each recurrent layer: the tensors that are kept per sequence
    config:      the config's fields that query statistics depend on; None: not known
    overridden:  names of those that hf_overrides changed
    layer_ids:   where these are some of the model's layers: which; num_model_layers: of how many
    """

    name: str
    fingerprint: str
    layers: tuple[LayerFacts, ...]
    dtype: torch.dtype
    device: torch.device
    max_position: int
    rope_problem: str | None = None
    hidden_size: int | None = None
    states: tuple[tuple[StateShape, ...], ...] = ()
    config: Mapping[str, Any] | None = None
    overridden: tuple[str, ...] = ()
    layer_ids: tuple[int, ...] | None = None
    num_model_layers: int = 0

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def state_bytes(self) -> int:
        """Bytes of all recurrent layers' states of one sequence, at any length."""
        return sum(tensor.num_bytes for layer in self.states for tensor in layer)

    @property
    def ids(self) -> tuple[int, ...]:
        """The place of each of these layers in the model."""
        return tuple(range(self.num_layers)) if self.layer_ids is None else self.layer_ids

    def of_layers(self, ids: tuple[int, ...]) -> ModelFacts:
        """Facts of these layers alone."""
        layers = tuple(self.layers[n] for n in ids)
        return replace(self, layers=layers, layer_ids=ids, num_model_layers=self.num_layers)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Number and kind of blocks.

    k_dim:  stored dims of a key: the rotary part alone where latent
    latent: a key is its value followed by the k_dim stored dims (MLA)
    """

    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    k_dim: int
    v_dim: int
    latent: bool = False

    @classmethod
    def of(cls, layers: Sequence[LayerFacts], num_blocks: int, block_size: int) -> CacheShape:
        first = layers[0]
        return cls(
            num_layers=len(layers),
            num_blocks=num_blocks,
            num_kv_heads=first.num_kv_heads,
            block_size=block_size,
            k_dim=first.key_dims,
            v_dim=first.v_head_dim,
            latent=first.latent,
        )

    @property
    def head_dim(self) -> int:
        """Dims of a key as queries meet it."""
        return self.v_dim + self.k_dim if self.latent else self.k_dim

    @property
    def units(self) -> tuple[int, int, int]:
        return self.num_layers, self.num_blocks, self.num_kv_heads
