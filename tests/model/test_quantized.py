"""Models with packed weights compute what the same models compute with the weights as numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import tiny_gguf
import tiny_packed
import torch
from gguf import GGMLQuantizationType as Form
from one_text import OneText
from torch import Tensor
from transformers import PreTrainedModel

from kvreclaim import LLM, SamplingParams
from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.model.loader import LoadedModel, load_model
from kvreclaim.model.quantized import gguf_file
from kvreclaim.ops import extension

pytestmark = pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason="the native extension is not there"
)


@torch.inference_mode()
def logits(loaded: LoadedModel, ids: Tensor) -> Tensor:
    places = torch.arange(ids.shape[1])[None]
    found: Tensor = loaded.model(
        input_ids=ids, position_ids=places, use_cache=False, kv_batch=OneText()
    ).logits
    return found


def check(path: Path, source: PreTrainedModel) -> None:
    """Exact logits within 1e-5 and the same greedy tokens; those of integers within a KL."""
    ids = torch.tensor(tiny.prompts((40,), seed=3))
    with torch.inference_mode():
        want = source(ids).logits
    exact = load_model(path, dtype="float32", quantized_activations="exact")
    torch.testing.assert_close(logits(exact, ids), want, rtol=0, atol=1e-5 * float(want.abs().max()))
    for activations, most in (("int8", 1e-3), ("int16", 1e-6)):
        loaded = load_model(path, dtype="float32", quantized_activations=activations)
        rounded = logits(loaded, ids).log_softmax(-1)
        kl = (want.softmax(-1) * (want.log_softmax(-1) - rounded)).sum(-1)
        assert abs(float(kl.mean())) < most
        assert not torch.equal(rounded, want.log_softmax(-1))
    llm = LLM(path, dtype="float32", num_blocks=64, quantized_activations="exact")
    with pytest.raises(InvalidArgumentError, match="make another LLM"):
        llm.sibling(quantized_activations="int8")
    prompts = tiny.prompts((5, 33), seed=1)
    answers = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            whole = source.generate(
                torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert answer.outputs[0].token_ids == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("kind", tiny_packed.SCHEMES)
def test_checkpoints(kind: str, family: str, tmp_path: Path) -> None:
    check(tmp_path, tiny_packed.write(kind, tmp_path, family))


def test_gguf_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    source = tiny_gguf.write(tmp_path / "tiny.gguf")
    loaded = load_model(tmp_path / "tiny.gguf")
    assert (loaded.model.dtype, loaded.facts.dtype) == (torch.float32, torch.bfloat16)
    assert loaded.facts.name == "tiny.gguf"
    assert loaded.eos_token_ids == {tiny_gguf.EOS}
    assert loaded.tokenizer.chat_template == tiny.CHAT_TEMPLATE
    ids = torch.tensor(tiny.prompts((40,), seed=3))
    with torch.inference_mode():
        want = source(ids).logits
    exact = load_model(tmp_path / "tiny.gguf", dtype="float32", quantized_activations="exact")
    # the source's weights were rounded to bf16, the file's were not
    torch.testing.assert_close(logits(exact, ids), want, rtol=0, atol=0.02 * float(want.abs().max()))


def test_hidden_states_are_fp32_where_all_matrices_are_packed(tmp_path: Path, monkeypatch) -> None:
    """Logits of the engine are closer to the exact ones than those of bf16 hidden states."""
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    file, text = tmp_path / "tiny.gguf", tiny.prompts((60,), seed=3)[0]
    tiny_gguf.write(file)

    def log_probs(**how: str) -> Tensor:
        rows: list[Tensor] = []
        llm = LLM(file, num_blocks=64, **how)
        llm.score([text[:4]], [text[4:]], observers=[lambda _, each: rows.append(each.float().clone())])
        return torch.cat(rows).log_softmax(-1)

    exact = log_probs(dtype="float32", quantized_activations="exact", kernels="reference")
    error, bf16_error = ((log_probs(dtype=dtype) - exact).norm() for dtype in ("auto", "bfloat16"))
    assert error < bf16_error / 1.5


def test_matrices_that_are_not_packed_stay_in_16_bits(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    tiny_gguf.write(tmp_path / "tiny.gguf", form=Form.F16)
    loaded = load_model(tmp_path / "tiny.gguf")
    assert loaded.model.dtype == loaded.facts.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("family", "form", "how"),
    [
        ("llama", Form.Q4_1, {}),
        ("llama", Form.Q4_1, {"scaling": "yarn", **tiny_gguf.YARN}),
        ("qwen3", Form.Q5_1, {}),
        ("qwen3", Form.Q5_1, {"scaling": "yarn", **tiny_gguf.YARN}),
        ("gemma2", Form.Q5_0, {}),
        ("gemma3", Form.Q5_0, {}),
        ("gemma3", Form.Q8_0, {"scaling": "linear", "rope_parameters": tiny_gguf.TWO_ROTATIONS}),
        ("phi3", Form.Q5_0, {}),
        ("phi3", Form.Q4_0, {"scaling": "longrope", **tiny_gguf.LONGROPE}),
    ],
    ids=[
        "llama",
        "llama-yarn",
        "qwen3",
        "qwen3-yarn",
        "gemma2",
        "gemma3",
        "gemma3-linear",
        "phi3",
        "phi3-longrope",
    ],
)
def test_gguf_architectures(family: str, form: Form, how: dict, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    check(file, tiny_gguf.write(file, family=family, form=form, dtype=torch.float32, **how))


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gemma_of_27b_scales_queries_by_its_width(
    family: str, layers: int, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    for num_layers, scalar in ((2, 32), (layers, 64 // 4)):
        tiny_gguf.write(file, family=family, num_hidden_layers=num_layers)
        assert gguf_file.gguf_config(gguf_file.GgufSource(file)).query_pre_attn_scalar == scalar


def test_types_that_stay_refused_are_named(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    file = tmp_path / "tiny.gguf"
    tiny_gguf.write(file, form=Form.MXFP4)
    with pytest.raises(UnsupportedModelError, match=r"token_embd\.weight of tiny\.gguf is MXFP4.*fetch FILE"):
        load_model(file)


def test_the_tokenizer_of_a_gguf_file_is_read_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    tiny_gguf.write(tmp_path / "tiny.gguf")
    first = load_model(tmp_path / "tiny.gguf")
    with monkeypatch.context() as without:
        without.setattr(gguf_file, "_write_parts", None)
        again = load_model(tmp_path / "tiny.gguf")
    for text in ("one 12 <eos>", "\n\n1"):
        assert again.tokenizer.encode(text) == first.tokenizer.encode(text)
    assert again.tokenizer.chat_template == first.tokenizer.chat_template
    assert again.facts.fingerprint == first.facts.fingerprint
    tiny_gguf.write(tmp_path / "tiny.gguf", pre="default")
    load_model(tmp_path / "tiny.gguf")
    assert len(list((tmp_path / "home" / "gguf").iterdir())) == 2, "another header, another entry"
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "file"))
    with pytest.raises(InvalidArgumentError, match="set KVRECLAIM_HOME to a directory that can be written"):
        load_model(tmp_path / "tiny.gguf")


def test_layers_are_native_and_the_line_says_what_is_packed(tmp_path: Path) -> None:
    tiny_packed.write("awq", tmp_path)
    loaded = load_model(tmp_path)
    assert "decoder layers: native (2)" in loaded.modules
    assert "packed weights: 14 of 4 bits (" in loaded.modules
    assert "int16 activations)" in loaded.modules
    assert "packed_data" in " ".join(name for name, _ in loaded.model.named_buffers())


def test_statistics_are_of_one_way_of_packing(tmp_path: Path) -> None:
    tiny_packed.write("awq", tmp_path / "awq")
    tiny_packed.write("gptq", tmp_path / "gptq")
    tiny.save_model("llama", tmp_path / "plain")
    found = {load_model(tmp_path / name).facts.fingerprint for name in ("awq", "gptq", "plain")}
    assert len(found) == 3


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("awq", {"quant_method": "hqq"}, "is quantised with 'hqq'"),
        ("awq", {"version": "exllama"}, "is AWQ in the layout 'exllama'"),
        ("awq", {"bits": 3}, "has weights of 3 bits"),
        ("awq", {"group_size": 16}, "groups of 16 columns"),
        ("gptq", {"checkpoint_format": "marlin"}, "is GPTQ in the layout 'marlin'"),
        ("compressed-tensors", {"format": "float-quantized"}, "of the format 'float-quantized'"),
        ("bitsandbytes", {"load_in_4bit": False}, "is bitsandbytes of 8 bits"),
    ],
)
def test_what_is_refused_by_name(kind: str, settings: dict, words: str, tmp_path: Path) -> None:
    tiny_packed.write(kind, tmp_path, settings=settings)
    with pytest.raises(UnsupportedModelError) as refused:
        load_model(tmp_path)
    assert words in str(refused.value)


def test_columns_in_the_order_of_activations_are_refused(tmp_path: Path, monkeypatch) -> None:
    def shuffled(weight: Tensor) -> tiny_packed.Written:
        tensors, numbers = tiny_packed.gptq(weight)
        return {**tensors, "g_idx": tensors["g_idx"].flip(0)}, numbers

    monkeypatch.setitem(tiny_packed.SCHEMES, "gptq", (shuffled, tiny_packed.SCHEMES["gptq"][1]))
    tiny_packed.write("gptq", tmp_path)
    with pytest.raises(UnsupportedModelError, match="desc_act"):
        load_model(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch) -> None:
    def without(weight: Tensor) -> tiny_packed.Written:
        tensors, numbers = tiny_packed.awq(weight)
        del tensors["scales"]
        return tensors, numbers

    monkeypatch.setitem(tiny_packed.SCHEMES, "awq", (without, tiny_packed.SCHEMES["awq"][1]))
    tiny_packed.write("awq", tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"q_proj .* lacks scales"):
        load_model(tmp_path)


def test_half_precision_is_refused(tmp_path: Path) -> None:
    tiny_packed.write("awq", tmp_path)
    with pytest.raises(InvalidArgumentError, match="allowed are auto, float32 and bfloat16"):
        load_model(tmp_path, dtype="float16")
