"""Whole models whose layers run on these kernels: transformers' logits and tokens, few launches a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_packed
import torch
from launches import Launches, counted
from one_text import OneText, zeroed
from torch import Tensor, nn
from triton_pair import DEVICE

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.execute.graphs import DecodeGraphs, GraphKind
from kvreclaim.model.fast_layers import use_fast_layers
from kvreclaim.model.inputs import inputs_handed_out
from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.model.native_modules import NativeLayer, use_fast_norms
from kvreclaim.ops.triton import decoder
from kvreclaim.ops.triton.support import is_interpreted

TAKEN = (
    *("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "glm4", "olmo2"),
    *("qwen3-moe", "gpt-oss", "deepseek-v3"),
)
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.04, "float16": 0.006}
LAUNCHES = {
    **dict.fromkeys(TAKEN, 11),
    **dict.fromkeys(("gemma2", "gemma3", "glm4"), 12),  # norms of what is added to the residual
    "olmo2": 13,  # norms of all queries and all keys
    "qwen3-moe": 13,  # routers and experts
    "gpt-oss": 12.5,  # layers with windows attend in one share
    "deepseek-v3": 15,  # and products of latents
}
ALL_EXPERTS = {
    "gpt-oss": {"num_experts_per_tok": 4},
    "deepseek-v3": {"num_experts_per_tok": 4, "n_group": 1},
}
"""Every token has all experts: roundings alone can change a choice."""
"""A layer's, of a decode step, attention over several shares of a sequence included."""


def load(directory: Path, kernels: str = "triton", dtype: str = "float32") -> LoadedModel:
    return load_model(directory, dtype=dtype, device=str(DEVICE), kernels=kernels)


@torch.inference_mode()
def logits(loaded: LoadedModel, tokens: int = 7, batch: Any = None) -> Tensor:
    ids = (torch.arange(tokens, device=DEVICE)[None] * 31 + 5) % tiny.VOCAB_SIZE
    given = {"position_ids": torch.arange(3, 3 + tokens, device=DEVICE)[None], "use_cache": False}
    found: Tensor = loaded.model(input_ids=ids, kv_batch=batch or OneText(), **given).logits[0]
    return found


def layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), NativeLayer)]


def close(got: Tensor, want: Tensor, dtype: str = "float32") -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE[dtype] * float(want.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", TAKEN)
def test_logits_are_those_of_transformers(
    tiny_dir: Callable[[str], Path], tmp_path: Path, name: str, dtype: str
) -> None:
    how = ALL_EXPERTS.get(name)
    directory = tiny.save_model(name, tmp_path, **how) if how else tiny_dir(name)
    ours, plain = (load(directory, kernels, dtype) for kernels in ("triton", "torch"))
    count = ours.model.config.num_hidden_layers
    assert f"decoder layers: triton ({count})" in ours.modules
    assert ("forward: triton" in ours.modules) == (name != "gemma3")  # whose layers have two rotations
    assert len(layers(ours.model)) == count
    for tokens in (1, 7, 67):
        found, theirs = logits(ours, tokens), logits(plain, tokens)
        close(found, theirs, dtype)
    names = dict(plain.model.named_parameters())
    assert all(torch.equal(weight, names[name]) for name, weight in ours.model.named_parameters())
    if dtype != "float32":  # fewer roundings: no further from the same weights in fp32
        plain.model.float()
        exact = logits(plain, 67)
        assert (found.float() - exact).norm() <= 1.1 * (theirs.float() - exact).norm()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_tokens_are_those_of_generate(tiny_dir: Callable[[str], Path], family: str) -> None:
    """Layers of other kinds keep transformers' code around norms, and MLPs, that run here."""
    given = {"dtype": "float32", "device": str(DEVICE), "kernels": "triton", "max_num_batched_tokens": 24}
    llm = LLM(tiny_dir(family), num_blocks=40, **given)
    assert ("decoder layers: triton (" in llm.loaded.modules) == (family in (*TAKEN, "ministral"))
    assert "norms: triton (" in llm.loaded.modules
    prompts = tiny.prompts((27, 9), seed=1)
    answers = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    found = [answer.outputs[0].token_ids for answer in answers]
    assert found == tiny.greedy(tiny_dir(family), prompts, 4)


def step_of(directory: Path, kind: GraphKind) -> tuple[Launches, str]:
    """What a decode step of two sequences launches as it is captured, and what runs on which kernels."""
    engine = LLM(directory, num_blocks=40, dtype="float32", device="cpu", kernels="triton").engine
    found: list[Launches] = []

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        run()
        with counted() as launches:
            run()
        found.append(launches)
        return run

    limits = {"max_num_seqs": 2, "max_model_len": 1024, "max_chunk": 64}
    model, cache = engine.loaded.model, engine.cache
    graphs = DecodeGraphs(model, cache, engine.backend, engine.groups, **limits, capture=capture)
    with torch.inference_mode():
        assert graphs._prepare(2, kind) is None
    return found[0], engine.loaded.modules


def launches_a_layer(save: Callable[[int], Path], kind: GraphKind = GraphKind()) -> tuple[float, str]:  # noqa: B008, frozen
    (few, _), (many, modules) = (step_of(save(count), kind) for count in (2, 4))
    assert not many.waits
    return (many.total - few.total) / 2, modules


@pytest.mark.skipif(not is_interpreted(), reason="launches are counted in the interpreter")
@pytest.mark.parametrize(
    ("family", "kind", "most"),
    [
        *((family, GraphKind(), most) for family, most in LAUNCHES.items()),
        *(
            (family, GraphKind(unequal=True), LAUNCHES[family] + 2)
            for family in ("llama", "gemma3", "gpt-oss")
        ),
    ],
)
def test_launches_of_a_layer(family: str, kind: GraphKind, most: float, tmp_path: Path) -> None:
    """Each layer has tables of its own where heads are unequal."""

    def save(count: int) -> Path:
        return tiny.save_model(family, tmp_path / str(count), num_hidden_layers=count)

    assert launches_a_layer(save, kind)[0] <= most


@pytest.mark.skipif(not is_interpreted(), reason="launches are counted in the interpreter")
def test_launches_of_a_layer_with_packed_weights(tmp_path: Path) -> None:
    """Matrices of one kind with one input are one matrix; norms, rotation and gates are these kernels."""

    def save(count: int) -> Path:
        tiny_packed.write("awq", tmp_path / str(count), num_hidden_layers=count)
        return tmp_path / str(count)

    found, modules = launches_a_layer(save)
    assert "decoder layers: triton (4)" in modules
    assert found <= 12


def test_hooks_gradients_and_plain_calls_get_transformers_code(tiny_dir: Callable[[str], Path]) -> None:
    ours, plain = (load(tiny_dir("mistral"), kernels) for kernels in ("triton", "torch"))
    batch = OneText()
    with inputs_handed_out(ours.model):
        close(logits(ours, batch=batch), logits(plain))
    norm = ours.model.model.layers[0].input_layernorm
    ids = (torch.arange(7, device=DEVICE) * 31 + 5) % tiny.VOCAB_SIZE
    with torch.inference_mode():
        close(batch.calls[0].hidden, norm(ours.model.model.embed_tokens(ids)))
    seen: list[Tensor] = []
    hook = ours.model.model.layers[1].mlp.register_forward_hook(lambda _, args, out: seen.append(out))
    close(logits(ours), logits(plain))
    hook.remove()
    assert len(seen) == 1
    for each in (ours, plain):
        each.model.set_attn_implementation("sdpa")
    got, want = (each.model(input_ids=ids[None], use_cache=False).logits for each in (ours, plain))
    close(got, want)
    states = ours.model.model.embed_tokens(ids[None]).requires_grad_()
    ours.model(inputs_embeds=states, use_cache=False).logits.sum().backward()
    assert states.grad is not None
    assert bool(states.grad.abs().sum() > 0)


@pytest.mark.parametrize("act", [nn.GELU(), nn.SiLU(), nn.Tanh(), nn.GELU(approximate="tanh")])
def test_the_gate_is_found_by_trial(tiny_dir: Callable[[str], Path], act: nn.Module) -> None:
    """The error function's GELU is none of the kernels', near as it is."""
    loaded = load(tiny_dir("gemma2"), "torch")
    for layer in loaded.model.model.layers:
        layer.mlp.act_fn = act
    use_fast_norms(loaded.model, decoder)
    want = logits(loaded)
    is_known = isinstance(act, nn.SiLU) or getattr(act, "approximate", "") == "tanh"
    assert use_fast_layers(loaded.model, decoder).startswith("decoder layers: triton") == is_known
    close(logits(loaded), want)


def test_copies_have_weights_of_their_own(tiny_dir: Callable[[str], Path]) -> None:
    loaded = load(tiny_dir("llama"))
    want = logits(loaded)
    copied = zeroed(loaded.model)
    assert torch.equal(logits(loaded), want)
    assert not logits(LoadedModel(copied, None, loaded.facts, frozenset(), 0, "")).any()
