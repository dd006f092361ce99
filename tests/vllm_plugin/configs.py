"""vLLM's configuration, made as its front ends make it: no engine, no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from vllm import EngineArgs

SETTINGS = {"policy": "streaming_llm", "budget": 256, "interval": 64}
SCHEDULER = "kvreclaim.integrations.vllm.entry.scheduler.ReclaimScheduler"
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}


def make_config(model: Path, compression: object = SETTINGS, **more: Any) -> Any:
    """vLLM's configuration for this model, with compression unless that is None."""
    extra = {} if compression is None else {"additional_config": {"kv_compression": compression}}
    settings = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, **extra, **more}
    return EngineArgs(model=str(model), skip_tokenizer_init=True, **settings).create_engine_config()


def mla_config() -> transformers.PretrainedConfig:
    """A small model with multi-head latent attention and experts."""
    heads = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "first_k_dense_replace": 2}
    return transformers.DeepseekV2Config(
        **SMALL, num_key_value_heads=4, kv_lora_rank=32, q_lora_rank=None, **heads, **experts
    )


def make_model(path: Path, config: transformers.PretrainedConfig, architecture: str) -> Path:
    """A directory with a configuration and no weights."""
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path
