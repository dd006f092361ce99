"""Run a loaded model's linear layers, RMS norms, decoder layers and forward on kernels of its device,
without touching a weight."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.inputs import hands_out_input
from kvreclaim.ops.facts import Softmax
from kvreclaim.ops.native import decoder as native_layers
from kvreclaim.ops.native.decoder import DTYPES, UNLIMITED, linear, max_rows

EPS_NAMES = ("variance_epsilon", "eps")
PROBE_SCALES = (1e-4, 1.0, 100.0)
"""Sizes of the trial rows: the first is so small that eps decides."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Relative; an output is rounded twice, so it may be off by two steps where a sum's last bit decides."""
IGNORED = {"kv_batch", "position_ids", "use_cache"}
"""Keyword arguments that decide nothing else in a call with a KV batch."""


class NativeLinear(nn.Linear):
    """nn.Linear that multiplies on the native kernels; weights, hooks and state_dict are nn.Linear's."""

    def forward(self, input: Tensor) -> Tensor:
        parameters = self._parameters  # attribute access would search three dicts
        return linear(input, parameters["weight"], parameters["bias"])  # type: ignore[arg-type]


def use_fast_linears(model: nn.Module) -> str:
    """Turn every plain nn.Linear with fp32 or bf16 weights on the CPU into a NativeLinear.

    Only the module's class changes, so tied weights stay tied. Subclasses, parametrised and quantised
    layers are left alone. Calling it again changes nothing.

    Returns: one line that says what runs.
    """
    problem = native_layers.unavailable_reason()
    if problem is not None:
        return f"linear layers: torch ({problem})"
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for module in linears:
        if _is_plain(module):
            module.__class__ = NativeLinear
    native = [module for module in linears if type(module) is NativeLinear]
    if not native:
        return "linear layers: torch (none is a plain nn.Linear with float32 or bfloat16 weights on the CPU)"
    limits = sorted({max_rows(module.weight.dtype) for module in native})
    rows = "" if limits[0] >= UNLIMITED else f" up to {limits[0]} rows, torch above"
    rest = f"; {len(linears) - len(native)} others: torch" if len(native) < len(linears) else ""
    return f"linear layers: native{rows} ({len(native)}){rest}"


def _is_plain(module: nn.Linear) -> bool:
    weight = module._parameters.get("weight")
    return (
        type(module) is nn.Linear
        and "forward" not in vars(module)
        and type(weight) is nn.Parameter
        and weight.device.type == "cpu"
        and weight.dtype in DTYPES
        and weight.is_contiguous()
    )


class NativeNorm:
    """The forward of one norm: the kernel, or the module's own for tensors that the kernel does not take."""

    def __init__(self, module: nn.Module, eps: float, from_one: bool, ops: ModuleType) -> None:
        self.module = module
        self.eps = eps
        self.from_one = from_one
        self.takes, self.norm = ops.takes_norm, ops.rms_norm

    def __call__(self, hidden_states: Tensor) -> Tensor:
        weight = self.module._parameters["weight"]
        if weight is None or not self.takes(hidden_states, weight):
            return type(self.module).forward(self.module, hidden_states)
        found: Tensor = self.norm(hidden_states, weight, self.eps, from_one=self.from_one)
        return found


def use_fast_norms(model: nn.Module, ops: ModuleType = native_layers) -> str:
    """Give every norm that computes what ops.rms_norm computes the kernel as its forward.

    A norm is a module with one vector `weight`, no buffers and no children, an eps, and one argument (gated
    norms of recurrent layers have two); whether it is *this* norm is decided by running it on trial rows.
    Weights and state_dict stay as they are.

    ops: as kernels_of (model/decoder.py) gives it
    Returns: one line that says what runs.
    """
    problem = ops.unavailable_reason()
    if problem is not None:
        return f"norms: torch ({problem})"
    count = 0
    for module in model.modules():
        eps = _eps(module, ops)
        if eps is None:
            continue
        for from_one in (False, True):
            if _computes_rms_norm(module, eps, from_one, ops):
                module.forward = NativeNorm(module, eps, from_one, ops)
                count += 1
                break
    return f"norms: {ops.NAME} ({count})" if count else "norms: torch (none is a plain RMS norm)"


def _eps(module: nn.Module, ops: ModuleType) -> float | None:
    """Return the module's eps if it could be a norm, else None."""
    own = list(module.parameters())
    plain = len(own) == 1 and not list(module.buffers()) and not list(module.children())
    if not plain or "forward" in vars(module) or len(inspect.signature(module.forward).parameters) != 1:
        return None
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 1:
        return None
    if not ops.runs_on(weight.device) or weight.dtype not in ops.DTYPES:
        return None
    return next(
        (float(value) for name in EPS_NAMES if isinstance(value := getattr(module, name, None), float)), None
    )


@torch.inference_mode()
def _computes_rms_norm(module: nn.Module, eps: float, from_one: bool, ops: ModuleType) -> bool:
    """Return whether module and kernel agree within rounding on trial rows."""
    weight = module._parameters["weight"]
    assert weight is not None
    if from_one and not ops.has_norm_from_one():
        return False
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn((len(PROBE_SCALES), weight.numel()), generator=generator)
        * torch.tensor(PROBE_SCALES)[:, None]
    )
    x = x.to(weight.device, weight.dtype)
    try:
        expected = module(x)
    except (TypeError, ValueError, RuntimeError):  # not a module that maps rows to rows
        return False
    if not isinstance(expected, Tensor) or expected.shape != x.shape or expected.dtype is not x.dtype:
        return False
    found = ops.rms_norm(x, weight, eps, from_one=from_one)
    tiny = torch.finfo(x.dtype).smallest_normal * TOLERANCE[x.dtype]
    return torch.allclose(found, expected, rtol=TOLERANCE[x.dtype], atol=tiny)


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

    def __init__(self, module: Any, output: type[Any]) -> None:
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
