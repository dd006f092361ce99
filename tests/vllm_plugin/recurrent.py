"""Random models with recurrent layers beside full attention: for windowed.check_windowed.

>>> directory = make_lfm2(tmp_path / "lfm2")
>>> engine = Engine(directory, compilation_config=ROTATED)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import ATTENTION_GAIN, KEY_GAIN, VOCAB_SIZE
from transformers import (
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
)
from windowed import _fill, _save

ROTATED = {"custom_ops": ["-rotary_embedding"]}
"""vLLM's CPU operation takes LFM2's queries [T, H, D] for a batch and rotates them wrongly. PyTorch does not.
"""
FULL, STATE = "full_attention", "linear_attention"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": VOCAB_SIZE - 1,
    "max_position_embeddings": 16_384,
}


def make_lfm2(path: Path) -> Path:
    """Write a tiny LFM2, of short convolutions, in bf16, the same one every time. Returns: path."""
    config = Lfm2Config(
        **SIZES,
        layer_types=["conv", "conv", FULL] * 2,
        block_auto_adjust_ff_dim=False,
        block_dim=128,
        conv_dim=128,
    )
    network = Lfm2ForCausalLM(config)
    _fill(network)
    with torch.no_grad():
        for layer in network.model.layers[2::3]:
            layer.self_attn.out_proj.weight *= ATTENTION_GAIN
    return _save(network, path)


def make_granite(path: Path) -> Path:
    """Write a tiny Granite 4, of Mamba2, in bf16, the same one every time. A state is as large as 38 tokens,
    so blocks have 64. Returns: path."""
    config = GraniteMoeHybridConfig(
        **SIZES,
        layer_types=[STATE, STATE, FULL] * 2,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="rope",
        attention_multiplier=32**-0.5,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=64,
    )
    network = GraniteMoeHybridForCausalLM(config)
    _fill(network)
    with torch.no_grad():
        for layer in network.model.layers[
            2::3
        ]:  # keys of one head of two are longer, which queries take back
            layer.self_attn.k_proj.weight[:32] *= KEY_GAIN
            layer.self_attn.q_proj.weight[:64] /= KEY_GAIN
    return _save(network, path)
