"""Attention of one forward pass over the paged cache."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kvreclaim.engine.attend.latent import latent_parts
from kvreclaim.engine.attend.parts import AttentionPart, attend_all
from kvreclaim.engine.signals.observer import Observer
from kvreclaim.memory.windows import Place
from kvreclaim.model.attention import AttentionCall, LatentCall
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.kv_cache import KVCache, LayerCache


@dataclass(frozen=True, slots=True, eq=False)
class PagedKVBatch:
    """Serves the attention layers of one forward pass from the paged cache (model.attention.KVBatch).

    layers:   every layer of the model, at `places` in the tables
    batches:  one per table; the first one is used by compression, observers and parts, with the layers of
              the cache
    observer: called for every attention call, if policies of the step need signals
    parts:    of the batch; none if it is attended as a whole
    """

    ops: Backend
    cache: KVCache
    layers: tuple[LayerCache, ...]
    places: tuple[Place, ...]
    batches: tuple[AttentionBatch, ...]
    observer: Observer | None = None
    parts: tuple[AttentionPart, ...] = ()

    @property
    def batch(self) -> AttentionBatch:
        return self.batches[0]

    def destination(self, layer: int) -> tuple[LayerCache, Tensor]:
        """Return a layer's cache, and the slots [T] int64 that store its keys and values."""
        return self.layers[layer], self.batches[self.places[layer].table].slot_mapping

    def attend(self, call: AttentionCall) -> Tensor:
        layer, place = call.served_by(self.layers[call.layer]), self.places[call.layer]
        batch = self.batches[place.table]
        if not call.is_stored:
            self.ops.write_kv(layer, call.k, call.v, batch.slot_mapping)
        if not place.table and (self.observer is not None or self.parts):
            if place.layer != call.layer:
                call = replace(call, layer=place.layer)
            if self.observer is not None:
                self.observer.see(call)
            if self.parts:
                return attend_all(self.parts, call)
        return self.ops.paged_attention(call.q, layer, batch)

    def attend_latent(self, call: LatentCall) -> Tensor:
        """[T, H, dv]: attention over latents. Keys and values are expanded where that is faster."""
        parts = () if self.parts else latent_parts(call, self.batch)
        if not parts:
            return call.finish(self.attend(call.absorbed()))
        new = call.call
        layer = new.served_by(self.layers[new.layer])
        if not new.is_stored:
            self.ops.write_kv(layer, new.k, new.v, self.batch.slot_mapping)
        if self.observer is not None:
            self.observer.see(call.absorbed())
        out = new.q.new_empty((*new.q.shape[:2], call.weights.w_uv.shape[1]))
        for part in parts:
            part.attend(call, self.ops, layer, out)
        return out
