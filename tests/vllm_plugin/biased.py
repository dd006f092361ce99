"""A random model with keys far from zero, as those of Qwen2.5: what a quantised cache loses shows."""

from __future__ import annotations

from pathlib import Path

import torch
from models import MAX_POSITION, VOCAB_SIZE, save
from transformers import Qwen2Config, Qwen2ForCausalLM

BIAS = 96.0
"""Bias of the keys in the slowest rotary bands."""
GAIN = 1.3


def make_biased_model(path: Path, *, heads: int = 4, kv_heads: int = 2, head_dim: int = 64) -> Path:
    """Write a Qwen2-shaped random model of two layers in fp32. path: to make; one that exists is taken."""
    if path.exists():
        return path
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=heads * head_dim,
        intermediate_size=2 * heads * head_dim,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
        pad_token_id=VOCAB_SIZE - 1,
    )
    network = Qwen2ForCausalLM(config)
    gains = {"q_proj": GAIN, "k_proj": GAIN, "o_proj": 3.0, "down_proj": 0.5, "lm_head": 1.5}
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim == 2:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                weight.copy_(torch.randn(weight.shape, generator=generator) * gain * weight.shape[1] ** -0.5)
        for layer in network.model.layers:
            keys, queries = layer.self_attn.k_proj.bias, layer.self_attn.q_proj.bias
            keys.zero_(), queries.normal_(generator=generator)
            slow = keys.view(kv_heads, 2, head_dim // 2)[..., -6:]
            slow.copy_(BIAS * torch.randn(slow.shape, generator=generator).sign())
    return save(network, path)
