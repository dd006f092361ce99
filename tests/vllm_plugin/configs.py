"""vLLM's configuration, made as its front ends make it: no engine, no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from vllm import EngineArgs

ASKED = {"policy": "streaming_llm", "budget": 256, "interval": 64}
SCHEDULER = "kvreclaim.integrations.vllm.entry.scheduler.ReclaimScheduler"
SMALL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def make_config(model: Path, compression: object = ASKED, **more: Any) -> Any:
    """vLLM's configuration for this model, asking for compression unless that is None."""
    extra = {} if compression is None else {"additional_config": {"kv_compression": compression}}
    settings = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 1024, **extra, **more}
    return EngineArgs(model=str(model), skip_tokenizer_init=True, **settings).create_engine_config()


def make_model(path: Path, config: transformers.PretrainedConfig, architecture: str) -> Path:
    """A directory with a configuration and no weights."""
    config.architectures = [architecture]
    config.save_pretrained(path)
    return path
