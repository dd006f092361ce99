"""Run a loaded model in few calls a decoder layer, and a loop over these, where they compute the same.

    norm, q, k, v and rotary    (write    attend: the batch's)    output and sum, norm, gate and up, down and
    sum

The calls are those of ops.native.decoder on a CPU and of ops.triton.decoder on a GPU.

A layer's modules are found by running the whole model on trial tokens (layer_trial.py), which also prove it:
queries, keys, values and outputs have to agree with transformers' own code within rounding. Weights keep
their names; q, k and v, and gate and up, become views of one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvreclaim.model.layer_trial import LayerModules, LayerTrial, TrialBatch, trial_inputs
from kvreclaim.model.native_modules import NativeLayer, NativeModel
from kvreclaim.model.quantized.layers import PackedLinear
from kvreclaim.ops.layer_parts import Gate, Heads, LayerForm, Norm
from kvreclaim.ops.native import decoder as native_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""Largest difference over the largest value; trial states pass through all layers before."""
PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")


@torch.inference_mode()
def proved(module: Any, seen: LayerTrial, ops: ModuleType) -> NativeLayer | None:
    """Return the layer in kernel calls, if its output for the trial's arguments agrees with the module's."""
    form = _form(seen, ops)
    if form is None:
        return None
    found = seen.modules
    parts = [joined(found.qkv, form.before[0], ops), single(found.out, ops), *mlp_parts(found, form, ops)]
    natives = []
    angles = seen.kwargs["position_embeddings"][0].shape[-1]
    for rotation in ops.ROTATIONS:
        heads = replace(form.heads, **rotation)
        if heads.half_angles and 2 * angles > heads.dim:
            continue
        own = replace(form, heads=heads)
        natives.append(NativeLayer(module, seen.call.softmax, ops.DecoderLayer(own, *parts), ops))
    return best_of(natives, seen)


def mlp_parts(found: LayerModules, form: LayerForm, ops: ModuleType) -> list[Any]:
    """Return the last arguments of ops.DecoderLayer."""
    if found.mlp is not None:
        return [found.mlp]
    return [joined(found.gate_up, form.before[1], ops), single(found.down, ops, is_gated=True)]


def best_of(natives: Sequence[NativeLayer], seen: LayerTrial) -> NativeLayer | None:
    """The layer that is nearest to the trial's queries and keys, if it agrees with all of the trial."""
    if not natives[0].takes(seen.states, seen.kwargs):
        return None
    pairs = [_pairs(native, seen) for native in natives]
    best = min(range(len(pairs)), key=lambda i: sum(distance(*pair) for pair in pairs[i][:2]))
    return natives[best] if all(agree(got, want) for got, want in pairs[best]) else None


def _form(seen: LayerTrial, ops: ModuleType) -> LayerForm | None:
    """Return the layer's parts around its products, without the rotation, if the kernels support them."""
    call, found = seen.call, seen.modules
    (_, count, dim), kv_count = call.q.shape, call.k.shape[1]
    numbers = sum(each.out_features for each in found.qkv)
    if (
        call.latent
        or call.v.shape != call.k.shape
        or numbers != (count + 2 * kv_count) * dim
        or len(found.own) not in (0, 2)
        or not are_alike(found)
    ):
        return None
    gate = gate_of(seen, ops)
    if gate is None and found.mlp is None:
        return None
    q_norm, k_norm = (norm_of(each) for each in found.own or (None, None))
    widths = [norm.weight.shape[0] for norm in (q_norm, k_norm) if norm is not None]
    if widths not in ([], [dim, dim], [count * dim, kv_count * dim]):
        return None
    before, after = ((norm_of(a), norm_of(b)) for a, b in (found.before, found.after))
    form = LayerForm(Heads(count, kv_count, dim, q_norm, k_norm), before, after, gate)
    return form if ops.takes_form(form) else None


def gate_of(seen: LayerTrial, ops: ModuleType) -> Gate | None:
    """The gate of the MLP, if the kernels have it. GELU by its tanh formula and by the error function are
    closer to each other than the tolerance of agree()."""
    if seen.gates is None:
        return None
    gate_up, gated = seen.gates
    offs: dict[Gate, float] = {kind: distance(gate(gate_up), gated) for kind, gate in ops.GATES.items()}
    best = min(offs, key=offs.__getitem__)
    return best if offs[best] <= TOLERANCE[gated.dtype] / 8 else None


def are_alike(found: LayerModules) -> bool:
    """Return whether linear layers of the same input are packed or not, and have biases or none, together."""
    return all(
        len({(type(each) is PackedLinear, each.bias is None) for each in group}) == 1
        for group in filter(None, (found.qkv, found.gate_up))
    )


def _pairs(native: NativeLayer, seen: LayerTrial) -> list[tuple[Tensor, Tensor]]:
    """Return the layer's queries, keys, values and output, each with that of the trial."""
    trial, call = TrialBatch(), seen.call
    out = native(seen.states, **{**seen.kwargs, "kv_batch": trial})
    again = trial.calls[native.layer]
    return [(again.q, call.q), (again.k, call.k), (again.v, call.v), (out, seen.out)]


def distance(got: Tensor, want: Tensor) -> float:
    """The root of the sum of squares of their differences, over that of the values. A few large values, which
    are the same in every form, do not hide the others as they do in agree()."""
    if got.shape != want.shape:
        return float("inf")
    return float((got.float() - want.float()).norm() / want.float().norm())


def agree(got: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether they are the same within the rounding of a dtype, by default theirs."""
    if got.shape != want.shape or got.dtype is not want.dtype:
        return False
    largest = float(want.float().abs().max())
    return float((got.float() - want.float()).abs().max()) <= TOLERANCE[dtype or want.dtype] * largest


def norm_of(module: Any) -> Norm | None:
    """Return the norm of a module on kernels (NativeNorm); None of None."""
    return None if module is None else Norm(module.weight, module.forward.eps, module.forward.from_one)


def weight_dtype(linear: Any) -> torch.dtype:
    found: torch.dtype = linear.dtype if isinstance(linear, PackedLinear) else linear.weight.dtype
    return found


def is_taken(linear: Any, ops: ModuleType = native_layers) -> bool:
    """Return whether the kernels multiply with its weight."""
    if isinstance(linear, PackedLinear):
        return linear.dtype in ops.DTYPES and linear.products.kernels == ops.NAME
    return linear.weight.dtype in ops.DTYPES and bool(ops.runs_on(linear.weight.device))


def single(linear: Any, ops: ModuleType = native_layers, *, is_gated: bool = False) -> Any:
    if isinstance(linear, PackedLinear):
        return _packed([linear], linear.bias, ops, is_gated=is_gated)
    return ops.Projection(linear.weight, linear.bias, is_gated=is_gated)


def _packed(linears: Sequence[PackedLinear], bias: Tensor | None, ops: ModuleType, **more: Any) -> Any:
    (first, *_) = linears
    like = torch.empty(0, dtype=first.dtype)
    return ops.Projection(
        [each.matrix for each in linears], bias, like=like, activations=first.products.activations, **more
    )


def joined(linears: list[Any], norm: Norm | None, ops: ModuleType = native_layers) -> Any:
    """One product for several that share their input; their weights and biases become views of its own, but
    packed weights stay where they are."""
    biases = [each.bias for each in linears if each.bias is not None]
    bias = _join(biases) if biases else None
    if isinstance(linears[0], PackedLinear):
        return _packed(linears, bias, ops, norm=norm)
    return ops.Projection(_join([each.weight for each in linears]), bias, norm=norm)


def _join(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    with torch.inference_mode(False):  # gradients flow through weights that are no inference tensors alone
        whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
        part.data = view
    return whole


def use_native_model(model: PreTrainedModel, ops: ModuleType = native_layers) -> str:
    """Give the module that holds the decoder layers a NativeModel as its forward where it computes the same.

    Call after use_fast_layers. Returns: one line that describes it; empty if transformers' forward runs.
    """
    for module in model.modules():
        if _looks_known(module) and (native := _proved(module, model)) is not None:
            module.forward = native
            return f"forward: {ops.NAME}"
    return ""


def _looks_known(module: nn.Module) -> bool:
    layers = getattr(module, "layers", None)
    return (
        "forward" not in vars(module)
        and all(hasattr(module, name) for name in PARTS)
        and isinstance(layers, nn.ModuleList)
        and all(isinstance(vars(layer).get("forward"), NativeLayer) for layer in layers)
    )


@torch.inference_mode()
def _proved(module: Any, model: PreTrainedModel) -> NativeModel | None:
    """Return a forward that loops over the layers, if it agrees with transformers' on trial tokens."""
    inputs = trial_inputs(model)
    try:
        output = type(module).forward(module, **inputs, kv_batch=TrialBatch())
        native, want = NativeModel(module, type(output)), output.last_hidden_state
        got = native(**inputs, kv_batch=TrialBatch()).last_hidden_state
    except (AttributeError, RuntimeError, TypeError, ValueError):  # its parts are called in another way
        return None
    return native if got.dtype is want.dtype and torch.equal(got, want) else None
