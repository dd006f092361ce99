"""A transformers model without memory, filled with packed and plain weights one by one, by threads that
show a progress bar."""

from __future__ import annotations

import copy
import ctypes
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError, reason_of
from kvreclaim.model.attention import register_attention
from kvreclaim.model.dense import DenseModel, is_dense
from kvreclaim.model.quantized.layers import PackedEmbedding, PackedLinear
from kvreclaim.model.quantized.products import Products
from kvreclaim.model.quantized.source import WeightSource
from kvreclaim.ops.packed import Each, PackedMatrix

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_THREADS = 4
"""Bounds memory: each thread holds a piece of an unpacked matrix, some MB."""
SHOWN_AFTER_S = 1.0
_one_at_a_time = Lock()
"""Serialises loads: torch's thread count is global, so a second load would inherit the first one's count."""


@contextmanager
def packing(num_weights: int) -> Iterator[tuple[Each, Callable[[int], object]]]:
    """Start as many threads as torch has, at most MOST_THREADS, to pack num_weights in all.

    Yields: a map over the threads, and a callback for the number of finished weights. On a terminal, a
        progress bar appears after SHOWN_AFTER_S.
    """
    with _one_at_a_time:
        yield from _packing(num_weights)


def _packing(num_weights: int) -> Iterator[tuple[Each, Callable[[int], object]]]:
    threads = torch.get_num_threads()
    bar = tqdm(
        total=num_weights,
        desc="Packing weights",
        bar_format="{desc} {percentage:3.0f} %",
        delay=SHOWN_AFTER_S,
        disable=None,  # shown only on a terminal
        leave=False,
    )
    torch.set_num_threads(1)  # inherited by the pool's threads
    try:
        with bar, ThreadPoolExecutor(min(threads, MOST_THREADS), "kvreclaim-packing") as pool:
            yield pool.map, bar.update
    finally:
        torch.set_num_threads(threads)


def build(
    config: Any,
    name: str,
    source: WeightSource,
    dtype: torch.dtype,
    products: Products,
    device: torch.device,
) -> PreTrainedModel:
    """Build the causal model of a config with the weights of a source.

    config:   config of the model; its quantization_config is ignored
    name:     the model's name in error messages
    dtype:    dtype of unpacked weights and of activations
    device:   device of packed weights, copied one by one; unpacked weights stay in CPU memory

    Raises: InvalidArgumentError for weights that are missing or of another shape; UnsupportedModelError for
        packed weights of something that is neither a linear layer nor an embedding, such as experts.
    """
    config = copy.deepcopy(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    try:
        model: Any = DenseModel(config, dtype) if is_dense(config) else _of_transformers(config, dtype)
    except Exception as error:  # inconsistent sizes: each model family raises its own type
        raise InvalidArgumentError(
            f"the config of {name} makes no model ({reason_of(error)}); download or convert the checkpoint "
            "again."
        ) from error
    own_head = _pack(model, source, dtype, products, device)
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if config.tie_word_embeddings and not own_head and isinstance(embeddings, PackedEmbedding):
        model.set_output_embeddings(PackedLinear(embeddings.matrix, None, dtype, products))
    elif config.tie_word_embeddings and head is not None and not own_head:
        head.weight = embeddings.weight  # filled below, once
    fill(model, name, source.dense)
    if lost := source.unread():
        raise UnsupportedModelError(
            f"{name} holds {len(lost)} weights ({lost[0]} is one) that no linear layer or embedding of "
            f"{type(model).__name__} takes; kvreclaim packs linear layers only: pass the checkpoint that is "
            "not quantised."
        )
    return model


def _of_transformers(config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """Return transformers' own model without memory."""
    from accelerate import init_empty_weights  # vLLM's environment, which loads no packed model, may lack it
    from transformers.initialization import no_init_weights

    with init_empty_weights(include_buffers=False), no_init_weights():
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=register_attention(), trust_remote_code=False
        )
    model.tie_weights()  # no_init_weights skips it
    return model


def _pack(
    model: PreTrainedModel,
    source: WeightSource,
    dtype: torch.dtype,
    products: Products,
    device: torch.device,
) -> bool:
    """Replace every module that has a packed weight. Returns: True if the output layer was one."""
    head, was_head = model.get_output_embeddings(), False
    found = [pair for pair in model.named_modules() if isinstance(pair[1], nn.Linear | nn.Embedding)]
    with packing(sum(module.weight.numel() for _, module in found)) as (each, done):
        for path, module in found:
            size = (module.weight.shape[0], module.weight.shape[1])
            matrix = source.packed(f"{path}.weight", size, each)
            if matrix is not None:
                was_head |= module is head
                model.set_submodule(path, _packed_module(module, matrix.to(device), dtype, products))
                _give_back()
            done(module.weight.numel())
    return was_head


def _packed_module(
    module: nn.Linear | nn.Embedding, matrix: PackedMatrix, dtype: torch.dtype, products: Products
) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return PackedEmbedding(matrix, dtype, products, getattr(module, "embed_scale", None))
    return PackedLinear(matrix, module.bias, dtype, products)


def _give_back() -> None:
    """Return freed memory to the system: glibc keeps it, and it adds up over a load."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def fill(model: nn.Module, name: str, dense: Callable[[str], Tensor | None]) -> None:
    """Give every parameter without memory its tensor, in the parameter's dtype.

    dense: the tensor of a parameter's name; None if it is missing

    Raises: InvalidArgumentError for a tensor that is missing or of another shape.
    """
    done: dict[int, nn.Parameter] = {}
    for path, owner in model.named_modules():
        for leaf, empty in list(owner._parameters.items()):
            if empty is None or not empty.is_meta:
                continue
            if id(empty) not in done:
                done[id(empty)] = _parameter(dense(f"{path}.{leaf}"), empty, f"{path}.{leaf}", name)
            owner._parameters[leaf] = done[id(empty)]
        for leaf, buffer in list(owner._buffers.items()):
            if buffer is None or leaf in owner._non_persistent_buffers_set or leaf.startswith("packed_"):
                continue
            found = dense(f"{path}.{leaf}")
            if found is not None:
                owner._buffers[leaf] = found.to(buffer.dtype)


def _parameter(found: Tensor | None, empty: Tensor, path: str, name: str) -> nn.Parameter:
    if found is None:
        raise InvalidArgumentError(
            f"the weights of model {name!r} lack {path}, which would be random; download or convert the "
            "checkpoint again."
        )
    if found.shape != empty.shape:
        raise InvalidArgumentError(
            f"{path} of model {name!r} is {list(found.shape)}, and its config asks for {list(empty.shape)}; "
            "download or convert the checkpoint again."
        )
    return nn.Parameter(found.to(empty.dtype).contiguous(), requires_grad=False)
