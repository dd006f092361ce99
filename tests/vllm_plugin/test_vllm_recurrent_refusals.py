"""Recurrent layers beside attention: how the configuration names them, and what does not compose. No
engine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from configs import NGRAM, SCHEDULER, SETTINGS, SMALL, make_config, make_model
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.integrations.vllm.refusals.loaded import refuse_groups
from kvreclaim.integrations.vllm.refusals.table import refuse_config
from kvreclaim.integrations.vllm.settings.groups import full_group, layer_kinds, most_other_blocks
from kvreclaim.integrations.vllm.v0_32.front_side import check_request

STATE, FULL = "linear_attention", "full_attention"
TINY = {**SMALL, "num_key_value_heads": 2}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16}
MODELS: dict[str, tuple[Any, tuple[int, int, None]]] = {
    "Lfm2ForCausalLM": (
        lambda: transformers.Lfm2Config(
            **{**TINY, "num_hidden_layers": 3}, layer_types=["conv", "conv", FULL], conv_dim=64, block_dim=64
        ),
        (1, 2, None),
    ),
    "GraniteMoeHybridForCausalLM": (
        lambda: transformers.GraniteMoeHybridConfig(**TINY, **MAMBA2, layer_types=[STATE, FULL]),
        (1, 1, None),
    ),
    "FalconH1ForCausalLM": (
        lambda: transformers.FalconH1Config(**TINY, **MAMBA2, mamba_d_ssm=128),
        (2, 2, None),
    ),
    "NemotronHForCausalLM": (
        lambda: transformers.NemotronHConfig(
            **{name: value for name, value in TINY.items() if name != "num_hidden_layers"},
            head_dim=32,
            layers_block_type=[STATE, "mlp", FULL, STATE],
        ),
        (1, 2, None),
    ),
    "JambaForCausalLM": (
        lambda: transformers.JambaConfig(**TINY, num_experts=2, attn_layer_period=2, attn_layer_offset=1),
        (1, 1, None),
    ),
    "Qwen3NextForCausalLM": (
        lambda: transformers.Qwen3NextConfig(**TINY, head_dim=32, layer_types=[STATE, FULL], num_experts=4),
        (1, 1, None),
    ),
}


@pytest.fixture
def lfm2(tmp_path: Path) -> Path:
    return make_model(tmp_path / "lfm2", MODELS["Lfm2ForCausalLM"][0](), "Lfm2ForCausalLM")


@pytest.mark.parametrize("architecture", MODELS)
def test_attention_beside_recurrent_layers_is_taken(architecture: str, tmp_path: Path) -> None:
    make, kinds = MODELS[architecture]
    config = make_config(make_model(tmp_path / "model", make(), architecture))
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert layer_kinds(config.model_config) == kinds
    groups = -(-kinds[1] // kinds[0])
    assert most_other_blocks(config) == 4 * groups  # read, written, one step in flight and a checkpoint
    config = make_config(tmp_path / "model", enable_prefix_caching=False)
    assert most_other_blocks(config) == groups


def test_a_hybrid_model_that_names_no_layers_is_refused(tmp_path: Path) -> None:
    name = "NemotronHForCausalLM"
    config = make_config(make_model(tmp_path / "model", MODELS[name][0](), name), None)
    refuse_config(config)
    config.model_config.hf_text_config.layers_block_type = None
    with pytest.raises(UnsupportedModelError, match="whose configuration names no layer_types"):
        refuse_config(config)


@pytest.mark.parametrize(
    ("policy", "word"),
    [("auto", "policy auto .* has no statistics"), ("surrogate", "needs query statistics .* not loaded")],
)
def test_a_request_for_them_is_refused_too(policy: str, word: str, lfm2: Path) -> None:
    params = SamplingParams(max_tokens=8, extra_args={"kv_compression": {"policy": policy}})
    request = SimpleNamespace(
        sampling_params=params, prompt_token_ids=[1] * 8, prompt_embeds=None, resumable=False
    )
    with pytest.raises(VLLMValidationError, match=rf"{word}.* such as streaming_llm or knorm"):
        check_request(request, make_config(lfm2))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"speculative_config": NGRAM}, "--speculative-config for a model .* beside recurrent layers"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size for a model .* beside recurrent layers"),
        ({"compression": {**SETTINGS, "snapshots": True}}, 'recurrent layers beside "snapshots"'),
        ({"compression": {**SETTINGS, "policy": "snapkv"}}, "recurrent layers beside a policy that looks at"),
    ],
)
def test_beside_recurrent_layers_these_are_refused(options: dict[str, Any], word: str, lfm2: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=word):
        make_config(lfm2, **options)


def test_the_v2_runner_is_refused(lfm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(lfm2, None)
    refuse_config(config)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(InvalidArgumentError, match=r"the V2 model runner .* VLLM_USE_V2_MODEL_RUNNER=0"):
        refuse_config(config)


def cache_config(*specs: Any) -> Any:
    groups = [KVCacheGroupSpec([f"model.layers.{n}"], one) for n, one in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def attention(kind: type = FullAttentionSpec, **more: Any) -> Any:
    return kind(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, **more)


def state(block_size: int) -> Any:
    return MambaSpec(block_size=block_size, shapes=((8,),), dtypes=(torch.float32,))


def test_states_are_taken_in_blocks_of_any_size() -> None:
    for size in (32, 1024):
        found = cache_config(state(size), attention(), state(size))
        refuse_groups(found)
        assert full_group(found) == 1


@pytest.mark.parametrize(
    "specs",
    [
        [state(32)],
        [state(32), state(32)],
        [state(32), attention(), attention()],
        [state(32), attention(), attention(SlidingWindowSpec, sliding_window=64)],
    ],
)
def test_other_groups_beside_states_are_refused(specs: list[Any]) -> None:
    with pytest.raises(UnsupportedModelError, match="MambaSpec"):
        refuse_groups(cache_config(*specs))
