"""Chats where vLLM renders them: system prompt and tools are counted, to be kept as sinks of the request, and
texts with kv_drop are cleared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.chat import PLACEHOLDER, SYSTEM_ROLES, num_shared
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.integrations.vllm.settings.enabled import is_enabled
from kvreclaim.integrations.vllm.settings.options import KEY, as_plain
from kvreclaim.integrations.vllm.settings.patching import wrap

logger = logging.getLogger("vllm.kvreclaim")
NUM_SYSTEM = "kvreclaim_num_system"
"""Key in a rendered chat: its leading tokens that are system prompt and tools."""
DROP = "kv_drop"
"""Field of a message: its text is cleared."""


def install() -> None:
    """Wrap vLLM's renderers. Idempotent; other configurations see no change."""
    from vllm.renderers.base import BaseRenderer

    wrap(BaseRenderer, "render_chat", _counting)
    wrap(BaseRenderer, "render_chat_async", _counting_async)


def protected(params: Any, settings: CompressionConfig, prompt: object, block_size: int) -> CompressionConfig:
    """The settings with system prompt and tools among the sinks, written into params for the scheduler."""
    count = prompt.get(NUM_SYSTEM, 0) if isinstance(prompt, Mapping) else 0
    found = settings.protecting(count, block_size) if count else settings
    if found is not settings:
        params.extra_args = {**(params.extra_args or {}), KEY: as_plain(found)}
    return found


def _counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """BaseRenderer.render_chat."""

    def render_chat(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        if not is_enabled(self.config.additional_config, {}):
            return original(self, conversations, chat_params, tok_params, **kwargs)
        conversations = [_without_dropped(readable(messages)) for messages in conversations]
        rendered, prompts = original(self, conversations, chat_params, tok_params, **kwargs)
        for messages, prompt in zip(conversations, prompts, strict=True):
            if has_system(messages, chat_params):
                note_system(self, messages, prompt, chat_params, tok_params)
        return rendered, prompts

    return render_chat


def _counting_async(original: Callable[..., Any]) -> Callable[..., Any]:
    """BaseRenderer.render_chat_async; renders and tokenizes in the threads in which vLLM does."""

    async def render_chat_async(
        self: Any, conversations: Any, chat_params: Any, tok_params: Any = None, **kwargs: Any
    ) -> Any:
        if not is_enabled(self.config.additional_config, {}):
            return await original(self, conversations, chat_params, tok_params, **kwargs)
        conversations = [_without_dropped(readable(messages)) for messages in conversations]
        rendered, prompts = await original(self, conversations, chat_params, tok_params, **kwargs)
        for messages, prompt in zip(conversations, prompts, strict=True):
            if has_system(messages, chat_params):
                arguments = (self, messages, prompt, chat_params, tok_params)
                await asyncio.get_running_loop().run_in_executor(self._executor, note_system, *arguments)
        return rendered, prompts

    return render_chat_async


def readable(messages: Sequence[Any]) -> list[Any]:
    """Return messages with contents that can be read twice. Over HTTP, lists of parts are iterators."""
    return [
        message
        if not isinstance(message, dict) or isinstance(message.get("content"), str | list | None)
        else {**message, "content": list(message["content"])}
        for message in messages
    ]


def _without_dropped(messages: Sequence[Any]) -> list[Any]:
    """Return cleared(messages). Raises: VLLMValidationError, HTTP 400."""
    try:
        return cleared(messages)
    except InvalidArgumentError as error:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError(str(error), parameter=DROP) from None


def cleared(messages: Sequence[Any]) -> list[Any]:
    """Return messages with PLACEHOLDER instead of texts with kv_drop. Raises: InvalidArgumentError."""
    return [
        _cleared(message, f"messages.{index}.{DROP}", index == len(messages) - 1)
        if isinstance(message, Mapping) and DROP in message
        else message
        for index, message in enumerate(messages)
    ]


def _cleared(message: Mapping[str, Any], name: str, is_last: bool) -> dict[str, Any]:
    drop, rest = message[DROP], {key: value for key, value in message.items() if key != DROP}
    if drop is None or drop is False:
        return rest
    problem = None
    if drop is True or drop == "lossy":
        problem = "inside vLLM no text leaves a cache that is already computed; write 'exact', or remove it"
    elif drop != "exact":
        problem = "it must be 'exact'"
    elif _is_system(message):
        problem = "system prompts and tools stay; remove it"
    elif is_last:
        problem = "nothing follows this message yet; drop it in a later turn"
    if problem is not None:
        raise InvalidArgumentError(f"{name} is {drop!r}, but {problem}.", field=DROP)
    return {**rest, "content": PLACEHOLDER}


def has_system(messages: Sequence[Any], chat_params: Any) -> bool:
    """Return whether the request may have a system prompt or tools to protect."""
    return bool(messages) and (_is_system(messages[0]) or bool(chat_params.chat_template_kwargs.get("tools")))


def note_system(
    renderer: Any, messages: Sequence[Any], prompt: Any, chat_params: Any, tok_params: Any
) -> None:
    """Write the number under NUM_SYSTEM into the rendered prompt, where it is one of tokens.

    As num_leading_tokens counts, but the conversation is cut down to one message: it may be long, and its
    pictures would be loaded again.
    """
    if prompt.get("prompt_token_ids") is None:
        return
    try:
        drafts = [renderer.render_messages(opened(messages, text), chat_params)[1] for text in "ab"]
        key = "prompt" if "prompt" in drafts[0] else "prompt_token_ids"  # some tokenizers render at once
        one, other = (draft[key] for draft in drafts)
        head = one[: num_shared(one, other)]
        params = renderer.default_chat_tok_params if tok_params is None else tok_params
        tokens = renderer.tokenize_prompt({key: head}, params)["prompt_token_ids"] if head else []
        prompt[NUM_SYSTEM] = num_shared(list(tokens), list(prompt["prompt_token_ids"]))
    except Exception as error:  # a template is foreign code, and the prompt itself is rendered
        logger.warning(
            "a chat's system prompt and tools are not protected: the chat template renders the chat, but not "
            "its beginning (%s)",
            type(error).__name__,
        )


def opened(messages: Sequence[Any], text: str) -> list[Any]:
    """Return the system prompt with this text instead of the conversation. The common prefix for different
    texts is what the template writes before the conversation."""
    talk = (index for index, message in enumerate(messages) if not _is_system(message))
    first = next(talk, None)
    if first is None:
        return list(messages)
    later = [message for message in messages[first:] if _is_system(message)]
    return [*messages[:first], {"role": "user", "content": text}, *later]


def _is_system(message: Any) -> bool:
    return isinstance(message, Mapping) and message.get("role") in SYSTEM_ROLES
