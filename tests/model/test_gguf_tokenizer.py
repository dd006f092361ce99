"""The tokenizer of a GGUF file begins texts, reads the first word and picks templates as llama.cpp does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf

from kvreclaim import LLM
from kvreclaim.engine.api.chat import chat_text
from kvreclaim.model.gguf import convert_gguf
from kvreclaim.model.loader import load_tokenizer

BOS = {"controls": ["<s>"], "ends": {"eos": tiny_gguf.EOS, "bos": tiny_gguf.CONTROL}}
PIECES = {"is_sentencepiece": True, "ends": {"bos": 1, "eos": 2}}
NAMED = [
    {"name": "default", "template": "D{% for m in messages %}{{ m.content }}{% endfor %}"},
    {
        "name": "tool_use",
        "template": "T{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}",
    },
]
BEGUN = ("llama-bpe", "llama3", "falcon3", "pixtral", "lfm2", "tekken")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))


def tokens(directory: Path, text: str = "the", **how: Any) -> list[str]:
    """Tokens of a text by a file's tokenizer, which is also that of the directory made of the file."""
    file = directory / "tiny.gguf"
    tiny_gguf.write(file, **how)
    convert_gguf(file, directory / "made", print)
    own, made = load_tokenizer(file), load_tokenizer(directory / "made")
    ids = own.encode(text)
    assert made.encode(text) == ids
    assert own.decode(ids, skip_special_tokens=True) == made.decode(ids, skip_special_tokens=True) == text
    return own.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("pre", BEGUN)
def test_rules_that_begin_texts(pre: str, tmp_path: Path) -> None:
    assert tokens(tmp_path, pre=pre, **BOS) == ["<s>", "the"]


@pytest.mark.parametrize("pre", ["qwen2", "smollm", "gpt-2", "default"])
def test_rules_that_begin_nothing(pre: str, tmp_path: Path) -> None:
    assert tokens(tmp_path, pre=pre, **BOS) == ["the"]


@pytest.mark.parametrize("begins", [True, False])
def test_a_file_that_says_so_is_followed(begins: bool, tmp_path: Path) -> None:
    for pre in ("llama-bpe", "qwen2"):
        (tmp_path / pre).mkdir()
        flags = {"add_bos_token": begins}
        assert tokens(tmp_path / pre, pre=pre, flags=flags, **BOS) == ["<s>"] * begins + ["the"]


def test_without_a_token_nothing_begins(tmp_path: Path) -> None:
    assert tokens(tmp_path, pre="llama-bpe") == ["the"]


@pytest.mark.parametrize(
    ("flags", "ends", "want"),
    [
        ({}, {"bos": 1, "eos": 2}, ["<s>", "▁the"]),
        ({}, {"eos": 2}, ["<s>", "▁the"]),
        ({"add_bos_token": False}, {"bos": 1, "eos": 2}, ["▁the"]),
        ({"add_space_prefix": True}, {"bos": 1, "eos": 2}, ["<s>", "▁the"]),
        ({"add_space_prefix": False}, {"bos": 1, "eos": 2}, ["<s>", "the"]),
        ({"add_space_prefix": False, "add_bos_token": False}, {"bos": 1, "eos": 2}, ["the"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_sentencepiece(
    family: str, flags: dict[str, bool], ends: dict[str, int], want: list[str], tmp_path: Path
) -> None:
    if family == "phi3":
        file = tmp_path / "tiny.gguf"
        tiny_gguf.write(file, family=family, is_sentencepiece=True, flags=flags, ends=ends)
        own = load_tokenizer(file)
        assert own.convert_ids_to_tokens(own.encode("the")) == want
    else:
        assert tokens(tmp_path, is_sentencepiece=True, flags=flags, ends=ends) == want


def test_spaces_of_a_text_stay(tmp_path: Path) -> None:
    got = tokens(tmp_path, " the a", **PIECES, flags={"add_space_prefix": False})
    assert got == ["<s>", "▁the", "▁a"]


def test_tools_take_their_own_template(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf", pre="qwen2", template=NAMED)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "made", print)
    messages = [{"role": "user", "content": "the"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for where in (tmp_path / "tiny.gguf", tmp_path / "made"):
        with LLM(where, num_blocks=64, cache_packed_weights=False) as llm:
            assert chat_text(llm.loaded, messages) == "Dthe"
            assert chat_text(llm.loaded, messages, tools=[tool]).startswith('T[{"type": "function"')


def test_one_template_is_no_dict(tmp_path: Path) -> None:
    tiny_gguf.write(tmp_path / "tiny.gguf")
    assert load_tokenizer(tmp_path / "tiny.gguf").chat_template == tiny.CHAT_TEMPLATE
