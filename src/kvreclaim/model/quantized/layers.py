"""Linear layers and embeddings over packed weights."""

from __future__ import annotations

import hashlib
from collections import Counter

import torch
from torch import Tensor, nn

from kvreclaim.model.quantized.products import Products
from kvreclaim.ops.packed import PackedMatrix

ROWS_AT_ONCE = 4096
"""Rows of a packed embedding that embeddings_of unpacks at most."""


class _PackedModule(nn.Module):
    """A module with a packed matrix. Its bytes are registered as buffers, so model tensors include them."""

    def __init__(self, matrix: PackedMatrix, dtype: torch.dtype, products: Products) -> None:
        super().__init__()
        self.matrix, self.dtype, self.products = matrix, dtype, products
        for name, part in matrix.parts.items():
            self.register_buffer(f"packed_{name}", part)

    def extra_repr(self) -> str:
        size = self.matrix
        return f"{size.in_features} -> {size.out_features}, {size.bits} bits ({size.grid.name.lower()})"


class PackedLinear(_PackedModule):
    """nn.Linear over a packed weight: y = x W^T + bias, of x's dtype."""

    def __init__(
        self, matrix: PackedMatrix, bias: nn.Parameter | None, dtype: torch.dtype, products: Products
    ) -> None:
        super().__init__(matrix, dtype, products)
        self.in_features, self.out_features = matrix.in_features, matrix.out_features
        self.bias = bias

    def forward(self, input: Tensor) -> Tensor:
        how = self.products
        return how.ops.packed_linear(input, [self.matrix], self.bias, activations=how.activations)


class PackedEmbedding(_PackedModule):
    """nn.Embedding over a packed weight [N, K]. The forward pass unpacks the rows that it looks up.

    scale: factor of the rows, in models that have one (Gemma)
    """

    scale: Tensor | None

    def __init__(
        self, matrix: PackedMatrix, dtype: torch.dtype, products: Products, scale: Tensor | None = None
    ) -> None:
        super().__init__(matrix, dtype, products)
        self.num_embeddings, self.embedding_dim = matrix.out_features, matrix.in_features
        self.register_buffer("scale", None if scale is None else scale.to(dtype), persistent=False)

    def forward(self, input: Tensor) -> Tensor:
        rows: Tensor = self.products.ops.unpack_rows(self.matrix, input.reshape(-1), self.dtype)
        rows = rows.view(*input.shape, -1)
        return rows if self.scale is None else rows * self.scale


def embeddings_of(module: nn.Module) -> Tensor:
    """Return an embedding's weight [N, K]; of a packed one, the first ROWS_AT_ONCE rows."""
    if not isinstance(module, PackedEmbedding):
        weight: Tensor = module.weight  # type: ignore[assignment]
        return weight
    return module(torch.arange(min(ROWS_AT_ONCE, module.num_embeddings), device=module.matrix.device))


def products_of(model: nn.Module) -> str:
    """Return how packed weights are multiplied, and a digest of the grids of their codes. The codes are
    buffers. Empty for a model without packed weights."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, _PackedModule)]
    if not found:
        return ""
    digest = hashlib.sha256()
    for name, module in found:
        size = module.matrix
        table = None if size.table is None else size.table.tolist()
        digest.update(repr((name, str(module.dtype), size.bits, size.group, size.grid.value, table)).encode())
    kinds = sorted({f"{module.products.kernels} {module.products.activations}" for _, module in found})
    return f"{', '.join(kinds)}, grids {digest.hexdigest()[:16]}"


def describe_packed(model: nn.Module) -> str | None:
    """Describe a model's packed weights and their kernels in one line; None for a model without."""
    found = [module for module in model.modules() if isinstance(module, _PackedModule)]
    linears = [module for module in found if isinstance(module, PackedLinear)]
    if not found:
        return None
    bits = Counter(module.matrix.bits for module in found)
    matrices = {id(module.matrix): module.matrix for module in found}
    size = sum(matrix.num_bytes for matrix in matrices.values())
    kinds = ", ".join(f"{count} of {b} bits" for b, count in sorted(bits.items()))
    products = found[0].products
    how = f"{products.activations} activations" if linears else "embeddings alone"
    how += ", triton" if products.kernels == "triton" else ""
    return f"packed weights: {kinds} ({size / 1e6:.0f} MB, {how})"
