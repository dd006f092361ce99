"""A Qwen2 of two layers, and drafters that nearly agree with it: heads of EAGLE and EAGLE-3, an MTP layer.

All of them see the next token and hidden states of the target. Here they look at the token alone, through the
target's own first layer; the second adds little. Embeddings have an RMS of one, so that norms change nothing.
A drafter's tokens lie one position before the target's, and the first is missing. The EAGLE-3 head drafts
from a part of the vocabulary, and adds a little of three hidden states where the target adds the embedding.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from models import VOCAB_SIZE, make_tiny_model
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, Qwen2Config, Qwen2ForCausalLM

HIDDEN = 128
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."
ATTENTION_GAIN = 6.0
FAINT = 0.1
DRAFTED = 400
"""Tokens that the EAGLE-3 head drafts."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Directories. mtp: the target once more, with an MTP layer (MiMo)."""

    target: Path
    eagle: Path
    eagle3: Path
    mtp: Path


def make_heads(folder: Path) -> Heads:
    """Write the target and all drafters, in fp32."""
    made = Heads(*(folder / name for name in ("target", "eagle", "eagle3", "mtp")))
    network = _target()
    network.save_pretrained(made.target)
    AutoTokenizer.from_pretrained(make_tiny_model(folder / "tiny")).save_pretrained(made.target)
    weights = {name: weight.contiguous() for name, weight in network.state_dict().items()}
    layer = {name.removeprefix(LAYER): weight for name, weight in weights.items() if name.startswith(LAYER)}
    plain = {name: weight for name, weight in layer.items() if not name.endswith(".bias")}  # which are zero
    _save(made.eagle, LlamaConfig(**SHAPE, num_hidden_layers=1), _eagle(plain))
    ids = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(7))[:DRAFTED].sort().values
    config = LlamaConfig(
        **SHAPE, num_hidden_layers=1, draft_vocab_size=DRAFTED, eagle_aux_hidden_state_layer_ids=[0, 1, 2]
    )
    _save(made.eagle3, config, _eagle3(plain, weights["lm_head.weight"], ids))
    shutil.copytree(made.target, made.mtp)
    config = Qwen2Config(**SHAPE, num_hidden_layers=2, num_nextn_predict_layers=1)
    _save(made.mtp, config, weights | _mtp(layer), "MiMoForCausalLM")
    return made


def _target() -> Qwen2ForCausalLM:
    network = Qwen2ForCausalLM(Qwen2Config(**SHAPE, num_hidden_layers=2))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
            if name.startswith("model.layers.1.") and name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(FAINT)
            if name.endswith(".bias"):
                weight.zero_()
        embeddings = network.model.embed_tokens.weight
        embeddings.div_(embeddings.pow(2).mean(-1, keepdim=True).sqrt())
        attention = network.model.layers[0].self_attn
        for projection, gain in (
            (attention.q_proj, 2.0),
            (attention.k_proj, 2.0),
            (attention.o_proj, ATTENTION_GAIN),
        ):
            projection.weight.mul_(gain)
    return network


def _eagle(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """No norm before its layer; fc looks at (token, hidden state)."""
    found = {f"layers.0.{name}": weight for name, weight in layer.items() if "input_layernorm" not in name}
    return found | {"fc.weight": torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], dim=1)}


def _eagle3(layer: dict[str, Tensor], head: Tensor, ids: Tensor) -> dict[str, Tensor]:
    """Queries, keys and values look at (token, fc of the hidden states)."""
    found = {f"midlayer.{name}": weight for name, weight in layer.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = layer[f"self_attn.{name}.weight"]
        found[f"midlayer.self_attn.{name}.weight"] = torch.cat([weight, torch.zeros_like(weight)], dim=1)
    states = torch.randn(HIDDEN, 3 * HIDDEN, generator=torch.Generator().manual_seed(6))
    drafted = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    drafted[ids] = True
    return found | {
        "midlayer.hidden_norm.weight": torch.ones(HIDDEN),
        "fc.weight": states * 0.1 * (3 * HIDDEN) ** -0.5,
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": head[ids].contiguous(),
        "d2t": ids - torch.arange(DRAFTED),
        "t2d": drafted,
    }


def _mtp(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """input_proj looks at (hidden state, token)."""
    found = dict(layer)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    found |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    found["input_proj.weight"] = torch.cat([torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)], dim=1)
    return {f"model.mtp_layers.0.{name}": weight.clone() for name, weight in found.items()}


def _save(
    folder: Path, config: object, weights: dict[str, Tensor], architecture: str = "LlamaForCausalLM"
) -> None:
    config.architectures = [architecture]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
