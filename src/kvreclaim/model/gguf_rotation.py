"""How a GGUF file scales rotary positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.gguf_checks import quoted

BETAS = ("beta_fast", "beta_slow")


def rope_scaling(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scaling as entries of transformers' rope_parameters; empty where positions are not scaled.

    As in llama.cpp a factor without a type is linear, and a factor of 0 or 1 is none.

    Raises: UnsupportedModelError for a scaling that transformers does not have.
    """
    own = f"{fields.get('general.architecture')}."
    said = {
        key.removeprefix(f"{own}rope.scaling."): value for key, value in fields.items() if key.startswith(own)
    }
    kind = said.get("type", "linear")
    factor = float(said.get("factor", said.get(f"{own}rope.scale_linear", 0.0)))
    original = said.get("original_context_length", said.get(f"{own}context_length"))
    if kind == "longrope":
        return {"rope_type": kind, "original_max_position_embeddings": original}
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    unread = [key for key in ("yarn_ext_factor", "yarn_attn_factor") if said.get(key, 1.0) != 1.0]
    unread += ["yarn_log_multiplier"] if said.get("yarn_log_multiplier") else []
    if kind != "yarn" or unread:
        raise UnsupportedModelError(
            f"the file scales rotary positions by {' '.join([quoted(kind), *unread])}, which is not read "
            "from GGUF; pass the model's hub id, or another file."
        )
    found = {"rope_type": kind, "factor": factor, "original_max_position_embeddings": original}
    found |= {beta: float(said[f"yarn_{beta}"]) for beta in BETAS if f"yarn_{beta}" in said}
    if said.get("attn_factor", 1.0) != 1.0:
        found["attention_factor"] = said["attn_factor"] * (0.1 * math.log(factor) + 1.0)
    return found
