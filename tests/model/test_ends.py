"""What ends an answer: all that a model's files name, of a packed file as of the directory made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import tiny_gguf
import tiny_packed
from tokenizers import AddedToken
from transformers import Gemma3Config, LlamaConfig, Phi3Config, PreTrainedTokenizerFast, Qwen2Config

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.request.outputs import CompletionOutput
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.ends import directory_ends
from kvreclaim.model.gguf import convert_gguf
from kvreclaim.model.loader import load_model

LLAMA3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>", "<|eot_id|>"]
LLAMA3_ENDS = {"<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"}
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GEMMA = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
PHI3 = ["<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>"]


def turns(before: str, behind: str) -> str:
    return f"{{% for m in messages %}}{before}{{{{ m.role }}}}\n{{{{ m.content }}}}{behind}\n{{% endfor %}}"


CHATML = turns("<|im_start|>", "<|im_end|>")
FILES = {
    "llama3": (LLAMA3, {"eos": "<|end_of_text|>", "eot": "<|eot_id|>", "eom": "<|eom_id|>"}, "", LLAMA3_ENDS),
    "llama3 as found": (LLAMA3, {"eos": "<|eot_id|>"}, "", LLAMA3_ENDS),
    "gemma3": (GEMMA, {"eos": "<eos>", "eot": "<end_of_turn>"}, "", {"<eos>", "<end_of_turn>"}),
    "gemma3 as found": (GEMMA, {"eos": "<eos>"}, "", {"<eos>", "<end_of_turn>"}),
    "qwen2.5": (QWEN, {"eos": "<|im_end|>"}, CHATML, {"<|im_end|>", "<|endoftext|>"}),
    "qwen2.5 apart": (
        QWEN,
        {"eos": "<|endoftext|>", "eot": "<|im_end|>"},
        "",
        {"<|im_end|>", "<|endoftext|>"},
    ),
    "phi3": (PHI3, {"eos": "<|endoftext|>"}, turns("<|assistant|>", "<|end|>"), {"<|endoftext|>", "<|end|>"}),
    "gpt-oss": (["<|end|>", "<|return|>"], {"eos": "<|return|>"}, "", {"<|return|>"}),
    "named by the header": (["<over>", "<out>"], {"eot": "<over>", "eom": "<out>"}, "", {"<over>", "<out>"}),
    "named by the template": (["<over>"], {"eos": "<eos>"}, turns("", "<over>"), {"<eos>", "<over>"}),
    "plain text behind an answer": (["<over>"], {"eos": "<eos>"}, turns("<over>", ". <over>"), {"<eos>"}),
    "a template of another kind": (
        ["<over>"],
        {"eos": "<eos>"},
        "{{ messages.none.there }}<over>",
        {"<eos>"},
    ),
    "no control token": ([], {"eos": "<eos>"}, turns("", "<|im_end|>"), {"<eos>"}),
}


def texts(path: Path) -> set[str]:
    loaded = load_model(path)
    return set(loaded.tokenizer.convert_ids_to_tokens(sorted(loaded.eos_token_ids)))


@pytest.mark.parametrize(("controls", "header", "template", "want"), FILES.values(), ids=FILES)
def test_of_a_gguf_file_packed_and_fetched(
    controls, header, template, want, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    ids = {text: tiny_gguf.CONTROL + i for i, text in enumerate(controls)} | {"<eos>": tiny_gguf.EOS}
    ends = {kind: ids[text] for kind, text in header.items()}
    tiny_gguf.write(
        tmp_path / "tiny.gguf", controls=controls, ends=ends, template=template or tiny.CHAT_TEMPLATE
    )
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", print)
    assert texts(tmp_path / "tiny.gguf") == texts(tmp_path / "made") == want
    eos_token_id = json.loads((tmp_path / "made" / "generation_config.json").read_text())["eos_token_id"]
    assert eos_token_id == (min(ids[t] for t in want) if len(want) == 1 else sorted(ids[t] for t in want))


def named(end: str | None, behind: str = "", *special: str) -> PreTrainedTokenizerFast:
    """A tokenizer with special tokens from 263 on, whose template writes `behind` behind a message."""
    tokenizer = tiny.tokenizer(eos_token=end)
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.chat_template = turns("", behind)
    return tokenizer


SIZE = {"vocab_size": 300}
TEXT = {"text_config": {"vocab_size": 300, "eos_token_id": 8}}
DIRECTORIES = {
    "llama3": ([251, 258, 259], LlamaConfig(eos_token_id=259, **SIZE), None, {251, 258, 259}),
    "llama3 without": ([251, 258, 259], LlamaConfig(**SIZE), None, {251, 258, 259}),
    "gemma3": ([1, 106], Gemma3Config(eos_token_id=[1, 106], **TEXT), None, {1, 106, 8}),
    "gemma3 without": (None, Gemma3Config(eos_token_id=[1, 106], text_config=SIZE), None, {1, 106}),
    "qwen2.5": ([245, 243], Qwen2Config(eos_token_id=245, **SIZE), named(None, "<|im_end|>"), {243, 245}),
    "phi3": ([200, 201, 207], Phi3Config(eos_token_id=200, **SIZE), named("<eos>"), {200, 201, 207, 262}),
    "one id": (7, LlamaConfig(eos_token_id=9, **SIZE), None, {7, 9}),
    "of the class": (None, LlamaConfig(**SIZE), None, {2}),
    "none": (None, Qwen2Config(**SIZE), None, set()),
    "tokenizer": (None, LlamaConfig(**SIZE), named("<eos>"), {262}),
    "template": (None, LlamaConfig(**SIZE), named(None, "<over>", "<over>"), {263}),
    "tokens that are none": ([7, 300, -1], LlamaConfig(eos_token_id=None, **SIZE), None, {7}),
}


@pytest.mark.parametrize(("generation", "config", "tokenizer", "want"), DIRECTORIES.values(), ids=DIRECTORIES)
def test_of_a_directory(generation, config, tokenizer, want, tmp_path: Path) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert directory_ends(str(tmp_path), tokenizer, config) == want


@pytest.mark.parametrize("kind", ["awq", None])
def test_a_loaded_directory_has_them(kind: str | None, tmp_path: Path) -> None:
    if kind is None:
        tiny.save_model("llama", tmp_path, eos_token_id=9)
    else:
        tiny_packed.write(kind, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    named("<eos>").save_pretrained(tmp_path)
    assert load_model(tmp_path).eos_token_ids == {7, 8, tiny_gguf.EOS} | ({9} if kind is None else set())


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_generation_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text, encoding="latin-1")
    with pytest.raises(
        InvalidArgumentError, match=r"^generation_config\.json of model .*repair or remove it"
    ):
        directory_ends(str(tmp_path), None, LlamaConfig())


NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


@pytest.mark.parametrize("drafts", [None, NGRAM], ids=["alone", "drafts"])
@pytest.mark.parametrize("kind", ["eot", "eom"])
def test_an_answer_ends_with_each(kind: str, drafts, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))

    def answered(ends: dict[str, int], **more) -> CompletionOutput:
        tiny_gguf.write(tmp_path / "tiny.gguf", ends=ends)
        llm = LLM(tmp_path / "tiny.gguf", device="cpu", num_blocks=60, speculative_config=drafts)
        params = SamplingParams(temperature=0.0, max_tokens=24, **more)
        return llm.generate(tiny.prompts((30,), seed=2), params)[0].outputs[0]

    whole = answered({}, ignore_eos=True).token_ids
    first, second = [token for token in dict.fromkeys(whole) if token not in whole[:4]][:2]
    ends = {"eos": second, kind: first}
    ended = answered(ends)
    assert ended.token_ids == whole[: whole.index(first) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert answered(ends, ignore_eos=True).token_ids == whole
    assert {first, second}.isdisjoint(answered(ends, min_tokens=20).token_ids[:19])
