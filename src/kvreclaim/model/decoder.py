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
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.inputs import hands_out_input
from kvreclaim.model.layer_trial import LayerModules, LayerTrial
from kvreclaim.model.quantized.layers import PackedLinear
from kvreclaim.model.trial_batch import TrialBatch
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.layer_parts import Gate, Heads, LayerForm, Norm
from kvreclaim.ops.native import decoder as native_layers

IGNORED = {"kv_batch", "position_ids", "use_cache"}
"""Keyword arguments that decide nothing else in a call with a KV batch."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""Largest difference over the largest value; trial states pass through all layers before."""


class NativeLayer:
    """The forward of one decoder layer; the module's own for calls without a KV batch and with hooks."""

    def __init__(self, module: Any, softmax: Softmax, parts: Any, ops: ModuleType) -> None:
        """parts: an ops.DecoderLayer."""
        self.module = module
        self.attention, self.mlp = module.self_attn, module.mlp
        self.layer = int(self.attention.layer_idx)
        self.softmax = softmax
        self.rms_norm = ops.rms_norm
        self.parts = parts

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        batch = kwargs.get("kv_batch")
        if batch is None or args or not self.takes(hidden_states, kwargs):
            forward: Any = type(self.module).forward
            found: Tensor = forward(self.module, hidden_states, *args, **kwargs)
            return found
        cos, sin = kwargs["position_embeddings"]
        x = hidden_states[0]
        seen = self.attended(batch, x, (cos[0], sin[0]))
        out: Tensor = self.parts.behind(seen.reshape(x.shape[0], -1), x)
        return out[None]

    def attended(self, batch: Any, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Compute attention of x [T, M], before the output projection: [T, H, Dv]."""
        heads = self.parts.form.heads
        rows = self.parts.before(x, *angles)
        each = rows.view(rows.shape[0], -1, heads.dim)
        keys = heads.count + heads.kv_count
        call = AttentionCall(
            layer=self.layer,
            q=each[:, : heads.count],
            k=each[:, heads.count : keys],
            v=each[:, keys:],
            softmax=self.softmax,
            hidden=self.handed_out(x),
        )
        found: Tensor = batch.attend(call)
        return found

    def handed_out(self, x: Tensor) -> Tensor | None:
        """Return the layer's input for attention, if it is handed out."""
        norm = self.parts.form.before[0]
        if not self.attention._forward_pre_hooks:
            return None
        if norm is None:
            return x
        found: Tensor = self.rms_norm(x, norm.weight, norm.eps, from_one=norm.from_one)
        return found

    def takes(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether the kernels compute this call: one row of tokens of the weights' dtype, without gradients,
        and no hook sees a part of it but the one that hands out the attention layer's input."""
        cos, sin = kwargs["position_embeddings"]
        hooks = self.attention._forward_pre_hooks
        return (
            cos.dtype is sin.dtype
            and (cos.dtype is x.dtype or self.parts.any_angles)
            and cos.shape[0] == sin.shape[0] == 1
            and x.dim() == 3
            and x.shape[0] == 1
            and x.dtype is self.parts.qkv.dtype
            and x.is_contiguous()
            and kwargs.get("query_scale") is None
            and not torch.is_grad_enabled()
            and not (self.mlp._forward_pre_hooks or self.mlp._forward_hooks or self.attention._forward_hooks)
            and (not hooks or (len(hooks) == 1 and hands_out_input(self.attention)))
        )


class NativeModel:
    """The forward of the module that holds embeddings, layers and the last norm; the module's own for calls
    without a KV batch, with other arguments, and while hooks see a layer's calls."""

    def __init__(self, module: Any, output: type[Any] = BaseModelOutputWithPast) -> None:
        """output: what the module's own forward returns."""
        self.module, self.output = module, output

    def __call__(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
        module = self.module
        if input_ids is None or not self.takes(kwargs):
            return type(module).forward(module, input_ids=input_ids, **kwargs)
        places = kwargs["position_ids"]
        states = module.embed_tokens(input_ids)
        given = {
            "kv_batch": kwargs["kv_batch"],
            "position_ids": places,
            "position_embeddings": module.rotary_emb(states, places),
        }
        for layer in module.layers:
            states = layer.forward(states, **given)
        return self.output(last_hidden_state=module.norm(states))

    def takes(self, kwargs: dict[str, Any]) -> bool:
        """Return whether the layers alone compute this call."""
        return (
            kwargs.get("kv_batch") is not None
            and kwargs.get("position_ids") is not None
            and not kwargs.get("use_cache")
            and all(value is None for name, value in kwargs.items() if name not in IGNORED)
            and not any(layer._forward_pre_hooks or layer._forward_hooks for layer in self.module.layers)
        )


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
