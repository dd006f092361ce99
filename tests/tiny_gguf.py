"""A tiny llama as a GGUF file, written as llama.cpp's converter does.

>>> model = tiny_gguf.write(file)  # the source, in fp32, with weights that bf16 holds
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import tiny
import torch
from gguf import GGMLQuantizationType as Form
from transformers import PreTrainedModel

EOS = 262
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)
"""Of tensors: from transformers' to llama.cpp's, of as many layers and more."""


def write(
    file: Path,
    *,
    pre: str = "smollm",
    architecture: str = "llama",
    without: str = "",
    beside: Sequence[str] = (),
    scaling: str = "none",
) -> PreTrainedModel:
    """The model that transformers should make of the file; its matrices are Q4_1, its vectors F32.

    pre:     how the file says that text is cut
    without: a tensor that is left out
    beside:  further tensors, of 8 numbers each
    scaling: of rotary positions
    """
    model = tiny.build("llama", eos_token_id=EOS)
    writer = gguf.GGUFWriter(file, architecture)
    _write_config(writer, model.config)
    _write_tokenizer(writer, pre)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            form = Form.Q4_1 if parameter.dim() > 1 else Form.F32
            stored = _as_stored(name, parameter.numpy(), model.config)
            blocks = gguf.quantize(stored, form)
            if _stored_name(name) != without:
                writer.add_tensor(_stored_name(name), blocks, raw_dtype=form)
            read = torch.from_numpy(_as_computed(name, gguf.dequantize(blocks, form), model.config))
            parameter.copy_(read.bfloat16())
    for name in beside:
        writer.add_tensor(name, np.ones(8, np.float32))
    writer.add_string(f"{architecture}.rope.scaling.type", scaling)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_config(writer: gguf.GGUFWriter, config) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: gguf.GGUFWriter, pre: str) -> None:
    """tiny.tokenizer() with a merge of two line ends and one across a digit, filled up with unused tokens."""
    vocab = tiny.tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.get)
    assert tokens[EOS] == "<eos>"
    tokens += ["ĊĊ", "Ġ1", *(f"unused{i}" for i in range(tiny.VOCAB_SIZE - len(tokens) - 2))]
    plain, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([control if token == "<eos>" else plain for token in tokens])
    writer.add_token_merges(["e n", "en d", "t h", "th e", "s t", "o p", "Ċ Ċ", "Ġ 1"])
    writer.add_eos_token_id(EOS)
    writer.add_chat_template(tiny.CHAT_TEMPLATE)


def _stored_name(name: str) -> str:
    found = NAMES.get_name(name, (".weight",))
    assert found is not None, name
    return found


def _num_heads(name: str, config) -> int | None:
    """Of queries and keys, whose rows llama.cpp keeps in another order: (x, y) pairs, not halves."""
    if ".q_proj." in name:
        return config.num_attention_heads
    return config.num_key_value_heads if ".k_proj." in name else None


def _as_stored(name: str, weight: np.ndarray, config) -> np.ndarray:
    heads = _num_heads(name, config)
    if heads is None:
        return weight
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _as_computed(name: str, weight: np.ndarray, config) -> np.ndarray:
    heads = _num_heads(name, config)
    if heads is None:
        return weight
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
