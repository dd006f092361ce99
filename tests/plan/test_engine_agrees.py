"""A tiny model of every bundled architecture is given the pool that its plan says, to the byte."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from kvreclaim import LLM
from kvreclaim.config import KV_CACHE_DTYPE_ALIASES, EngineConfig
from kvreclaim.engine.request import sizing
from kvreclaim.kv_bytes import KV_BYTES
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.plan.configs import ABOUT, bundled_models, load_shape
from kvreclaim.plan.demand import Cache
from kvreclaim.plan.families import FAMILIES
from kvreclaim.plan.pool import Seats, make_pool
from kvreclaim.plan.weights import WEIGHTS
from kvreclaim.schedule.budget.footprint import Footprint

FILES = [path for path in sorted({*bundled_models().values()}) if not load_shape(path).has_states]
FORMATS = ("fp32", "int8", "int4", "turboquant4")
FRACTION, MAX_SEQS = 0.5, 4
LAYERS = 6
SMALL = {
    "hidden_size": 96,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": LAYERS,
    "vocab_size": tiny.VOCAB_SIZE,
    "max_position_embeddings": 512,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "sliding_window": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 16,
}


def shrunk(config: dict[str, Any]) -> dict[str, Any]:
    """The same kind of model: its windows, its heads per KV head, its kinds of layers, all small."""
    small = {key: SMALL[key] if key in SMALL and value else value for key, value in config.items()}
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    small["num_key_value_heads"] = 2 if group <= 4 else 1
    small["num_attention_heads"] = small["num_key_value_heads"] * min(group, 8)
    if config["model_type"].startswith("deepseek"):
        small |= {"num_attention_heads": 4, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1}
    if "layer_types" in config:
        small["layer_types"] = config["layer_types"][:LAYERS]
    small |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "torch_dtype": "float32"}
    return {key: value for key, value in small.items() if key != "quantization_config"}


def saved(path: Path, directory: Path) -> Path:
    fields = json.loads(path.read_text())
    del fields[ABOUT]
    fields = fields.get("text_config", fields)
    small = shrunk(fields)
    config = CONFIG_MAPPING[small.pop("model_type")](**small)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_blocks_and_bytes_are_the_engines(path: Path, tmp_path: Path, monkeypatch) -> None:
    directory = saved(path, tmp_path / "model")
    shape = load_shape(directory)
    for name in FORMATS:
        cache = Cache(shape, KV_BYTES[name], Footprint(block_size=16))
        free = 99 * cache.block_bytes + 12_345
        monkeypatch.setattr(sizing, "free_memory_bytes", lambda _, free=free: free)
        llm = LLM(
            directory,
            dtype="float32",
            device="cpu",
            kv_cache_dtype=name,
            kv_memory_fraction=FRACTION,
            max_num_seqs=MAX_SEQS,
            disable_hybrid_kv_cache_manager=True,
        )
        pool = make_pool(cache, free, WEIGHTS["fp32"], utilization=FRACTION, other_bytes=0)
        pool = replace(pool, weight_bytes=0)  # the engine asks how much is free beside them
        assert llm.engine.cache.bytes_per_block == cache.block_bytes
        assert llm.engine.memory.pool.num_blocks == pool.num_blocks > 20
        assert [layer.softmax.window for layer in llm.engine.loaded.facts.layers] == [
            layer.window for layer in shape.layers
        ]


PLANNED = [name for name in tiny.HYBRIDS if tiny.config(name).model_type in FAMILIES]


@pytest.mark.parametrize("family", PLANNED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_are_the_engines(family: str, dtype: str, tiny_dir, monkeypatch) -> None:
    """Their bytes, the slots, the sequences that have room for theirs, and the blocks beside them."""
    llm = LLM(tiny_dir(family), dtype=dtype, device="cpu", num_blocks=8, max_num_seqs=2)
    shape = replace(load_shape(tiny_dir(family)), dtype=KV_CACHE_DTYPE_ALIASES[dtype])
    cache = Cache(shape, KV_BYTES[shape.dtype], Footprint(block_size=16))
    facts = llm.engine.loaded.facts
    assert facts.state_bytes == cache.state_bytes
    assert llm.engine.cache.bytes_per_block == cache.block_bytes
    assert [x.num_kv_heads for x in facts.layers] == [x.num_kv_heads for x in shape.attention]
    for num_states, kept, drafts in ((100, None, 0), (60, 5, 2), (40, 0, 0), (4000, 7, 4)):
        free = num_states * cache.state_bytes + 12_345
        monkeypatch.setattr(sizing, "free_memory_bytes", lambda _, free=free: free)
        states = {"state_checkpoints": kept, "state_drafts": drafts}
        given = EngineConfig(kv_memory_fraction=FRACTION, max_num_seqs=12, **states)
        config = sizing.choose_limits(given, facts)
        seats = Seats(12, each=2 + drafts, checkpoints=kept, drafts=drafts)
        weighs = make_pool(cache, 0, WEIGHTS["fp32"], utilization=FRACTION, other_bytes=0).weight_bytes
        pool = make_pool(cache, free, WEIGHTS["fp32"], utilization=FRACTION, other_bytes=-weighs, seats=seats)
        most = blocks_for(facts.max_position, 16) * config.max_num_seqs
        assert config.max_num_seqs == pool.num_seqs > 0
        assert sizing.state_slots(config, facts) == pool.states
        assert config.num_blocks == min(most, pool.num_blocks) > 0
