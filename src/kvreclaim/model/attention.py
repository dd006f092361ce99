"""The one attention function registered with transformers; what it does is decided by its caller.

The engine passes a KVBatch as the keyword argument `kv_batch` of the model's forward; transformers
hands it down to every attention layer. Nothing is fetched from globals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import transformers
from torch import Tensor, nn

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.latent import hands_out_latents, up_projection
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.kv_cache import LayerCache
from kvreclaim.ops.latent import UpProjection

ATTENTION_NAME = "kvreclaim_paged"


@dataclass(frozen=True, slots=True, eq=False)
class AttentionCall:
    """The inputs of one attention layer: q [T, H, Dk], k [T, K, Dk], v [T, K, Dv], already rotated.

    softmax: the softmax of this call, with sinks in their own dtype
    latent:  there is one KV head, and its keys begin with its values (multi-head latent attention)
    hidden:  [T, M] what the layer was given, where it hands that out (model/inputs.py)
    is_stored: keys and values are in the cache, where the batch's `destination` points
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    softmax: Softmax
    latent: bool = False
    hidden: Tensor | None = None
    is_stored: bool = False

    def part(self, rows: slice | Tensor) -> AttentionCall:
        """Return the call of these tokens."""
        hidden = None if self.hidden is None else self.hidden[rows]
        return replace(self, q=self.q[rows], k=self.k[rows], v=self.v[rows], hidden=hidden)

    def served_by(self, layer: LayerCache) -> LayerCache:
        """Return the layer's place in the cache, itself.

        Raises: UnsupportedModelError if the softmax differs from the probed one.
        """
        now, then = self.softmax, layer.softmax
        if (now.scale, now.softcap, now.window, now.chunk, now.sinks is None) != (
            then.scale,
            then.softcap,
            then.window,
            then.chunk,
            then.sinks is None,  # sinks are weights: only their being there is compared
        ):
            raise UnsupportedModelError(
                f"layer {self.layer} has {now}, but had {then} when the model "
                "was loaded; use a model whose attention layers do not change."
            )
        return layer


@dataclass(frozen=True, slots=True, eq=False)
class LatentCall:
    """The inputs of a layer of multi-head latent attention.

    call:    its latents k [T, 1, R + dr] and v [T, 1, R], and the queries q [T, H, dn + dr] of expanded keys
    weights: what expands latents
    """

    call: AttentionCall
    weights: UpProjection

    def part(self, rows: slice | Tensor) -> LatentCall:
        """Return the call of these tokens."""
        return replace(self, call=self.call.part(rows))

    def queries(self, rows: slice | Tensor) -> Tensor:
        """[t, H, dn + dr], rotated."""
        return self.call.q[rows]

    def absorbed(self, rows: Tensor | slice = slice(None)) -> AttentionCall:
        """Return the call over latents, with the queries of these rows: attention of one KV head."""
        return replace(self.call, q=self.weights.absorb(self.call.q[rows]), latent=True)

    def finish(self, attended: Tensor) -> Tensor:
        """[t, H, R] of absorbed queries -> [t, H, dv]."""
        return self.weights.finish(attended)

    def attended_by(self, batch: KVBatch) -> Tensor:
        """[T, H, dv]: the batch's `attend_latent`, or its `attend` of the absorbed call."""
        attend: Callable[[LatentCall], Tensor] | None = getattr(batch, "attend_latent", None)
        return self.finish(batch.attend(self.absorbed())) if attend is None else attend(self)


class KVBatch(Protocol):
    """Serves the attention layers of one forward pass.

    Layers that cache latents call `attend_latent`, LatentCall -> [T, H, dv], of a batch that has it, and
    pass their absorbed calls to any other. If a batch has `destination`, layer -> LayerCache and slots [T], a
    layer may store its keys and values there itself.
    """

    def attend(self, call: AttentionCall) -> Tensor:
        """[T, H, Dv], dtype of call.q."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Narrowed:
    """A KVBatch for a model with hidden states of a wider dtype than its queries. Keys and values are rounded
    once, when the cache stores them."""

    batch: KVBatch
    dtype: torch.dtype

    def attend(self, call: AttentionCall) -> Tensor:
        return self.batch.attend(replace(call, q=call.q.to(self.dtype))).to(call.q.dtype)


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    kv_batch: KVBatch | None = None,
    layer_input: Tensor | None = None,
    query_scale: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, H, T, D], key and value [1, K, T, D] -> [1, T, H, Dv];
    layer_input [1, T, M]; query_scale [1, T] fp32 (model/attention.py)."""
    if kv_batch is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand keyword arguments down to its attention function, "
            "so the paged cache cannot reach it; use a model whose attention layers do "
            "(Llama, Qwen, Mistral, Gemma 2, Phi-3, GLM-4, OLMo 2, DeepSeek-V3, ...)."
        )
    if query_scale is not None:
        query = (query * query_scale[:, None, :, None]).to(query.dtype)
    call = AttentionCall(
        layer=int(module.layer_idx),  # type: ignore[arg-type]
        q=query[0].transpose(0, 1),
        k=key[0].transpose(0, 1),
        v=value[0].transpose(0, 1),
        softmax=Softmax(
            scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
            softcap=kwargs.get("softcap"),
            window=kwargs.get("sliding_window"),
            sinks=kwargs.get("s_aux"),
            chunk=_chunk(module),
        ),
        hidden=None if layer_input is None else layer_input[0],
    )
    if not hands_out_latents(module):
        return kv_batch.attend(call)[None], None
    return LatentCall(call, up_projection(module)).attended_by(kv_batch)[None], None


def _chunk(module: nn.Module) -> int | None:
    """Tokens of the chunks that a layer attends within; None where it attends to all."""
    config: Any = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    if not types or types[module.layer_idx] != "chunked_attention":
        return None
    return int(config.attention_chunk_size)


def register_attention() -> str:
    """Make ATTENTION_NAME known to transformers, and return it; calling it again changes nothing.

    No mask function is registered, so transformers builds no masks; they follow from the batch.
    """
    transformers.AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
    return ATTENTION_NAME


def use_token_positions(model: nn.Module) -> None:
    """Let the attention function scale what such layers would have scaled themselves; only the instances
    change. Source: arXiv 2501.19399; transformers, modeling_llama4.py."""
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if getattr(attention, "attn_temperature_tuning", False) and not getattr(attention, "use_rope", True):
            attention.attn_temperature_tuning = False
            layer.register_forward_pre_hook(partial(_with_scale, attention), with_kwargs=True)


def scales(positions: Tensor, floor_scale: float, attn_scale: float) -> Tensor:
    """fp32, of the shape of positions: what queries are multiplied with."""
    return torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * attn_scale + 1.0


def _with_scale(
    attention: Any, _: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Keyword arguments go down to the attention function."""
    found = scales(kwargs["position_ids"], attention.floor_scale, attention.attn_scale)
    return args, {**kwargs, "query_scale": found}
