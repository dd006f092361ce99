"""Decoder layers in native calls compute what transformers' code does, or are not replaced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from one_text import OneText, zeroed
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Ernie4_5Config

from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.decoder import use_native_model
from kvreclaim.model.fast_layers import use_fast_layers
from kvreclaim.model.inputs import inputs_handed_out
from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.model.native_modules import NativeLayer, NativeModel
from kvreclaim.ops import extension
from kvreclaim.ops.native.decoder import max_rows

pytestmark = pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason="the native extension is not there"
)
TAKEN = ("llama", "qwen2", "qwen3", "mistral", "phi3")
LEFT = ("gemma2", "gemma3", "olmo2", "glm4", "qwen3-moe", "gpt-oss", "deepseek-v3", "llama4")
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.03}


@torch.inference_mode()
def logits(loaded: LoadedModel, tokens: int = 7, first: int = 3) -> Tensor:
    ids = (torch.arange(tokens)[None] * 31 + 5) % 272
    places = torch.arange(first, first + tokens)[None]
    model = loaded.model
    found: Tensor = model(input_ids=ids, position_ids=places, use_cache=False, kv_batch=OneText()).logits[0]
    return found


def layers(loaded: LoadedModel) -> list[nn.Module]:
    return [m for m in loaded.model.modules() if isinstance(vars(m).get("forward"), NativeLayer)]


def close(got: Tensor, want: Tensor, dtype: str) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype] * float(want.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TAKEN)
def test_logits_are_those_of_transformers(tiny_dir: Callable[[str], Path], name: str, dtype: str) -> None:
    native, plain = (load_model(tiny_dir(name), dtype=dtype, kernels=k) for k in ("native", "torch"))
    assert len(layers(native)) == native.model.config.num_hidden_layers
    assert f"decoder layers: native ({len(layers(native))})" in native.modules
    for tokens in (1, 7, min(max_rows(native.facts.dtype), 100) + 3):
        close(logits(native, tokens), logits(plain, tokens), dtype)
    names = dict(plain.model.named_parameters())
    assert all(torch.equal(weight, names[name]) for name, weight in native.model.named_parameters())


@pytest.mark.parametrize("name", LEFT)
def test_other_families_keep_their_own_code(tiny_dir: Callable[[str], Path], name: str) -> None:
    native, plain = (load_model(tiny_dir(name), dtype="float32", kernels=k) for k in ("native", "torch"))
    assert layers(native) == []
    assert "decoder layers: transformers (" in native.modules
    close(logits(native), logits(plain), "float32")


def test_latents_keep_their_own_code(tmp_path: Path) -> None:
    """Their attention has as many linear layers as Llama's."""
    loaded = load_model(tiny.save_model("deepseek-v3", tmp_path, q_lora_rank=None), kernels="native")
    assert "decoder layers: transformers" in loaded.modules


def test_layers_whose_angles_are_of_another_dtype_keep_their_code(tmp_path: Path) -> None:
    """Ernie's parts are Llama's, but it turns neighbours, by angles in fp32, and rounds behind that."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 272}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    network = AutoModelForCausalLM.from_config(Ernie4_5Config(**sizes, **heads))
    network.to(torch.bfloat16).save_pretrained(tmp_path)
    native, plain = (load_model(tmp_path, kernels=k) for k in ("native", "torch"))
    assert layers(native) == []
    close(logits(native), logits(plain), "bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(tiny_dir: Callable[[str], Path], dtype: torch.dtype) -> None:
    loaded = load_model(tiny_dir("qwen3"), dtype=str(dtype).removeprefix("torch."), kernels="native")
    (layer, *_) = layers(loaded)
    x = torch.randn(20, layer.self_attn.q_proj.in_features, generator=torch.Generator().manual_seed(1)).to(
        dtype
    )
    angles = torch.arange(20)[:, None] * torch.rand(16, generator=torch.Generator().manual_seed(2))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    class Values:
        def attend(self, call: AttentionCall) -> Tensor:
            return call.v.repeat_interleave(2, 1) * call.q + call.k.repeat_interleave(2, 1)

    @torch.inference_mode()
    def run(rows: slice) -> Tensor:
        found: Tensor = layer(
            x[rows][None], position_embeddings=(cos[rows][None], sin[rows][None]), kv_batch=Values()
        )
        return found[0]

    together = run(slice(0, 20))
    for i in range(20):
        assert torch.equal(run(slice(i, i + 1))[0], together[i])


def test_layers_that_compute_something_else_are_refused(tiny_dir: Callable[[str], Path]) -> None:
    """The parts of Mistral by name, but another activation, or attention that is scaled."""
    loaded = load_model(tiny_dir("mistral"), kernels="torch")
    assert use_fast_layers(loaded.model).startswith(
        "decoder layers: transformers (none has"
    )  # norms: unproved
    for change in ("act_fn", "scaled"):
        again = load_model(tiny_dir("mistral"), kernels="native")
        for layer in layers(again):
            del layer.forward
        module = again.model.model.layers[1]
        if change == "act_fn":
            module.mlp.act_fn = nn.GELU()
        else:
            own = type(module.self_attn).forward
            module.self_attn.forward = lambda *a, own=own, m=module.self_attn, **k: (
                2 * own(m, *a, **k)[0],
                None,
            )
        want = logits(again)
        line = use_fast_layers(again.model)
        assert (
            line
            == "decoder layers: transformers (a MistralDecoderLayer does not compute what the kernels do)"
        )
        assert layers(again) == []
        assert torch.equal(logits(again), want)


def test_hooks_gradients_and_plain_calls_get_transformers_code(tiny_dir: Callable[[str], Path]) -> None:
    native, plain = (load_model(tiny_dir("mistral"), kernels=k) for k in ("native", "torch"))
    with inputs_handed_out(native.model), torch.inference_mode():
        batch = OneText()
        native.model(
            input_ids=torch.tensor([[1, 2]]),
            position_ids=torch.tensor([[0, 1]]),
            use_cache=False,
            kv_batch=batch,
        )
    assert all(call.hidden is not None for call in batch.calls)
    ids = torch.tensor([[1, 2, 3]])
    for each in (native, plain):
        each.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        close(native.model(input_ids=ids).logits, plain.model(input_ids=ids).logits, "float32")


def test_the_forward_is_a_loop_over_native_layers(tiny_dir: Callable[[str], Path]) -> None:
    """Outputs are to the bit those of transformers' forward, which hooks, and other arguments, still get."""
    loaded = load_model(tiny_dir("mistral"), kernels="native")
    body = loaded.model.model
    assert isinstance(vars(body)["forward"], NativeModel)
    assert "forward: native" in loaded.modules
    own = [logits(loaded, tokens) for tokens in (1, 7)]
    seen: list[Tensor] = []
    hook = body.layers[1].register_forward_hook(lambda _, args, out: seen.append(out))
    hooked = logits(loaded)
    hook.remove()
    assert [each.shape for each in seen] == [(1, 7, loaded.model.config.hidden_size)]
    kept = vars(body).pop("forward")
    assert all(torch.equal(got, logits(loaded, n)) for got, n in zip((*own, hooked), (1, 7, 7), strict=True))
    body.forward = kept
    ids, places = torch.tensor([[3]]), torch.tensor([[0]])
    found = body(
        input_ids=ids, position_ids=places, use_cache=False, kv_batch=OneText(), output_hidden_states=True
    )
    assert len(found.hidden_states) == len(body.layers) + 1


def test_a_forward_that_computes_something_else_is_kept(tiny_dir: Callable[[str], Path]) -> None:
    """Embeddings that are scaled behind their module; layers of which one is left out."""
    loaded = load_model(tiny_dir("mistral"), kernels="native")
    body = loaded.model.model
    del body.forward
    kind = type(body)

    class Scaled(kind):  # type: ignore[misc, valid-type]
        def forward(self, input_ids: Tensor | None = None, **kwargs: Any) -> Any:
            return kind.forward(self, inputs_embeds=2 * self.embed_tokens(input_ids), **kwargs)

    body.__class__ = Scaled
    assert use_native_model(loaded.model) == ""
    body.__class__ = kind
    assert use_native_model(loaded.model) == "forward: native"
    del body.forward
    body.config.num_hidden_layers -= 1
    assert use_native_model(loaded.model) == ""


def test_copies_have_weights_of_their_own(tiny_dir: Callable[[str], Path]) -> None:
    loaded = load_model(tiny_dir("llama"), kernels="native")
    want = logits(loaded)
    assert not logits(replace(loaded, model=zeroed(loaded.model))).any()
    assert torch.equal(logits(loaded), want)
