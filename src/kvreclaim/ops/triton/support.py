"""Availability of Triton's kernels, and facts about the machine that they need.

Importing this needs no triton. Everything else in the package does.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache

import torch
from torch import Tensor

from kvreclaim.ops.backend import Need

MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 512
"""Largest dim of a latent cache's values, the wider part of its keys."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INTERPRETED_PROCESSORS = 8
"""Multiprocessors that Triton's interpreter pretends to have."""
INTERPRETED_SHARED_BYTES = 99 << 10
"""Shared memory that it pretends to have: that of the smallest GPUs with bf16."""


def unavailable_reason() -> str | None:
    """Why no kernel of this package can run in this process, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not is_interpreted() and not torch.cuda.is_available():
        return "no CUDA device, and TRITON_INTERPRET=1 is not set"
    return None


def unsupported_reason(need: Need) -> str | None:
    """Why the kernels cannot serve this model on this device, or None."""
    first = need.layers[0]
    widest = max(first.key_dims, first.v_head_dim)
    limit = MAX_LATENT_DIM if first.latent else MAX_HEAD_DIM
    problems = {
        f"device is {need.device.type}, not cuda": need.device.type != "cuda" and not is_interpreted(),
        f"dtype {need.dtype} is none of fp32, fp16 and bf16": need.dtype not in DTYPES,
        f"head dim {widest} is above {limit}": widest > limit,
        f"latents of {widest} dims in fp32 take more registers than a GPU has, load the model in 16 bits": (
            _is_wide_fp32(need, widest) and not is_interpreted()
        ),
    }
    reason = unavailable_reason() or next((text for text, holds in problems.items() if holds), None)
    return reason or need.kv_format.unsupported_reason(need.layers)


def _is_wide_fp32(need: Need, widest: int) -> bool:
    """Return whether attention multiplies fp32 rows of a latent cache that is wider than any other."""
    form = need.kv_format
    operands = need.dtype if not form.is_plain or form.dtype == need.dtype else torch.float32
    return widest > MAX_HEAD_DIM and operands == torch.float32


def describe() -> str:
    """Text for the start line about kernels."""
    return "triton (interpreter)" if is_interpreted() else f"triton ({torch.cuda.get_device_name()})"


def is_interpreted() -> bool:
    """Kernels run in Triton's interpreter, on tensors of any device. Decided before triton is imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def keeps_16_bits(dtype: torch.dtype) -> bool:
    """Return whether tl.dot takes its operands as they lie in the cache. The interpreter computes bf16 on raw
    words and must be given fp32."""
    return dtype != torch.float32 and not is_interpreted()


@cache
def dot_precision(device: torch.device) -> str:
    """Precision of tl.dot in fp32: three tf32 products where tensor cores have them (fp32 accuracy
    without the registers that plain fp32 products of whole rows take), else plain fp32."""
    has_tf32 = device.type == "cuda" and torch.version.hip is None and _capability(device) >= (8, 0)
    return "tf32x3" if has_tf32 else "ieee"


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may take, in bytes."""
    if device.type != "cuda":
        return INTERPRETED_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    most: int = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    return most


@cache
def num_processors(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def padded(dim: int) -> int:
    """Return the power of two that a tile of this many columns takes; tl.dot needs 16."""
    return max(16, 1 << (dim - 1).bit_length())


def new_output(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised, in the dtype that kernels write for tensors like this one: the interpreter rounds
    to bf16 wrongly where a carry reaches the exponent, so it writes fp32 and torch rounds."""
    dtype = torch.float32 if is_interpreted() else like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device)
