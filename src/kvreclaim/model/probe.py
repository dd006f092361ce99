"""Learn a model's attention facts by running it once, instead of guessing them from its config.

The probe feeds one token at several positions and answers every attention layer with the values
themselves; ops/rope_probe.py documents its use of the queries and keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.inputs import inputs_handed_out
from kvreclaim.model.position_limit import position_limit
from kvreclaim.model.quantized.layers import embeddings_of
from kvreclaim.model.recurrent import RecurrentLayers
from kvreclaim.model.rotation import frequencies_in
from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.rope import RopeLayout
from kvreclaim.ops.rope_probe import POSITIONS, find_rope, loudest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FINGERPRINT_FIELDS = ("model_type", "hidden_size", "intermediate_size", "vocab_size")


class _Probe:
    """A KVBatch that records each layer's call and returns every token's own value."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = call
        return call.v.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)


@torch.inference_mode()
def probe(
    model: PreTrainedModel,
    name: str,
    quantization: str | None = None,
    recurrent: RecurrentLayers | None = None,
    dtype: torch.dtype | None = None,
) -> ModelFacts:
    """Run the probe and describe every attention layer.

    quantization: packing of the weights, from quantization_in
    recurrent:    the other layers of a hybrid model, which is proved already
    dtype:        of ModelFacts; None for the model's own

    Raises: UnsupportedModelError when a layer does not go through AttentionInterface, or when
    layers differ in heads or dims (one block table could not serve them all).
    """
    config = model.config.get_text_config()
    if recurrent is None:
        calls = _run(model, name, config.num_hidden_layers)
    else:
        with recurrent.beginning([1] * len(POSITIONS)):  # each token is then the same one everywhere
            calls = _run(model, name, recurrent.num_attention)
    candidates = frequencies_in(model)
    layers, problem = [], None
    for index in range(len(calls)):
        call = calls[index]
        rope = find_rope(call.q, call.k, candidates)
        if rope is None and problem is None:
            problem = f"layer {index} of {name} encodes positions in a way that no known rotation explains"
        layers.append(_layer_facts(call, rope))
    _check_uniform(layers, name)
    return ModelFacts(
        name=name,
        fingerprint=fingerprint(config, layers, quantization),
        layers=tuple(layers),
        dtype=model.dtype if dtype is None else dtype,
        device=model.device,
        max_position=positions_of(config),
        rope_problem=problem,
        hidden_size=_hidden_size([call.hidden for call in calls.values()]),
        states=() if recurrent is None else tuple(recurrent.shapes),
    )


def _run(model: PreTrainedModel, name: str, expected: int) -> dict[int, AttentionCall]:
    recorder = _Probe()
    positions = torch.tensor([POSITIONS], device=model.device)
    embeddings = embeddings_of(model.get_input_embeddings())
    token = torch.full_like(positions, loudest(embeddings))
    with inputs_handed_out(model):
        model(input_ids=token, position_ids=positions, use_cache=False, kv_batch=recorder)
    if sorted(recorder.calls) != list(range(expected)):
        missing = sorted(set(range(expected)) - set(recorder.calls))
        raise UnsupportedModelError(
            f"{name} keeps state outside of paged attention: layers {missing} of {expected} do not call "
            "the registered attention function; use a model whose every layer is softmax attention."
        )
    return recorder.calls


def _layer_facts(call: AttentionCall, rope: RopeLayout | None) -> LayerFacts:
    sinks = call.softmax.sinks
    return LayerFacts(
        num_heads=call.q.shape[1],
        num_kv_heads=call.k.shape[1],
        head_dim=call.q.shape[2],
        v_head_dim=call.v.shape[2],
        softmax=replace(call.softmax, sinks=None if sinks is None else sinks.detach().float()),
        rope=rope,
        latent=call.latent,
    )


def _hidden_size(inputs: list[Tensor | None]) -> int | None:
    """Return the value that all layers share; None if they differ."""
    sizes = {None if hidden is None else hidden.shape[-1] for hidden in inputs}
    return sizes.pop() if len(sizes) == 1 else None


def _check_uniform(layers: list[LayerFacts], name: str) -> None:
    shapes = {(f.num_heads, f.num_kv_heads, f.head_dim, f.v_head_dim) for f in layers}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"{name} has attention layers of different shapes {sorted(shapes)} (heads, KV heads, head dim, "
            "value dim); one block table serves only layers of one shape."
        )


def positions_of(config: Any) -> int:
    """Return the longest sequence that transformers' config of a language model is made for. Raises:
    InvalidArgumentError."""
    known = int(getattr(config, "max_position_embeddings", 0) or 0) or 2**31 - 1
    return position_limit(config.to_dict(), known)


PACKED_METHODS = ("awq", "gptq", "compressed-tensors", "bitsandbytes", "gguf")


def quantization_in(config: Any) -> str | None:
    """Return the config's packing method; None if weights are not kept packed."""
    settings = getattr(config, "quantization_config", None)
    settings = settings if isinstance(settings, dict) else getattr(settings, "__dict__", {})
    method = settings.get("quant_method")
    method = str(getattr(method, "value", method))
    return method if method in PACKED_METHODS else None


def fingerprint(config: Any, layers: Sequence[LayerFacts], quantization: str | None = None) -> str:
    """sha256 hex digest over what decides the meaning of keys and queries: a few config fields that
    every version of transformers names in the same way, what the probe found of each layer, and how weights
    are packed."""
    fields = [str(getattr(config, name, None)) for name in FINGERPRINT_FIELDS]
    fields += [] if quantization is None else [quantization]
    return hashlib.sha256(json.dumps([fields, [_identity(layer) for layer in layers]]).encode()).hexdigest()


def _identity(layer: LayerFacts) -> list[Any]:
    dims = [layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim]
    shape: list[Any] = [*dims, layer.softmax.window, *(["latent"] if layer.latent else [])]
    if layer.softmax.chunk is not None:
        shape.append(f"chunk {layer.softmax.chunk}")
    if layer.rope is None:
        return [*shape, f"{layer.softmax.scale:.5e}", None]
    frequencies = [f"{x:.5e}" for x in layer.rope.inv_freq.tolist()]
    return [*shape, f"{layer.softmax.scale:.5e}", layer.rope.style, layer.rope.start, frequencies]
