"""A model's forward over its native decoder layers, without what transformers does around them: masks, caches
and keyword arguments for each layer.

It is taken by the names of its parts (Llama's), and proved by trial tokens: the last states have to be those
of transformers' own forward, to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvreclaim.model.decoder import NativeLayer, TrialBatch, trial_inputs

PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")
IGNORED = {"kv_batch", "position_ids", "use_cache"}
"""Keyword arguments that decide nothing else in a call with a KV batch."""


class NativeModel:
    """The forward of the module that holds embeddings, layers and the last norm; the module's own for calls
    without a KV batch, with other arguments, and while hooks see a layer's calls."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        module = self.module
        if input_ids is None or not self.takes(kwargs):
            return type(module).forward(module, input_ids=input_ids, **kwargs)
        places = kwargs["position_ids"]
        states = module.embed_tokens(input_ids)
        given = {
            "kv_batch": kwargs["kv_batch"],
            "position_ids": places,
            "position_embeddings": module.rotary_emb(states, places),
        }
        for layer in module.layers:
            states = layer.forward(states, **given)
        return BaseModelOutputWithPast(last_hidden_state=module.norm(states))

    def takes(self, kwargs: dict[str, Any]) -> bool:
        """Whether the layers alone compute this call."""
        return (
            kwargs.get("kv_batch") is not None
            and kwargs.get("position_ids") is not None
            and not kwargs.get("use_cache")
            and all(value is None for name, value in kwargs.items() if name not in IGNORED)
            and not any(layer._forward_pre_hooks or layer._forward_hooks for layer in self.module.layers)
        )


def use_native_model(model: PreTrainedModel) -> str:
    """Give the module that holds the decoder layers a NativeModel as its forward where it computes the same.

    Behind use_fast_layers. Returns: one line that says what runs; empty where transformers' forward does.
    """
    for module in model.modules():
        if _looks_known(module) and (native := _proved(module, model)) is not None:
            module.forward = native
            return "forward: native"
    return ""


def _looks_known(module: nn.Module) -> bool:
    layers = getattr(module, "layers", None)
    return (
        "forward" not in vars(module)
        and all(hasattr(module, name) for name in PARTS)
        and isinstance(layers, nn.ModuleList)
        and all(isinstance(vars(layer).get("forward"), NativeLayer) for layer in layers)
    )


@torch.inference_mode()
def _proved(module: Any, model: PreTrainedModel) -> NativeModel | None:
    """The forward in a loop over the layers, if it makes of trial tokens what transformers' makes."""
    native, inputs = NativeModel(module), trial_inputs(model)
    try:
        want = type(module).forward(module, **inputs, kv_batch=TrialBatch()).last_hidden_state
        got = native(**inputs, kv_batch=TrialBatch()).last_hidden_state
    except (AttributeError, RuntimeError, TypeError, ValueError):  # its parts are called in another way
        return None
    return native if got.dtype is want.dtype and torch.equal(got, want) else None
