"""Conversations become the prompt of the template; those it does not take are refused in a sentence."""

from __future__ import annotations

import json

import pytest
import tiny

from kvreclaim import LLM, SamplingParams, demo_model
from kvreclaim.engine.api.chat import render_chat
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.loader import load_model

USER = {"role": "user", "content": "the end"}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded(tiny_dir):
    return load_model(tiny_dir("llama"), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def demo():
    return load_model(demo_model(), device="cpu")


def text(loaded, messages, **how):
    return loaded.tokenizer.decode(render_chat(loaded, messages, **how))


def test_the_models_template_or_another_one(loaded):
    assert text(loaded, [USER]) == "user: the end\nassistant: "
    assert text(loaded, [USER], add_generation_prompt=False) == "user: the end\n"
    given = "{% for m in messages %}{{ m.content }}{{ mark }}{% endfor %}"
    assert text(loaded, [USER], chat_template=given, template_kwargs={"mark": "!"}) == "the end!"


def test_the_last_message_is_continued(loaded):
    started = [USER, {"role": "assistant", "content": "so th"}]
    ids = render_chat(loaded, started, add_generation_prompt=False, continue_final_message=True)
    assert loaded.tokenizer.decode(ids) == "user: the end\nassistant: so th"


def test_tools_go_where_the_template_has_a_place_for_them(loaded):
    given = "{% if tools %}{{ tools | tojson }}\n{% endif %}{{ messages[0].content }}"
    assert text(loaded, [USER], chat_template=given, tools=[TOOL]) == f"{json.dumps([TOOL])}\nthe end"
    assert text(loaded, [USER], chat_template=given, tools=[]) == "the end"


@pytest.mark.parametrize(
    ("messages", "how", "message"),
    [
        ([], {}, "messages is empty"),
        ("hello", {}, "messages is a str"),
        ([{"content": "x"}], {}, "message 0 is a dict without a role"),
        ([USER, "x"], {}, "message 1 is a str"),
        ([{**USER, "kv_drop": "lossy"}], {}, "message 0 has kv_drop"),
        ([USER], {"tools": [TOOL]}, "tools are given, but the chat template of .* has no place"),
        ([USER], {"template_kwargs": {"thinking": True}}, "'thinking', which the chat template .* not read"),
        ([USER], {"template_kwargs": {"tokenize": True}}, "'tokenize', which is reserved"),
        ([USER], {"template_kwargs": {"messages": []}}, "'messages', which is reserved"),
        ([USER], {"continue_final_message": True}, "both true"),
        ([USER], {"add_generation_prompt": 1}, "add_generation_prompt is 1"),
        ([USER], {"chat_template": ""}, "chat_template is empty"),
        ([USER], {"chat_template": "{{ messages"}, r"cannot render these messages \(.*end of print"),
        (
            [USER],
            {"chat_template": "{{ raise_exception('roles must alternate') }}"},
            r"\(roles must alternate\)",
        ),
        ([USER], {"chat_template": "{{ messages[3].content.strip() }}"}, "no element 3"),
        ([{"role": "user"}], {"chat_template": "{{ messages[0].content + 'x' }}"}, "no attribute 'content'"),
        ([USER], {"chat_template": "{{ 'x' + 1 }}"}, "TypeError"),
        ([{"role": "user", "content": "\ud800"}], {}, "lone surrogate"),
    ],
)
def test_what_a_template_cannot_take_is_refused(messages, how, message, loaded):
    with pytest.raises(InvalidArgumentError, match=message):
        render_chat(loaded, messages, **how)


def test_a_message_that_cannot_be_continued_is_not_quoted(loaded):
    how = {"chat_template": "{{ messages[0].content[:3] }}", "add_generation_prompt": False}
    with pytest.raises(InvalidArgumentError, match="does not appear in the chat") as raised:
        render_chat(loaded, [{"role": "user", "content": "secret"}], continue_final_message=True, **how)
    assert "secret" not in str(raised.value)


def test_a_model_without_template_or_tokenizer(tmp_path, tiny_dir):
    path = tiny.save_model("llama", tmp_path)
    loaded = load_model(path, dtype="float32", device="cpu")
    loaded.tokenizer.chat_template = None
    with pytest.raises(InvalidArgumentError, match="has no chat template; pass one"):
        render_chat(loaded, [USER])
    assert text(loaded, [USER], chat_template="{{ messages[0].content }}") == "the end"
    loaded.tokenizer.chat_template = {"a": "x", "b": "y"}
    with pytest.raises(InvalidArgumentError, match="several chat templates"):
        render_chat(loaded, [USER])
    bare = load_model(tiny_dir("qwen3"), dtype="float32", device="cpu")
    with pytest.raises(InvalidArgumentError, match="has no tokenizer"):
        render_chat(bare, [USER])


def test_the_demo_models_prompt_is_the_words_alone(demo):
    words = "GO wind wave QUERY L1"
    plain = demo.tokenizer.encode(words)
    assert demo.tokenizer.unk_token_id not in plain
    assert render_chat(demo, [{"role": "user", "content": words}]) == plain
    apart = [{"role": "system", "content": "GO wind"}, {"role": "user", "content": "wave QUERY L1"}]
    assert render_chat(demo, apart) == plain
    parts = [{"type": "text", "text": "GO wind wave"}, {"type": "text", "text": "QUERY L1"}]
    assert render_chat(demo, [{"role": "user", "content": parts}]) == plain
    turns = [apart[0], {"role": "assistant", "content": None}, apart[1]]
    assert render_chat(demo, turns) == plain


def test_the_demo_model_sees_tools_and_calls_as_unknown_words(demo):
    plain = render_chat(demo, [{"role": "user", "content": "wind"}])
    unknown = demo.tokenizer.unk_token_id
    with_tools = render_chat(demo, [{"role": "user", "content": "wind"}], tools=[TOOL])
    assert with_tools == [unknown] * len(json.dumps([TOOL]).split()) + plain
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function"}]}
    called = render_chat(demo, [{"role": "user", "content": "wind"}, call])
    assert called == [*plain, *[unknown] * len(json.dumps(call["tool_calls"]).split())]


def test_chat_answers_what_generate_answers(tiny_dir):
    llm = LLM(tiny_dir("llama"), dtype="float32", num_blocks=50)
    (out,) = llm.chat([USER], GREEDY, chat_template="{{ messages[0].content }}")
    assert out.outputs[0].token_ids == llm.generate("the end", GREEDY)[0].outputs[0].token_ids
