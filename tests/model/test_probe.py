"""What the probe finds in a model equals what the model's configuration means."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.model.attention import ATTENTION_NAME, register_attention
from kvreclaim.model.loader import load_model
from kvreclaim.model.probe import probe
from kvreclaim.ops.facts import LayerFacts

HEADS, KV_HEADS, DIM = 4, 2, 16
PLAIN = [(None, "half", 8, 0)] * 2
LAYERS = {  # per layer: window, style, bands, start
    "llama": PLAIN,
    "qwen2": PLAIN,
    "qwen3": PLAIN,
    "qwen3-moe": PLAIN,
    "mistral": [(tiny.WINDOW, "half", 8, 0)] * 2,
    "gemma2": [(tiny.WINDOW, "half", 8, 0), (None, "half", 8, 0)],
    "phi3": PLAIN,
    "gpt-oss": [(tiny.WINDOW, "half", 8, 0), (None, "half", 8, 0)],
    "glm4": [(None, "interleaved", 4, 0)] * 2,
    "olmo2": PLAIN,
    "smollm3": [(None, "half", 8, 0), (None, "half", 0, 0)],
    "deepseek-v2": [(None, "interleaved", 4, 32)] * 2,
    "deepseek-v3": [(None, "half", 4, 16)] * 2,
    "llama-llama3": PLAIN,
    "llama-yarn": PLAIN,
    "llama-linear": PLAIN,
}
SHAPES = {"deepseek-v2": (4, 1, 40, 32), "deepseek-v3": (4, 1, 24, 16)}  # heads, KV heads, head and value dim
YARN_SCALE = (0.1 * 0.8 * math.log(4.0) + 1.0) ** 2
SCALES = {"gemma2": 25**-0.5, "deepseek-v2": 24**-0.5 * YARN_SCALE, "deepseek-v3": 24**-0.5}


def layout(layer: LayerFacts) -> tuple[int | None, str, int, int]:
    assert layer.rope is not None
    return layer.softmax.window, layer.rope.style, layer.rope.num_bands, layer.rope.start


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", LAYERS)
def test_the_facts_of_every_family(family, dtype, tiny_dir) -> None:
    facts = load_model(tiny_dir(family), dtype=dtype, device="cpu").facts
    assert [layout(layer) for layer in facts.layers] == LAYERS[family]
    for layer in facts.layers:
        shape = (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_head_dim)
        assert shape == SHAPES.get(family, (HEADS, KV_HEADS, DIM, DIM))
        assert layer.softmax.scale == pytest.approx(SCALES.get(family, DIM**-0.5))
        assert layer.softmax.softcap == (2.0 if family == "gemma2" else None)
        assert (layer.softmax.sinks is not None) == (family == "gpt-oss")
        assert layer.latent == (family in tiny.LATENT)
    assert facts.rope_problem is None
    assert facts.max_position == (2048 if family == "llama-linear" else 512)
    assert facts.dtype == getattr(torch, dtype)
    assert (facts.device.type, facts.num_layers) == ("cpu", 2)


@pytest.mark.parametrize("family", ["llama", "glm4", *tiny.SCALED, "gpt-oss"])
def test_frequencies_are_those_after_scaling(family, tiny_dir) -> None:
    config = tiny.config(family)
    if (kind := config.rope_parameters["rope_type"]) != "default":
        want, _ = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    else:
        bands = {"llama": 8, "glm4": 4}[family]
        want = config.rope_parameters["rope_theta"] ** -(torch.arange(bands) / bands)
    for layer in load_model(tiny_dir(family)).facts.layers:
        assert layer.rope.inv_freq.dtype == torch.float64
        torch.testing.assert_close(layer.rope.inv_freq, want.double(), atol=1e-7, rtol=1e-6)


def test_layers_may_turn_at_different_frequencies(tmp_path: Path) -> None:
    """Gemma 3: windowed layers turn faster than full ones."""
    fields = {**tiny.config("gemma2").to_dict(), "layer_types": ["sliding_attention", "full_attention"]}
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "layer_types")
    config = Gemma3TextConfig(**{name: fields[name] for name in kept}, sliding_window=tiny.WINDOW)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    first, second = load_model(tmp_path, dtype="float32").facts.layers
    bands = -torch.arange(8, dtype=torch.float64) / 8
    torch.testing.assert_close(first.rope.inv_freq, 1e4**bands, atol=1e-7, rtol=1e-6)
    torch.testing.assert_close(second.rope.inv_freq, 1e6**bands, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_massive_dims_do_not_hide_the_rotation_of_the_others(dtype, tmp_path: Path) -> None:
    """Qwen2's biases reach hundreds in its slowest bands, where nothing turns in 120 positions."""
    model = tiny.build("qwen2")
    with torch.no_grad():
        for block in model.model.layers:
            for linear in (block.self_attn.q_proj, block.self_attn.k_proj):
                linear.bias.view(-1, DIM)[:, [7, 15]] = 400.0
    model.save_pretrained(tmp_path)
    facts = load_model(tmp_path, dtype=dtype).facts
    assert [layout(layer) for layer in facts.layers] == PLAIN


def test_learned_positions_are_a_known_problem_not_a_guess(tmp_path: Path) -> None:
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=64, bos_token_id=None, eos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    facts = load_model(tmp_path).facts
    assert [layer.rope for layer in facts.layers] == [None, None]
    assert facts.rope_problem == (
        f"layer 0 of {tmp_path.name} encodes positions in a way that no known rotation explains"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sinks_are_those_of_each_layer_in_fp32(dtype: str, tiny_dir) -> None:
    loaded = load_model(tiny_dir("gpt-oss"), dtype=dtype, device="cpu")
    for layer, facts in zip(loaded.model.model.layers, loaded.facts.layers, strict=True):
        sinks = facts.softmax.sinks
        assert sinks is not None
        assert sinks.dtype == torch.float32
        assert torch.equal(sinks, layer.self_attn.sinks.detach().float())


def paged_llama() -> torch.nn.Module:
    register_attention()
    model = tiny.build("llama")
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def test_layers_of_different_shapes_are_refused() -> None:
    model = paged_llama()
    attention = model.model.layers[1].self_attn
    attention.k_proj = attention.v_proj = torch.nn.Linear(64, HEADS * DIM, bias=False)
    shapes = r"\[\(4, 2, 16, 16\), \(4, 4, 16, 16\)\]"
    with pytest.raises(UnsupportedModelError, match=f"odd has attention layers of different shapes {shapes}"):
        probe(model, "odd")


def test_a_layer_without_attention_is_refused() -> None:
    class PassOn(torch.nn.Module):
        def forward(self, hidden: torch.Tensor, **kwargs) -> torch.Tensor:
            return hidden

    model = paged_llama()
    model.model.layers[1] = PassOn()
    with pytest.raises(UnsupportedModelError, match=r"layers \[1\] of 2 do not call"):
        probe(model, "hybrid")


@pytest.mark.parametrize(
    ("family", "fields", "longest"),
    [
        ("llama", {}, 512),
        ("llama-yarn", {}, 512),
        ("llama-linear", {"max_position_embeddings": 300}, 1200),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}, 512),
        (
            "phi3",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 500.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [4.0] * 8,
                },
                "original_max_position_embeddings": 128,
            },
            128,
        ),
    ],
    ids=["default", "yarn", "shorter", "dynamic", "longrope"],
)
def test_max_position_ends_where_frequencies_would_change(family, fields, longest, tmp_path: Path) -> None:
    loaded = load_model(tiny.save_model(family, tmp_path, **fields), dtype="float32")
    assert loaded.facts.max_position == longest
    rotary = loaded.model.model.rotary_emb
    before = rotary.inv_freq.clone()
    rotary(torch.zeros(1), torch.arange(longest)[None])
    assert torch.equal(rotary.inv_freq, before)
    if fields.get("rope_parameters"):
        rotary(torch.zeros(1), torch.arange(longest + 1)[None])
        assert not torch.equal(rotary.inv_freq, before)


def digest(family: str, directory: Path, **fields) -> str:
    return load_model(tiny.save_model(family, directory, **fields), dtype="float32").facts.fingerprint


def test_equal_configs_have_equal_fingerprints(tiny_dir, tmp_path: Path) -> None:
    first = load_model(tiny_dir("llama"), dtype="float32").facts.fingerprint
    assert digest("llama", tmp_path) == first
    assert load_model(tiny_dir("llama"), dtype="bfloat16").facts.fingerprint == first
    assert len(bytes.fromhex(first)) == 32


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 128},
        {"intermediate_size": 80},
        {"num_hidden_layers": 3},
        {"num_attention_heads": 2},
        {"num_key_value_heads": 1},
        {"head_dim": 32},
        {"vocab_size": 300},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        {"sliding_window": 9},
    ],
    ids=str,
)
def test_another_config_has_another_fingerprint(fields, tmp_path: Path) -> None:
    assert digest("mistral", tmp_path / "a", **fields) != digest("mistral", tmp_path / "b")


def test_layers_without_rotation_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    digests = {digest("smollm3", tmp_path / str(i), no_rope_layers=n) for i, n in enumerate(([1, 0], [1, 1]))}
    assert len(digests) == 2


def test_another_family_has_another_fingerprint(tiny_dir) -> None:
    assert len({load_model(tiny_dir(f), dtype="float32").facts.fingerprint for f in LAYERS}) == len(LAYERS)
