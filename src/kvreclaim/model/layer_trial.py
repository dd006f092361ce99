"""What decoder layers consist of, observed while transformers' own code runs trial tokens.

A module's place follows from its tensors: a norm before attention makes what attention is given, a norm after
it is given what attention makes. Names do not decide: families give the same name to different places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.native_modules import NativeLinear, NativeNorm
from kvreclaim.model.quantized.layers import PackedLinear
from kvreclaim.model.trial_batch import TrialBatch, trial_inputs


@dataclass(frozen=True, slots=True, eq=False)
class LayerModules:
    """The modules of a decoder layer by their place.

    before, after: norms of the inputs and outputs of attention and MLP
    own:           norms of queries and keys, or none
    qkv, gate_up:  linear layers of the inputs; out, down: of what becomes the outputs
    """

    before: tuple[Any, Any]
    after: tuple[Any, Any]
    own: list[Any]
    qkv: list[Any]
    out: Any
    gate_up: list[Any]
    down: Any


@dataclass(frozen=True, slots=True, eq=False)
class LayerTrial:
    """A layer's arguments in a trial run, its attention call, its output, and its modules.

    gate_up: [T, 2 I] what the MLP's first linear layers made; gated: [T, I] what its last one was given
    """

    states: Tensor
    kwargs: dict[str, Any]
    call: AttentionCall
    out: Tensor
    modules: LayerModules
    gate_up: Tensor
    gated: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A module with its first tensor and what it made of it."""

    module: nn.Module
    given: Tensor
    made: Any


@torch.inference_mode()
def observe_layers(model: PreTrainedModel, layers: Sequence[nn.Module]) -> dict[nn.Module, LayerTrial]:
    """Each layer with its trial; those are left out that have other modules than LayerModules, or are called
    in another way than with states and position_embeddings."""
    trial, found = TrialBatch(), {}
    runs: list[_Run] = []

    def keep_run(module: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        given = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
        runs.append(_Run(module, given, out[0] if isinstance(out, tuple) else out))

    def keep(layer: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        modules, call = _modules(layer, runs), trial.calls.get(_index(layer))
        is_plain = isinstance(out, Tensor) and len(args) == 1
        if modules is not None and call is not None and is_plain and kwargs.get("position_embeddings"):
            made = [run.made[0] for run in runs if run.module in modules.gate_up]
            (gated,) = (run.given[0] for run in runs if run.module is modules.down)
            states = (args[0].clone(), kwargs, call, out.clone())
            found[layer] = LayerTrial(*states, modules, torch.cat(made, -1), gated)
        runs.clear()

    handles = []
    for layer in layers:
        parts: tuple[Any, Any] = (layer.self_attn, layer.mlp)
        inner = [each for each in layer.modules() if is_linear(each) or is_norm(each)]
        handles += [each.register_forward_hook(keep_run, with_kwargs=True) for each in (*inner, *parts)]
        handles.append(layer.register_forward_hook(keep, with_kwargs=True))
    try:
        model(**trial_inputs(model), kv_batch=trial)
    finally:
        for handle in handles:
            handle.remove()
    return found


def is_linear(module: Any) -> bool:
    return type(module) in (nn.Linear, NativeLinear, PackedLinear)


def is_norm(module: nn.Module) -> bool:
    """Whether it is an RMS norm that runs on kernels."""
    return isinstance(vars(module).get("forward"), NativeNorm)


def _index(layer: Any) -> int:
    return int(layer.self_attn.layer_idx)


def _modules(layer: Any, runs: list[_Run]) -> LayerModules | None:
    """The places of the modules that ran; None where linear layers are more or fewer."""
    parts = [next(run for run in runs if run.module is part) for part in (layer.self_attn, layer.mlp)]
    norms = [run for run in runs if is_norm(run.module)]
    before, after = [], []
    linears: list[Any] = []
    for part in parts:
        before.append(next((run.module for run in norms if run.made is part.given), None))
        after.append(next((run.module for run in norms if run.given is part.made), None))
        inner = set(part.module.modules())
        own = [run for run in runs if run.module in inner and is_linear(run.module)]
        first = [run.module for run in own if run.given is part.given]
        if not first or len(own) != len(first) + 1:
            return None
        linears += [first, own[-1].module]
    inner = set(layer.self_attn.modules())
    heads = [run.module for run in norms if run.module in inner]
    return LayerModules((before[0], before[1]), (after[0], after[1]), heads, *linears)
