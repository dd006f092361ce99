"""Multi-head latent attention (DeepSeek-V2/V3 and what copies it) over a cache of latents.

transformers makes the keys and values of all heads from the latents in a module's `expand_kv`, right before
it calls the attention function. Here that step is left out, module by module: the attention function is
given the latents, and what their up-projection would have done is done to queries and outputs
(model/attention.py, ops/latent.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.ops.latent import UpProjection

DTYPES = {torch.float32: 1e-4, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Dtypes of up-projections that are understood, and how near their products must come to the module's own,
relative to the largest."""
DIMS = ("num_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
EXPAND = "expand_kv"
TRIAL_TOKENS = 5


def use_latent_cache(model: nn.Module) -> str:
    """Let every attention layer of a model with multi-head latent attention hand out latents.

    All layers or none, since one block table serves them all. A layer qualifies if its up-projection is a
    plain linear layer without bias, and its own expand_kv, tried on random latents, agrees with that weight.
    Only the instances change. Calling it again changes nothing.

    Returns: one line that describes the cache; "" for a model without latents.
    """
    modules = [module for module in model.modules() if _has_latents(module)]
    if not modules:
        return ""
    for module in modules:
        if not hands_out_latents(module) and (problem := _problem(module)) is not None:
            return f"latent cache: off, keys and values are expanded (layer {module.layer_idx}: {problem})"
    for module in modules:
        setattr(module, EXPAND, _latents)
    first: Any = modules[0]
    return f"latent cache: {first.kv_lora_rank} + {first.qk_rope_head_dim} numbers per token and layer"


def _has_latents(module: nn.Module) -> bool:
    """Return whether it is the attention of a layer that makes keys and values of latents."""
    ranked = getattr(module, "kv_lora_rank", None) is not None
    return ranked and isinstance(getattr(module, "layer_idx", None), int)


def hands_out_latents(module: nn.Module) -> bool:
    """Return whether the module passes latents instead of keys and values to its attention function."""
    return vars(module).get(EXPAND) is _latents


def up_projection(module: Any) -> UpProjection:
    """Return the module's up-projection by head: views of its weight."""
    rows = (module.num_heads, module.qk_nope_head_dim + module.v_head_dim, module.kv_lora_rank)
    w_uk, w_uv = module.kv_b_proj.weight.view(rows).split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    return UpProjection(w_uk, w_uv)


def _latents(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Replace expand_kv: [1, 1, T, R], [1, 1, T, dr] -> the key [c; k_pe] of the only KV head, and c."""
    return torch.cat([latents, rotary], dim=-1), latents


def _problem(module: Any) -> str | None:
    """Why the module has to stay expanded."""
    if not callable(getattr(module, EXPAND, None)):
        return "this version of transformers has no expand_kv to leave out"
    if missing := [name for name in DIMS if not isinstance(getattr(module, name, None), int)]:
        return f"it does not say its {missing[0]}"
    linear = getattr(module, "kv_b_proj", None)
    if not isinstance(linear, nn.Linear) or linear.weight.dtype not in DTYPES:
        return "kv_b_proj is no linear layer with float32, bfloat16 or float16 weights"
    if linear.bias is not None:
        return "kv_b_proj has a bias"
    dims = module.num_heads * (module.qk_nope_head_dim + module.v_head_dim), module.kv_lora_rank
    if tuple(linear.weight.shape) != dims:
        return f"the weight of kv_b_proj is {tuple(linear.weight.shape)}, not {dims}"
    return None if _expands_alike(module) else "its expand_kv computes something else than kv_b_proj"


@torch.inference_mode()
def _expands_alike(module: Any) -> bool:
    """Whether the module's expand_kv and its weight give the same keys and values of random latents."""
    weight: Tensor = module.kv_b_proj.weight
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, TRIAL_TOKENS, module.kv_lora_rank + module.qk_rope_head_dim)
    both = torch.randn(shape, generator=generator).to(weight)
    latents, rotary = both.split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    try:
        found = module.expand_kv(latents, rotary)
    except (TypeError, ValueError, RuntimeError):  # not the step that this module knows
        return False
    want = up_projection(module).expand(latents[0, 0], rotary[0, 0])
    return len(found) == 2 and all(map(_near, found, want))


def _near(found: Any, want: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != (1, *want.shape):
        return False
    limit = DTYPES[want.dtype] * float(want.abs().max())
    return bool((found[0] - want).abs().max() <= limit)
