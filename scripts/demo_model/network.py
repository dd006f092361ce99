"""The demo model, its two optimisers and one training step."""

import random

import torch
from torch.nn import functional as F
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from demo_model.batches import draw_batch, kind_weights
from kvreclaim.eval.chain import EOS, PAD, TOKENS, Kind

MAX_TOKENS = 4096
MUON_LR = 0.01
ADAMW_LR = 2e-3
STEP_TOKENS = 6144
START_GAIN = 1.5


def build_network() -> Qwen3ForCausalLM:
    """Return a freshly initialised network: 0.5 M parameters, fp32."""
    config = Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    network = Qwen3ForCausalLM(config)
    _ease_start(network)
    network.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    return network


@torch.no_grad()
def _ease_start(network: Qwen3ForCausalLM) -> None:
    """Shorten the wait for heads that find the token before: they need a start that knows no token.

    A part that all embeddings share lets layer 0 attend by position alone; larger norm gains sharpen it.
    """
    embedding = network.model.embed_tokens.weight
    embedding.add_(torch.randn(embedding.shape[1]) * network.config.initializer_range)
    for layer in network.model.layers:
        layer.self_attn.q_norm.weight.fill_(START_GAIN)
        layer.self_attn.k_norm.weight.fill_(START_GAIN)


class Trainer:
    """Owns network and optimisers; `step` changes both, `state_dict` holds what a resume needs of them."""

    def __init__(self, network: Qwen3ForCausalLM) -> None:
        """Give the layers' matrices to Muon and everything else to AdamW."""
        layers = [p for p in network.model.layers.parameters() if p.ndim == 2]
        taken = {id(p) for p in layers}
        others = [p for p in network.parameters() if id(p) not in taken]
        self.network = network
        self.weights = kind_weights()
        self.optimizers = (
            torch.optim.Muon(layers, lr=MUON_LR, weight_decay=0.0, momentum=0.95),
            torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(self, rng: random.Random, num_tokens: int, lr_scale: float) -> dict[Kind, float]:
        """Train on one batch of rows of `num_tokens`; return the share of right guesses by kind."""
        ids, kinds = draw_batch(rng, max(1, STEP_TOKENS // num_tokens), num_tokens)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.network.model(ids, use_cache=False).last_hidden_state
            in_trace = kinds[:, 1:] >= 0
            logits = self.network.lm_head(hidden[:, :-1][in_trace])
        golds, gold_kinds = ids[:, 1:][in_trace], kinds[:, 1:][in_trace]
        weights = self.weights[gold_kinds]
        losses = F.cross_entropy(logits.float(), golds, reduction="none")
        (losses * weights).sum().div(weights.sum()).backward()
        self._update(lr_scale)
        right = (logits.argmax(-1) == golds).float()
        return {kind: right[gold_kinds == i].mean().item() for i, kind in enumerate(Kind)}

    def _update(self, lr_scale: float) -> None:
        """Apply the gradients at a share of the full learning rates and clear them."""
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer, lr in zip(self.optimizers, (MUON_LR, ADAMW_LR), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = lr * lr_scale
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict:
        """Return weights and optimiser states."""
        return {"network": self.network.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers]}

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` returned."""
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
