"""Text token by token equals the tokenizer's own decoding of all tokens at once."""

from __future__ import annotations

import pytest
import tiny
import tiny_spaced
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from kvreclaim.engine.sampling.detokenizer import Detokenizer

BYTES = tiny.tokenizer()
TOKENS = st.lists(st.integers(0, len(BYTES) - 1), max_size=20)


FALLBACK = tiny_spaced.tokenizer()
THE, END, SPACE, LETTER_A = FALLBACK.convert_tokens_to_ids(["▁the", "▁end", "▁", "a"])


def fallback_bytes(text: str) -> list[int]:
    return [1 + byte for byte in text.encode()]


def run(tokenizer: PreTrainedTokenizerFast, tokens: list[int], *stops: str) -> tuple[Detokenizer, str | None]:
    """Append until a stop string is found. What was printed must never change, but for the cut."""
    detokenizer = Detokenizer(tokenizer, stops)
    for token in tokens:
        printed = detokenizer.text
        stop = detokenizer.append(token, may_stop=True)
        if stop is not None:
            return detokenizer, stop
        assert detokenizer.text.startswith(printed)
    return detokenizer, None


def test_a_character_is_printed_with_its_last_byte() -> None:
    detokenizer = Detokenizer(BYTES, ())
    printed = []
    for token in BYTES.encode("é👧!"):
        detokenizer.append(token, may_stop=True)
        printed.append(detokenizer.text)
    assert printed == ["", "é", "é", "é", "é", "é👧", "é👧!"]


@given(TOKENS)
@settings(max_examples=300, deadline=None)
def test_any_bytes_equal_decoding_them_at_once(tokens: list[int]) -> None:
    """Broken UTF-8 and special tokens included."""
    detokenizer, _ = run(BYTES, tokens)
    detokenizer.finish()
    assert detokenizer.text == BYTES.decode(tokens, skip_special_tokens=True)


@given(st.lists(st.sampled_from([THE, END, SPACE, LETTER_A, *fallback_bytes("é👧")]), max_size=12))
@settings(max_examples=300, deadline=None)
def test_broken_byte_runs_never_fail_and_never_change_what_was_printed(tokens: list[int]) -> None:
    detokenizer, _ = run(FALLBACK, tokens)
    printed = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text.startswith(printed)


@pytest.mark.parametrize(
    "tokens",
    [
        [THE, END],
        [LETTER_A, THE, *fallback_bytes("é👧"), LETTER_A],
        [*fallback_bytes("👧"), THE],
        [SPACE, SPACE, LETTER_A],
    ],
)
def test_leading_spaces_and_byte_tokens(tokens: list[int]) -> None:
    detokenizer, _ = run(FALLBACK, tokens)
    assert detokenizer.text == FALLBACK.decode(tokens)


def test_after_a_broken_byte_run_text_goes_on() -> None:
    """é is printed; the byte after it makes the run invalid as a whole."""
    tokens = [*fallback_bytes("é"), 1 + 0xA9, LETTER_A, THE]
    assert FALLBACK.decode(tokens) == "\ufffd\ufffd\ufffda the"
    assert run(FALLBACK, tokens)[0].text == "éa the"


def pieces(text: str) -> list[str]:
    return BYTES.convert_ids_to_tokens(BYTES.encode(text))


@pytest.mark.parametrize(
    ("text", "stops", "left", "found"),
    [
        ("say stop now", ("stop",), "say ", "stop"),  # over the tokens "st" and "op"
        ("the friend of", ("ien",), "the fr", "ien"),  # ends inside the token "end"
        ("weekend end", ("nd e",), "weeke", "nd e"),  # begins inside one token, ends inside another
        ("send more", ("se",), "", "se"),
        ("a\n\nb", ("\n\n",), "a", "\n\n"),
        ("ask 👧 again", ("👧",), "ask ", "👧"),
        ("ababab", ("bab", "ab"), "", "ab"),
        ("xxend", ("nd", "end"), "xx", "end"),  # both come with one token: the one that begins first
        ("then", ("hen", "hen!"), "t", "hen"),
        ("never", ("no", "neverx"), "never", None),
    ],
)
def test_stop_strings(text: str, stops: tuple[str, ...], left: str, found: str | None) -> None:
    detokenizer, stop = run(BYTES, BYTES.encode(text), *stops)
    assert left.startswith(detokenizer.text)
    detokenizer.finish()
    assert (detokenizer.text, stop) == (left, found)


def test_the_cases_above_cross_token_borders() -> None:
    assert pieces("stop") == ["st", "op"]
    assert pieces("friend")[-2:] == ["i", "end"]
    assert pieces("weekend end")[-3:] == ["end", "Ġ", "end"]


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_stopping_cuts_where_the_first_stop_string_to_be_complete_begins(text, stops) -> None:
    """One character is one token here, so the oracle looks at every beginning of the text."""
    detokenizer, stop = run(BYTES, BYTES.encode(text), *stops)
    detokenizer.finish()
    beginnings = (text[:end] for end in range(1, len(text) + 1))
    ends = next((b for b in beginnings if any(b.endswith(s) for s in stops)), None)
    if ends is None:
        assert (detokenizer.text, stop) == (text, None)
    else:
        longest = max((s for s in stops if ends.endswith(s)), key=len)
        assert (detokenizer.text, stop) == (ends.removesuffix(longest), longest)


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=4), max_size=3))
def test_what_is_printed_never_changes_even_if_a_stop_string_comes(text, stops) -> None:
    detokenizer = Detokenizer(BYTES, tuple(stops))
    printed = []
    for token in BYTES.encode(text):
        stop = detokenizer.append(token, may_stop=True)
        printed.append(detokenizer.text)
        if stop is not None:
            break
    detokenizer.finish()
    assert all(detokenizer.text.startswith(part) for part in printed)


def test_before_min_tokens_nothing_stops() -> None:
    detokenizer = Detokenizer(BYTES, ("x",))
    assert detokenizer.append(BYTES.encode("x")[0], may_stop=False) is None
    assert detokenizer.text == "x"
    assert detokenizer.append(BYTES.encode("x")[0], may_stop=True) == "x"
    assert detokenizer.text == "x"


def test_a_stop_string_complete_before_min_tokens_does_not_stop_later() -> None:
    """It does not, even where a longer stop string would begin that early."""
    detokenizer = Detokenizer(BYTES, ("x", "a long one"))
    assert detokenizer.append(BYTES.encode("x")[0], may_stop=False) is None
    assert detokenizer.append(BYTES.encode("y")[0], may_stop=True) is None
    assert detokenizer.text == "xy"


def test_a_stop_string_half_before_min_tokens_stops() -> None:
    detokenizer = Detokenizer(BYTES, ("xy",))
    assert detokenizer.append(BYTES.encode("x")[0], may_stop=False) is None
    assert detokenizer.append(BYTES.encode("y")[0], may_stop=True) == "xy"
    assert detokenizer.text == ""
