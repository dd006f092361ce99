"""Structure of decoder layers, observed while transformers' own code runs trial tokens.

A module's place follows from its tensors: a norm before attention makes what attention is given, a norm after
it is given what attention makes. Names do not decide: families give the same name to different places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.native_modules import NativeLinear, NativeNorm
from kvreclaim.model.quantized.layers import PackedLinear

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRIAL_POSITIONS = (0, 1, 2, 5, 11, 23, 60)


class TrialBatch:
    """A KVBatch with outputs that depend on queries, keys and values. It records its calls."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = replace(call, q=call.q.clone(), k=call.k.clone(), v=call.v.clone())
        share = call.q.shape[1] // call.k.shape[1]
        scores = (call.q * call.k.repeat_interleave(share, 1)).float().sum(-1, keepdim=True)
        return (call.v.repeat_interleave(share, 1) * torch.tanh(scores * call.q.shape[2] ** -0.5)).to(
            call.q.dtype
        )


def trial_inputs(model: PreTrainedModel) -> dict[str, Any]:
    """Trial tokens, as a model or the module of its layers takes them."""
    positions = torch.tensor([TRIAL_POSITIONS], device=model.device)
    tokens = (positions * 7919 + 1) % model.config.get_text_config().vocab_size
    return {"input_ids": tokens, "position_ids": positions, "use_cache": False}


@dataclass(frozen=True, slots=True, eq=False)
class LayerModules:
    """The modules of a decoder layer by their place.

    before, after: norms of the inputs and outputs of attention and MLP
    own:           norms of queries and keys, or none; with latents of the queries' latent, if there is one,
        and of the latent
    qkv, gate_up:  linear layers of the inputs, with latents that of queries first
    out, down:     linear layers of what becomes the outputs
    mlp:           the MLP itself, where it does not consist of gate_up and down, which then is None
    queries:       linear layer of the queries' normed latent
    """

    before: tuple[Any, Any]
    after: tuple[Any, Any]
    own: list[Any]
    qkv: list[Any]
    out: Any
    gate_up: list[Any]
    down: Any
    mlp: Any
    queries: Any = None


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
        call = trial.calls.get(_index(layer))
        modules = None if call is None else _modules(layer, runs, is_latent=call.latent)
        is_plain = isinstance(out, Tensor) and len(args) == 1
        has_angles = isinstance(kwargs.get("position_embeddings"), tuple)
        if modules is not None and call is not None and is_plain and has_angles:
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
    """Return whether it is an RMS norm that runs on kernels."""
    return isinstance(vars(module).get("forward"), NativeNorm)


def _index(layer: Any) -> int:
    return int(layer.self_attn.layer_idx)


def _gates(modules: LayerModules, runs: list[_Run]) -> tuple[Tensor, Tensor] | None:
    if modules.mlp is not None:
        return None
    made = [run.made[0] for run in runs if run.module in modules.gate_up]
    (gated,) = (run.given[0] for run in runs if run.module is modules.down)
    return torch.cat(made, -1), gated


def _modules(layer: Any, runs: list[_Run], *, is_latent: bool) -> LayerModules | None:
    """The places of the modules that ran; None where attention or MLP did not run, or attention has more or
    fewer linear layers."""
    parts = [run for part in (layer.self_attn, layer.mlp) for run in runs if run.module is part]
    if [run.module for run in parts] != [layer.self_attn, layer.mlp]:
        return None
    norms = [run for run in runs if is_norm(run.module)]
    before, after = [], []
    for part in parts:
        before.append(next((run.module for run in norms if run.made is part.given), None))
        after.append(next((run.module for run in norms if run.given is part.made), None))
    attention, mlp = ([run for run in runs if run.module in set(part.module.modules())] for part in parts)
    heads = [run for run in attention if is_norm(run.module)]
    linears = [run for run in attention if is_linear(run.module)]
    places = (_latent_places if is_latent else _places)(parts[0], linears, heads)
    if places is None:
        return None
    own = [run for run in mlp if is_linear(run.module)]
    inputs = [run for run in own if run.given is parts[1].given]
    is_whole = bool(inputs) and len(own) == len(inputs) + 1 and _has_no_other_weights(layer.mlp, own)
    return LayerModules(
        before=(before[0], before[1]),
        after=(after[0], after[1]),
        **places,
        gate_up=[run.module for run in inputs] if is_whole else [],
        down=own[-1].module if is_whole else None,
        mlp=None if is_whole else layer.mlp,
    )


def _places(part: _Run, linears: list[_Run], norms: list[_Run]) -> dict[str, Any] | None:
    """Return the modules of attention with keys and values of heads."""
    inputs = [run.module for run in linears if run.given is part.given]
    if not inputs or len(linears) != len(inputs) + 1:
        return None
    return {"own": [run.module for run in norms], "qkv": inputs, "out": linears[-1].module}


def _latent_places(part: _Run, linears: list[_Run], norms: list[_Run]) -> dict[str, Any] | None:
    """The modules of attention that hands out latents. The latent is made by the linear layer with first
    numbers that a norm is given."""
    inputs = [run for run in linears if run.given is part.given]
    pairs = [(run, norm) for run in inputs for norm in norms if _begins(norm.given, run.made)]
    if len(inputs) != 2 or len(pairs) != 1:
        return None
    (latent, kv_norm), (other,) = pairs[0], (run for run in inputs if run is not pairs[0][0])
    q_norm = next((norm for norm in norms if norm.given is other.made), None)
    queries = next((run for run in linears if q_norm is not None and run.given is q_norm.made), None)
    own, known = [norm for norm in (q_norm, kv_norm) if norm], [run for run in (*inputs, queries) if run]
    if (q_norm is None) != (queries is None) or len(own) != len(norms) or len(linears) != len(known) + 1:
        return None
    return {
        "own": [norm.module for norm in own],
        "qkv": [other.module, latent.module],
        "queries": None if queries is None else queries.module,
        "out": linears[-1].module,
    }


def _begins(given: Tensor, made: Tensor) -> bool:
    """Return whether a tensor is the first columns of another, in its memory, and not all of them."""
    return given.data_ptr() == made.data_ptr() and given.shape[-1] < made.shape[-1]


def _has_no_other_weights(module: nn.Module, linears: list[_Run]) -> bool:
    """Return whether all tensors of a module are those of its linear layers."""
    own = {id(each) for run in linears for each in (*run.module.parameters(), *run.module.buffers())}
    return all(id(each) in own for each in (*module.parameters(), *module.buffers()))
