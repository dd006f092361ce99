"""Tiny models as GGUF files, written as llama.cpp's converter does.

>>> model = tiny_gguf.write(file)  # the source, in fp32, with weights that bf16 holds
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import tiny
import torch
from gguf import GGMLQuantizationType as Form
from transformers import PreTrainedModel

EOS = 262
CONTROL = 265
PIECES = ("▁", "t", "h", "e", "th", "the", "▁t", "▁the", "a", "▁a", "n", "▁▁", "1")
_GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma2": {**_GEMMA, "final_logit_softcapping": 5.0},
    "gemma3": _GEMMA,
    "phi3": {"sliding_window": tiny.WINDOW},
}
"""What a file says or implies: Gemma's queries are scaled by their own size, its head is its embeddings."""
ARCHITECTURES = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}
LONGROPE: dict[str, Any] = {
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.25, 1.5, 2.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 256,
        "attention_factor": 1.25,
    },
}
YARN: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}
TWO_ROTATIONS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


def write(
    file: Path,
    *,
    pre: str = "smollm",
    family: str = "llama",
    architecture: str = "",
    form: Form = Form.Q4_1,
    dtype: torch.dtype = torch.bfloat16,
    without: str = "",
    beside: Sequence[str] = (),
    scaling: str = "none",
    controls: Sequence[str] = (),
    ends: Mapping[str, int] = MappingProxyType({"eos": EOS}),
    template: str | list[dict[str, str]] = tiny.CHAT_TEMPLATE,
    flags: Mapping[str, bool] = MappingProxyType({}),
    is_sentencepiece: bool = False,
    **overrides: Any,
) -> PreTrainedModel:
    """The model that transformers should make of the file; its vectors are F32.

    pre:     how the file says that text is cut
    architecture: what the file says instead of its family
    form:    of matrices
    dtype:   that the model's weights are rounded to
    without: a tensor that is left out
    beside:  further tensors, of 8 numbers each
    scaling: of rotary positions
    controls: texts of control tokens, from CONTROL on
    ends:    ids that the header names, by kind
    template: of chats, or a list of named ones
    flags:   of the tokenizer, such as add_bos_token
    is_sentencepiece: the tokenizer is PIECES, not that of tiny
    overrides: fields of the model's config
    """
    model = tiny.build(family, eos_token_id=EOS, **(FAMILIES[family] | overrides))
    architecture = architecture or family
    writer = gguf.GGUFWriter(file, architecture)
    write_config(writer, model.config)
    write_rotation(writer, model.config, scaling)
    if is_sentencepiece:
        _write_pieces(writer)
    else:
        _write_tokenizer(writer, pre, controls)
    for flag, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{flag}", value)
    for kind, token in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", token)
    writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(ARCHITECTURES[family], model.config.num_hidden_layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            of = form if parameter.dim() > 1 else Form.F32
            blocks = gguf.quantize(_as_stored(name, parameter.numpy(), model.config), of)
            stored_name = names.get_name(name, (".weight",))
            if stored_name != without:
                writer.add_tensor(stored_name, blocks, raw_dtype=of)
            read = torch.from_numpy(_as_computed(name, gguf.dequantize(blocks, of), model.config))
            parameter.copy_(read.to(dtype))
    for name in beside:
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_config(writer: gguf.GGUFWriter, config) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)


def write_rotation(writer: gguf.GGUFWriter, config, scaling: str) -> None:
    rotation = config.rope_parameters.get("full_attention", config.rope_parameters)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_freq_base(rotation["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rotation.get("partial_rotary_factor", 1.0)))
    writer.add_string(f"{writer.arch}.rope.scaling.type", scaling)
    if "factor" in rotation:
        writer.add_rope_scaling_factor(rotation["factor"])
    if rotation["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rotation["original_max_position_embeddings"])
    if "sliding_attention" in config.rope_parameters:
        base = config.rope_parameters["sliding_attention"]["rope_theta"]
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", base)
    if rotation["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rotation["attention_factor"])
        for kind in ("short", "long"):
            factors = np.array(rotation[f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def _write_tokenizer(writer: gguf.GGUFWriter, pre: str, controls: Sequence[str]) -> None:
    """tiny.tokenizer() with a merge of two line ends and one across a digit, filled up with unused tokens."""
    vocab = tiny.tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    assert tokens[EOS] == "<eos>"
    tokens += ["ĊĊ", "Ġ1", *controls]
    tokens += [f"unused{i}" for i in range(tiny.VOCAB_SIZE - len(tokens))]
    plain, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in ("<eos>", *controls) else plain for token in tokens])
    writer.add_token_merges(["e n", "en d", "t h", "th e", "s t", "o p", "Ċ Ċ", "Ġ 1"])


def _write_pieces(writer: gguf.GGUFWriter) -> None:
    """A SentencePiece vocabulary: unknown, BOS, EOS, all bytes, and PIECES."""
    types = gguf.TokenType
    controls = [types.UNKNOWN, types.CONTROL, types.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES])
    writer.add_token_scores([0.0] * 259 + [3.0 * len(piece) - 10.0 for piece in PIECES])
    writer.add_token_types(controls + [types.BYTE] * 256 + [types.NORMAL] * len(PIECES))


def _num_heads(name: str, config) -> int | None:
    """Return the heads of llama's queries and keys: llama.cpp orders rows in (x, y) pairs, not halves."""
    if config.model_type != "llama":
        return None
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else None


def _one_more(name: str, config) -> int:
    """What Gemma's norms add to their weights, and files hold added."""
    return int(config.model_type in ("gemma2", "gemma3_text") and name.endswith("norm.weight"))


def _as_stored(name: str, weight: np.ndarray, config) -> np.ndarray:
    heads = _num_heads(name, config)
    if heads is None:
        return weight + _one_more(name, config)
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _as_computed(name: str, weight: np.ndarray, config) -> np.ndarray:
    heads = _num_heads(name, config)
    if heads is None:
        return weight - _one_more(name, config)
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
