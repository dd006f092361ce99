"""Outputs in every format: the published examples, cut anywhere, are the same pieces; nothing is lost."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence

import pytest

from kvreclaim.parsers.formats import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Splitter,
    holds_name,
    reasoning_parser_of,
    tool_parser_of,
)
from kvreclaim.parsers.json_calls import DEEPSEEK, KIMI, LLAMA, MISTRAL
from kvreclaim.parsers.json_calls import HERMES as HERMES_FORMAT
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text, ToolCall, merged
from kvreclaim.parsers.tag_calls import DSML as DSML_FORMAT
from kvreclaim.parsers.tag_calls import GLM, MINIMAX
from kvreclaim.parsers.tag_calls import QWEN3_CODER as QWEN3_CODER_FORMAT

JSON_FORMATS = (DEEPSEEK, HERMES_FORMAT, KIMI, LLAMA, MISTRAL)
TAG_FORMATS = (DSML_FORMAT, GLM, MINIMAX, QWEN3_CODER_FORMAT)
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "zip": {"type": ["string", "null"]},
            "options": {"type": "object"},
        },
    }
}
WEATHER = ToolCall("get_weather", '{"city": "Bern"}')
HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>'
BARE = '{\n  "name": "get_weather",\n  "arguments": {"city": "Bern"}\n}'
OTHER = '{"name": "add", "arguments": {"a": 2}}'
"""No call, for there is no such function."""
QWEN3_CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
    '<parameter=days>\n3\n</parameter>\n<parameter=options>\n{"a": [1, null]}\n</parameter>\n'
    "<parameter=zip>\nnull\n</parameter>\n</function>\n</tool_call>"
)
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">Bern</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
DEEPSEEK_V3 = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
    '{"city": "Bern"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n'
    "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
HARMONY = (
    "<|channel|>analysis<|message|>Look it up.<|end|><|start|>assistant<|channel|>commentary"
    ' to=functions.get_weather <|constrain|>json<|message|>{"city": "Bern"}<|call|>'
)
EXAMPLES: list[tuple[str, str, list[Text | Reasoning | ToolCall]]] = [
    ("hermes", "no call at all", [Text("no call at all")]),
    ("hermes", "", []),
    ("hermes", f"Let me look.\n{HERMES}", [Text("Let me look."), WEATHER]),
    ("hermes", f"{HERMES}\n{HERMES}\n", [WEATHER, WEATHER]),
    ("hermes", f"a {HERMES} b\n", [Text("a"), WEATHER, Text("b\n")]),
    ("hermes", "ends with spaces  \n", [Text("ends with spaces  \n")]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", "{}")]),
    (
        "hermes",
        '<tool_call>{"arguments": {"a": [1]}, "name": "f"}</tool_call>',
        [ToolCall("f", '{"a": [1]}')],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}, "id": 7}</tool_call>', [ToolCall("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"parameters": {"city": "Bern"}, "name": "get_weather"}\n</tool_call>',
        [WEATHER],
    ),
    # The closing tag may be missing at the end, or stand inside a string.
    ("hermes", HERMES.removesuffix("</tool_call>"), [WEATHER]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": "a </tool_call> \\" b"}}</tool_call>!',
        [ToolCall("f", '{"x": "a </tool_call> \\" b"}'), Text("!")],
    ),
    (
        "hermes",
        '<tool_call>{"arguments": {"x": "a </tool_call> \\" b"}, "name": "f"}</tool_call>!',
        [ToolCall("f", '{"x": "a </tool_call> \\" b"}'), Text("!")],
    ),
    # Qwen2.5-Coder writes calls without tags, mostly in a code block.
    ("hermes", BARE, [WEATHER]),
    ("hermes", f"```json\n{BARE}\n```", [WEATHER]),
    ("hermes", f" ```\n{BARE}\n{BARE}\n```\n", [WEATHER, WEATHER]),
    ("hermes", f"```json\n{BARE}", [WEATHER]),
    ("hermes", f"```json\n{BARE}\n```\nThen {HERMES}", [WEATHER, Text("Then"), WEATHER]),
    ("hermes", f"{BARE} and more", [WEATHER, Text("and more")]),
    ("hermes", f"{BARE}\n{OTHER}", [WEATHER, Text(f"\n{OTHER}")]),
    # What is no call is text; a call behind it is still found.
    ("hermes", f"```json\n{OTHER}\n```\n{HERMES}", [Text(f"```json\n{OTHER}\n```"), WEATHER]),
    ("hermes", f"<tool_call> oh {HERMES}", [Text("<tool_call> oh"), WEATHER]),
    (
        "qwen3_coder",
        f"A\n{QWEN3_CODER}",
        [
            Text("A"),
            ToolCall("get_weather", '{"city": "Bern", "days": 3, "options": {"a": [1, null]}, "zip": null}'),
        ],
    ),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", [ToolCall("now", "{}")]),
    (
        "qwen3_coder",
        '<function=get_weather>\n<parameter=city>\n\n"Be\\rn"\n\n</parameter>\n</function>\n</tool_call>',
        [ToolCall("get_weather", '{"city": "\\n\\"Be\\\\rn\\"\\n"}')],
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=x>\n12\n</parameter>\n</function>\n</tool_call>",
        [ToolCall("f", '{"x": "12"}')],
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Bern"}}', [WEATHER]),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Bern"}}', [WEATHER]),
    (
        "llama3_json",
        '{"name": "get_weather", "parameters": {"city": "Bern"}}; {"name": "get_weather", "parameters": {}}',
        [WEATHER, ToolCall("get_weather", "{}")],
    ),
    (
        "llama3_json",
        '{"name": "Alice", "parameters": {}} is JSON',
        [Text('{"name": "Alice", "parameters": {}} is JSON')],
    ),
    (
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Bern"}}; then I wait',
        [WEATHER, Text("; then I wait")],
    ),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": "Bern"}}\n', [WEATHER]),
    ("mistral", 'Hm.[TOOL_CALLS]get_weather{"city": "Bern"}', [Text("Hm."), WEATHER]),
    ("mistral", r'[TOOL_CALLS]C:\x{"a": 1}', [ToolCall(r"C:\x", '{"a": 1}')]),
    ("harmony", "<|channel|>commentary to=functions.now<|message|><|call|>", [ToolCall("now", "{}")]),
    (
        "mistral",
        '[TOOL_CALLS]get_weather[CALL_ID]aB3[ARGS]{"city": "Bern"}[TOOL_CALLS]now[ARGS]{}',
        [ToolCall("get_weather", '{"city": "Bern"}', "aB3"), ToolCall("now", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bern"}, "id": "a1"}, '
        '{"name": "now", "arguments": {}}]',
        [WEATHER, ToolCall("now", "{}")],
    ),
    ("deepseek_v3", DEEPSEEK_V3, [WEATHER, ToolCall("now", "{}")]),
    (
        "deepseek_v3",
        "Sure.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Bern"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [Text("Sure."), WEATHER],
    ),
    (
        "deepseek_v32",
        f"Sure.\n\n{DSML}",
        [Text("Sure."), ToolCall("get_weather", '{"city": "Bern", "days": 5}')],
    ),
    (
        "glm45",
        "Sure.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
        [Text("Sure."), ToolCall("get_weather", '{"city": "Bern", "days": 3}')],
    ),
    ("glm45", "<tool_call>now\n</tool_call>", [ToolCall("now", "{}")]),
    (
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|>',
        [ToolCall("get_weather", '{"city": "Bern"}', "functions.get_weather:0")],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Bern</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        [WEATHER],
    ),
    ("harmony", HARMONY, [Reasoning("Look it up."), WEATHER]),
    (
        "harmony",
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Hello.<|return|>",
        [Reasoning("Easy."), Text("Hello.")],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.now"
        "<|channel|>commentary json<|message|>{}",
        [Text("I look."), ToolCall("now", "{}")],
    ),
]
BROKEN = [
    ("hermes", "x <tool_call>\nnot JSON\n</tool_call> y"),
    ("hermes", 'a <tool_call>{"name": "f", "argum'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "half'),
    ("hermes", "<tool_call>[1]</tool_call>"),
    ("hermes", '<tool_call>{"name": ""}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1}} and so on</tool_call> y'),
    ("hermes", "<tool_call>" + "[" * 1000 + "</tool_call>"),
    ("hermes", '<tool_call>{"name": "get\nweather", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "a\\q", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "note": tru3, "arguments": {}}</tool_call>'),
    ("hermes", OTHER),
    ("hermes", f"```json\n{OTHER}\n```"),
    ("hermes", f"```python\n{BARE}\n```"),
    ("hermes", f"As JSON: {BARE}"),
    ("hermes", '{"arguments": {"city": 3}, "name": "get_weather"}'),
    ("hermes", '{"name": "x", "name": "get_weather", "arguments": {"city": 3}}'),
    ("hermes", '```json\n{"city": "Bern"}\n```'),
    ("llama3_json", '{"type": "function", "name": "Alice", "parameters": {}}'),
    ("llama3_json", '{"parameters": {"a": 1}, "name": "Alice"} is JSON'),
    ("llama3_json", '{"type": "report", "rows": [1, {"name": "x"}]}'),
    ("json_array", '[{"parameters": {}, "name": 5}]'),
    ("mistral", '[TOOL_CALLS] [{"arguments": {"a": 1}}]'),
    ("hermes", 'the <tool_call> tag is 5" wide, said "he" {"name": "f"}</tool_call>'),
    ("qwen3_coder", "a <tool_call>\n<function=f>\n<parameter=x>\nhalf"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nno parameter</function>"),
    ("glm45", "<tool_call>f\n<arg_key>city</arg_key>"),
    ("mistral", "[TOOL_CALLS] is a marker"),
    ("deepseek_v3", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": oops}'),
    ("llama3_json", '{"nam'),
    ("llama3_json", '{"name": "get_weather", "parameters": {"city": Bern}}'),
    ("harmony", "<|channel|>commentary to=functions.f"),
]
"""Outputs that hold no call that is complete: all of them is text."""


def pieces(tool_parser: str, chunks: Sequence[str], **more: str) -> list[Piece]:
    if tool_parser == "harmony":
        more.setdefault("reasoning_parser", "harmony")
    splitter = Splitter(tool_parser, tools=TOOLS, **more)
    found = [piece for chunk in chunks for piece in splitter.take(chunk, last=False)]
    found += splitter.take("", last=True)
    assert splitter.num_calls == found.count(CallEnd())
    assert all(piece.text for piece in found if isinstance(piece, Text | Reasoning | Arguments))
    return found


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_published_examples_cut_anywhere(name: str, text: str, expected: list[Piece]) -> None:
    assert merged(pieces(name, [text])) == expected
    assert merged(pieces(name, list(text))) == expected
    for place in range(len(text)):
        assert merged(pieces(name, [text[:place], text[place:]])) == expected
    assert all(json.loads(call.arguments) is not None for call in expected if isinstance(call, ToolCall))


@pytest.mark.parametrize(("name", "text"), BROKEN)
def test_what_is_no_call_is_text_to_the_last_character(name: str, text: str) -> None:
    assert merged(pieces(name, [text]), cut_as_text=True) == [Text(text)]
    assert merged(pieces(name, list(text)), cut_as_text=True) == [Text(text)]


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_an_output_that_ends_within_a_call_has_it_so_far(name: str, text: str, expected: list[Piece]) -> None:
    """Nothing of it is text; its arguments are the beginning of those of the whole output."""
    calls = [part for part in expected if isinstance(part, ToolCall)]
    for place in range(len(text)):
        found = pieces(name, list(text[:place]))
        whole = merged(found)
        assert whole == merged(pieces(name, [text[:place]]))
        begun = [part for part in whole if isinstance(part, ToolCall)]
        for call, complete in zip(begun, calls, strict=False):
            assert call.name == complete.name
            if name == "harmony" and call.arguments == "{}":  # no arguments, as no marker is shown
                continue
            assert complete.arguments.startswith(call.arguments) if call.is_cut else call == complete
        assert [call.is_cut for call in begun[:-1]] == [False] * (len(begun) - 1)
        if begun and begun[-1].is_cut:
            assert whole[-1] is begun[-1]
            assert isinstance(found[-1], CallEnd)
            streamed = [piece.text for piece in found if isinstance(piece, Arguments)]
            assert "".join(streamed) == "".join(call.arguments for call in begun)


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "half', '{"x": "half'),
        ("harmony", "<|channel|>commentary to=functions.f<|message|>{", "{"),
        ("glm45", "<tool_call>f\n<arg_key>ci", ""),
        ("glm45", "<tool_call>get_weather\n<arg_key>options</arg_key><arg_value>[1, ", '{"options": [1,'),
        ("glm45", "<tool_call>get_weather\n<arg_key>days</arg_key><arg_value>so</arg", '{"days": "so"'),
        ("qwen3_coder", "<function=get_weather><parameter=city>\nBe\n</param", '{"city": "Be'),
        ("qwen3_coder", "<function=get_weather><parameter=city>\nB\n</parameter>\n</func", '{"city": "B"'),
    ],
)
def test_arguments_so_far(name: str, text: str, arguments: str) -> None:
    (call,) = merged(pieces(name, [text]))
    assert isinstance(call, ToolCall)
    assert (call.arguments, call.is_cut) == (arguments, True)


@pytest.mark.parametrize("rest", ["<parameter oops>1</parameter>", "</function> and more", "no parameter"])
def test_no_tag_of_the_call_at_the_end_is_text(rest: str) -> None:
    text = f"<tool_call>\n<function=f>\n{rest}"
    assert merged(pieces("qwen3_coder", [text])) == [Text(text)]


NUMBERS = '{"x": 1e999, "y":[-1E+999, 1.50]}'
QWEN3 = "<function=f>\n<parameter=x>\n{}\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {NUMBERS}}}</tool_call>', NUMBERS),
        ("hermes", f'<tool_call>{{"arguments": {NUMBERS}, "name": "f"}}</tool_call>', NUMBERS),
        ("llama3_json", f'{{"name": "get_weather", "parameters": {NUMBERS}}}', NUMBERS),
        ("mistral", f"[TOOL_CALLS]f[ARGS]{NUMBERS}", NUMBERS),
        ("qwen3_coder", QWEN3.format(NUMBERS), f'{{"x": {NUMBERS}}}'),
        ("qwen3_coder", QWEN3.format("-1e999"), '{"x": -1e999}'),
    ],
)
def test_arguments_are_what_the_model_wrote(name: str, text: str, arguments: str) -> None:
    """Numbers, too, that no float holds."""
    tools = {function: {"properties": {"x": {"type": ["number", "object"]}}} for function in ("f", *TOOLS)}
    for chunks in ([text], list(text)):
        splitter = Splitter(name, tools=tools)
        found = [piece for chunk in chunks for piece in splitter.take(chunk, last=False)]
        (call,) = merged(found + splitter.take("", last=True))
        assert isinstance(call, ToolCall)
        assert call.arguments == arguments


OBJECTS = [
    ("hermes", "arguments", "<tool_call>\n{}\n</tool_call>", "\n"),
    ("llama3_json", "parameters", "{}", "; "),
    ("llama3_json", "arguments", "<|python_tag|>{}", ""),
    ("mistral", "arguments", "[TOOL_CALLS] [{}]", ""),
    ("json_array", "parameters", "[{}]", ""),
]


@pytest.mark.parametrize(("name", "arguments", "shape", "between"), OBJECTS)
def test_a_calls_fields_in_any_order(name: str, arguments: str, shape: str, between: str) -> None:
    """Whole, and cut anywhere."""
    given = {"name": "get_weather", arguments: {"city": "Bern"}, "type": "function", "meta": {"name": [1]}}
    for size in range(2, len(given) + 1):
        for fields in itertools.permutations(given.items(), size):
            if not {"name", arguments} <= dict(fields).keys() or (
                name != "hermes" and fields[0][0] == "meta"
            ):
                continue
            one = json.dumps(dict(fields))
            inside = f"{one}, {one}" if shape.endswith("[{}]") else one
            text = shape.replace("{}", inside)
            text = between.join([text] * (2 if between else 1))
            wanted = [WEATHER] * (2 if between or inside != one else 1)
            assert merged(pieces(name, [text])) == wanted, text
            assert merged(pieces(name, list(text))) == wanted, text
            place = len(text) // 2
            assert merged(pieces(name, [text[:place], text[place:]])) == wanted, text


def test_a_function_as_an_object_of_its_own() -> None:
    function = '{"name": "get_weather", "arguments": {"city": "Bern"}}'
    for text in (f'{{"type": "function", "function": {function}}}', f'{{"function": {function}, "id": "a"}}'):
        assert merged(pieces("llama3_json", [text])) == merged(pieces("llama3_json", list(text))) == [WEATHER]


ODD_NAMES = (
    "mcp/fs.read",
    "srv:tool",
    "srv:0",
    "a b",
    " a",
    "größe",
    "a<b",
    "a>b",
    "functions.f",
    "functions.mcp/x",
    "a{b}",
    "a[b]",
    'say "hi"',
    "a\\b",
    "a|b",
    "a\nb",
    "to=x",
    "function",
    "x" * 128,
    "x" * 129,
    "🦆" * 100,
    "a=b,c;d",
)
NAMED = {
    "hermes": lambda name: f'<tool_call>{{"name": {json.dumps(name)}, "arguments": {{}}}}</tool_call>',
    "qwen3_coder": lambda name: f"<tool_call>\n<function={name}>\n</function>\n</tool_call>",
    "llama3_json": lambda name: f'{{"name": {json.dumps(name)}, "parameters": {{}}}}',
    "mistral": lambda name: f"[TOOL_CALLS]{name}[ARGS]{{}}",
    "deepseek_v3": lambda name: (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{{}}\n```<｜tool▁call▁end｜>"
    ),
    "deepseek_v32": lambda name: f'<｜DSML｜invoke name="{name}">\n</｜DSML｜invoke>',
    "glm45": lambda name: f"<tool_call>{name}\n</tool_call>",
    "kimi_k2": lambda name: (
        f"<|tool_call_begin|>functions.{name}:12<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    ),
    "minimax_m2": lambda name: f'<invoke name="{name}">\n</invoke>',
    "harmony": lambda name: (
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{{}}<|call|>"
    ),
}


@pytest.mark.parametrize("form", TOOL_PARSERS)
def test_a_functions_name_is_read_whole_or_refused(form: str) -> None:
    assert all(holds_name(form, name) for name in ("get_weather.v2-x", "mcp/fs.read", "a:b"))
    others = {each: {} for each in ("mcp", "srv", "a", "f", "to", "x" * 128, "mcp/x")}
    for name in ODD_NAMES:
        if not holds_name(form, name):
            continue
        text = NAMED[form](name)
        tools = {name: {}} if name.startswith("functions.") else {name: {}, **others}
        for chunks in ([text], list(text)):
            splitter = Splitter(form, "harmony" if form == "harmony" else None, tools=tools)
            found = [piece for chunk in chunks for piece in splitter.take(chunk, last=False)]
            calls = merged(found + splitter.take("", last=True))
            assert [call.name for call in calls if isinstance(call, ToolCall)] == [name]
            assert len(calls) == 1


def test_arguments_stream_before_a_call_is_complete() -> None:
    splitter = Splitter("hermes")
    assert splitter.take('<tool_call>{"name": "write", "arguments": {"text": "on', last=False) == [
        CallBegin("write"),
        Arguments('{"text": "on'),
    ]
    assert splitter.take("ce", last=False) == [Arguments("ce")]
    assert splitter.take('"}}</tool', last=False) == [Arguments('"}')]
    assert splitter.take("_call>", last=False) == [CallEnd()]
    splitter = Splitter("qwen3_coder")
    assert splitter.take("<function=write>\n<parameter=text>\non", last=False) == [
        CallBegin("write"),
        Arguments('{"text": '),
        Arguments('"'),
        Arguments("on"),
    ]
    assert splitter.take("ce\n</par", last=False) == [Arguments("ce")]


def test_a_streamed_call_that_breaks_off_goes_on_as_text() -> None:
    found = pieces("hermes", ['<tool_call>{"name": "f", "arguments": {"x": 1', "oops}</tool_call>"])
    assert found == [
        CallBegin("f"),
        Arguments('{"x": 1'),
        CallEnd('<tool_call>{"name": "f", "arguments": {"x": 1'),
        Text("oops}</tool_call>"),
    ]


@pytest.mark.parametrize(
    ("name", "prompt_end", "text", "expected"),
    [
        ("think", "", "<think>\nHm.\n</think>\n\nYes.", [Reasoning("Hm."), Text("Yes.")]),
        (
            "think",
            "<|im_start|>assistant\n<think>\n",
            "Hm. </thin>\n</think>\n\nYes.",
            [Reasoning("Hm. </thin>"), Text("Yes.")],
        ),
        ("think", "<think>\n\n</think>\n\n", "Yes.", [Text("Yes.")]),
        ("think", "", "<think>Hm", [Reasoning("Hm")]),
        ("think", "", " <thin", [Text(" <thin")]),
        ("think", "", "No <think> here </think>", [Text("No <think> here </think>")]),
        ("magistral", "", "[THINK]Hm.[/THINK]Yes.", [Reasoning("Hm."), Text("Yes.")]),
        (
            "harmony",
            "",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            [Reasoning("Hm."), Text("Yes.")],
        ),
        ("think", "", f"<think>{HERMES}</think>{HERMES}", [WEATHER, WEATHER]),
        ("think", "", f"<think>Hm.\n{HERMES}", [Reasoning("Hm."), WEATHER]),
        ("think", "<think>\nLet me", f" see. {HERMES}\n</think>\n\n", [Reasoning("see."), WEATHER]),
        (
            "think",
            "",
            f"<think>Hm.{HERMES}{HERMES} Done.",
            [Reasoning("Hm."), WEATHER, WEATHER, Text("Done.")],
        ),
        (
            "think",
            "",
            "<think>A <tool_call> is {} not needed. <tool_call>\n</think>\nHi <tool_call>",
            [Reasoning("A <tool_call> is {} not needed. <tool_call>"), Text("Hi <tool_call>")],
        ),
        ("think", "", '<think>So <tool_call>{"name": "f"', [Reasoning('So <tool_call>{"name": "f"')]),
        (
            "think",
            "",
            '<think>So <tool_call>{"name": "f", "arguments": {"a": "</think>"}}</tool_call>',
            [Reasoning("So"), ToolCall("f", '{"a": "</think>"}')],
        ),
        (
            "think",
            "",
            '<think>So <tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call> x </think> y',
            [Reasoning("So"), ToolCall("f", '{"a": 1}'), Text("xy")],
        ),
        ("think", "<think>", "Hm </think> Yes.", [Reasoning("Hm"), Text("Yes.")]),
        ("think", "<think>\nLet me see", ". </think> Yes.", [Reasoning("."), Text("Yes.")]),
        ("think", "<think></think>", " Yes.", [Text(" Yes.")]),
        ("think", "<think>a</think>b <think>c", "d</think>Yes.", [Reasoning("d"), Text("Yes.")]),
        (
            "harmony",
            "assistant<|channel|>analysis<|message|>Let me",
            " see.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
            [Reasoning("see."), Text("Yes.")],
        ),
    ],
)
def test_reasoning(name: str, prompt_end: str, text: str, expected: list[Piece]) -> None:
    for chunks in ([text], list(text)):
        assert merged(pieces("hermes", chunks, reasoning_parser=name, prompt_end=prompt_end)) == expected


def squeezed(text: str) -> str:
    """Less white space and markers around calls, which belong to nothing."""
    for form in (*JSON_FORMATS, *TAG_FORMATS):
        for marker in form.around:
            text = text.replace(marker, "")
    return "".join(text.split())


def test_random_outputs_are_the_same_whatever_the_cuts_and_lose_nothing() -> None:
    """Texts of parts of the examples."""
    rng = random.Random(0)
    texts: dict[str, list[str]] = {}
    for name, text, *_ in [*EXAMPLES, *BROKEN]:
        texts.setdefault(name, []).append(text)
    for name, known in texts.items():
        for _ in range(150):
            parts = []
            for _ in range(rng.randint(1, 4)):
                text = rng.choice(known)[:200]
                begin, end = sorted(rng.randint(0, len(text)) for _ in range(2))
                parts.append(text[begin:end])
            text = "".join(parts)
            cuts = sorted(rng.randint(0, len(text)) for _ in range(5))
            chunks = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            whole = merged(pieces(name, [text]))
            assert merged(pieces(name, chunks)) == whole, (name, text, cuts)
            texts_of = merged(pieces(name, chunks), cut_as_text=True)
            kept = "".join(piece.text for piece in texts_of if isinstance(piece, Text | Reasoning))
            if name != "harmony" and not any(isinstance(piece, ToolCall) for piece in texts_of):
                assert squeezed(kept) == squeezed(text), (name, text)


def test_every_parser_leaves_plain_text_alone() -> None:
    for name in TOOL_PARSERS:
        assert merged(pieces(name, ["Plain text, ", 'with {"json": 1}.'])) == [
            Text('Plain text, with {"json": 1}.')
        ]


@pytest.mark.parametrize(
    ("template", "tool_parser", "reasoning_parser"),
    [
        ('{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>', None, None),
        ("<tool_call>\n{...}\n</tool_call>", "hermes", None),
        ("<tool_call>\n<function=example>\n", "qwen3_coder", None),
        ("<tool_call>{name}<arg_key>", "glm45", None),
        ("[TOOL_CALLS]", "mistral", None),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v3", None),
        ("<|start|>assistant<|channel|>analysis", "harmony", "harmony"),
        ("{%- if '</think>' in content %}<think>\n", None, "think"),
        ("", None, None),
    ],
)
def test_formats_are_known_by_the_chat_template(
    template: str, tool_parser: str | None, reasoning_parser: str | None
) -> None:
    assert tool_parser_of(template) == tool_parser
    assert reasoning_parser_of(template) == reasoning_parser
    assert tool_parser is None or tool_parser in TOOL_PARSERS
    assert reasoning_parser is None or reasoning_parser in REASONING_PARSERS


def test_harmony_without_its_calls_or_its_reasoning() -> None:
    """A request without tools gets no call, whatever the model says."""
    analysis, call = Reasoning("Look it up."), Text('{"city": "Bern"}')
    splitter = Splitter(None, "harmony")
    assert merged(splitter.take(HARMONY, last=True)) == [analysis, call]
    splitter = Splitter("harmony", None)
    assert merged(splitter.take(HARMONY, last=True)) == [Text("Look it up."), WEATHER]


DEFINITIONS = {
    "Zip": {"type": "string"},
    "Count": {"type": "integer"},
    "Flag": {"type": "boolean"},
    "Alias": {"$ref": "#/$defs/Zip"},
    "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "string"}]},
    "a/b c": {"enum": ["7"]},
}


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": ["integer", "null"]}, "None", None),
        ({"const": 5}, "5", 5),
        ({"enum": ["a", 1]}, "1", 1),
        ({"enum": 5}, "1", "1"),
        ({"anyOf": 5}, "1", "1"),
        ({"type": [{}]}, "1", "1"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "7", 7),
        ({"type": "string"}, "True", "True"),
        ({"$ref": "#/x"}, '{"a": [1]}', {"a": [1]}),
        ({"type": ["string", "integer"]}, "true", "true"),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "1.0", 1.0),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["boolean", "string"]}, "1", "1"),
        ({"type": "number"}, "3", 3),
        ({"type": "number"}, "true", True),
        ({"$ref": "#/$defs/Zip"}, "12345", "12345"),
        ({"$ref": "#/$defs/Count"}, "12345", 12345),
        ({"$ref": "#/$defs/Loop"}, "7", "7"),
        ({"$ref": "#/$defs/Alias"}, "7", "7"),
        ({"$ref": "#/$defs/a~1b%20c"}, "7", "7"),
        ({"allOf": [{"$ref": "#/$defs/Zip"}], "default": "1"}, "12345", "12345"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "5", "5"),
        ({"allOf": [{}, {"type": "integer"}]}, "5", 5),
        ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"$ref": "#/$defs/Zip"}, {"type": "null"}]}, "null", None),
        ({"oneOf": [{"allOf": [{"$ref": "#/$defs/Zip"}]}, {"type": "boolean"}]}, "True", True),
        ({"anyOf": [{"anyOf": [{"type": "string"}]}, {"$ref": "#/$defs/Flag"}]}, "5", "5"),
        ({"type": ["string", "integer"], "anyOf": [{"type": "string"}, {"type": "object"}]}, "5", "5"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"enum": ["x", 1]}, "true", "true"),
        ({"enum": [True, "1"]}, "1", "1"),
        ({}, "[1]", "[1]"),
    ],
)
def test_an_argument_in_a_tag_has_the_type_of_its_schema(schema: object, written: str, value: object) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=x>\n{written}\n</parameter>\n</function>\n</tool_call>"
    for parameters in (
        {"properties": {"x": schema}},
        {"$ref": "#/$defs/Arguments"},
        {"allOf": [{"properties": {"y": {}}}, {"anyOf": [{"properties": {"x": schema}}]}]},
        {"additionalProperties": schema},
    ):
        tools = {"f": {**parameters, "$defs": DEFINITIONS | {"Arguments": {"properties": {"x": schema}}}}}
        for chunks in ([text], list(text)):
            splitter = Splitter("qwen3_coder", tools=tools)
            found = [piece for chunk in chunks for piece in splitter.take(chunk, last=False)]
            [call] = merged(found + splitter.take("", last=True))
            read = json.loads(call.arguments)["x"]
            assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("string", "schema", "value"),
    [
        ("true", {}, "5"),
        ("false", {}, 5),
        ("false", {"type": "string"}, "5"),
        ("true", {"type": "integer"}, 5),
        ("true", {"type": ["string", "integer"]}, "5"),
        ("false", {"type": ["string", "integer"]}, 5),
    ],
)
def test_a_models_mark_decides_where_the_schema_allows_both(
    string: str, schema: dict[str, object], value: object
) -> None:
    text = (
        f'<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="x" string="{string}">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>"
    )
    splitter = Splitter("deepseek_v32", tools={"f": {"properties": {"x": schema}}})
    [call] = merged(splitter.take(text, last=True))
    assert json.loads(call.arguments) == {"x": value}


UNCLOSED = [
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
    ),
    (
        "qwen3_coder",
        "<tool_call>\n<function=f>\n<parameter=a>\nx\n<parameter=b>\n2\n</function>\n</tool_call>",
    ),
    ("qwen3_coder", "<function=f><parameter=b>2<parameter=a>x</parameter></function>"),
    (
        "glm45",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x\n<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n"
        "</tool_call>",
    ),
    (
        "minimax_m2",
        '<invoke name="f">\n<parameter name="a">x\n<parameter name="b">2</parameter>\n</invoke>',
    ),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="a" string="true">x\n'
        '<｜DSML｜parameter name="b" string="false">2\n</｜DSML｜invoke>',
    ),
]


@pytest.mark.parametrize(("name", "text"), UNCLOSED)
def test_an_argument_without_a_closing_tag_ends_at_the_next_one(name: str, text: str) -> None:
    tools = {"f": {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}}
    for chunks in ([text], list(text), [text[:40], text[40:]]):
        splitter = Splitter(name, tools=tools)
        found = [piece for chunk in chunks for piece in splitter.take(chunk, last=False)]
        [call] = merged(found + splitter.take("", last=True))
        assert isinstance(call, ToolCall)
        assert json.loads(call.arguments) == {"a": "x", "b": 2}


def test_tags_in_a_string_that_are_none() -> None:
    value = "<parameter=\n</function> </param <parameter=a b"
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    for chunks in ([text], list(text)):
        splitter = Splitter("qwen3_coder")
        found = [piece for chunk in chunks for piece in splitter.take(chunk, last=False)]
        assert merged(found + splitter.take("", last=True)) == [ToolCall("f", json.dumps({"a": value}))]


def test_a_closing_tag_in_a_string_ends_no_call() -> None:
    splitter = Splitter("hermes")
    parts = ['<tool_call>{"arguments": {"a": "', *["</tool_call>"] * 500, '"}, "name": "f"}</tool_call>']
    found = [piece for part in parts for piece in splitter.take(part, last=False)]
    assert merged(found) == [ToolCall("f", json.dumps({"a": "</tool_call>" * 500}))]
