"""Trial input of a model before its modules run natively: tokens, and a batch with outputs that depend on
all inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvreclaim.model.attention import AttentionCall

TRIAL_POSITIONS = (0, 1, 2, 5, 11, 23, 60)


class TrialBatch:
    """A KVBatch with outputs that depend on queries, keys and values. It records its calls."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = replace(call, q=call.q.clone(), k=call.k.clone(), v=call.v.clone())
        share = call.q.shape[1] // call.k.shape[1]
        scores = (call.q * call.k.repeat_interleave(share, 1)).float().sum(-1, keepdim=True)
        return (call.v.repeat_interleave(share, 1) * torch.tanh(scores * call.q.shape[2] ** -0.5)).to(
            call.q.dtype
        )


def trial_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Trial tokens, as a model or the module of its layers takes them."""
    positions = torch.tensor([TRIAL_POSITIONS], device=model.device)
    tokens = (positions * 7919 + 1) % model.config.get_text_config().vocab_size
    return {"input_ids": tokens, "position_ids": positions, "use_cache": False}
