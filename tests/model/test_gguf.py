"""A GGUF file becomes a directory that computes what the file's weights compute."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import gguf
import pytest
import tiny
import tiny_gguf
import torch
from transformers import AutoModelForCausalLM, GgufConfig, PreTrainedModel

from kvreclaim import LLM, SamplingParams
from kvreclaim.errors import FetchError
from kvreclaim.model import checkpoint_file
from kvreclaim.model import gguf as reading
from kvreclaim.model.gguf import convert_gguf
from kvreclaim.model.loader import load_model


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[PreTrainedModel, Path]:
    """The source of a file, and the directory made of the file."""
    home = tmp_path_factory.mktemp("gguf")
    source, progress = tiny_gguf.write(home / "tiny.gguf"), []
    convert_gguf(home / "tiny.gguf", home / "made", progress.append)
    assert progress == []
    return source, home / "made"


def test_logits_are_those_of_the_files_weights(converted) -> None:
    source, made = converted
    tokens = torch.tensor(tiny.prompts((40, 40), seed=3))
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, source(tokens).logits)


def test_it_is_an_ordinary_directory_in_bf16(converted) -> None:
    loaded = load_model(converted[1], device="cpu")
    assert loaded.facts.dtype == torch.bfloat16
    assert loaded.eos_token_ids == {tiny_gguf.EOS}
    assert loaded.tokenizer.chat_template == tiny.CHAT_TEMPLATE
    assert not hasattr(loaded.model.config, "quantization_config")


def test_text_comes_back_and_digits_are_cut_off(converted) -> None:
    tokenizer = load_model(converted[1], device="cpu").tokenizer
    text = "the end\n\n12 1, Zoë"
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.convert_ids_to_tokens(tokens)[:8] == ["the", "Ġ", "end", "ĊĊ", "1", "2", "Ġ", "1"]
    assert tokenizer.encode("<eos>") == [tiny_gguf.EOS]


def test_it_chats(converted) -> None:
    llm = LLM(converted[1], device="cpu", num_blocks=64)
    (answer,) = llm.chat([{"role": "user", "content": "stop"}], SamplingParams(temperature=0.0, max_tokens=4))
    assert answer.metrics.num_prompt_tokens == len(llm.tokenizer.encode("user: stop\nassistant: "))
    assert answer.metrics.num_generated_tokens >= 1


@pytest.mark.parametrize(("pre", "num_warnings"), [("gpt-2", 0), ("llama-bpe", 0), ("someones-own", 1)])
def test_a_rule_that_is_not_followed_is_reported(pre: str, num_warnings: int, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", pre=pre)
    warnings: list[str] = []
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", warnings.append)
    assert len(warnings) == num_warnings
    assert all(repr(pre) in line for line in warnings)
    assert load_model(tmp_path / "made").tokenizer.decode([256]) == "en"


@pytest.mark.parametrize("length", [0, 100, -50_000])
def test_a_damaged_file(length: int, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    tiny_gguf.write(file)
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(FetchError, match=r"^tiny\.gguf cannot be read as GGUF .*damaged") as refused:
        convert_gguf(file, tmp_path / "made", print)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "made").exists()


def test_an_architecture_that_transformers_does_not_read(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", architecture="nobodys")
    with pytest.raises(FetchError, match=r"nobodys.*pass another file"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", print)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"without": "blk.1.ffn_up.weight"}, "lacks 1 tensors (model.layers.1.mlp.up_proj.weight is one)"),
        ({"beside": ["blk.0.attn_q.bias"]}, "it does not read the rest from GGUF"),
        ({"beside": ["rope_freqs.weight"]}, "scales its rotary positions (rope_freqs.weight)"),
        (
            {"scaling": "su", "rope_parameters": tiny_gguf.YARN["rope_parameters"]},
            "scales rotary positions by 'su'",
        ),
    ],
    ids=str,
)
def test_what_would_become_another_model(how: dict, words: str, tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", **how)
    with pytest.raises(FetchError) as refused:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", print)
    assert words in str(refused.value)
    assert not (tmp_path / "made").exists()


def test_a_scaled_rotation_is_kept(tmp_path: Path) -> None:
    source = tiny_gguf.write(tmp_path / "tiny.gguf", scaling="yarn", **tiny_gguf.YARN)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", print)
    tokens = torch.tensor(tiny.prompts((300,), seed=3))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, source(tokens).logits)


def test_without_its_package(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("kvreclaim.model.gguf_index.find_spec", {}.get)
    with pytest.raises(FetchError, match=r"needs gguf, .*pip install 'kvreclaim\[gguf\]'"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", print)


def written_by_transformers(file: Path, directory: Path, **how) -> dict[str, bytes]:
    """The files of a model that transformers reads whole and writes whole, by name."""
    plain = GgufConfig(dequantize=True)
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16, quantization_config=plain)
    model.save_pretrained(directory, **how)
    return {
        file.name: file.read_bytes() for file in directory.glob("*") if file.name != "generation_config.json"
    }


@pytest.mark.parametrize("most_bytes", ["50GB", "60KB"])
@pytest.mark.parametrize("without", ["", "output.weight"], ids=["head", "tied"])
def test_the_bytes_are_those_that_transformers_writes(
    without: str, most_bytes: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(checkpoint_file, "MOST_BYTES", most_bytes)
    monkeypatch.setattr(checkpoint_file, "AT_ONCE", 1000)
    monkeypatch.setattr(reading, "AT_ONCE", 1000)
    tiny_gguf.write(tmp_path / "tiny.gguf", without=without)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", print)
    want = written_by_transformers(tmp_path / "tiny.gguf", tmp_path / "want", max_shard_size=most_bytes)
    assert len(want) == (2 if most_bytes == "50GB" else 2 + len(list(tmp_path.glob("want/*.safetensors"))))
    assert {name: (tmp_path / "made" / name).read_bytes() for name in want} == want


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(reading, "AT_ONCE", 1000)
    source, dequantize = tiny_gguf.write(tmp_path / "tiny.gguf"), gguf.dequantize
    pieces: list[tuple[int, weakref.ref]] = []
    gc.freeze()  # what is there already is not among gc.get_objects()

    def watched(blocks, form):
        assert not any(piece() is not None for _, piece in pieces), "the piece before is held"
        assert not any(map(is_tensor, gc.get_objects())), "the tensor before is held"
        numbers = dequantize(blocks, form)
        pieces.append((numbers.size, weakref.ref(numbers)))
        return numbers

    monkeypatch.setattr(gguf, "dequantize", watched)
    try:
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", print)
    finally:
        gc.unfreeze()
    assert sum(size for size, _ in pieces) == sum(p.numel() for p in source.parameters())
    assert max(size for size, _ in pieces) <= 1000


def is_tensor(each: object) -> bool:
    """Return whether it is one with memory; isinstance reads __class__, at which some objects warn."""
    return issubclass(type(each), torch.Tensor) and not each.is_meta
