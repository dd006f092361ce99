"""A model on native linear layers and norms computes what it computed before."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from kvreclaim.model.native_modules import NativeLinear, use_fast_linears, use_fast_norms
from kvreclaim.ops import extension
from kvreclaim.ops.native.decoder import has_norm_from_one

pytestmark = pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason="the native extension is not there"
)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 101,
}


def tiny(dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True, attention_bias=True)).to(dtype)
    for module in model.modules():
        if type(module).__name__ == "Qwen3RMSNorm":
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def logits(model: nn.Module, tokens: int = 6) -> Tensor:
    ids = torch.arange(tokens)[None] % 101
    return model(input_ids=ids, use_cache=False).logits


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_same_logits_and_untouched_state(dtype: torch.dtype, atol: float) -> None:
    model = tiny(dtype)
    before = {name: value.data_ptr() for name, value in model.state_dict().items()}
    expected = logits(model)
    assert use_fast_linears(model).startswith("linear layers: native")
    assert use_fast_norms(model) == "norms: native (9)"
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == before
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert all(type(m) is NativeLinear for m in model.modules() if isinstance(m, nn.Linear))
    torch.testing.assert_close(
        logits(model), expected, rtol=0.02 if dtype == torch.bfloat16 else 1e-5, atol=atol
    )


def test_again_changes_nothing_and_copies_work() -> None:
    model = tiny()
    first = use_fast_linears(model)
    use_fast_norms(model)
    expected = logits(model)
    assert use_fast_linears(model) == first
    use_fast_norms(model)
    assert torch.equal(logits(model), expected)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.model.norm.weight)
    assert torch.equal(logits(model), expected)
    assert not bool(logits(copied).any())


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_other_linear_layers_are_left_alone() -> None:
    model = nn.ModuleDict(
        {
            "plain": nn.Linear(4, 4),
            "subclass": Scaled(4, 4),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
            "fp16": nn.Linear(4, 4).half(),
            "turned": nn.Linear(4, 4),
        }
    )
    model["turned"].weight = nn.Parameter(torch.randn(4, 4).t())
    types = {name: type(module) for name, module in model.items()}
    assert use_fast_linears(model).endswith("(1); 4 others: torch")
    assert type(model["plain"]) is NativeLinear
    assert {name: type(module) for name, module in model.items() if name != "plain"} == {
        name: kind for name, kind in types.items() if name != "plain"
    }


def test_hooks_and_gradients_keep_working() -> None:
    layer = nn.Sequential(nn.Linear(8, 3))
    use_fast_linears(layer)
    seen: list[Tensor] = []
    layer[0].register_forward_hook(lambda module, args, output: seen.append(output))
    layer(torch.randn(2, 8)).sum().backward()
    assert len(seen) == 1
    assert layer[0].weight.grad is not None


@pytest.mark.skipif(not has_norm_from_one(), reason="the native extension is older")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_whose_weights_count_from_one(dtype: torch.dtype) -> None:
    gemma = Gemma2ForCausalLM(Gemma2Config(**SIZES, query_pre_attn_scalar=16)).eval().to(dtype)
    norms = [module for module in gemma.modules() if "Norm" in type(module).__name__]
    for norm in norms:
        nn.init.normal_(norm.weight, std=0.3)
    assert use_fast_norms(gemma) == f"norms: native ({len(norms)})"
    x = torch.randn(2, 5, SIZES["hidden_size"]).to(dtype)
    with torch.no_grad():
        for norm in norms:
            torch.testing.assert_close(norm(x), type(norm).forward(norm, x))


def test_norms_that_compute_something_else_are_left_alone() -> None:
    layers = nn.ModuleList(
        [nn.LayerNorm(8, bias=False), nn.RMSNorm(8, eps=1e-6), nn.RMSNorm(8), nn.Linear(3, 1, bias=False)]
    )
    nn.init.normal_(layers[0].weight)
    assert use_fast_norms(layers) == "norms: native (1)"
    assert "forward" in vars(layers[1])


def test_a_norm_falls_back_for_other_tensors() -> None:
    norm = nn.Sequential(nn.RMSNorm(8, eps=1e-6))
    use_fast_norms(norm)
    x = torch.randn(8, 5)
    torch.testing.assert_close(norm(x.t()), norm(x.t().contiguous()))
    norm(torch.randn(2, 8)).sum().backward()
    assert norm[0].weight.grad is not None


def test_without_the_extension_torch_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    monkeypatch.setattr("kvreclaim.ops.native.decoder.unavailable_reason", lambda: "no compiler")
    assert use_fast_linears(model) == "linear layers: torch (no compiler)"
    assert use_fast_norms(model) == "norms: torch (no compiler)"
    assert not any(isinstance(module, NativeLinear) for module in model.modules())
