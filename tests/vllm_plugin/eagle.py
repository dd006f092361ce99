"""A Llama of one layer, and an EAGLE head that nearly says what it says.

The head sees the next token and the target's hidden state, and has a layer without its first norm. Here it
looks at the token alone, through the target's own layer; embeddings have an RMS of one, so that the norm
changes nothing. Its tokens lie one position before the target's, and the first is missing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from models import VOCAB_SIZE, make_tiny_model
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

LAYER = "model.layers.0."


def make_target_and_head(folder: Path) -> tuple[Path, Path]:
    """Write both in fp32. Returns: their directories."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=VOCAB_SIZE - 1,
    )
    network = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
        embeddings = network.model.embed_tokens.weight
        embeddings.div_(embeddings.pow(2).mean(-1, keepdim=True).sqrt())
        for name in ("q_proj", "k_proj", "o_proj"):
            network.get_parameter(f"{LAYER}self_attn.{name}.weight").mul_(2.0)
    target, head = folder / "target", folder / "head"
    network.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_model(folder / "tiny"))
    tokenizer.save_pretrained(target)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(head)
    layer = {
        name.removeprefix("model."): weight.contiguous()
        for name, weight in network.state_dict().items()
        if name.startswith(LAYER) and "input_layernorm" not in name
    }
    sees_the_token = torch.cat([torch.eye(config.hidden_size), torch.zeros(2 * (config.hidden_size,))], dim=1)
    save_file(layer | {"fc.weight": sees_the_token}, head / "model.safetensors")
    return target, head
