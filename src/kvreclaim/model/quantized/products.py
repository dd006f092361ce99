"""The choice of kernels for products with packed weights."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.model.quantized.source import WeightSource
from kvreclaim.ops.extension import unavailable_reason as native_reason
from kvreclaim.ops.packed import DTYPES


@dataclass(frozen=True, slots=True)
class Products:
    """Kernels for products with packed weights.

    kernels:     "native" or "triton", a back-end of ops/
    activations: the argument of that back-end's packed_linear
    """

    kernels: str
    activations: str

    @property
    def ops(self) -> Any:
        """The module with packed_linear and unpack_rows."""
        return importlib.import_module(f"kvreclaim.ops.{self.kernels}.packed")


def _triton() -> Any:
    return importlib.import_module("kvreclaim.ops.triton.support")


def choose_products(
    name: str, source: WeightSource, device: torch.device, kernels: str, activations: str
) -> Products:
    """Choose the products of a model on a device. activations: the engine's quantized_activations.

    Raises: UnsupportedModelError if no kernel multiplies packed weights; InvalidArgumentError for activations
    that the kernels do not support.
    """
    on_gpu = device.type == "cuda" or kernels == "triton"
    problem = _triton().unavailable_reason() if on_gpu else native_reason()
    if device.type not in ("cpu", "cuda"):
        problem = f"they run on CPUs and CUDA, not on {device.type}"
    if problem is not None:
        raise UnsupportedModelError(
            f"{name} has packed weights ({source.label}), which need the {'Triton' if on_gpu else 'native'} "
            f"kernels ({problem}); pass a checkpoint that is not quantised, or another device."
        )
    if activations == "auto":
        return Products("triton", "dtype") if on_gpu else Products("native", "int16")
    if on_gpu and activations != "exact":
        raise InvalidArgumentError(
            f"quantized_activations is {activations!r}, which CPUs do; pass 'auto' or 'exact' on a GPU."
        )
    return Products("triton" if on_gpu else "native", activations)


def packed_dtypes(
    config: Any, name: str, dtype: torch.dtype | str, products: Products, source: WeightSource
) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of hidden states and unpacked weights, and that of queries, keys and values.

    "auto" uses fp32 hidden states on a CPU if every matrix is packed. A step reads the same bytes, and logits
    are closer to the exact ones than with bf16 (`python -m benchmarks rounding`).

    Raises: InvalidArgumentError.
    """
    own_dtype: torch.dtype = getattr(config.get_text_config(), "dtype", None) or torch.bfloat16
    is_auto = isinstance(dtype, str)
    chosen = own_dtype if isinstance(dtype, str) else dtype
    if products.kernels == "triton" and chosen in _triton().DTYPES:
        return chosen, chosen
    if chosen is torch.float16 and is_auto:
        chosen = torch.bfloat16  # CPUs have instructions for it; packed weights do not change
    if chosen not in DTYPES:
        raise InvalidArgumentError(
            f"dtype is {str(chosen).removeprefix('torch.')!r}, and {name} has packed weights; allowed are "
            "auto, float32 and bfloat16."
        )
    if is_auto and products.kernels == "native" and source.packs_every_matrix:
        return torch.float32, chosen
    return chosen, chosen
