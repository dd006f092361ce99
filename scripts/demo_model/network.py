"""The demo model, its two optimisers and one training step."""

import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
)

from demo_model.batches import draw_batch, kind_weights
from kvreclaim.eval.example import TokenKind
from kvreclaim.eval.vocabulary import EOS, PAD, TOKENS

MAX_TOKENS = 4096
MUON_LR = 0.01
ADAMW_LR = 2e-3
STEP_TOKENS = 6144
MIN_ROWS = 2
START_GAIN = 1.5
CONFIGS = {"qwen3": Qwen3Config, "llama": LlamaConfig}


def build_network(arch: str, num_layers: int) -> PreTrainedModel:
    """Return a freshly initialised network in fp32: 0.5 M parameters with three layers.

    arch: qwen3 (QK-norm) or llama (none)
    """
    config = CONFIGS[arch](
        vocab_size=len(TOKENS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
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
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _ease_start(network)
    network.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, do_sample=False)
    return network


@torch.no_grad()
def _ease_start(network: PreTrainedModel) -> None:
    """Shorten the wait for heads that find the token before: they need a start that knows no token.

    A part that all embeddings share lets layer 0 attend by position alone; larger norm gains sharpen it.
    """
    embedding = network.model.embed_tokens.weight
    embedding.add_(torch.randn(embedding.shape[1]) * network.config.initializer_range)
    for layer in network.model.layers:
        if hasattr(layer.self_attn, "q_norm"):
            layer.self_attn.q_norm.weight.fill_(START_GAIN)
            layer.self_attn.k_norm.weight.fill_(START_GAIN)


@torch.no_grad()
def start_from(network: PreTrainedModel, folder: Path) -> None:
    """Copy the weights of the model in `folder`, which may have fewer words and fewer layers.

    New words keep their random embedding around the old ones' mean; new layers, the last ones, begin by
    adding nothing, so that the network begins as the same function on the old words.
    """
    old = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name: weight for name, weight in old.state_dict().items() if weight.ndim}
    embedding = weights.pop("model.embed_tokens.weight")
    weights.pop("lm_head.weight", None)
    result = network.load_state_dict(weights, strict=False)
    if result.unexpected_keys:
        raise ValueError(f"{folder} has weights that this network has not: {result.unexpected_keys}")
    num_words, rows = embedding.shape[0], network.model.embed_tokens.weight
    spread = embedding.std(0)
    rows[:num_words] = embedding
    rows[num_words:] = embedding.mean(0) + torch.randn_like(rows[num_words:]) * spread
    for layer in network.model.layers[len(old.model.layers) :]:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()


class Trainer:
    """Owns network and optimisers; `step` changes both, `state_dict` holds what a resume needs of them."""

    def __init__(self, network: PreTrainedModel, dtype: torch.dtype) -> None:
        """Give the layers' matrices to Muon and the rest to AdamW; `dtype` is that of matrix products."""
        layers = [p for p in network.model.layers.parameters() if p.ndim == 2]
        taken = {id(p) for p in layers}
        others = [p for p in network.parameters() if id(p) not in taken]
        self.network = network
        self.dtype = dtype
        self.weights = kind_weights()
        self.optimizers = (
            torch.optim.Muon(layers, lr=MUON_LR, weight_decay=0.0, momentum=0.95),
            torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
        )

    def step(
        self, rng: random.Random, tasks: Sequence[str], num_tokens: int, lr_scale: float
    ) -> dict[tuple[str, TokenKind], float]:
        """Train on a batch, a row of `num_tokens` for each task; return the share of right guesses."""
        ids, kinds = draw_batch(rng, tasks, num_tokens)
        right = self.backward(ids, kinds)
        self._update(lr_scale)
        shares = {}
        for task in dict.fromkeys(tasks):
            rows = torch.tensor([name == task for name in tasks])
            for i, kind in enumerate(TokenKind):
                chosen = rows[:, None] & (kinds[:, 1:] == i)
                if chosen.any():
                    shares[task, kind] = right[chosen].float().mean().item()
        return shares

    def backward(self, ids: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
        """Add the gradients of one batch [N, T]; return which tokens [N, T - 1] were guessed right.

        Each row counts the same, however short its trace.
        """
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32):
            hidden = self.network.model(ids, use_cache=False).last_hidden_state
            in_trace = kinds[:, 1:] >= 0
            logits = self.network.lm_head(hidden[:, :-1][in_trace])
        golds = ids[:, 1:][in_trace]
        weights = torch.zeros_like(in_trace, dtype=torch.float32)
        weights[in_trace] = self.weights[kinds[:, 1:][in_trace]]
        weights = weights / weights.sum(1, keepdim=True) / len(ids)
        losses = F.cross_entropy(logits.float(), golds, reduction="none")
        (losses * weights[in_trace]).sum().backward()
        right = torch.zeros_like(in_trace)
        right[in_trace] = logits.argmax(-1) == golds
        return right

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


def faster_dtype(network: PreTrainedModel, num_tokens: int = 256) -> torch.dtype:
    """Time forward and backward in fp32 and in bf16 and return the faster: few CPUs have bf16 hardware."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        trainer = Trainer(network, dtype)
        batch = draw_batch(random.Random(0), ["chain"] * (STEP_TOKENS // num_tokens), num_tokens)
        for _ in range(2):  # the first one warms up
            begin_s = time.perf_counter()
            trainer.backward(*batch)
            seconds[dtype] = time.perf_counter() - begin_s
        network.zero_grad(set_to_none=True)
    dtype = min(seconds, key=seconds.__getitem__)
    print(f"{dtype}: " + ", ".join(f"{d} {s:.2f} s a step" for d, s in seconds.items()), flush=True)
    return dtype
