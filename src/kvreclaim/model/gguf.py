"""GGUF files (llama.cpp's format) by transformers' names: config, tokenizer and weights, and their conversion
into a directory as transformers writes it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim.errors import FetchError, reason_of
from kvreclaim.model.checkpoint_file import write_checkpoint
from kvreclaim.model.ends import gguf_ends
from kvreclaim.model.gguf_index import GgufIndex, GgufTensor, has_gguf, rope_scaling

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers import PreTrainedTokenizerBase as Tokenizer

AT_ONCE = 2**22
"""Numbers that gguf decodes at a time."""
DIGITS_APART = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Values of tokenizer.ggml.pre for which llama.cpp cuts every digit off before GPT-2's pattern is applied."""
LIKE_GPT2 = frozenset({"default", "gpt-2"})
BEGUN = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        *("jina-v5-nano", "tekken", "chameleon"),
    }
)
"""Values of tokenizer.ggml.pre for which llama.cpp begins texts with BOS where the file does not say."""
SPACE, SENTENCEPIECE_BOS = "\u2581", 1
TEMPLATE, NAMED = "tokenizer.chat_template", "tokenizer.chat_template."
LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the models that scale queries by hidden size / heads, not by head dim. No field tells
them apart, and llama.cpp uses the layers, too."""
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors with which LongRoPE divides frequencies."""


def check_packages() -> None:
    """Raises: FetchError where the package that reads GGUF files is not installed."""
    if not has_gguf():
        raise FetchError(
            "reading GGUF files needs gguf, which this environment lacks; run pip install 'kvreclaim[gguf]'."
        )


def convert_gguf(file: Path, directory: Path, say: Callable[[str], object]) -> None:
    """Write config, tokenizer, chat template and weights, dequantised to bf16, into an empty directory; one
    tensor at a time is in memory.

    say: called with one line if the tokenizer may cut text otherwise than the model has learned

    Raises: FetchError where the file is no GGUF that transformers reads, or reads whole; OSError where the
        directory cannot be written.
    """
    check_packages()
    with _reading(file.name):
        index, tokenizer, model = _opened(file)
        weights = GgufWeights(index, model)
    _check_whole(file.name, index, model, weights.missing)
    as_in_llama_cpp(tokenizer, index.fields, say)
    model.config.save_pretrained(directory)
    _write_ends(gguf_ends(index.fields, tokenizer, model.config), model.config, directory)
    write_checkpoint(model, weights.own, _reading(file.name)(weights.read), directory)
    tokenizer.save_pretrained(directory)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn any error of foreign code that parses foreign files into a FetchError."""
    try:
        yield
    except Exception as error:
        raise FetchError(
            f"{name} cannot be read as GGUF ({reason_of(error)}); it is damaged or of an architecture that "
            "transformers does not read from GGUF: pass another file or a hub id."
        ) from error


def _write_ends(ends: frozenset[int], config: Any, directory: Path) -> None:
    """Write the generation config, with one id or a list."""
    from transformers import GenerationConfig

    settings, ids = GenerationConfig.from_model_config(config), sorted(ends)
    settings.update(eos_token_id=ids[0] if len(ids) == 1 else ids or None)
    settings.save_pretrained(directory)


def _opened(file: Path) -> tuple[GgufIndex, Tokenizer, PreTrainedModel]:
    """Return the index, and what transformers makes of the header; the model is in bf16 and has no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    index = GgufIndex(file)
    index.num_layers()
    where: Any = {"pretrained_model_name_or_path": os.fspath(file.parent), "gguf_file": file.name}
    config, tokenizer = AutoConfig.from_pretrained(**where), AutoTokenizer.from_pretrained(**where)
    config.update(scaled_rotation(index, config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.config.update({"architectures": [type(model).__name__]})
    return index, tokenizer, model


def _check_whole(name: str, index: GgufIndex, model: PreTrainedModel, missing: Set[str]) -> None:
    """Refuse what transformers would fill with random numbers or leave out, since the model would be another.

    Raises: FetchError.
    """
    remedy = "pass the model's hub id, or another file."
    if missing:
        raise FetchError(f"{name} lacks {len(missing)} tensors ({min(missing)} is one); {remedy}")
    found = sum(parameter.numel() for parameter in model.parameters())
    if found != index.num_weights:
        raise FetchError(
            f"{name} holds {index.num_weights} weights, of which transformers makes {found}: it does not "
            f"read the rest from GGUF; {remedy}"
        )
    refuse_rotation(name, index, model.config)


def refuse_rotation(name: str, index: GgufIndex, config: Any) -> None:
    """Raises: FetchError where a file scales its rotary positions by a tensor, and not as LongRoPE does."""
    rotation: Any = config.get_text_config().rope_parameters or {}
    scales = next((tensor for tensor in index.tensors if tensor.startswith("rope_")), None)
    if scales is not None and rotation.get("rope_type") != "longrope":
        raise FetchError(
            f"{name} scales its rotary positions ({scales}), which transformers does not read from GGUF; "
            "pass the model's hub id, or another file."
        )


class GgufWeights:
    """A file's tensors as transformers reads them.

    own:     the tensors of the model by name, without memory, each once
    missing: names of those that the file lacks
    """

    def __init__(self, index: GgufIndex, model: PreTrainedModel) -> None:
        """Raises: NotImplementedError for a model without names in transformers' GGUF tables."""
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self._index = index
        processor = TENSOR_PROCESSORS.get(index.fields["general.architecture"], TensorProcessor)
        self._processor = processor(config=model.config.to_dict())
        self._names: dict[str, str] = get_gguf_hf_weights_map(model, self._processor)
        self._sources: dict[str, list[GgufTensor]] = defaultdict(list)
        for name, tensor in index.tensors.items():
            known = self._names.get(name) or self._names.get(name.removesuffix(".weight"))
            if known is not None:
                self._sources[known].append(tensor)
        first: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():  # where one is tied, both names have it
            first.setdefault(id(tensor), (name, tensor))
        self.own = {name: tensor.detach() for name, tensor in first.values()}
        self.missing = self.own.keys() - self._sources.keys()

    def read(self, name: str) -> Tensor:
        """One tensor in fp32, of its own memory.

        Raises: ValueError where it is of another shape than the model's; what gguf raises for unknown types.
        """
        held: dict[str, Tensor] = {}
        for source in self._sources[name]:
            self._decode(source, name, held)
        if held[name].shape != self.own[name].shape:
            raise ValueError(f"{name} is {list(held[name].shape)}, not {list(self.own[name].shape)}")
        return held[name]

    def _decode(self, source: GgufTensor, name: str, held: dict[str, Tensor]) -> None:
        """Put a tensor, or the part of it that a source has, into held."""
        made = self._processor.process(
            weights=_dequantized(self._index, source),
            name=source.name,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": held},
        )
        if made.name is not None:  # else it is there already: experts are merged from parts
            held[name] = torch.from_numpy(np.ascontiguousarray(made.weights))
        self._index.forget(source)


def _dequantized(index: GgufIndex, source: GgufTensor) -> np.ndarray:
    """Yield pieces in fp32; gguf holds its input twice."""
    from gguf import GGMLQuantizationType, dequantize

    rows = index.rows(source).reshape(max(1, prod(source.shape[:-1])), -1)
    numbers = np.empty((len(rows), source.shape[-1]), np.float32)
    step = max(1, AT_ONCE // source.shape[-1])
    for first in range(0, len(rows), step):
        numbers[first : first + step] = dequantize(
            rows[first : first + step], GGMLQuantizationType[source.kind]
        )
    return numbers.reshape(source.shape)


def gguf_fields(index: GgufIndex, config: Any) -> dict[str, Any]:
    """Fields that replace those of the config that transformers makes of the file.

    Raises: KeyError for what the architecture needs and the file lacks.
    """
    architecture = str(index.fields["general.architecture"])
    header = {key.removeprefix(f"{architecture}."): value for key, value in index.fields.items()}
    if architecture == "gemma2":
        return _gemma(header, config)
    if architecture == "gemma3":
        return {**_gemma(header, config), "rope_parameters": _two_rotations(index, config)}
    if architecture == "phi3":
        return _phi3(header, config, index)
    fields = scaled_rotation(index, config)
    if architecture == "qwen3" and "attention.key_length" in header:
        fields["head_dim"] = header["attention.key_length"]
    return fields


def scaled_rotation(index: GgufIndex, config: Any) -> dict[str, Any]:
    """The config's rotation with the scaling that the file names, where it names one and all layers share it.

    Raises: UnsupportedModelError.
    """
    scaling, own = rope_scaling(index.fields), getattr(config, "rope_parameters", None) or {}
    is_plain = own.get("rope_type", "default") == "default" and not any(
        isinstance(x, dict) for x in own.values()
    )
    return {"rope_parameters": {**own, **scaling}} if scaling and is_plain else {}


def _gemma(header: dict[str, Any], config: Any) -> dict[str, Any]:
    is_27b = config.num_hidden_layers == LAYERS_OF_27B[header["general.architecture"]]
    scalar = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {"query_pre_attn_scalar": scalar, **{cap: header[cap] for cap in caps if cap in header}}


def _two_rotations(index: GgufIndex, config: Any) -> dict[str, Any]:
    """Rotations of layers with a window, and of the others, which alone are scaled."""
    full, sliding = (config.rope_parameters[f"{kind}_attention"] for kind in ("full", "sliding"))
    full = {**full, **rope_scaling(index.fields)}
    base = index.fields.get("gemma3.rope.freq_base_swa", sliding["rope_theta"])
    return {"full_attention": full, "sliding_attention": {**sliding, "rope_theta": base}}


def _phi3(header: dict[str, Any], config: Any, index: GgufIndex) -> dict[str, Any]:
    head_dim = config.hidden_size // config.num_attention_heads
    partial = header.get("rope.dimension_count", head_dim) / head_dim
    rotation = {**config.rope_parameters, "partial_rotary_factor": partial}
    fields = {
        "sliding_window": header.get("attention.sliding_window") or None,
        "pad_token_id": header.get("tokenizer.ggml.padding_token_id"),
        "rope_parameters": rotation,
    }
    if SHORT not in index.tensors:
        return fields
    factors = (index.rows(index.tensors[name]) for name in (SHORT, LONG))
    short, long = (each.view(np.float32).ravel().tolist() for each in factors)
    original = header["rope.scaling.original_context_length"]
    rotation |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    rotation |= {"original_max_position_embeddings": original}
    if "rope.scaling.attn_factor" in header:
        rotation["attention_factor"] = header["rope.scaling.attn_factor"]
    return {**fields, "original_max_position_embeddings": original}


def as_in_llama_cpp(tokenizer: Tokenizer, fields: Mapping[str, Any], say: Callable[[str], object]) -> None:
    """Make the tokenizer that transformers reads from a file follow these fields of its header.

    say: called with one line where the file's rule for cutting text is not known
    """
    _cut_as_trained(tokenizer, fields.get("tokenizer.ggml.pre", "default"), say)
    _begin_texts(tokenizer, fields)
    if fields.get("tokenizer.ggml.add_space_prefix") is False:
        _add_no_space(tokenizer)
    names = [key.removeprefix(NAMED) for key in fields if key.startswith(NAMED)]
    if names:
        default = {"default": fields[TEMPLATE]} if TEMPLATE in fields else {}
        tokenizer.chat_template = default | {name: fields[f"{NAMED}{name}"] for name in names}


def _cut_as_trained(tokenizer: Tokenizer, rule: str, say: Callable[[str], object]) -> None:
    """Cut digits off where the vocabulary was trained so, which transformers 5.23 does not: it cuts "\\n\\n1"
    as "\\n", "\\n", "1", where the model has learned "\\n\\n", "1"."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    backend = tokenizer.backend_tokenizer
    if rule in DIGITS_APART:
        backend.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    elif rule not in LIKE_GPT2 and isinstance(backend.pre_tokenizer, ByteLevel):
        say(f"text is cut as GPT-2 does, since transformers does not know {rule!r}, which the file names")


def _begin_texts(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    """Begin texts with BOS where llama.cpp does by default."""
    model, rule = (fields.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if tokenizer.bos_token is None and model == "llama":
        tokenizer.bos_token = tokenizer.convert_ids_to_tokens(SENTENCEPIECE_BOS)
    begins = model == "llama" or (model == "gpt2" and rule in BEGUN)
    if fields.get("tokenizer.ggml.add_bos_token", begins) and tokenizer.bos_token is not None:
        tokenizer.add_bos_token = True


def _add_no_space(tokenizer: Tokenizer) -> None:
    """Read the first word of a text as it is, without a space before it."""
    from tokenizers import decoders, normalizers, pre_tokenizers

    backend = tokenizer.backend_tokenizer
    if isinstance(backend.pre_tokenizer, pre_tokenizers.Metaspace):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="never", split=False)
    elif "Prepend" in str(backend.normalizer):
        backend.normalizer = normalizers.Replace(" ", SPACE)
    else:
        return
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(parts)
    tokenizer.init_kwargs["add_prefix_space"] = False  # saved with the tokenizer
