"""A cache of latents in place of keys and values: the same attention, where the model can do it at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny
import torch
import transformers
from one_text import OneText
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvreclaim.model.attention import ATTENTION_NAME, register_attention
from kvreclaim.model.latent import hands_out_latents, use_latent_cache
from kvreclaim.model.loader import load_model
from kvreclaim.model.probe import fingerprint, probe

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 40.0, "original_max_position_embeddings": 16}
VARIANTS = {
    "v2": ("deepseek-v2", {}),
    "v2 with a low-rank query": ("deepseek-v2", {"q_lora_rank": 24}),
    "v3": ("deepseek-v3", {}),
    "v3 with a full-rank query": ("deepseek-v3", {"q_lora_rank": None}),
    "v3 with halves turned": ("deepseek-v3", {"rope_interleave": False}),
    "v3 with YaRN": ("deepseek-v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3 with two mscales": (
        "deepseek-v3",
        {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}},
    ),
    "v3 with YaRN alone": ("deepseek-v3", {"rope_parameters": YARN}),
    "v3 with biases": ("deepseek-v3", {"attention_bias": True}),
    "v3 with experts everywhere": ("deepseek-v3", {"first_k_dense_replace": 0}),
    "v3 without experts": ("deepseek-v3", {"first_k_dense_replace": 2}),
    "v3 with narrow values": ("deepseek-v3", {"v_head_dim": 8, "kv_lora_rank": 40}),
}
COPIES = ("YoutuConfig", "Glm4MoeLiteConfig", "MiniCPM3Config", "AXK1Config")


@torch.inference_mode()
def logits(model: nn.Module, batch: OneText | None = None) -> Tensor:
    ids = torch.tensor(tiny.prompts((40,), seed=1))
    return model(ids, use_cache=False, **({} if batch is None else {"kv_batch": batch})).logits


def paged(model: PreTrainedModel) -> PreTrainedModel:
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def attention_modules(model: nn.Module) -> list[nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


def check_latent_logits(model: PreTrainedModel) -> OneText:
    """Check that logits with latents are those of transformers' own attention and expanded keys."""
    model.set_attn_implementation("eager")
    want = logits(model)
    assert use_latent_cache(paged(model)).startswith("latent cache: ")
    batch = OneText()
    torch.testing.assert_close(logits(model, batch), want, atol=1e-4, rtol=0)
    for call in batch.calls:
        rank, rotary = model.config.kv_lora_rank, model.config.qk_rope_head_dim
        assert call.latent
        assert call.k.shape == (40, 1, rank + rotary)
        assert torch.equal(call.v, call.k[..., :rank])
    return batch


@pytest.mark.parametrize("variant", VARIANTS)
def test_latents_give_transformers_logits(variant) -> None:
    family, overrides = VARIANTS[variant]
    model = tiny.build(family, **overrides)
    batch = check_latent_logits(model)
    assert len(batch.calls) == 2
    assert {call.softmax.scale for call in batch.calls} == {attention_modules(model)[0].scaling}


@pytest.mark.parametrize("name", COPIES)
def test_models_that_copied_the_attention_do_too(name) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"this version of transformers has no {name}")
    shape = {**tiny.config("deepseek-v3").to_dict(), "kv_lora_rank": 32}
    fields = ("model_type", "architectures", "rope_parameters", "head_dim", "mlp_layer_types")
    config = getattr(transformers, name)(**{k: v for k, v in shape.items() if k not in fields})
    torch.manual_seed(1)
    check_latent_logits(AutoModelForCausalLM.from_config(config).float().eval())


def test_the_scale_is_that_of_the_expanded_key_and_its_mscale() -> None:
    model = paged(tiny.build("deepseek-v3", rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 0.3}))
    expanded = probe(model, "v3").layers[0]
    use_latent_cache(model)
    latent = probe(model, "v3").layers[0]
    assert latent.softmax.scale == expanded.softmax.scale == attention_modules(model)[0].scaling > 24**-0.5
    assert (expanded.num_kv_heads, expanded.head_dim, expanded.v_head_dim) == (4, 24, 16)
    assert (latent.num_kv_heads, latent.head_dim, latent.v_head_dim, latent.key_dims) == (1, 24, 16, 8)
    assert latent.rope is not None
    assert (latent.rope.start, latent.rope.num_bands) == (16, 4)


def test_only_the_instances_change_and_once() -> None:
    first, second = (tiny.build("deepseek-v3") for _ in range(2))
    line = use_latent_cache(first)
    assert line == use_latent_cache(first) == "latent cache: 16 + 8 numbers per token and layer"
    assert all(hands_out_latents(module) for module in attention_modules(first))
    assert not any(hands_out_latents(module) for module in attention_modules(second))
    assert list(first.state_dict()) == list(second.state_dict())


def test_weights_that_change_later_count() -> None:
    """Views of the parameter, no copies."""
    model, twin = tiny.build("deepseek-v3"), tiny.build("deepseek-v3")
    use_latent_cache(paged(model))
    with torch.no_grad():
        for module in attention_modules(model) + attention_modules(twin):
            module.kv_b_proj.weight.mul_(1.5)
    torch.testing.assert_close(logits(model, OneText()), logits(twin), atol=1e-4, rtol=0)


def test_models_without_latents_are_left_alone() -> None:
    assert use_latent_cache(tiny.build("llama")) == ""


def _bias(module: nn.Module) -> None:
    linear = module.kv_b_proj
    module.kv_b_proj = nn.Linear(linear.in_features, linear.out_features)
    with torch.no_grad():
        module.kv_b_proj.weight.copy_(linear.weight)


def _no_linear(module: nn.Module) -> None:
    module.kv_b_proj = nn.Sequential(module.kv_b_proj)


def _double(module: nn.Module) -> None:
    module.kv_b_proj.to(torch.float64)


def _twisted(module: nn.Module) -> None:
    """Keys of other sizes than the weight says: a quantised or adapted layer looks like this."""
    expand = type(module).expand_kv
    module.expand_kv = lambda latents, rotary: expand(module, latents * 2, rotary)


def _other_shape(module: nn.Module) -> None:
    module.v_head_dim += 1


def _unnamed(module: nn.Module) -> None:
    del module.qk_nope_head_dim


def _old_transformers(module: nn.Module) -> None:
    module.expand_kv = None


REASONS: dict[Callable[[nn.Module], None], str] = {
    _bias: "kv_b_proj has a bias",
    _no_linear: "kv_b_proj is no linear layer with float32, bfloat16 or float16 weights",
    _double: "kv_b_proj is no linear layer with float32, bfloat16 or float16 weights",
    _twisted: "its expand_kv computes something else than kv_b_proj",
    _other_shape: r"the weight of kv_b_proj is (128, 16), not (132, 16)",
    _unnamed: "it does not say its qk_nope_head_dim",
    _old_transformers: "this version of transformers has no expand_kv to leave out",
}


@pytest.mark.parametrize("change", REASONS, ids=lambda change: change.__name__)
def test_an_unusual_layer_keeps_the_whole_model_expanded_and_says_why(change) -> None:
    model = tiny.build("deepseek-v3")
    change(attention_modules(model)[1])
    reason = f"latent cache: off, keys and values are expanded (layer 1: {REASONS[change]})"
    assert use_latent_cache(model) == reason
    assert not any(hands_out_latents(module) for module in attention_modules(model))


@pytest.mark.parametrize("change", [_bias, _twisted])
def test_an_expanded_model_still_says_what_transformers_says(change) -> None:
    model = tiny.build("deepseek-v3")
    for module in attention_modules(model):
        change(module)
    model.set_attn_implementation("eager")
    want = logits(model)
    use_latent_cache(paged(model))
    batch = OneText()
    torch.testing.assert_close(logits(model, batch), want, atol=1e-4, rtol=0)
    assert not any(call.latent for call in batch.calls)
    assert batch.calls[0].k.shape == (40, 4, 24)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_loaded_model_says_what_it_caches(dtype, kernels, tiny_dir) -> None:
    loaded = load_model(tiny_dir("deepseek-v3"), dtype=dtype, device="cpu", kernels=kernels)
    assert loaded.modules.endswith("; latent cache: 16 + 8 numbers per token and layer")
    assert "latent" not in load_model(tiny_dir("llama"), device="cpu").modules


def test_the_fingerprint_tells_latents_from_keys(tiny_dir) -> None:
    """A cache or a file of statistics of one never serves the other, even where shapes agree."""
    loaded = load_model(tiny_dir("deepseek-v3"), dtype="float32", device="cpu")
    plain = [replace(layer, latent=False) for layer in loaded.facts.layers]
    assert fingerprint(loaded.model.config, plain) != loaded.facts.fingerprint
    assert fingerprint(loaded.model.config, loaded.facts.layers) == loaded.facts.fingerprint
