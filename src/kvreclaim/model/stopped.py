"""The first layers of a model alone."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch.nn import functional

from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.reference.attention import causal_attention


class _Reached(Exception):
    pass


class _UpTo:
    """Serves the layers before one; there the forward pass ends."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.found: AttentionCall | None = None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if call.layer == self.layer:
            self.found = call
            raise _Reached
        softmax = call.softmax
        if any(each is not None for each in (softmax.softcap, softmax.sinks, softmax.window, softmax.chunk)):
            return causal_attention(call.q, call.k, call.v, softmax)
        q, k, v = (x.transpose(0, 1)[None] for x in (call.q, call.k, call.v))
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=softmax.scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)


@torch.inference_mode()
def call_of_layer(loaded: LoadedModel, tokens: list[int], layer: int) -> AttentionCall:
    """A layer's inputs for one text at positions 0, 1, ..., after full attention in the layers before."""
    batch = _UpTo(layer)
    ids = torch.tensor([tokens], device=loaded.facts.device)
    places = torch.arange(len(tokens), device=ids.device)[None]
    with suppress(_Reached):
        loaded.model(input_ids=ids, position_ids=places, use_cache=False, logits_to_keep=1, kv_batch=batch)
    assert batch.found is not None, f"layer {layer} was not reached"
    return batch.found
