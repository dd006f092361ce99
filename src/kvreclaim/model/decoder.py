"""Run a loaded model in few calls a decoder layer, and a loop over these, where they compute the same.

    norm, q, k, v and rotary    (write    attend: the batch's)    output and sum, norm, gate and up, down and
    sum

The calls are those of ops.native.decoder on a CPU and of ops.triton.decoder on a GPU.

A layer is taken by the names of its parts (Llama's, which Mistral, Qwen2, Qwen3 and others share) and proved
by running the whole model on trial tokens: queries, keys, values and outputs have to agree with transformers'
own code within rounding. Weights keep their names; q, k and v, and gate and up, become views of one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.inputs import hands_out_input
from kvreclaim.model.native_modules import NativeLinear, NativeNorm
from kvreclaim.model.quantized.layers import PackedLinear
from kvreclaim.model.trial_batch import TrialBatch, trial_inputs
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.layer_parts import Heads, Norm
from kvreclaim.ops.native import decoder as native_layers

PARTS = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
NORMS = ("input_layernorm", "post_attention_layernorm")
IGNORED = {"kv_batch", "position_ids", "use_cache"}
"""Keyword arguments that decide nothing else in a call with a KV batch."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2.0**-5, torch.float16: 2.0**-8}
"""Largest difference over the largest value; trial states pass through all layers before."""


@dataclass(frozen=True, slots=True, eq=False)
class _Seen:
    """A layer's arguments in a trial run, what it asked for, and what it gave back."""

    states: Tensor
    kwargs: dict[str, Any]
    call: AttentionCall
    out: Tensor


class NativeLayer:
    """The forward of one decoder layer; the module's own for calls without a KV batch and with hooks."""

    def __init__(self, module: Any, softmax: Softmax, heads: Heads, ops: ModuleType) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.module = module
        self.attention, self.mlp = attention, mlp
        self.norm = Norm(module.input_layernorm.weight, module.input_layernorm.forward.eps)
        self.layer = int(attention.layer_idx)
        self.softmax = softmax
        self.rms_norm = ops.rms_norm
        self.parts = ops.DecoderLayer(
            heads,
            joined([attention.q_proj, attention.k_proj, attention.v_proj], module.input_layernorm, ops),
            single(attention.o_proj, ops),
            joined([mlp.gate_proj, mlp.up_proj], module.post_attention_layernorm, ops),
            single(mlp.down_proj, ops, is_gated=True),
        )

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        batch = kwargs.get("kv_batch")
        if batch is None or args or not self.takes(hidden_states, kwargs):
            forward: Any = type(self.module).forward
            found: Tensor = forward(self.module, hidden_states, *args, **kwargs)
            return found
        cos, sin = kwargs["position_embeddings"]
        x, heads, norm = hidden_states[0], self.parts.heads, self.norm
        rows = self.parts.before(x, cos[0], sin[0])
        each = rows.view(rows.shape[0], -1, heads.dim)
        keys = heads.count + heads.kv_count
        call = AttentionCall(
            layer=self.layer,
            q=each[:, : heads.count],
            k=each[:, heads.count : keys],
            v=each[:, keys:],
            softmax=self.softmax,
            hidden=self.rms_norm(x, norm.weight, norm.eps) if self.attention._forward_pre_hooks else None,
        )
        seen = batch.attend(call)
        out: Tensor = self.parts.behind(seen.reshape(x.shape[0], -1), x)
        return out[None]

    def takes(self, x: Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether the kernels compute this call: one row of tokens of the weights' dtype, without gradients,
        and no hook sees a part of it but the one that hands out the attention layer's input."""
        cos, sin = kwargs["position_embeddings"]
        hooks = self.attention._forward_pre_hooks
        return (
            cos.dtype is sin.dtype is x.dtype
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

    def __init__(self, module: Any) -> None:
        self.module = module

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
        return BaseModelOutputWithPast(last_hidden_state=module.norm(states))

    def takes(self, kwargs: dict[str, Any]) -> bool:
        """Whether the layers alone compute this call."""
        return (
            kwargs.get("kv_batch") is not None
            and kwargs.get("position_ids") is not None
            and not kwargs.get("use_cache")
            and all(value is None for name, value in kwargs.items() if name not in IGNORED)
            and not any(layer._forward_pre_hooks or layer._forward_hooks for layer in self.module.layers)
        )


def use_fast_layers(model: PreTrainedModel, ops: ModuleType = native_layers) -> str:
    """Give every decoder layer that computes what a NativeLayer computes that as its forward.

    Behind use_fast_norms, which proves the norms; behind it, nothing replaces weights. If one layer does not
    prove, none is replaced.

    ops: ops.native.decoder or ops.triton.decoder
    Returns: one line that says what runs.
    """
    problem = ops.unavailable_reason()
    if problem is not None:
        return f"decoder layers: transformers ({problem})"
    layers = [module for module in model.modules() if _looks_known(module, ops)]
    if not layers:
        return (
            "decoder layers: transformers (none has the parts of Llama's, with plain norms and with weights "
            f"that the {ops.NAME} kernels take)"
        )
    seen = _observe(model, layers)
    for module in layers:
        native = _proved(module, seen[module], ops) if module in seen else None
        if native is None:
            name = type(module).__name__
            _restore(layers)
            return f"decoder layers: transformers (a {name} does not compute what the kernels do)"
        module.forward = native
    return f"decoder layers: {ops.NAME} ({len(layers)})"


def _restore(layers: list[nn.Module]) -> None:
    for module in layers:
        vars(module).pop("forward", None)


def _looks_known(module: nn.Module, ops: ModuleType) -> bool:
    """Whether it has the parts, and each is of a kind that the kernels take."""
    linears: list[Any] = []
    for owner, names in PARTS.items():
        part = getattr(module, owner, None)
        linears += [getattr(part, name, None) for name in names]
    if not all(type(each) in (nn.Linear, NativeLinear, PackedLinear) for each in linears):
        return False
    norms = [getattr(module, name, None) for name in NORMS]
    attention: Any = module.self_attn
    own = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    norms += [each for each in own if each is not None]
    forwards = [getattr(each, "forward", None) for each in norms]
    together = [linears[:3], linears[4:6]]
    return (
        "forward" not in vars(module)
        and len(norms) in (2, 4)
        and all(isinstance(each, NativeNorm) and not each.from_one for each in forwards)
        and all(len({each.bias is None for each in group}) == 1 for group in together)
        and all(len({type(each) is PackedLinear for each in group}) == 1 for group in together)
        and len({weight_dtype(each) for each in linears}) == 1
        and all(is_taken(each, ops) for each in linears)
    )


@torch.inference_mode()
def _observe(model: PreTrainedModel, layers: list[nn.Module]) -> dict[nn.Module, _Seen]:
    """Each layer's inputs and outputs for trial tokens, in transformers' own code."""
    trial, found = TrialBatch(), {}

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        call = trial.calls.get(int(module.self_attn.layer_idx))  # type: ignore[union-attr, arg-type]
        if call is not None and isinstance(out, Tensor) and len(args) == 1:
            found[module] = _Seen(args[0].clone(), kwargs, call, out.clone())

    handles = [module.register_forward_hook(keep, with_kwargs=True) for module in layers]
    try:
        model(**trial_inputs(model), kv_batch=trial)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.inference_mode()
def _proved(module: Any, seen: _Seen, ops: ModuleType) -> NativeLayer | None:
    """The layer in calls of the kernels, if it does with the trial's arguments what the module did."""
    attention, call = module.self_attn, seen.call
    dim = call.q.shape[2]
    outputs = [getattr(attention, name).out_features for name in PARTS["self_attn"][:3]]
    if outputs != [x.shape[1] * dim for x in (call.q, call.k, call.v)] or call.latent:
        return None
    own = [_norm(getattr(attention, name, None)) for name in ("q_norm", "k_norm")]
    if (
        any(norm is not None and norm.weight.shape[0] != dim for norm in own)
        or len({_eps(n) for n in own}) > 1
    ):
        return None
    native = NativeLayer(module, call.softmax, Heads(call.q.shape[1], call.k.shape[1], dim, *own), ops)
    trial = TrialBatch()
    if not native.takes(seen.states, seen.kwargs):
        return None
    out = native(seen.states, **{**seen.kwargs, "kv_batch": trial})
    again = trial.calls[native.layer]
    pairs = [(again.q, call.q), (again.k, call.k), (again.v, call.v), (out, seen.out)]
    return native if all(agree(got, want) for got, want in pairs) else None


def agree(got: Tensor, want: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether they are the same within the rounding of a dtype, by default theirs."""
    if got.shape != want.shape or got.dtype is not want.dtype:
        return False
    largest = float(want.float().abs().max())
    return float((got.float() - want.float()).abs().max()) <= TOLERANCE[dtype or want.dtype] * largest


def _norm(module: Any) -> Norm | None:
    return None if module is None else Norm(module.weight, module.forward.eps)


def _eps(norm: Norm | None) -> float | None:
    return None if norm is None else norm.eps


def weight_dtype(linear: Any) -> torch.dtype:
    found: torch.dtype = linear.dtype if isinstance(linear, PackedLinear) else linear.weight.dtype
    return found


def is_taken(linear: Any, ops: ModuleType = native_layers) -> bool:
    """Whether the kernels multiply with its weight."""
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


def joined(linears: list[Any], norm: Any, ops: ModuleType = native_layers) -> Any:
    """One product for several that share their input; their weights and biases become views of its own, but
    packed weights stay where they are."""
    if isinstance(linears[0], PackedLinear):
        found = [each.bias for each in linears if each.bias is not None]
        return _packed(linears, _join(found) if found else None, ops, norm=_norm(norm))
    weight = _join([each.weight for each in linears])
    biases = [each.bias for each in linears if each.bias is not None]
    return ops.Projection(weight, _join(biases) if biases else None, norm=_norm(norm))


def _join(parts: Sequence[Tensor]) -> Tensor:
    with torch.inference_mode(False):  # gradients flow through weights that are no inference tensors alone
        whole = torch.cat([part.data for part in parts])
    for part, view in zip(parts, whole.split([part.shape[0] for part in parts]), strict=True):
        part.data = view
    return whole
