"""A model's step over one text, without a cache; a copy of a model with other weights."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.reference.attention import causal_attention


class OneText:
    """A KVBatch whose tokens attend to each other; calls: the calls of all layers."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return causal_attention(call.q, call.k, call.v, call.softmax)


def zeroed(model: nn.Module) -> nn.Module:
    """A copy of the model with zeros in all of its linear layers."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for module in copied.modules():
            if isinstance(module, nn.Linear):
                module.weight.zero_()
    return copied
