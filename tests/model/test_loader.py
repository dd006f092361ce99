"""What is loaded, and how what cannot be loaded is refused: a typed error that says what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.model.loader import load_model, resolve_device


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A directory of the test's own, to break."""
    return tiny.save_model("llama", tmp_path / "llama")


def rewrite_weights(directory: Path, change) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def test_a_loaded_model_is_frozen_and_paged(tiny_dir) -> None:
    loaded = load_model(tiny_dir("llama"), device="cpu")
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.vocab_size == tiny.VOCAB_SIZE
    assert loaded.eos_token_ids == frozenset()
    assert loaded.facts.name == tiny_dir("llama").name
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("the end")) == "the end"


def test_a_path_with_a_slash_at_its_end_has_the_same_name(tiny_dir) -> None:
    assert load_model(f"{tiny_dir('qwen3')}/").facts.name == tiny_dir("qwen3").name


def test_without_tokenizer_files_there_is_no_tokenizer(tiny_dir) -> None:
    assert load_model(tiny_dir("qwen3")).tokenizer is None


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_dtypes(stored: str, dtype: str, tmp_path: Path) -> None:
    tiny.build("qwen3").to(getattr(torch, stored)).save_pretrained(tmp_path)
    loaded = load_model(tmp_path, dtype=dtype)
    want = getattr(torch, stored if dtype == "auto" else dtype)
    assert loaded.facts.dtype == want
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {want}


@pytest.mark.parametrize("dtype", ["fp32", "float64", "FLOAT32", "", "torch.float32"])
def test_an_unknown_dtype_lists_the_known_ones(dtype: str, tiny_dir) -> None:
    with pytest.raises(InvalidArgumentError, match="allowed are auto, float32, bfloat16, float16"):
        load_model(tiny_dir("llama"), dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99", ""])
def test_an_impossible_device_is_refused_before_any_weight_is_read(device: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"device is .*; pass 'auto'"):
        load_model("/nowhere", device=device)


def test_devices() -> None:
    best = "cuda" if torch.cuda.is_available() else "cpu"
    assert resolve_device("auto").type == best
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["/no/such/directory", "nobody/no-such-model", ""])
def test_a_model_that_is_not_there(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"pass a local directory with config\.json"):
        load_model(name)


@pytest.mark.parametrize("text", [None, "{", "{}", '{"model_type": "no-such-type"}'])
def test_a_directory_without_a_readable_config(text: str | None, llama: Path) -> None:
    if text is None:
        (llama / "config.json").unlink()
    else:
        (llama / "config.json").write_text(text)
    with pytest.raises(InvalidArgumentError, match=f"model '{llama}' has no readable config"):
        load_model(llama)


def test_code_from_a_repository_is_never_run(llama: Path, monkeypatch) -> None:
    """It does not run even where the user at the terminal would agree."""
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    auto_map = {"AutoConfig": "theirs.Config", "AutoModelForCausalLM": "theirs.Model"}
    (llama / "config.json").write_text(json.dumps({"model_type": "theirs", "auto_map": auto_map}))
    (llama / "theirs.py").write_text(f"open({str(llama / 'ran')!r}, 'w')\n")
    with pytest.raises(InvalidArgumentError, match="contains custom code"):
        load_model(llama)
    assert not (llama / "ran").exists()


def test_pickled_weights_are_not_read(llama: Path) -> None:
    weights = llama / "model.safetensors"
    torch.save(load_file(weights), llama / "pytorch_model.bin")
    weights.unlink()
    with pytest.raises(InvalidArgumentError, match="convert the checkpoint to safetensors"):
        load_model(llama)


@pytest.mark.parametrize("length", [0, 1000, -100])
def test_truncated_weights(length: int, llama: Path) -> None:
    weights = llama / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:length])
    with pytest.raises(InvalidArgumentError, match="damaged or do not fit"):
        load_model(llama)


def test_weights_of_another_shape(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(
        InvalidArgumentError, match=r"gate_proj.weight .* is \[96, 64\], and its config asks for \[32, 64\]"
    ):
        load_model(llama)


def test_a_missing_tensor_is_not_replaced_by_noise(llama: Path) -> None:
    rewrite_weights(llama, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(InvalidArgumentError, match=r"lack 1 tensors \(model.layers.1.mlp.up_proj.weight"):
        load_model(llama)


def test_tied_embeddings_are_not_missing(tmp_path: Path) -> None:
    directory = tiny.save_model("llama", tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(directory / "model.safetensors")
    model = load_model(directory).model
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


def test_a_broken_tokenizer_is_not_ignored(llama: Path) -> None:
    (llama / "tokenizer.json").write_text("{")
    with pytest.raises(InvalidArgumentError, match=r"tokenizer of model .* cannot be read"):
        load_model(llama)


def test_a_model_that_is_no_language_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(UnsupportedModelError, match=r"\(clip\) is not a causal language model"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("t5", "is an encoder-decoder"),
        ("falcon", "has its own attention code"),
        ("mamba", "no attention layer"),
    ],
)
def test_what_the_config_shows_is_refused_without_weights(family, reason, tmp_path: Path) -> None:
    tiny.config(family).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load_model(tmp_path)
