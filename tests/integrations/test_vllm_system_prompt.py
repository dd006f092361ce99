"""A chat inside vLLM: system prompt and tools are counted as our own engine counts, and kept as sinks; texts
with kv_drop are cleared."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from kvreclaim.engine.api.chat import num_system_tokens, render_chat
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.settings.options import KEY, Options
from kvreclaim.integrations.vllm.v0_32.chat_side import (
    NUM_SYSTEM,
    _counting,
    _counting_async,
    cleared,
    protected,
    readable,
)
from kvreclaim.model.loader import load_model

SYSTEM = {"role": "system", "content": "never say the word of the day, which is kestrel"}
CHAT = [
    {"role": "user", "content": "a tale of the sea"},
    {"role": "assistant", "content": "a ship came in"},
    {"role": "user", "content": "and then the end"},
]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
TEMPLATES = {
    "turns": TURNS,
    "tools first": "{% if tools %}<system>{{ tools | tojson }}{% endif %}" + TURNS,
    "in the user's turn": "{% for m in messages[1:] %}<{{ m.role }}>{% if loop.first %}"
    "{{ messages[0].content }}{% if tools %}{{ tools | tojson }}{% endif %}{% endif %}"
    "{{ m.content }}</>{% endfor %}",
    "system prompts collected": "{% for m in messages if m.role == 'system' %}{{ m.content }};{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}</>{% endfor %}",
}


class Renderer:
    """The part of vLLM's renderers that chat_side uses. as_tokens: the template's text comes as token ids"""

    def __init__(self, loaded: Any, *, as_tokens: bool = False, compressed: bool = True) -> None:
        self.loaded, self.as_tokens = loaded, as_tokens
        self.config = SimpleNamespace(additional_config={KEY: {}} if compressed else {})
        self.default_chat_tok_params = object()
        self._executor = ThreadPoolExecutor(1)
        self.seen: list[Any] = []

    def render_messages(self, messages: list[Any], params: Any) -> tuple[list[Any], dict[str, Any]]:
        self.seen.append(messages)
        kwargs = params.chat_template_kwargs
        template, tools = params.chat_template, kwargs.get("tools")
        ids = render_chat(self.loaded, messages, chat_template=template, tools=tools)
        if self.as_tokens:
            return messages, {"prompt_token_ids": ids}
        return messages, {"prompt": self.loaded.tokenizer.decode(ids)}

    def tokenize_prompt(self, prompt: dict[str, Any], params: Any) -> dict[str, Any]:
        assert params is self.default_chat_tok_params
        if "prompt_token_ids" in prompt:
            return prompt
        return {"prompt_token_ids": self.loaded.tokenizer.encode(prompt["prompt"], add_special_tokens=False)}

    def render_chat(self, conversations: Any, chat_params: Any, tok_params: Any = None, **kwargs: Any) -> Any:
        params = tok_params or self.default_chat_tok_params
        rendered = [self.render_messages(messages, chat_params)[1] for messages in conversations]
        return conversations, [self.tokenize_prompt(prompt, params) for prompt in rendered]

    async def render_chat_async(self, *args: Any, **kwargs: Any) -> Any:
        return self.render_chat(*args, **kwargs)


@pytest.fixture(scope="module")
def loaded(tiny_dir):
    return load_model(tiny_dir("llama"), dtype="float32", device="cpu")


def params(template: str, tools: Any = None) -> Any:
    return SimpleNamespace(chat_template=template, chat_template_kwargs={"tools": tools} if tools else {})


def counted(renderer: Renderer, conversations: list[Any], params: Any) -> list[Any]:
    """The rendered prompts, the same whether vLLM renders at once or as a coroutine."""
    _, prompts = _counting(Renderer.render_chat)(renderer, conversations, params)
    render = _counting_async(Renderer.render_chat_async)
    _, again = asyncio.run(render(renderer, conversations, params))
    assert again == prompts
    return prompts


@pytest.mark.parametrize("as_tokens", [False, True])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_the_number_is_that_of_our_engine(loaded, template, as_tokens):
    tools = TOOLS if "tools" in template else None
    chats = [
        [SYSTEM, *CHAT],
        [{**SYSTEM, "role": "developer"}, *CHAT],
        [SYSTEM, CHAT[0], {"role": "system", "content": "be brief"}, *CHAT[1:]],
        [SYSTEM],
    ]
    prompts = counted(Renderer(loaded, as_tokens=as_tokens), chats, params(template, tools))
    for messages, prompt in zip(chats, prompts, strict=True):
        ids = prompt["prompt_token_ids"]
        expected = num_system_tokens(loaded, ids, messages, chat_template=template, tools=tools)
        assert prompt[NUM_SYSTEM] == expected
    assert prompts[0][NUM_SYSTEM] > len(SYSTEM["content"]) // 8


def test_a_conversation_alone_is_rendered_once_and_not_marked(loaded):
    renderer = Renderer(loaded)
    [prompt] = _counting(Renderer.render_chat)(renderer, [CHAT], params(TURNS))[1]
    assert NUM_SYSTEM not in prompt
    assert renderer.seen == [CHAT]
    renderer = Renderer(loaded, compressed=False)
    [prompt] = _counting(Renderer.render_chat)(renderer, [[SYSTEM, *CHAT]], params(TURNS))[1]
    assert NUM_SYSTEM not in prompt
    assert len(renderer.seen) == 1


def test_a_template_that_refuses_the_beginning_alone_is_logged_and_serves_the_chat(loaded, caplog):
    picky = "{% if messages | length < 4 %}{{ raise_exception('too short') }}{% endif %}" + TURNS
    [prompt] = _counting(Renderer.render_chat)(Renderer(loaded), [[SYSTEM, *CHAT]], params(picky))[1]
    assert NUM_SYSTEM not in prompt
    assert "are not protected" in caplog.text


def test_parts_that_come_as_an_iterator_can_be_read_twice():
    parts = [{"type": "text", "text": "a tale"}]
    [message, same] = readable([{"role": "user", "content": iter(parts)}, SYSTEM])
    assert message["content"] == parts
    assert same is SYSTEM


@pytest.mark.parametrize(
    ("extra", "count", "sinks"),
    [
        (None, 100, 128),
        (None, 2, 32),
        (None, 2000, 224),  # half of what 64 recent tokens leave of 512, in whole blocks
        ("on", 100, 128),
        ('{"budget": 256}', 90, 96),
        ({"protect_system": False}, 100, 4),
        ({"protect_system": False, "sinks": 9}, 100, 9),
    ],
)
def test_the_scheduler_reads_the_sinks_from_the_request(extra, count, sinks):
    own = {"policy": "streaming_llm", "budget": 512, "interval": 64, "recent": 64}
    options = Options.read(own, "the test")
    given = None if extra is None else {KEY: extra, "other": 1}
    request = SimpleNamespace(extra_args=given)
    settings = options.of_request(given)
    found = protected(request, settings, {NUM_SYSTEM: count}, 32)
    assert found.sinks == sinks
    assert options.of_request(request.extra_args) == found
    assert (request.extra_args is given) == (found is settings)
    assert protected(request, settings, "a prompt as text", 32) is settings


def test_the_operator_may_switch_it_off():
    own = {"policy": "knorm", "budget": 512, "interval": 64, "protect_system": False}
    options = Options.read(own, "the test")
    assert options.as_json()["protect_system"] is False
    settings = options.of_request(None)
    assert protected(SimpleNamespace(extra_args=None), settings, {NUM_SYSTEM: 100}, 32) is settings


def test_a_dropped_text_is_cleared_and_all_else_stays() -> None:
    tool = {"role": "tool", "tool_call_id": "1", "content": "a long list"}
    before = [SYSTEM, CHAT[0], tool, CHAT[2]]
    given = [SYSTEM, {**CHAT[0], "kv_drop": None}, {**tool, "kv_drop": "exact"}, CHAT[2]]
    assert cleared(given) == [SYSTEM, CHAT[0], {**tool, "content": "[cleared]"}, CHAT[2]]
    assert cleared(before) == before


@pytest.mark.parametrize(
    ("place", "drop", "words"),
    [
        (1, "lossy", "messages.1.kv_drop is 'lossy', but inside vLLM no text leaves .* write 'exact'"),
        (1, True, "messages.1.kv_drop is True, but inside vLLM"),
        (1, "gone", "messages.1.kv_drop is 'gone', but it must be 'exact'"),
        (0, "exact", "messages.0.kv_drop is 'exact', but system prompts and tools stay"),
        (3, "exact", "messages.3.kv_drop is 'exact', but nothing follows this message yet"),
    ],
)
def test_other_drops_are_refused(place: int, drop: object, words: str) -> None:
    messages = [SYSTEM, *CHAT]
    messages[place] = {**messages[place], "kv_drop": drop}
    with pytest.raises(InvalidArgumentError, match=words):
        cleared(messages)
