"""Load a transformers causal LM and its tokenizer so that its attention runs over paged blocks."""

from __future__ import annotations

import importlib
import itertools
import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError, printable
from kvreclaim.hub import hub_options
from kvreclaim.model.attention import register_attention, use_token_positions
from kvreclaim.model.config_fields import measured_fields
from kvreclaim.model.decoder import use_native_model
from kvreclaim.model.dense import DenseModel, is_dense
from kvreclaim.model.ends import directory_ends, gguf_ends
from kvreclaim.model.fast_layers import use_fast_layers
from kvreclaim.model.fused_experts import use_fused_experts
from kvreclaim.model.fused_moe import use_fused_moes
from kvreclaim.model.latent import use_latent_cache
from kvreclaim.model.native_mixers import use_native_mixers
from kvreclaim.model.native_mlp import use_fast_mlps
from kvreclaim.model.native_modules import use_fast_linears, use_fast_norms
from kvreclaim.model.overrides import overridden
from kvreclaim.model.probe import positions_of, probe
from kvreclaim.model.quantized.build import build, fill
from kvreclaim.model.quantized.checkpoint import SafetensorsFiles, checkpoint_source
from kvreclaim.model.quantized.gguf_file import GgufSource, gguf_config, gguf_tokenizer, is_gguf
from kvreclaim.model.quantized.layers import describe_packed
from kvreclaim.model.quantized.packed_copy import CopiedSource
from kvreclaim.model.quantized.products import choose_products, packed_dtypes
from kvreclaim.model.quantized.source import WeightSource
from kvreclaim.model.recurrent import (
    RECURRENT_LAYER_TYPES,
    RecurrentLayers,
    is_hybrid,
    no_attention,
)
from kvreclaim.model.recurrent_trial import prove, use_recurrent_states
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.moving import on_device

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TRANSFORMERS_METHODS = ("mxfp4",)
"""Packed weights that transformers itself turns into plain ones."""
DAMAGED = (SafetensorError, RuntimeError, LookupError, TypeError, ArithmeticError)
"""What damaged files raise, and sizes that make no model."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in eval mode with the paged attention function, and what the engine must know of it.

    tokenizer is None where the directory holds none: prompts are then token ids only.
    modules describes the layers on native kernels, and the cache of a model with latents.
    recurrent: the recurrent layers of a hybrid model, which take their states from the engine; None: none
    mapped_bytes: weights in pages of a file, which the system counts as free memory
    """

    model: transformers.PreTrainedModel
    tokenizer: Tokenizer | None
    facts: ModelFacts
    eos_token_ids: frozenset[int]
    vocab_size: int
    modules: str
    recurrent: RecurrentLayers | None = None
    mapped_bytes: int = 0

    @property
    def name(self) -> str:
        """The model's name in messages."""
        return self.facts.name

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters and buffers, shared memory counted once."""
        tensors = itertools.chain(self.model.parameters(), self.model.buffers())
        stores = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        return sum(stores.values())


@torch.inference_mode(False)  # weights are plain tensors wherever the caller loads them
def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: str = "auto",
    device: str = "auto",
    kernels: str = "auto",
    quantized_activations: str = "auto",
    hf_overrides: Mapping[str, Any] = MappingProxyType({}),
    cache_packed_weights: bool = False,
) -> LoadedModel:
    """Load a local directory, a hub id or a GGUF file; safetensors only, no code from the model's repository.

    Weights of 2 to 8 bits (AWQ, GPTQ, compressed-tensors, bitsandbytes, GGUF) stay packed.

    Args:
        dtype:  "auto" (as stored; fp32 hidden states with bf16 attention on a CPU if all matrices are
            packed), "float32", "bfloat16" or "float16"
        device: "auto" (cuda where there is one, else cpu) or any torch device
        kernels: "auto" or "native" run layers on the native kernels of a CPU; "auto" or "triton" run decoder
            layers, norms and MLPs on Triton's of a GPU
        quantized_activations: what products with packed weights round their input to: "auto" (int16 on a
            CPU, the model's dtype on a GPU), "int16", "int8" or "exact"; as of ops.native.packed and
            ops.triton.packed
        hf_overrides: fields that replace those of the model's config
        cache_packed_weights: take a GGUF file's packed weights from the copy in the cache directory, which
            is made if it is not there

    Raises: UnsupportedModelError naming the reason; InvalidArgumentError for a bad dtype, device or path
        and for files that are missing, damaged or incomplete.
    """
    name = os.fspath(path)
    target, torch_dtype = resolve_device(device), _resolve_dtype(dtype)
    gguf = GgufSource(Path(name)) if is_gguf(name) else None
    config = _load_config(name) if gguf is None else gguf_config(gguf, of_transformers=bool(hf_overrides))
    stored, config = config, overridden(config, hf_overrides, name)
    _refuse_unsupported(config, name)
    packed, mapped_bytes = _packed_source(name, config) if gguf is None else gguf, 0
    tokenizer: Tokenizer | None = None
    attention_dtype: torch.dtype | None = None
    if packed is None:
        model = _plain_model(name, torch_dtype, config) or _load_weights(name, torch_dtype, config)
    else:
        products = choose_products(name, packed, target, kernels, quantized_activations)
        chosen, attention_dtype = packed_dtypes(config, name, torch_dtype, products, packed)
        if gguf is not None and cache_packed_weights:
            source, tokenizer = _copied(gguf)
            with source as copied:
                model = build(config, name, copied, chosen, products, target)
            mapped_bytes = copied.mapped_bytes if target.type == "cpu" else 0
        else:
            model = build(config, name, packed, chosen, products, target)
    model.eval().requires_grad_(False).to(target)
    hybrid = is_hybrid(config, type(model))
    recurrent = use_recurrent_states(model, name) if hybrid else None
    layer_ops = _layer_ops(kernels, target)
    with on_device(target):
        latents = use_latent_cache(model)
        modules = _use_kernels(model, layer_ops)
    more = [latents, describe_packed(model)]
    modules = "; ".join([modules, *(line for line in more if line)])
    if recurrent is not None:
        native = layer_ops is not None and layer_ops.NAME == "native"
        steps = use_native_mixers(recurrent) if native else f"recurrent layers: {len(recurrent.mixers)}"
        with on_device(target):
            prove(model, recurrent, name)
        modules += f"; {steps}{recurrent.describe()}"
    known = gguf is not None or os.path.isdir(name)
    label = printable(os.path.basename(os.path.normpath(name)) if known else name)
    with on_device(target):
        facts = probe(model, label, None if packed is None else packed.label, recurrent, attention_dtype)
    before, measured = measured_fields(stored), measured_fields(config)
    changed = tuple(field for field in measured if measured[field] != before.get(field))
    facts = replace(facts, config=measured, overridden=changed)
    if gguf is None:
        tokenizer = load_tokenizer(name)
        ends = directory_ends(name, tokenizer, config)
    else:
        tokenizer = gguf_tokenizer(gguf, logger.warning) if tokenizer is None else tokenizer
        ends = gguf_ends(gguf.index.fields, tokenizer, config)
    use_token_positions(model)  # behind the probe, which looks for rotations alone
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        facts=facts,
        eos_token_ids=ends,
        vocab_size=int(config.get_text_config().vocab_size),
        modules=modules,
        recurrent=recurrent,
        mapped_bytes=mapped_bytes,
    )


def _copied(gguf: GgufSource) -> tuple[CopiedSource, Tokenizer]:
    """The copy of packed weights, summed without the interpreter's lock, and meanwhile the tokenizer."""
    with ThreadPoolExecutor(1) as beside:
        source = beside.submit(CopiedSource, gguf)
        tokenizer: Tokenizer = gguf_tokenizer(gguf, logger.warning)
    return source.result(), tokenizer


def _packed_source(name: str, config: Any) -> WeightSource | None:
    """Return the source of a checkpoint with packed weights; None for one that transformers reads."""
    settings = getattr(config, "quantization_config", None)
    if settings is None or settings.get("quant_method") in TRANSFORMERS_METHODS:
        return None
    return checkpoint_source(name, settings)


def _layer_ops(kernels: str, device: torch.device) -> ModuleType | None:
    """Return the kernels of a model's layers: ops.native.decoder, ops.triton.decoder, or None for torch's."""
    if kernels in ("auto", "native") and device.type == "cpu":
        return importlib.import_module("kvreclaim.ops.native.decoder")
    if kernels != "triton" and (kernels != "auto" or device.type != "cuda"):
        return None
    from kvreclaim.ops.triton.support import unavailable_reason

    return importlib.import_module("kvreclaim.ops.triton.decoder") if unavailable_reason() is None else None


def _use_kernels(model: transformers.PreTrainedModel, ops: ModuleType | None) -> str:
    """Switch to these kernels, and name what runs on them."""
    if ops is None:
        return "modules: torch"
    lines = [use_fast_linears(model)] if ops.NAME == "native" else []
    lines += [use_fast_norms(model, ops), use_fast_layers(model, ops)]
    lines += [use_native_model(model, ops), use_fast_mlps(model, ops), use_fused_experts(model, ops)]
    use_fused_moes(model)
    return "; ".join(filter(None, lines))


def hide_progress_bars() -> None:
    """Silence transformers' own bars, for commands that draw their own."""
    transformers_logging.disable_progress_bar()


def resolve_device(device: str) -> torch.device:
    """A torch device; "auto" is cuda where there is one, else cpu."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise InvalidArgumentError(f"device is {device!r}; pass 'auto', 'cpu' or 'cuda'.") from error
    if resolved.type == "meta":
        raise InvalidArgumentError("device is 'meta', which holds no data; pass 'auto', 'cpu' or 'cuda'.")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise InvalidArgumentError(
            f"device is {device!r}, but this machine has {torch.cuda.device_count()} CUDA devices that torch "
            "can use; pass 'auto' or 'cpu'."
        )
    return resolved


def _resolve_dtype(dtype: str) -> torch.dtype | str:
    if dtype == "auto":
        return "auto"
    if dtype not in DTYPES:
        raise InvalidArgumentError(f"dtype is {dtype!r}; allowed are auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


def read_config(path: str | os.PathLike[str]) -> Any:
    """transformers' config of a directory, a hub id or a GGUF file. Raises: as load_model."""
    name = os.fspath(path)
    return gguf_config(GgufSource(Path(name))) if is_gguf(name) else _load_config(name)


def _load_config(name: str) -> Any:
    options = hub_options(name)
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
    except Exception as error:  # every family checks its fields in its own way
        raise InvalidArgumentError(
            f"model {name!r} has no readable config ({_first_line(error)}); pass a local directory with "
            "config.json and *.safetensors, or the id of a model that is in the local hub cache."
        ) from error


def _refuse_unsupported(config: Any, name: str) -> None:
    """Refuse by config what can be known before any weight is read."""
    positions_of(config.get_text_config())
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{name} is an encoder-decoder ({config.model_type}); kvreclaim serves decoder-only models."
        )
    types = set(getattr(config.get_text_config(), "layer_types", None) or ())
    if types and types <= RECURRENT_LAYER_TYPES:
        raise UnsupportedModelError(no_attention(name, config))
    if is_dense(config):
        return
    mapping = transformers.AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise UnsupportedModelError(f"{name} ({config.model_type}) is not a causal language model.")
    model_class: Any = mapping[type(config)]
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name} ({config.model_type}) has its own attention code instead of transformers' "
            "AttentionInterface, so the paged cache cannot reach it."
        )


def _plain_model(name: str, dtype: torch.dtype | str, config: Any) -> Any:
    """Return the DenseModel of a directory; None for what transformers has to load, or to refuse."""
    chosen: Any = config.dtype if dtype == "auto" else dtype
    if chosen is None or not os.path.isdir(name) or not is_dense(config):
        return None
    try:
        files, model = SafetensorsFiles(Path(name)), DenseModel(config, chosen)
    except (OSError, ValueError, AttributeError, *DAMAGED):
        return None
    if any(key not in files.places for key, _ in model.named_parameters()):
        return None
    fill(model, name, files.dense)
    return model


def _load_weights(name: str, dtype: torch.dtype | str, config: Any) -> transformers.PreTrainedModel:
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=dtype,
            attn_implementation=register_attention(),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **hub_options(name),
        )
    except OSError as error:
        raise InvalidArgumentError(
            f"model {name!r} has no loadable safetensors weights ({_first_line(error)}); "
            "convert the checkpoint to safetensors."
        ) from error
    except ValueError as error:
        raise UnsupportedModelError(
            f"{name} cannot run with a custom attention function: {_first_line(error)}"
        ) from error
    except DAMAGED as error:
        raise InvalidArgumentError(
            f"the weights of model {name!r} are damaged or do not fit its config ({_first_line(error)}); "
            "download or convert the checkpoint again."
        ) from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):
        raise InvalidArgumentError(
            f"the weights of model {name!r} lack {len(missing)} tensors ({missing[0]} is one), which would "
            "be random; download or convert the checkpoint again."
        )
    return model


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer | None:
    """Load the tokenizer of a directory, a hub id or a GGUF file; None where a directory holds none. Raises:
    InvalidArgumentError."""
    name = os.fspath(path)
    if is_gguf(name):
        return gguf_tokenizer(GgufSource(Path(name)), logger.warning)
    if os.path.isdir(name) and not any(f.startswith("tokenizer") for f in os.listdir(name)):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False, **hub_options(name))
    except Exception as error:  # transformers parses foreign files and raises any type
        raise InvalidArgumentError(
            f"the tokenizer of model {name!r} cannot be read ({type(error).__name__}: {_first_line(error)}); "
            "repair its tokenizer files, or remove them to pass prompts as token ids."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
