"""Decoder layers with multi-head latent attention on Triton's kernels.

Queries stay as the projection made them until it is known how they attend: absorption and rotation are one
kernel. Latents go from the projection into the cache in one kernel, if the batch provides slots.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvreclaim.model.attention import AttentionCall, LatentCall
from kvreclaim.model.decoder import are_alike, best_of, gate_of, joined, mlp_parts, norm_of, single
from kvreclaim.model.latent import up_projection
from kvreclaim.model.layer_trial import LayerTrial
from kvreclaim.model.native_modules import NativeLayer
from kvreclaim.ops.layer_parts import Heads, LatentHeads, LayerForm


@dataclass(frozen=True, slots=True, eq=False)
class UnrotatedCall(LatentCall):
    """A LatentCall with queries before rotation.

    angles: cos and sin [T, dr] or [T, dr / 2]
    ops:    ops.triton.latent
    """

    angles: tuple[Tensor, Tensor]
    heads: LatentHeads
    ops: Any

    def part(self, rows: slice | Tensor) -> UnrotatedCall:
        return replace(self, call=self.call.part(rows), angles=self._angles(rows))

    def queries(self, rows: slice | Tensor) -> Tensor:
        found: Tensor = self.ops.rotate_queries(self.call.q[rows], self._angles(rows), self.heads)
        return found

    def absorbed(self, rows: Tensor | slice = slice(None)) -> AttentionCall:
        q = self.ops.absorb(self.call.q[rows], self._angles(rows), self.heads, self.weights.w_uk)
        return replace(self.call, q=q, latent=True)

    def finish(self, attended: Tensor) -> Tensor:
        found: Tensor = self.ops.values_of(attended, self.weights)
        return found

    def _angles(self, rows: slice | Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.angles
        return cos[rows], sin[rows]


class LatentLayer(NativeLayer):
    """A NativeLayer that hands out latents. parts: an ops.LatentDecoderLayer"""

    def __init__(
        self, module: Any, softmax: Any, parts: Any, ops: ModuleType, latent_ops: ModuleType
    ) -> None:
        super().__init__(module, softmax, parts, ops)
        self.ops = latent_ops

    def attended(self, batch: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """[T, H, dv]."""
        heads: LatentHeads = self.parts.form.latents
        find = getattr(batch, "destination", None)
        place = None if find is None else find(self.layer)
        if place is not None and not self.ops.can_store(place[0]):
            place = None
        q, latents = self.parts.latents(x, angles, place)
        call = AttentionCall(
            layer=self.layer,
            q=q,
            k=latents[:, None],
            v=latents[:, None, : heads.rank],
            softmax=self.softmax,
            hidden=self.handed_out(x),
            is_stored=place is not None,
        )
        return UnrotatedCall(call, up_projection(self.attention), angles, heads, self.ops).attended_by(batch)


@torch.inference_mode()
def proved_latent(module: Any, seen: LayerTrial, ops: ModuleType) -> NativeLayer | None:
    """Return the layer in kernel calls, if its output for the trial's arguments agrees with the module's."""
    found, form = seen.modules, _form(module.self_attn, seen, ops)
    if form is None or form.latents is None:
        return None
    latent_ops = importlib.import_module("kvreclaim.ops.triton.latent")
    parts = [
        joined(found.qkv, form.before[0], ops),
        None if found.queries is None else single(found.queries, ops),
        single(found.out, ops),
        *mlp_parts(found, form, ops),
    ]
    natives = []
    for turns_neighbours in (False, True):
        own = replace(form, latents=replace(form.latents, turns_neighbours=turns_neighbours))
        layer = latent_ops.LatentDecoderLayer(own, *parts)
        natives.append(LatentLayer(module, seen.call.softmax, layer, ops, latent_ops))
    return best_of(natives, seen)


def _form(attention: Any, seen: LayerTrial, ops: ModuleType) -> LayerForm | None:
    """Return the layer's parts around its products, without the rotation, if the kernels support them."""
    call, found = seen.call, seen.modules
    rank, rotary, nope = attention.kv_lora_rank, attention.qk_rope_head_dim, attention.qk_nope_head_dim
    count = call.q.shape[1]
    *q_norms, kv_norm = (norm_of(each) for each in found.own)
    columns, width = (each.out_features for each in found.qkv)
    queries = columns if found.queries is None else found.queries.out_features
    angles = seen.kwargs["position_embeddings"][0].shape[-1]
    gate = gate_of(seen, ops)
    if (
        kv_norm is None
        or width != rank + rotary
        or queries != count * (nope + rotary)
        or angles not in (rotary, rotary // 2)
        or (gate is None and found.mlp is None)
        or not are_alike(found)
    ):
        return None
    before, after = ((norm_of(a), norm_of(b)) for a, b in (found.before, found.after))
    latents = LatentHeads(nope, rotary, rank, kv_norm, q_norms[0] if q_norms else None)
    form = LayerForm(Heads(count, 1, rank + rotary), before, after, gate, latents)
    return form if ops.takes_form(form) else None
