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
    mlp:           the MLP itself, where it does not consist of gate_up and down, which then is None
    """

    before: tuple[Any, Any]
    after: tuple[Any, Any]
    own: list[Any]
    qkv: list[Any]
    out: Any
    gate_up: list[Any]
    down: Any
    mlp: Any


@dataclass(frozen=True, slots=True, eq=False)
class LayerTrial:
    """A layer's arguments in a trial run, its attention call, its output, and its modules.

    gates: [T, 2 I] what the MLP's first linear layers made, and [T, I] what its last one was given, if it
        consists of them
    """

    states: Tensor
    kwargs: dict[str, Any]
    call: AttentionCall
    out: Tensor
    modules: LayerModules
    gates: tuple[Tensor, Tensor] | None


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
        given = next((each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)), None)
        if given is not None:
            runs.append(_Run(module, given, out[0] if isinstance(out, tuple) else out))

    def keep(layer: nn.Module, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        modules, call = _modules(layer, runs), trial.calls.get(_index(layer))
        is_plain = isinstance(out, Tensor) and len(args) == 1
        if modules is not None and call is not None and is_plain and kwargs.get("position_embeddings"):
            states = (args[0].clone(), kwargs, call, out.clone())
            found[layer] = LayerTrial(*states, modules, _gates(modules, runs))
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


def _gates(modules: LayerModules, runs: list[_Run]) -> tuple[Tensor, Tensor] | None:
    if modules.mlp is not None:
        return None
    made = [run.made[0] for run in runs if run.module in modules.gate_up]
    (gated,) = (run.given[0] for run in runs if run.module is modules.down)
    return torch.cat(made, -1), gated


def _modules(layer: Any, runs: list[_Run]) -> LayerModules | None:
    """The places of the modules that ran; None where attention or MLP did not run, or attention has more or
    fewer linear layers."""
    parts = [run for part in (layer.self_attn, layer.mlp) for run in runs if run.module is part]
    if [run.module for run in parts] != [layer.self_attn, layer.mlp]:
        return None
    norms = [run for run in runs if is_norm(run.module)]
    before, after, first, last = [], [], [], []
    for part in parts:
        before.append(next((run.module for run in norms if run.made is part.given), None))
        after.append(next((run.module for run in norms if run.given is part.made), None))
        inner = set(part.module.modules())
        own = [run for run in runs if run.module in inner and is_linear(run.module)]
        inputs: list[Any] = [run.module for run in own if run.given is part.given]
        is_whole = bool(inputs) and len(own) == len(inputs) + 1
        first.append(inputs if is_whole else [])
        last.append(own[-1].module if is_whole else None)
    inner = set(layer.self_attn.modules())
    heads: list[Any] = [run.module for run in norms if run.module in inner]
    if last[0] is None:
        return None
    return LayerModules(
        before=(before[0], before[1]),
        after=(after[0], after[1]),
        own=heads,
        qkv=first[0],
        out=last[0],
        gate_up=first[1],
        down=last[1],
        mlp=layer.mlp if last[1] is None else None,
    )
