"""Linear layers for few rows, norms, and the parts of a decoder layer in few calls: a product with the norm
or gate before it and the sum behind it (csrc/include/kvreclaim/linear.h, norm.h, decoder.h). Weights are
read once."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kvreclaim.ops.extension import KERNELS, native, unavailable_reason
from kvreclaim.ops.layer_parts import Gate, Heads, LayerForm, Norm, is_alike
from kvreclaim.ops.native.packed import ACTIVATIONS, leading_rows, packed_parts
from kvreclaim.ops.packed import PackedMatrix

DTYPES = (torch.float32, torch.bfloat16)
ROWS_WITH_BF16_HARDWARE = 8
"""Most rows if torch has bf16 instructions and the kernels widen to fp32: above, arithmetic bounds."""
ROWS_WITH_PAIRS = 128
"""Rows of one pass over the weights if the kernels multiply pairs of bf16. On Zen 5 the products
of a small model take .7 to .9 of torch's time at 64 rows, .9 to 1.05 at 128."""
ROWS_WITH_MATRICES = 64
"""Rows of one pass over the weights if the kernels have matrix instructions."""
ROWS_OF_ISA = {"amx": ROWS_WITH_MATRICES, "avx512bf16": ROWS_WITH_PAIRS}
ROWS_FP32 = 32
"""Above these rows torch's fp32 product is the faster one: its library packs both factors."""
UNLIMITED = sys.maxsize
NAME = "native"
ROTATIONS: tuple[dict[str, bool], ...] = ({},)
"""The rotations that the kernels have, as fields of Heads."""
PLAIN_ALONE = True
"""Whether layers with norms that multiply by 1 + weight, or with an MLP that is a module, are never taken."""
MOST_ROWS = 64
"""Rows of a layer in two calls: the room for what lies between their products is kept."""


@contextmanager
def exact_rows(num_leading: int = UNLIMITED) -> Iterator[None]:
    """Inside, the kernels take so many leading rows of every product, however many there are behind them, so
    that each is, to the bit, what it is alone: decode rows next to prompt rows, and rows that carry
    drafts. Without a number all rows are, and attention computes the rows of a prompt as it does those of
    decode steps. For the thread that enters it.
    """
    token = leading_rows.set(num_leading)
    try:
        yield
    finally:
        leading_rows.reset(token)


def all_rows_are_exact() -> bool:
    """Return whether exact_rows() is in force without a number."""
    return leading_rows.get() == UNLIMITED


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear: x [..., K], weight [N, K], bias [N] -> [..., N], dtype of x.

    Sums in fp32 and rounds once; where the CPU multiplies pairs of bf16, numbers smaller than normal ones
    count as 0. The result of each of the first own_rows() rows does not depend on the other
    rows, their number or the number of threads; for later rows, and for inputs that the kernels do not
    take (other dtypes and devices, gradients, odd strides), torch's own product runs.
    """
    num_rows = x.numel() // x.shape[-1]
    own = own_rows(num_rows, x.dtype) if _takes(x, weight, bias) else 0
    if not own:
        return functional.linear(x, weight, bias)
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if own == num_rows:
        native().linear(x, weight, bias, out)
        return out
    rows, found = x.view(num_rows, -1), out.view(num_rows, -1)
    native().linear(rows[:own], weight, bias, found[:own])
    found[own:] = functional.linear(rows[own:], weight, bias)
    return out


def own_rows(num_rows: int, dtype: torch.dtype) -> int:
    """Leading rows of a product that the kernels take: all up to max_rows(), else as
    many as set by exact_rows()."""
    limit = max_rows(dtype)
    return num_rows if num_rows <= limit else min(num_rows, leading_rows.get() if limit else 0)


@cache
def max_rows(dtype: torch.dtype) -> int:
    """Rows of x up to which the kernels run: decided by what the CPU can do, never by a timing."""
    if dtype not in DTYPES or unavailable_reason() is not None:
        return 0
    if dtype == torch.float32:
        return ROWS_FP32
    if (isa := native().isa()) in ROWS_OF_ISA:
        return ROWS_OF_ISA[isa]
    return ROWS_WITH_BF16_HARDWARE if has_bf16_hardware() else UNLIMITED


@cache
def has_bf16_hardware() -> bool:
    """Return whether torch multiplies bf16 by instructions of this CPU (AVX512-BF16, AMX).

    Assumed True on other architectures, and if torch can't detect it.
    """
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if capabilities.get("architecture") != "x86_64":
        return True
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _takes(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return (
        x.dtype is weight.dtype
        and x.is_cpu
        and weight.is_cpu
        and (x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1))
        and weight.is_contiguous()
        and (bias is None or bias.dtype is x.dtype)
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, from_one: bool = False) -> Tensor:
    """x [..., D], weight [D] -> weight * (x / sqrt(mean(x²) + eps)), like x; sums in fp32.

    Rounds to the dtype of x before and after the weight, as Llama and its relatives do. from_one: times
    1 + weight, rounded once, as Gemma and Qwen3-Next do. See takes_norm() for the inputs.
    """
    out = torch.empty_like(x)
    (KERNELS.rms_norm_from_one if from_one else KERNELS.rms_norm)(x, weight, eps, out)
    return out


def has_norm_from_one() -> bool:
    """Return whether the extension is new enough for it."""
    return hasattr(KERNELS, "rms_norm_from_one")


def takes_norm(x: Tensor, weight: Tensor) -> bool:
    """Return whether rms_norm can run: fp32 or bf16 on the CPU, x contiguous, no gradient."""
    return (
        x.dtype is weight.dtype
        and x.dtype in DTYPES
        and x.is_cpu
        and weight.is_cpu
        and x.is_contiguous()
        and unavailable_reason() is None
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def runs_on(device: torch.device) -> bool:
    """Return whether the kernels run on tensors of this device."""
    return device.type == "cpu"


def takes_form(form: LayerForm) -> bool:
    """Return whether DecoderLayer computes it: norms are before the products alone, and of single heads."""
    own = (form.heads.q_norm, form.heads.k_norm)
    is_single = all(norm is None or norm.weight.shape[0] == form.heads.dim for norm in own)
    return form.gate is not None and form.after == (None, None) and is_single and is_alike(*own)


class Projection:
    """y = residual + f(x) Wᵀ + bias; f: an RMS norm, or SiLU of x's first half times its second, or nothing.

    Every result is rounded to the dtype where the single modules round. The own_rows() of a step, and with
    packed weights all, are one call of kernels with independent rows; for the rest
    torch's product runs.
    """

    def __init__(
        self,
        weight: Tensor | list[PackedMatrix],
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        is_gated: bool = False,
        like: Tensor | None = None,
        activations: str = "int16",
    ) -> None:
        """weight [N, K] contiguous and bias [N], fp32 or bf16 on the CPU; is_gated: x has 2 K numbers.

        Packed matrices have their outputs side by side; like: a tensor of x's dtype, with them alone.
        activations: as of packed_linear
        """
        self.weight, self.bias = weight, bias
        self.norm, self.is_gated, self.is_plain = norm, is_gated, isinstance(weight, Tensor)
        self.activations = activations
        if isinstance(weight, Tensor):
            self.dtype, self.out_features = weight.dtype, weight.shape[0]
            what: Any = weight
            like = weight
        else:
            assert like is not None
            self.dtype = like.dtype
            self.out_features = sum(each.out_features for each in weight)
            what = [each.native for each in weight]
        weights = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        kind = ACTIVATIONS.index(activations)
        self.native = native().Projection(what, like, bias, *weights, is_gated, kind)
        self._run = self.native.run

    def __deepcopy__(self, memo: dict[int, Any]) -> Projection:
        weight, bias = copy.deepcopy(self.weight, memo), copy.deepcopy(self.bias, memo)
        how: dict[str, Any] = {"is_gated": self.is_gated, "activations": self.activations}
        like = torch.empty(0, dtype=self.dtype)
        return Projection(weight, bias, norm=copy.deepcopy(self.norm, memo), like=like, **how)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, K | 2 K] and residual [T, N], contiguous, of the weight's dtype -> [T, N]."""
        num_rows = x.shape[0]
        if not self.is_plain:
            out = x.new_empty((num_rows, self.out_features))
            for part in packed_parts(num_rows):
                self._run(x[part], None if residual is None else residual[part], out[part])
            return out
        own = self.own_rows(num_rows)
        if not own:
            found = self._by_torch(x)
            return found if residual is None else residual + found
        out = x.new_empty((num_rows, self.out_features))
        self._run(x[:own], None if residual is None else residual[:own], out[:own])
        if own < num_rows:
            found = self._by_torch(x[own:])
            out[own:] = found if residual is None else residual[own:] + found
        return out

    def own_rows(self, num_rows: int) -> int:
        """Leading rows of so many that the kernels take."""
        if self.is_plain and num_rows > max_rows(self.dtype):
            return own_rows(num_rows, self.dtype)
        return num_rows

    def _by_torch(self, x: Tensor) -> Tensor:
        assert isinstance(self.weight, Tensor), "packed weights are the kernels'"
        if self.norm is not None:
            x = rms_norm(x, self.norm.weight, self.norm.eps)
        elif self.is_gated:
            x = gate(x)
        return functional.linear(x, self.weight, self.bias)


def gate(x: Tensor) -> Tensor:
    """[T, 2 I] -> [T, I]: SiLU of the first half times the second."""
    out = x.new_empty((x.shape[0], x.shape[1] // 2))
    native().gate_rows(x, out)
    return out


GATES: dict[Gate, Callable[[Tensor], Tensor]] = {"silu": gate}


def _native(heads: Heads) -> tuple[Any, ...]:
    """Weights of both norms and what both add, and the sizes, as the kernels take them."""
    q_weight, eps = (None, 0.0) if heads.q_norm is None else (heads.q_norm.weight, heads.q_norm.eps)
    k_weight = None if heads.k_norm is None else heads.k_norm.weight
    return q_weight, k_weight, eps, heads.count, heads.kv_count, heads.dim


def rotate(rows: Tensor, cos: Tensor, sin: Tensor, heads: Heads) -> None:
    """Rotary embedding of a step's queries and keys in place, behind the heads' norms.

    rows [T, (H + 2 K) D] contiguous; cos, sin [T, R]: number i < R / 2 of a head turns with number i + R / 2.
    Source: RoPE, arXiv 2104.09864, in the order of GPT-NeoX.
    """
    KERNELS.rotate_heads(rows, cos, sin, *_native(heads))


class DecoderLayer:
    """A decoder layer without its attention: for packed weights, and for up to MOST_ROWS rows, one call
    before it and one behind it, else a call for each part."""

    any_angles = False
    """Whether cos and sin may have another dtype than x."""

    def __init__(
        self, form: LayerForm, qkv: Projection, out: Projection, gate_up: Projection, down: Projection
    ) -> None:
        self.form, self.qkv, self.out, self.gate_up, self.down = form, qkv, out, gate_up, down
        self._is_packed = not any(each.is_plain for each in (qkv, out, gate_up, down))
        parts = (each.native for each in (qkv, out, gate_up, down))
        self._native = native().DecoderLayer(*parts, *_native(form.heads))

    def __deepcopy__(self, memo: dict[int, Any]) -> DecoderLayer:
        parts = [copy.deepcopy(part, memo) for part in (self.qkv, self.out, self.gate_up, self.down)]
        return DecoderLayer(copy.deepcopy(self.form, memo), *parts)

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [T, M], cos and sin [T, R] -> [T, (H + 2 K) D]: queries and keys, rotated, and values."""
        if not self._is_one_call(x.shape[0]):
            rows = self.qkv(x)
            rotate(rows, cos, sin, self.form.heads)
            return rows
        rows = x.new_empty((x.shape[0], self.qkv.out_features))
        for part in self._parts(x.shape[0]):
            self._native.before(x[part], cos[part], sin[part], rows[part])
        return rows

    def behind(self, attended: Tensor, x: Tensor) -> Tensor:
        """attended [T, H Dv], x [T, M] -> [T, M]: with the output projection added, and the MLP."""
        if not self._is_one_call(x.shape[0]):
            x = self.out(attended, x)
            return self.down(self.gate_up(x), x)
        out = torch.empty_like(x)
        for part in self._parts(x.shape[0]):
            self._native.behind(attended[part], x[part], out[part])
        return out

    def _parts(self, num_rows: int) -> list[slice]:
        return packed_parts(num_rows) if self._is_packed else [slice(num_rows)]

    def _is_one_call(self, num_rows: int) -> bool:
        return (num_rows <= MOST_ROWS or self._is_packed) and self.qkv.own_rows(num_rows) == num_rows
