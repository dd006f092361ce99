"""A config alone gives the frequencies, and with them the fingerprint, of the model it describes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, PreTrainedConfig, T5Config

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.loader import load_model
from kvreclaim.model.probe import fingerprint
from kvreclaim.model.rotation import frequencies_in, rotary_frequencies
from kvreclaim.ops.rope_probe import POSITIONS, find_rope

SERVED = (*tiny.FAMILIES, *tiny.SCALED)


class Recorder:
    """OutputProcessor each layer with the values, and remembers its keys."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        self.keys[call.layer] = call.k
        return call.v.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", SERVED)
def test_a_config_gives_the_models_frequencies_and_fingerprint(family, dtype, tiny_dir) -> None:
    loaded = load_model(tiny_dir(family), dtype=dtype, device="cpu")
    config = tiny.config(family)
    frequencies = rotary_frequencies(config)
    own = frequencies_in(loaded.model)
    assert [f.tolist() for f in frequencies] == [f.tolist() for f in own]
    recorder = Recorder()
    token = torch.full((1, len(POSITIONS)), 5)
    with torch.inference_mode():
        loaded.model(token, position_ids=torch.tensor([POSITIONS]), use_cache=False, kv_batch=recorder)
    layers = [
        replace(layer, rope=find_rope(None, recorder.keys[n], frequencies))
        for n, layer in enumerate(loaded.facts.layers)
    ]
    assert fingerprint(config, layers) == loaded.facts.fingerprint


def test_layers_may_turn_at_different_frequencies() -> None:
    fields = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
    kinds = ["sliding_attention", "full_attention"]
    found = rotary_frequencies(Gemma3TextConfig(**fields, vocab_size=64, layer_types=kinds))
    bands = -torch.arange(8, dtype=torch.float64) / 8
    assert len(found) == 2
    for base, frequencies in zip((1e4, 1e6), sorted(found, key=lambda f: -float(f[-1])), strict=True):
        torch.testing.assert_close(frequencies, base**bands, atol=1e-7, rtol=1e-6)


def test_a_model_without_rotation_has_none() -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, bos_token_id=None, eos_token_id=None)
    assert rotary_frequencies(config) == []


def test_the_config_is_left_as_it_is() -> None:
    config = tiny.config("llama-yarn")
    before = config.to_dict()
    rotary_frequencies(config)
    assert config.to_dict() == before


@pytest.mark.parametrize("config", [T5Config(), PreTrainedConfig()], ids=["t5", "unknown"])
def test_a_config_without_a_causal_model_is_refused(config) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"no causal model of .* use a policy that needs no query"
    ):
        rotary_frequencies(config)


def test_a_config_that_makes_no_model_is_refused() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=1)
    config.rope_parameters = {"rope_type": "strange"}
    with pytest.raises(UnsupportedModelError, match=r"of llama cannot be told .*KeyError"):
        rotary_frequencies(config)


def test_a_model_beyond_all_memory_is_not_allocated() -> None:
    """Some 8 TB of weights."""
    size = {"hidden_size": 1 << 17, "intermediate_size": 1 << 19, "num_hidden_layers": 8}
    config = LlamaConfig(**size, num_attention_heads=1024)
    assert [f.shape for f in rotary_frequencies(config)] == [(64,)]
