"""The output projection by head is the layer behind attention, whatever the model calls it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
import tiny_packed
import torch
from torch import Tensor, nn

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.loader import load_model
from kvreclaim.model.projection import output_projections, value_grams


class Echo:
    """A KVBatch that answers with every token's own value, and keeps the answers."""

    def __init__(self) -> None:
        self.outputs: dict[int, Tensor] = {}

    def attend(self, call: AttentionCall) -> Tensor:
        out = call.v.repeat_interleave(call.q.shape[1] // call.k.shape[1], dim=1)
        self.outputs[call.layer] = out + torch.arange(out.shape[1])[:, None]
        return self.outputs[call.layer]


@torch.inference_mode()
def attention_outputs(model: nn.Module, echo: Echo) -> list[Tensor]:
    """Per layer [T, M]: what the attention module gives for three tokens."""
    found: list[Tensor] = []
    hooks = [
        module.register_forward_hook(lambda _, __, out: found.append(out[0][0]))
        for name, module in model.named_modules()
        if name.endswith("self_attn")
    ]
    tokens = torch.tensor([[5, 17, 3]])
    model(input_ids=tokens, position_ids=torch.arange(3)[None], use_cache=False, kv_batch=echo)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("family", [name for name in tiny.FAMILIES if name not in tiny.LATENT])
def test_heads_add_up_to_what_the_attention_module_gives(family: str, kernels: str, tiny_dir) -> None:
    loaded = load_model(tiny_dir(family), dtype="float32", device="cpu", kernels=kernels)
    echo = Echo()
    outputs = attention_outputs(loaded.model, echo)
    projections = output_projections(loaded.model, loaded.facts)
    assert len(projections) == len(outputs) == loaded.facts.num_layers
    for layer, (weight, want) in enumerate(zip(projections, outputs, strict=True)):
        facts = loaded.facts.layers[layer]
        assert weight.shape == (facts.num_heads, facts.v_head_dim, 64)
        bias = loaded.model.model.layers[layer].self_attn.o_proj.bias
        got = torch.einsum("thd,hdm->tm", echo.outputs[layer], weight) + (0 if bias is None else bias)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", "gemma3"])
def test_grams_give_the_norm_of_what_a_value_adds(family: str, tiny_dir) -> None:
    loaded = load_model(tiny_dir(family), dtype="float32", device="cpu")
    grams, weights = (find(loaded.model, loaded.facts) for find in (value_grams, output_projections))
    for gram, weight, facts in zip(grams, weights, loaded.facts.layers, strict=True):
        value = torch.randn(facts.v_head_dim, generator=torch.Generator().manual_seed(3))
        want = (value @ weight).square().sum(-1).view(facts.num_kv_heads, -1)
        torch.testing.assert_close(value @ gram @ value, want, atol=1e-5, rtol=1e-4)


def test_grams_of_packed_weights_are_those_of_their_numbers(tmp_path) -> None:
    plain = tiny_packed.write("awq", tmp_path)
    packed = load_model(tmp_path, dtype="float32", device="cpu")
    grams = (value_grams(model, packed.facts) for model in (packed.model, plain))
    for got, want in zip(*grams, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", tiny.LATENT)
def test_a_latent_counts_by_its_own_norm(family: str, tiny_dir) -> None:
    loaded = load_model(tiny_dir(family), dtype="float32", device="cpu")
    for gram in value_grams(loaded.model, loaded.facts):
        assert gram.equal(torch.eye(gram.shape[-1]).expand_as(gram))


def test_the_weights_are_not_copied(tiny_dir) -> None:
    loaded = load_model(tiny_dir("llama"), dtype="float32", device="cpu")
    first = output_projections(loaded.model, loaded.facts)[0]
    assert first.data_ptr() == loaded.model.model.layers[0].self_attn.o_proj.weight.data_ptr()


@pytest.mark.parametrize("family", tiny.LATENT)
def test_latents_are_not_taken_for_values(family: str, tiny_dir) -> None:
    """deepseek-v3's W_o has the very shape that latents would have here."""
    loaded = load_model(tiny_dir(family), dtype="float32", device="cpu")
    with pytest.raises(InvalidArgumentError, match="one latent per token for all heads"):
        output_projections(loaded.model, loaded.facts)


def test_a_layer_that_is_not_found_is_named(tiny_dir) -> None:
    loaded = load_model(tiny_dir("llama"), dtype="float32", device="cpu")
    attention = loaded.model.model.layers[1].self_attn
    linear = attention.o_proj
    attention.o_proj = None
    attention.behind = linear
    with pytest.raises(InvalidArgumentError, match=r"attention layer 1 of .* was not found"):
        output_projections(loaded.model, loaded.facts)
    attention.o_proj = linear
    wider = replace(loaded.facts, layers=tuple(replace(f, v_head_dim=8) for f in loaded.facts.layers))
    with pytest.raises(InvalidArgumentError, match=r"attention layer 0 of .* was not found"):
        output_projections(loaded.model, wider)
