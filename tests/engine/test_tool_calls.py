"""Tool calls in streamed text: whatever the cuts, the same pieces; nothing lost, nothing invented."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.engine.api.tool_calls import HermesParser, Piece, ToolCall
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.config import ServerConfig

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CALL = ToolCall("weather", '{"city": "Bern"}')


def parsed(chunks: list[str]) -> list[Piece]:
    """All pieces, neighbouring text joined."""
    parser = HermesParser()
    pieces: list[Piece] = []
    for piece in [p for chunk in chunks for p in parser.feed(chunk)] + parser.finish():
        assert piece != ""
        if pieces and isinstance(piece, str) and isinstance(pieces[-1], str):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no call at all", ["no call at all"]),
        ("", []),
        (WEATHER, [CALL]),
        (f"Let me look.\n{WEATHER}", ["Let me look.", CALL]),
        (f"{WEATHER}\n{WEATHER}\n", [CALL, CALL]),
        (f"a {WEATHER} b\n", ["a", CALL, "b\n"]),
        ("ends with spaces  \n", ["ends with spaces  \n"]),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", "{}")]),
        ('<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>', [ToolCall("f", '{"a": [1]}')]),
        # The closing tag may be missing at the end, or stand inside a string.
        (WEATHER.removesuffix("</tool_call>"), [CALL]),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "a </tool_call> \\" b"}}</tool_call>!',
            [ToolCall("f", '{"x": "a </tool_call> \\" b"}'), "!"],
        ),
        # What is no call is text, to the last character; a call behind it is still found.
        ("x <tool_call>\nnot JSON\n</tool_call> y", ["x <tool_call>\nnot JSON\n</tool_call> y"]),
        (f"<tool_call> oh {WEATHER}", ["<tool_call> oh", CALL]),
        ('a <tool_call>{"name": "f", "argum', ['a <tool_call>{"name": "f", "argum']),
        ("<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
        ('<tool_call>{"name": ""}</tool_call>', ['<tool_call>{"name": ""}</tool_call>']),
        (
            '<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
            ['<tool_call>{"name": "f", "arguments": "x"}</tool_call>'],
        ),
        # JSON that Python reads and others do not.
        (
            '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
            ['<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
            ['<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'],
        ),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", ["<tool_call>" + "[" * 100_000 + "</tool_call>"]),
    ],
)
def test_pieces(text: str, expected: list[Piece]) -> None:
    assert parsed([text]) == expected
    if len(text) < 1000:
        assert parsed(list(text)) == expected


words = st.text(st.sampled_from('ab {}"<>/_\n'), max_size=12)
values = st.dictionaries(st.text(max_size=3), st.text(max_size=8) | st.integers() | st.booleans(), max_size=3)
calls = st.builds(lambda name, args: (name, args), st.text("fgh", min_size=1, max_size=4), values)


@given(st.lists(words.filter(lambda w: w == w.strip()) | calls, max_size=5), st.data())
def test_every_cut_of_a_stream_gives_the_same_pieces(
    parts: list[str | tuple[str, dict[str, object]]], data: st.DataObject
) -> None:
    text, expected = "", []
    for part in parts:
        if isinstance(part, str):
            text += part
            if part and expected and isinstance(expected[-1], str):
                expected[-1] += part
            elif part:
                expected.append(part)
            continue
        name, arguments = part
        text += "<tool_call>" + json.dumps({"name": name, "arguments": arguments}) + "</tool_call>"
        expected.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    chunks = [text[a:b] for a, b in pairwise([0, *cuts, len(text)])]
    assert parsed(chunks) == parsed([text]) == expected


def test_text_is_passed_on_as_soon_as_it_cannot_be_a_call() -> None:
    parser = HermesParser()
    assert parser.feed("sun") == ["sun"]
    assert parser.feed("shine \n<tool_") == ["shine"], "whitespace and half a tag wait"
    assert parser.feed("box> rain") == [" \n<tool_box> rain"]
    assert parser.feed("\n<tool_call>") == [], "a call is passed on whole"
    assert parser.feed('{"name": "f"}</tool_call') == []
    assert parser.feed(">") == [ToolCall("f", "{}")]
    assert parser.finish() == []


def test_an_unknown_parser_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match=r"tool_call_parser is 'mermes'; it must be one of hermes"):
        ServerConfig(served_model_name=("m",), tool_call_parser="mermes")
