"""The rotary frequencies of a model, from the model itself or from its config alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from kvreclaim.errors import UnsupportedModelError


def frequencies_in(module: nn.Module) -> list[Tensor]:
    """Return the distinct inv_freq buffers of a model, float64 on its device."""
    found: list[Tensor] = []
    for key, buffer in module.named_buffers():
        if not key.endswith("inv_freq") or "original" in key.rsplit(".", 1)[-1]:
            continue
        freq = buffer.detach().to(torch.float64)
        if not any(f.shape == freq.shape and torch.equal(f, freq) for f in found):
            found.append(freq)
    return found


def rotary_frequencies(config: Any) -> list[Tensor]:
    """frequencies_in the transformers model of a config, on the CPU, without its weights: only its rotary
    modules are made. Empty for a model that has none.

    config: of the text model; left as it is
    Raises: UnsupportedModelError if transformers has no causal model of it, or cannot make it.
    """
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise UnsupportedModelError(_unknown(config, f"transformers has no causal model of {type(config)}"))
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(
                copy.deepcopy(config), trust_remote_code=False
            )
        rotaries = {type(m): m for m in model.modules() if _turns(m)}
        return frequencies_in(nn.ModuleList(kind(m.config) for kind, m in rotaries.items()))
    except Exception as error:  # transformers raises any type for a wrong config
        raise UnsupportedModelError(_unknown(config, f"{type(error).__name__}: {error}")) from error


def _unknown(config: Any, reason: str) -> str:
    return (
        f"the rotary frequencies of {config.model_type} cannot be told from its config ({reason}); use a "
        "policy that needs no query statistics, such as knorm or streaming_llm."
    )


def _turns(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))
