"""Random models with sliding windows or recurrent layers beside full attention, and transformers with tokens
dropped in the layers with full attention alone.

>>> directory = make_gemma(tmp_path / "gemma")
>>> check_windowed(directory, prompt, engine.answer(name), passes_of(trace, name))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oracle
import torch
from engines import Answer
from models import (
    ATTENTION_GAIN,
    EMBEDDING_STD,
    HEAD_GAIN,
    MLP_GAIN,
    VOCAB_SIZE,
    _tell_heads_apart,
    make_tokenizer,
)
from oracle import Kept
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
)

WINDOW = 64
FP32 = 1e-3
"""Mean difference of log-probabilities that computing in fp32 may make."""
KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": WINDOW,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": VOCAB_SIZE - 1,
    "tie_word_embeddings": False,
}


def make_gemma(path: Path) -> Path:
    """Write a tiny Gemma 3 in bf16, the same one every time. Returns: path."""
    config = Gemma3TextConfig(
        **SIZES,
        intermediate_size=256,
        num_hidden_layers=len(KINDS),
        query_pre_attn_scalar=64,
        layer_types=KINDS,
        max_position_embeddings=16_384,
    )
    network = Gemma3ForCausalLM(config)
    _fill(network)
    with torch.no_grad():
        for index, layer in enumerate(network.model.layers):
            _tell_heads_apart(layer.self_attn, index % 2, config.num_key_value_heads)
    return _save(network, path)


def make_gpt_oss(path: Path) -> Path:
    """Write a tiny GPT-OSS in bf16, whose query heads have sinks, the same one every time. Returns: path."""
    config = GptOssConfig(
        **SIZES,
        intermediate_size=128,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    network = GptOssForCausalLM(config)
    _fill(network)
    return _save(network, path)


def _fill(network: PreTrainedModel) -> None:
    """Weights of every matrix by a generator of its own."""
    gains = {"o_proj": ATTENTION_GAIN, "down_proj": MLP_GAIN, "lm_head": HEAD_GAIN}
    with torch.no_grad():
        for index, (name, weight) in enumerate(network.named_parameters()):
            generator = torch.Generator().manual_seed(index)
            if name.endswith("sinks"):
                weight.copy_(torch.randn(weight.shape, generator=generator))
            elif weight.ndim >= 2:
                gain = next((gain for part, gain in gains.items() if part in name), 1.0)
                std = EMBEDDING_STD if "embed" in name else gain * weight.shape[-1] ** -0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)
            elif name.endswith("bias"):
                weight.zero_()
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(0.4)  # Gemma's norms multiply by 1 + weight


def _save(network: PreTrainedModel, path: Path) -> Path:
    network.to(torch.bfloat16).save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


@torch.inference_mode()
def windowed_logprobs(
    model: Path, prompt: Sequence[int], output: Sequence[int], passes: Sequence[Kept]
) -> Tensor:
    """Like oracle.logprobs_with_drops, for a model whose other layers see what they always see."""
    network = oracle._load(model)
    config, ids = network.config, torch.tensor([[*prompt, *output]])
    count, at = ids.shape[1], 0
    age = torch.arange(count)[:, None] - torch.arange(count)
    for kind, layer in zip(config.layer_types, network.model.layers, strict=True):
        attention = getattr(layer, "self_attn", None)
        if attention is None:
            continue
        attention.kv_rounding = None
        if kind in ("full_attention", "hybrid"):
            attention.seen = oracle.attention_mask(passes, at, config.num_attention_heads, count)
            at += 1
        else:
            attention.seen = ((age >= 0) & (age < config.sliding_window))[None]
    logits = network(ids, use_cache=False, logits_to_keep=len(output) + 1).logits[0]
    of_output = logits[:-1].float().log_softmax(dim=-1)
    return of_output.gather(1, torch.tensor(output)[:, None])[:, 0]


def check_windowed(
    model: Path, prompt: Sequence[int], answer: Answer, passes: Sequence[Kept], part: slice = slice(None)
) -> None:
    """Assert that this part of the answer's log-probabilities is that with the passes' tokens dropped in
    the layers with full attention alone, and that dropping them matters."""
    dropped = windowed_logprobs(model, prompt, answer.tokens, passes)
    error = float((dropped - answer.logprobs)[part].abs().mean())
    assert error <= FP32, f"log-probabilities differ by {error:.5f} on average"
    if passes:
        whole = windowed_logprobs(model, prompt, answer.tokens, ())
        effect = float((dropped - whole)[part].abs().mean())
        assert effect > 20 * FP32, f"{len(passes)} passes change log-probabilities by {effect:.3f} only"
