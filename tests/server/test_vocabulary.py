"""A token's text is what it adds to its text, its bytes are its bytes: the tokenizer's own decoding of all
tokens at once is the oracle."""

from __future__ import annotations

import pytest
import tiny
import tiny_spaced
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from kvreclaim.engine.sampling.detokenizer import Detokenizer
from kvreclaim.engine.sampling.logprobs import Logprob
from kvreclaim.server.base.vocabulary import Continuation, TokenPlaces, Vocabulary
from kvreclaim.server.openai.logprobs import completion_logprobs

CHARACTERS = "naïve – 漢字 the end 👧"


def words_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like the demo model's: no token has a space, decoding inserts them."""
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, "end": 2, "<s>": 3}, "<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")


TOKENIZERS = {
    **{kind: tiny_spaced.tokenizer(kind) for kind in tiny_spaced.KINDS},
    "bytes": tiny.tokenizer(),
    "words": words_tokenizer(),
}
VOCABULARIES = {name: Vocabulary(tokenizer) for name, tokenizer in TOKENIZERS.items()}
WHOLE_VOCABULARIES = {
    name: Vocabulary(tokenizer, skip_special_tokens=False) for name, tokenizer in TOKENIZERS.items()
}
WHOLE = {
    name: [token for token in range(len(tokenizer)) if "�" not in tokenizer.decode([token])]
    for name, tokenizer in TOKENIZERS.items()
}
"""Tokens that are no part of a character."""


def spelt(vocabulary: Vocabulary, tokens: list[int]) -> list[tuple[str, int, bytes]]:
    """Text, offset and bytes of each."""
    places = TokenPlaces(vocabulary)
    found = []
    for token in tokens:
        own, offset, _ = places.append(token)
        found.append((own.text, offset, bytes(own.bytes)))
    return found


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_texts_and_bytes_join_to_the_text(name: str, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.sampled_from(WHOLE[name]), max_size=12))
    whole = TOKENIZERS[name].decode(tokens, skip_special_tokens=True)
    at = 0
    found = spelt(VOCABULARIES[name], tokens)
    for token, (text, offset, own) in zip(tokens, found, strict=True):
        assert offset == at
        if token in TOKENIZERS[name].all_special_ids:
            assert (text, own) == (TOKENIZERS[name].convert_ids_to_tokens(token), b"")
        else:
            assert (text, own) == (whole[at : at + len(text)], text.encode())
            at += len(text)
    assert at == len(whole)


@pytest.mark.parametrize("name", ["strip", "metaspace", "bytes"])
def test_parts_of_characters_have_their_bytes(name: str) -> None:
    tokens = TOKENIZERS[name].encode(CHARACTERS)
    assert TOKENIZERS[name].decode(tokens) == CHARACTERS
    found = spelt(VOCABULARIES[name], tokens)
    assert b"".join(own for _, _, own in found).decode() == CHARACTERS
    assert any(text == "�" for text, _, _ in found), "some tokens are parts of a character"
    assert all(CHARACTERS[at:].startswith(text) for text, at, _ in found if text != "�")


@pytest.mark.parametrize("name", ["strip", "metaspace"])
def test_offsets_behind_a_broken_character(name: str) -> None:
    broken, end = TOKENIZERS[name].convert_tokens_to_ids(["<0xE2>", "▁end"])
    text = TOKENIZERS[name].decode([end, broken, end])
    assert text == "end� end"
    found = spelt(VOCABULARIES[name], [end, broken, end])
    assert [(part, at) for part, at, _ in found] == [("end", 0), ("�", 3), (" end", 4)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_special_tokens_that_are_not_skipped_are_text(name: str, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.sampled_from(WHOLE[name]), max_size=12))
    found = spelt(WHOLE_VOCABULARIES[name], tokens)
    assert "".join(text for text, _, _ in found) == TOKENIZERS[name].backend_tokenizer.decode(
        tokens, skip_special_tokens=False
    )
    assert [at for _, at, _ in found] == [
        sum(len(text) for text, _, _ in found[:n]) for n in range(len(found))
    ]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_no_two_tokens_share_a_key(name: str, first: bool) -> None:
    """All tokens are alternatives of one that is among the likeliest or last; it keeps its own text."""
    vocabulary, size = VOCABULARIES[name], len(TOKENIZERS[name])
    report = {token: Logprob(-float(token), token + 1) for token in range(size)}
    lead = [] if first else WHOLE[name][1:2]
    for drawn in (1, size - 1):
        places = TokenPlaces(vocabulary)
        for token in lead:
            places.append(token)
        shape = completion_logprobs([drawn], [report], places)
        [top], [text] = shape["top_logprobs"], shape["tokens"]
        assert sorted(top.values()) == sorted(found.logprob for found in report.values())
        assert top[text] == shape["token_logprobs"][0] == -float(drawn)
        named = {key: value for key, value in top.items() if key.startswith("token_id:")}
        assert all(value == -float(key.removeprefix("token_id:")) for key, value in named.items())


def test_of_alternatives_that_look_alike_the_likelier_has_the_text() -> None:
    """At the beginning of a text "▁the" and "the" add the same; behind it they do not."""
    tokenizer, vocabulary = TOKENIZERS["strip"], VOCABULARIES["strip"]
    spaced, bare, end = tokenizer.convert_tokens_to_ids(["▁the", "the", "end"])
    report = {bare: Logprob(-1.0, 1), spaced: Logprob(-2.0, 2), end: Logprob(-3.0, 3)}
    shape = completion_logprobs([end, end], [report, report], TokenPlaces(vocabulary))
    assert shape["top_logprobs"] == [
        {"the": -1.0, f"token_id:{spaced}": -2.0, "end": -3.0},
        {"the": -1.0, " the": -2.0, "end": -3.0},
    ]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data())
def test_an_answer_goes_on_from_its_prompt(name: str, data: st.DataObject) -> None:
    """The answer's text, decoded alone, and in front of it what joins it to the prompt's."""
    tokens = st.lists(st.sampled_from(WHOLE[name]), max_size=8)
    prompt, answer, tokenizer = data.draw(tokens), data.draw(tokens), TOKENIZERS[name]
    detokenizer, text = Detokenizer(tokenizer, ()), tokenizer.decode(prompt, skip_special_tokens=True)
    goes_on = Continuation(VOCABULARIES[name], prompt)
    for token in answer:
        before = len(detokenizer.text)
        detokenizer.append(token, may_stop=False)
        text += goes_on.take([token], detokenizer.text[before:])
    assert text == tokenizer.decode(prompt + answer, skip_special_tokens=True)
