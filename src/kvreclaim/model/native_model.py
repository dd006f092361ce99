"""A model's forward over its native decoder layers, without what transformers does around them: masks, caches
and keyword arguments for each layer.

It is taken by the names of its parts (Llama's), and proved by trial tokens: the last states have to be those
of transformers' own forward, to the bit.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvreclaim.model.decoder import NativeLayer, NativeModel
from kvreclaim.model.trial_batch import TrialBatch, trial_inputs
from kvreclaim.ops.native import decoder as native_layers

PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


def use_native_model(model: PreTrainedModel, ops: ModuleType = native_layers) -> str:
    """Give the module that holds the decoder layers a NativeModel as its forward where it computes the same.

    Call after use_fast_layers. Returns: one line that describes it; empty if transformers' forward runs.
    """
    for module in model.modules():
        if _looks_known(module) and (native := _proved(module, model)) is not None:
            module.forward = native
            return f"forward: {ops.NAME}"
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
    """Return a forward that loops over the layers, if it agrees with transformers' on trial tokens."""
    inputs = trial_inputs(model)
    try:
        output = type(module).forward(module, **inputs, kv_batch=TrialBatch())
        native, want = NativeModel(module, type(output)), output.last_hidden_state
        got = native(**inputs, kv_batch=TrialBatch()).last_hidden_state
    except (AttributeError, RuntimeError, TypeError, ValueError):  # its parts are called in another way
        return None
    return native if got.dtype is want.dtype and torch.equal(got, want) else None
