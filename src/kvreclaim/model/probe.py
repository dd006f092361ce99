"""Learn a model's attention facts by running it once, instead of guessing them from its config.

The probe feeds one token at several positions and answers every attention layer with the values
themselves. All tokens then carry the same hidden state in every layer, so a query differs between
positions by its rotation alone, and each candidate rotation can be checked by undoing it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.rope import RopeLayout, RopeStyle, rotate, to_bands

POSITIONS = (0, 1, 2, 3, 5, 11, 47, 120)
STYLES: tuple[RopeStyle, ...] = ("half", "interleaved")
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
FINGERPRINT_FIELDS = ("model_type", "hidden_size", "intermediate_size", "vocab_size")


class _Probe:
    """A KVBatch that records each layer's call and returns every token's own value."""

    def __init__(self) -> None:
        self.calls: dict[int, AttentionCall] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls[call.layer] = call
        return call.v.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)


@torch.inference_mode()
def probe(model: PreTrainedModel, name: str) -> ModelFacts:
    """Run the probe and describe every attention layer.

    Raises: UnsupportedModelError when a layer does not go through AttentionInterface, or when
    layers differ in heads or dims (one block table could not serve them all).
    """
    calls = _run(model, name)
    candidates = _inverse_frequencies(model)
    layers, problem = [], None
    for index in range(len(calls)):
        call = calls[index]
        rope = _find_rope(call, candidates)
        if rope is None and problem is None:
            problem = f"layer {index} of {name} encodes positions in a way that no known rotation explains"
        layers.append(_layer_facts(call, rope))
    _check_uniform(layers, name)
    config = model.config.get_text_config()
    return ModelFacts(
        name=name,
        fingerprint=fingerprint(config, layers),
        layers=tuple(layers),
        dtype=model.dtype,
        device=model.device,
        max_position=_max_position(config),
        rope_problem=problem,
    )


def _run(model: PreTrainedModel, name: str) -> dict[int, AttentionCall]:
    recorder = _Probe()
    positions = torch.tensor([POSITIONS], device=model.device)
    sizes = model.get_input_embeddings().weight.float().norm(dim=-1)  # type: ignore[operator]
    token = torch.full_like(positions, int(sizes.argmax()))  # never the zero row of a padding token
    model(input_ids=token, position_ids=positions, use_cache=False, kv_batch=recorder)
    expected = model.config.get_text_config().num_hidden_layers
    if sorted(recorder.calls) != list(range(expected)):
        missing = sorted(set(range(expected)) - set(recorder.calls))
        raise UnsupportedModelError(
            f"{name} keeps state outside of paged attention: layers {missing} of {expected} do not call "
            "the registered attention function; use a model whose every layer is softmax attention."
        )
    return recorder.calls


def _layer_facts(call: AttentionCall, rope: RopeLayout | None) -> LayerFacts:
    return LayerFacts(
        num_heads=call.q.shape[1],
        num_kv_heads=call.k.shape[1],
        head_dim=call.q.shape[2],
        v_head_dim=call.v.shape[2],
        scale=call.scale,
        sliding_window=call.window,
        rope=rope,
        softcap=call.softcap,
        sinks=call.sinks,
    )


def _check_uniform(layers: list[LayerFacts], name: str) -> None:
    shapes = {(f.num_heads, f.num_kv_heads, f.head_dim, f.v_head_dim) for f in layers}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"{name} has attention layers of different shapes {sorted(shapes)} (heads, KV heads, head dim, "
            "value dim); one block table serves only layers of one shape."
        )


def _inverse_frequencies(model: PreTrainedModel) -> list[Tensor]:
    """The distinct inv_freq buffers of the model, float64 on its device."""
    found: list[Tensor] = []
    for key, buffer in model.named_buffers():
        if not key.endswith("inv_freq") or "original" in key.rsplit(".", 1)[-1]:
            continue
        freq = buffer.detach().to(torch.float64)
        if not any(f.shape == freq.shape and torch.equal(f, freq) for f in found):
            found.append(freq)
    return found


def _find_rope(call: AttentionCall, frequencies: list[Tensor]) -> RopeLayout | None:
    """The layout under which queries and keys, un-rotated, are the same at every position."""
    dim = call.q.shape[-1]
    layouts = [RopeLayout(torch.empty(0, dtype=torch.float64, device=call.q.device))]
    for freq, style in product(frequencies, STYLES):
        starts = sorted({0, dim - 2 * freq.numel()})
        layouts += [RopeLayout(freq, style, start) for start in starts if start >= 0]
    changes = [_change(layout, call) for layout in layouts]
    least = min(range(len(layouts)), key=changes.__getitem__)
    tolerance = 1e-3 if call.q.dtype == torch.float32 else 2e-2
    return layouts[least] if changes[least] < tolerance else None


def _change(layout: RopeLayout, call: AttentionCall) -> float:
    """How much the un-rotated queries or keys still differ between positions: the mean, over heads, of
    each band's and each other dim's largest difference, relative to its own size.

    Relative to the whole vector, a head with a few massive dims (Qwen2's biases) would hide the
    rotation of all others, and pass for one without rotation in half precision.
    """
    positions = torch.tensor(POSITIONS, device=call.q.device)
    rest = layout.rest_dims(call.q.shape[-1]).to(call.q.device)
    worst = 0.0
    for x in (call.q, call.k):
        still = rotate(x.transpose(0, 1).float(), positions, layout, inverse=True)
        ratios = []
        for part in (to_bands(still, layout), still[..., rest]):
            size = part.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny)
            ratios.append((part - part[:, :1]).abs().amax(1) / size)
        worst = max(worst, float(torch.cat(ratios, dim=-1).mean()))
    return worst


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """rope_parameters is one dict, or one dict for each layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def _max_position(config: Any) -> int:
    """Longest sequence whose rotation does not depend on what else is in the batch."""
    limit = int(getattr(config, "max_position_embeddings", 0) or 0) or 2**31 - 1
    for parameters in _rope_parameters(config):
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, int(original or limit))
    return limit


def fingerprint(config: Any, layers: Sequence[LayerFacts]) -> str:
    """sha256 hex digest over what decides the meaning of keys and queries: a few config fields that
    every version of transformers names alike, and what the probe found of each layer."""
    fields = [str(getattr(config, name, None)) for name in FINGERPRINT_FIELDS]
    return hashlib.sha256(json.dumps([fields, [_identity(layer) for layer in layers]]).encode()).hexdigest()


def _identity(layer: LayerFacts) -> list[Any]:
    shape = [layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim, layer.sliding_window]
    if layer.rope is None:
        return [*shape, f"{layer.scale:.5e}", None]
    frequencies = [f"{x:.5e}" for x in layer.rope.inv_freq.tolist()]
    return [*shape, f"{layer.scale:.5e}", layer.rope.style, layer.rope.start, frequencies]
