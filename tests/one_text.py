"""A model's step over one text, without a cache."""

from __future__ import annotations

from torch import Tensor

from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.reference.attention import causal_attention


class OneText:
    """A KVBatch whose tokens attend to each other; calls: what each layer asked."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call)
        return causal_attention(call.q, call.k, call.v, call.softmax)
