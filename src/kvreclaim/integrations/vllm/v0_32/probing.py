"""Probing of vLLM's model for facts.py: its attention layers, their shapes, and one forward over a
single token at several positions, by which the layers' rotation is found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import extract_layer_index

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.settings.groups import full_layers, has_states
from kvreclaim.integrations.vllm.v0_32.centring_side import CentredAttention
from kvreclaim.model.rotation import frequencies_in, rotary_frequencies
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.rope_probe import POSITIONS, loudest

CANDIDATES = 512
WITHOUT_STATISTICS = "use a policy without statistics or queries, such as knorm, and leave out stats"


@dataclass(frozen=True, slots=True, eq=False)
class Recorded:
    """Inputs of one layer, in the shard of this rank: queries [8, H, D] and keys [8, K, D],
    rotated to POSITIONS."""

    queries: Tensor
    keys: Tensor


class AttentionRecorder:
    """Stands in for an attention implementation: keeps queries and keys, answers each token with its own
    value, and never touches the cache. Everything else is the implementation's own."""

    def __init__(self, impl: Any) -> None:
        self.impl = impl
        self.recorded: Recorded | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.impl, name)

    def do_kv_cache_update(self, *args: Any, **kwargs: Any) -> None:
        """Write nothing."""

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Mutates output, the third of args or a keyword, as the implementation would."""
        output: Tensor = kwargs["output"] if "output" in kwargs else args[2]
        self.recorded = Recorded(query.clone(), key.clone())
        output.copy_(value.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1).view_as(output))
        return output


def decoder_layers(runner: Any, some: bool = False) -> list[Attention]:
    """The decoder's layers with attention, in the order of their index, without a drafter's.

    some: whether other layers of the model have none

    Raises: UnsupportedModelError where a layer of the model keeps its state in no cache group.
    """
    found = get_layers_from_vllm_config(runner.vllm_config, Attention)
    for name in drafter_layers(runner):
        del found[name]
    by_index = {extract_layer_index(name): layer for name, layer in found.items()}
    expected = runner.model_config.hf_text_config.num_hidden_layers
    indices = sorted(by_index)
    if len(by_index) != len(found) or not (some or indices == list(range(expected))):
        raise UnsupportedModelError(
            f"{runner.model_config.model} has {len(found)} attention layers that vLLM pages, numbers "
            f"{indices}, but {expected} layers; use a model whose every layer is softmax attention."
        )
    return [by_index[index] for index in indices]


def every_layer(runner: Any) -> list[Attention]:
    """decoder_layers of a runner with a cache.

    Raises: UnsupportedModelError, as decoder_layers does.
    """
    return decoder_layers(runner, has_states(runner.kv_cache_config))


def attention_layers(runner: Any) -> list[Attention]:
    """The layers that are compressed: those with full attention.

    Raises: UnsupportedModelError, as every_layer does.
    """
    full = full_layers(runner.kv_cache_config)
    return [layer for layer in every_layer(runner) if layer.layer_name in full]


def drafter_layers(runner: Any) -> frozenset[str]:
    """Names of a drafter's own attention layers."""
    return frozenset(getattr(getattr(runner, "drafter", None), "_draft_attn_layer_names", ()))


def shape_of(layer: Attention) -> LayerFacts:
    """The layer as this rank holds it, without its rotation."""
    sinks: Tensor | None = getattr(layer.impl, "sinks", None)
    return LayerFacts(
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_size,
        v_head_dim=layer.head_size_v,
        softmax=Softmax(
            scale=float(layer.impl.scale),
            softcap=float(layer.impl.logits_soft_cap or 0) or None,
            window=layer.sliding_window,
            sinks=None if sinks is None else sinks.float(),
        ),
    )


def total_heads(runner: Any) -> tuple[int, int]:
    """Query heads and KV heads of the whole model."""
    config = runner.model_config
    return int(config.model_arch_config.total_num_attention_heads), int(config.get_total_num_kv_heads())


def hidden_size(runner: Any) -> int | None:
    """Numbers of a hidden state; None where the configuration has none."""
    size: int | None = getattr(runner.model_config.hf_text_config, "hidden_size", None)
    return size


def frequencies(runner: Any) -> list[Tensor]:
    """The rotary frequencies that the model may use, float64 on its device, as transformers has them: vLLM
    keeps rounded cosines instead, except where it runs transformers' own modules.

    Raises: UnsupportedModelError if transformers has none.
    """
    found = frequencies_in(runner.get_model()) or rotary_frequencies(runner.model_config.hf_text_config)
    return [frequency.to(runner.device) for frequency in found]


def tensor_parallel() -> tuple[int, int]:
    """Rank and size of the tensor-parallel group."""
    return int(get_tensor_model_parallel_rank()), int(get_tensor_model_parallel_world_size())


@torch.inference_mode()
def record(runner: Any, layers: Sequence[Attention], remedy: str = WITHOUT_STATISTICS) -> list[Recorded]:
    """Record every layer's inputs for one token at POSITIONS. All ranks must call it together.

    remedy: end of the error message

    Raises: UnsupportedModelError if the model cannot be run so, or does not call a layer.
    """
    model = runner.get_model()
    name = runner.model_config.model
    positions = torch.tensor(POSITIONS, device=runner.device)
    try:
        with (
            _recording(layers) as recorders,
            _without_states(runner.vllm_config),
            _context(runner.vllm_config),
        ):
            token = _token(runner)
            _without_adapters(runner, len(POSITIONS))
            model(input_ids=token, positions=positions)
    except Exception as error:  # whatever a model may raise: it is passed on, with what was tried
        raise UnsupportedModelError(
            f"{name} could not be run on one token to find how it encodes positions, or what its layers show "
            f"({type(error).__name__}: {error}); {remedy}."
        ) from error
    silent = [n for n, recorder in enumerate(recorders) if recorder.recorded is None]
    if silent:
        raise UnsupportedModelError(f"layers {silent} of {name} did not run attention; {remedy}.")
    return [recorder.recorded for recorder in recorders if recorder.recorded is not None]


@contextmanager
def _recording(layers: Sequence[Attention]) -> Iterator[list[AttentionRecorder]]:
    """Replace the layers' implementations by recorders, without quantised queries or centred keys."""
    before = [(layer.impl, layer.query_quant, type(layer)) for layer in layers]
    recorders = [AttentionRecorder(layer.impl) for layer in layers]
    try:
        for layer, recorder in zip(layers, recorders, strict=True):
            layer.impl, layer.query_quant = recorder, None
            if isinstance(layer, CentredAttention):
                layer.__class__ = Attention
        yield recorders
    finally:
        for layer, (impl, query_quant, kind) in zip(layers, before, strict=True):
            layer.impl, layer.query_quant, layer.__class__ = impl, query_quant, kind


@contextmanager
def _without_states(vllm_config: Any) -> Iterator[None]:
    """Let recurrent layers answer zeros: without a state some leave their answers unwritten."""
    layers = get_layers_from_vllm_config(vllm_config, MambaBase).values()
    handles = [layer.register_forward_hook(_zero, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _zero(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor | None) -> None:
    """Zero the answer: what a layer returns, or writes into its last argument."""
    if result is None:
        result = kwargs["output"] if "output" in kwargs else args[-1]
    result.zero_()


def _context(vllm_config: Any) -> Any:
    """Return a context without attention metadata, slots or compiled code."""
    return set_forward_context(
        None, vllm_config, num_tokens=len(POSITIONS), slot_mapping={}, skip_compiled=True
    )


def _token(runner: Any) -> Tensor:
    """[8]: of ids spread over the vocabulary the one with the largest embedding. Embeddings are summed over
    the ranks, so that all take the same."""
    vocab_size = runner.model_config.get_vocab_size()
    most = min(CANDIDATES, runner.vllm_config.scheduler_config.max_num_batched_tokens)
    ids = torch.arange(0, vocab_size, -(-vocab_size // most), device=runner.device)
    _without_adapters(runner, ids.numel())
    return ids[loudest(runner.get_model().embed_input_ids(ids))].repeat(len(POSITIONS))


def _without_adapters(runner: Any, num_tokens: int) -> None:
    """Set no LoRA adapter for the tokens, since layers look it up if LoRA is on."""
    if runner.lora_config is not None:
        none = (0,) * num_tokens
        runner._set_active_loras(none, none, set())
