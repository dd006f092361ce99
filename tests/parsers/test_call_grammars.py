"""Grammars of calls: what models write is allowed, and what is allowed is read as calls by the schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jsonschema_rs
import llguidance
import numpy as np
import pytest
from call_markers import MARKERS as COMMON
from llguidance.hf import from_tokenizer
from test_output_formats import DEEPSEEK_V3, DSML, HARMONY, HERMES, TOOLS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvreclaim.engine.features.structured_outputs.grammar import composed, reason_against
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.parsers.arguments import Callee
from kvreclaim.parsers.formats import ARRAY, Splitter
from kvreclaim.parsers.grammars import MAX_CALLS, SHAPES, Calls, answer_grammar
from kvreclaim.parsers.lark import Lark
from kvreclaim.parsers.pieces import Reasoning, Text, ToolCall, merged
from kvreclaim.parsers.thinking import THINK, ThinkSpan
from kvreclaim.structured_outputs import StructuredOutputsParams

MARKERS = ("<tool_call>", "</tool_call>", "[CALL_ID]", "｜DSML｜", "<|python_tag|>", *COMMON)
FORMS = (*SHAPES, "harmony")
KIMI = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Bern"}<|tool_call_end|><|tool_calls_section_end|>'
)
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
QWEN3_CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n"
    '<parameter=days>\n3\n</parameter>\n<parameter=options>\n{"a": [1, null]}\n</parameter>\n'
    "</function>\n</tool_call>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Bern</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
LLAMA = '{"name": "get_weather", "parameters": {"city": "Bern"}}'
OLD_MISTRAL = (
    '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Bern"}, "id": "aB3cD4eF5"}, '
    '{"name": "now", "arguments": {}}]'
)
NEW_MISTRAL = '[TOOL_CALLS]get_weather[CALL_ID]aB3cD4eF5[ARGS]{"city": "Bern"}[TOOL_CALLS]now[ARGS]{}'
PUBLISHED = [
    ("hermes", f"{HERMES}\n{HERMES}"),
    ("qwen3_coder", QWEN3_CODER),
    ("llama3_json", f"{LLAMA}; {LLAMA}"),
    ("llama3_json", f"<|python_tag|>{LLAMA}"),
    ("mistral", OLD_MISTRAL),
    ("mistral", NEW_MISTRAL),
    ("deepseek_v3", DEEPSEEK_V3),
    (
        "deepseek_v3",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Bern"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ),
    ("deepseek_v32", DSML),
    ("glm45", GLM),
    ("kimi_k2", KIMI),
    ("minimax_m2", MINIMAX),
    ("json_array", f"[{LLAMA}, {LLAMA}]"),
    ("harmony", HARMONY),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["c", "f"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "code": {"type": "string", "pattern": r"^[a-z/]{2}-\d$"},
        "short": {"type": "string", "maxLength": 5},
        "maybe": {"type": ["string", "integer", "null"]},
        "who": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
        "on": {"type": "boolean"},
        "mixed": {"enum": ["a", 1, None]},
        "kind": {"$ref": "#/$defs/kind", "description": "a kind"},
        "zip": {"allOf": [{"$ref": "#/$defs/zip"}], "default": "1"},
        "perhaps": {"anyOf": [{"$ref": "#/$defs/kind"}, {"type": "null"}]},
    },
    "required": ["city", "unit", "days", "code", "mixed"],
    "additionalProperties": False,
    "$defs": {
        "person": {"properties": {"name": {"type": "string", "maxLength": 4}}, "required": ["name"]},
        "kind": {"enum": ["12", "true", "x"], "title": "Kind"},
        "zip": {"type": "string", "maxLength": 3},
    },
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS: Mapping[str, Mapping[str, Any]] = {"get_weather": SCHEMA, "now": NOTHING, "any": {}}


class Vocabulary(NamedTuple):
    tokenizer: PreTrainedTokenizerFast
    tokens: llguidance.LLTokenizer
    special: Mapping[str, int]


def vocabulary(markers: Sequence[str]) -> Vocabulary:
    """Bytes, and these as special tokens."""
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in (*markers, "<eos>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    tokens = from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    return Vocabulary(tokenizer, tokens, {name: tokenizer.convert_tokens_to_ids(name) for name in markers})


BYTES, SPECIAL = vocabulary(()), vocabulary(MARKERS)
VOCABULARIES = pytest.mark.parametrize("words", [BYTES, SPECIAL], ids=["bytes", "special"])


def matcher(words: Vocabulary, grammar: StructuredOutputsParams) -> llguidance.LLMatcher:
    found = llguidance.LLMatcher(words.tokens, grammar.grammar, log_level=0)
    assert not found.is_error(), found.get_error()
    return found


def grammar(
    words: Vocabulary,
    form: str,
    schemas: Mapping[str, Mapping[str, Any]],
    *,
    forced: bool,
    one: bool = False,
    span: ThinkSpan | None = None,
    answer: StructuredOutputsParams | None = None,
) -> StructuredOutputsParams:
    functions = [Callee(name, schema, f"tools.{name}.parameters") for name, schema in schemas.items()]
    calls = Calls(form, functions, forced=forced, one_call=one)
    structured, lark = answer is not None, Lark(words.special)
    made = answer_grammar(lark, calls, span, harmony=form == "harmony", structured=structured)
    return composed(made, answer)


def accepts(words: Vocabulary, grammar: StructuredOutputsParams, text: str) -> bool:
    state, ids = matcher(words, grammar), words.tokenizer.encode(text, add_special_tokens=False)
    return state.try_consume_tokens(ids) == len(ids) and state.is_accepting()


@pytest.mark.parametrize(("form", "text"), PUBLISHED)
@VOCABULARIES
def test_what_models_write_is_allowed(words: Vocabulary, form: str, text: str) -> None:
    """Mistral has two formats; the grammar allows the one that its tokens are for."""
    schemas = {"get_weather": TOOLS["get_weather"], "now": {}}
    is_other = text == (OLD_MISTRAL if words is SPECIAL else NEW_MISTRAL)
    for forced in (True, False):
        given = grammar(words, form, schemas, forced=forced)
        assert accepts(words, given, text) is not is_other
        assert form == "harmony" or accepts(words, given, f"{text}\n") is not is_other
    thinks = grammar(words, form, schemas, forced=False, span=ThinkSpan(THINK))
    if form != "harmony" and not is_other:
        assert accepts(words, thinks, f"<think>\nfirst {'{'} <tool</think>\n\n{text}")
        assert accepts(words, thinks, "just text, with { and < in it")
        assert form == "llama3_json" or accepts(words, thinks, f"Let me see.\n{text}")
        assert not accepts(words, thinks, "<think>never ends")


@VOCABULARIES
def test_calls_without_tags_follow_the_schemas_too(words: Vocabulary) -> None:
    """Qwen2.5-Coder writes such calls. Other JSON stays free text, and forced calls have their tags."""
    bare = HERMES.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    city = {"type": "string", "maxLength": 9}
    schema = {**NOTHING, "properties": {"city": city}, "required": ["city"]}
    given, forced = (grammar(words, "hermes", {"get_weather": schema}, forced=each) for each in (False, True))
    good = [bare, f"{bare}\n{bare}", f"```json\n{bare}\n```", f"```\n{bare}\n{bare}\n```\n"]
    bad = [
        bare.replace("Bern", "B" * 10),
        bare.replace('"city"', '"town"'),
    ]
    for text in good:
        assert accepts(words, given, text), text
        assert not accepts(words, forced, text)
    for text in bad:
        assert not accepts(words, given, text), text
        assert not accepts(words, given, f"```json\n{text}\n```")
        assert accepts(words, given, f"Here: {text}")
    for text in (bare.replace("get_weather", "add"), '{"city": "Bern"}', "```python\nx = 1\n```"):
        assert accepts(words, given, text), text


def walk(words: Vocabulary, grammar: StructuredOutputsParams, rng: random.Random) -> tuple[str, bool]:
    """A text that the grammar allows, and whether it is complete."""
    state, ids, eos = matcher(words, grammar), [], words.tokenizer.eos_token_id
    short = {words.tokenizer.convert_tokens_to_ids(letter) for letter in '"<>/}]'} | {*words.special.values()}
    while len(ids) < 700 and not state.is_stopped():
        bits = np.frombuffer(state.compute_bitmask(), dtype=np.uint8)
        allowed = np.nonzero(np.unpackbits(bits, bitorder="little"))[0].tolist()
        assert allowed, words.tokenizer.decode(ids)
        if eos in allowed and (len(allowed) == 1 or rng.random() < 0.3):
            return words.tokenizer.decode(ids), True
        weights = [0 if each == eos else 20 if each in short else 1 for each in allowed]
        token = rng.choices(allowed, weights)[0]
        ids.append(token)
        assert state.consume_token(token)
    return words.tokenizer.decode(ids), state.is_stopped()


@pytest.mark.parametrize("form", FORMS)
@VOCABULARIES
def test_whatever_is_allowed_is_read_as_calls_by_their_schemas(words: Vocabulary, form: str) -> None:
    rng, num_calls = random.Random(form), 0
    spans = (None,) if form == "harmony" else (None, ThinkSpan(THINK, begun=True), ThinkSpan(THINK))
    ways = ((True, True), (True, False), *([] if form == ARRAY else [(False, False)]))
    for forced, one in ways:
        for span in spans:
            given = grammar(words, form, SCHEMAS, forced=forced, one=one, span=span)
            text, ended = walk(words, given, rng)
            reasoning = "harmony" if form == "harmony" else span and "think"
            end = "<think>" if span is not None and span.begun else ""
            splitter = Splitter(form, reasoning, tools=SCHEMAS, prompt_end=end)
            found = merged(splitter.take(text, last=True), cut_as_text=True)
            calls = [each for each in found if isinstance(each, ToolCall)]
            for call in calls:
                assert jsonschema_rs.is_valid(SCHEMAS[call.name], json.loads(call.arguments)), (call, text)
            if ended and forced:
                assert len(calls) == 1 if one else calls, text
                assert not any(isinstance(each, Text) for each in found), text
            num_calls += len(calls)
    assert num_calls > 0 or (form == "harmony" and words is BYTES)


@pytest.mark.parametrize(
    ("form", "lead", "call", "between", "trail"),
    [
        ("hermes", "", HERMES, "\n", ""),
        ("llama3_json", "", LLAMA, ";", ""),
        ("json_array", "[", LLAMA, ", ", "]"),
        ("glm45", "", GLM, "", ""),
        ("kimi_k2", KIMI[:28], KIMI[28:-26], "", KIMI[-26:]),
    ],
)
def test_forced_calls_are_bounded(form: str, lead: str, call: str, between: str, trail: str) -> None:
    schemas = {"get_weather": TOOLS["get_weather"]}
    for one, most in ((True, 1), (False, MAX_CALLS)):
        given = grammar(BYTES, form, schemas, forced=True, one=one)
        for count, fits in ((1, True), (most, True), (most + 1, False)):
            text = lead + between.join([call] * count) + trail
            assert accepts(BYTES, given, text) is fits, text


@pytest.mark.parametrize("form", FORMS)
def test_a_structured_answer_or_calls(form: str) -> None:
    answer = StructuredOutputsParams(json=SCHEMA)
    given = grammar(SPECIAL, form, {"now": NOTHING}, forced=False, answer=answer)
    value = '{"city": "Bern", "unit": "c", "days": 3, "code": "ab-1", "mixed": null}'
    lead = "<|channel|>analysis<|message|>So?<|end|><|start|>assistant<|channel|>final<|message|>"
    assert accepts(SPECIAL, given, (lead if form == "harmony" else "") + value)
    assert not accepts(SPECIAL, given, "{}")
    text, _ = next(
        (text, at) for at, (name, text) in enumerate(PUBLISHED) if name == form and text != OLD_MISTRAL
    )
    assert not accepts(SPECIAL, given, text)


@pytest.mark.parametrize("answer", [{"json": NOTHING}, {"regex": "[{][}]"}, {"choice": ["{}"]}])
@VOCABULARIES
def test_reasoning_before_a_structured_answer(words: Vocabulary, answer: dict[str, Any]) -> None:
    params = StructuredOutputsParams(**answer)
    for begun in (False, True):
        span = ThinkSpan(THINK, begun=begun)
        lark = answer_grammar(Lark(words.special), None, span, harmony=False, structured=True)
        given, lead = composed(lark, params), "" if begun else "<think>"
        assert accepts(words, given, f"{lead}\nHm {'{'} </thi\n</think>\n\n{{}}")
        assert accepts(words, given, "{}") is not begun
        assert not accepts(words, given, f"{lead}Hm</think>so")
        assert not accepts(words, given, f"{lead}Hm {{}}")


@pytest.mark.parametrize("form", ["hermes", "glm45", "qwen3_coder", "deepseek_v32"])
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "array"}, "has type 'array'"),
        ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}}, "[$]ref"),
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"properties": {"a": {"type": "string", "format": "date"}}}, "format"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "pattern"),
        ({"properties": {"a": {"enum": ["x</arg_value></parameter></｜DSML｜parameter>"]}}}, "enum"),
        ({"properties": {"a<b": {}}}, "no tag can hold"),
    ],
)
def test_what_cannot_be_followed_is_refused(form: str, schema: dict[str, Any], words: str) -> None:
    """JSON can be held to more than tags can."""
    try:
        reason = reason_against(grammar(BYTES, form, {"f": schema}, forced=True))
    except InvalidArgumentError as error:
        reason = f"{error.field} {error}"
    if form != "hermes" or words in ("uniqueItems", "has type 'array'"):
        assert reason is not None
        assert "uniqueItems" in words or reason.startswith("tools.f.parameters tools.f.parameters")
        assert words.replace("[$]", "$") in reason
    else:
        assert reason is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"properties": None}, "has properties 'None'; pass an object of schemas"),
        ({"properties": ["a"]}, "has properties \"['a']\""),
        ({"properties": {"a": 3}}, "has properties"),
        ({"required": 5}, "has required '5'; pass a list of names"),
        ({"required": [1]}, "has required '[1]'"),
        ({"type": 3}, "has type '3'"),
        ({"additionalProperties": None}, "has additionalProperties 'None'"),
        ({"$defs": []}, "has $defs '[]'"),
        ({"properties": {"a": {"enum": None}}}, ".properties.a has enum 'None'; pass a list of values"),
        ({"properties": {"a": {"type": [1]}}}, ".properties.a has type '[1]'"),
        ({"properties": {"a": {"type": "string", "minLength": "x"}}}, ".properties.a has minLength 'x'"),
        ({"properties": {"a": {"type": "string", "maxLength": -1}}}, ".properties.a has maxLength '-1'"),
        ({"properties": {"a": {"type": "string", "pattern": 3}}}, ".properties.a has pattern '3'"),
        ({"properties": {"a": {"anyOf": {}}}}, ".properties.a has anyOf '{}'"),
        ({"properties": {"a": {"$ref": 1}}}, ".properties.a has $ref '1'"),
    ],
)
def test_a_schema_that_is_none_is_refused(form: str, schema: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        grammar(BYTES, form, {"f": schema}, forced=True)
    assert refused.value.field == "tools.f.parameters"
    assert str(refused.value).startswith("tools.f.parameters")
    assert words in str(refused.value)


def test_values_of_other_types_than_the_argument_has() -> None:
    """An argument of type string may have the values that are strings, as in JSON schema."""
    call = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    for values in ({"enum": ["x", 1]}, {"const": "x"}):
        schema = {"properties": {"a": {"type": "string", **values}}, "required": ["a"]}
        given = grammar(BYTES, "qwen3_coder", {"f": schema}, forced=True)
        assert accepts(BYTES, given, call.format("x"))
        assert not accepts(BYTES, given, call.format("1"))
    for keyword, value in (("enum", [1]), ("enum", []), ("const", 3)):
        with pytest.raises(InvalidArgumentError, match=f"properties.a has '{keyword}'"):
            grammar(
                BYTES,
                "qwen3_coder",
                {"f": {"properties": {"a": {"type": "string", keyword: value}}}},
                forced=True,
            )


def test_reasoning_is_read_apart() -> None:
    splitter = Splitter("hermes", "think", tools=TOOLS)
    found = merged(splitter.take(f"<think>\nHm\n</think>\n\n{HERMES}", last=True))
    assert [type(each) for each in found] == [Reasoning, ToolCall]
