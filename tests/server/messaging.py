"""Anthropic's own client, and the engine's answers to the same requests without a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
from bare_messages import HELLO, RENDERED
from running import MODEL

from kvreclaim import LLM, SamplingParams

GREEDY = {"temperature": 0.0}

Connect = Callable[..., anthropic.Anthropic]


def ask(client: anthropic.Anthropic, **fields: Any) -> anthropic.types.Message:
    """Greedy; fields that the client has no argument for go beside the others."""
    extra = {**GREEDY, **fields.pop("extra", {})}
    given = {"model": MODEL, "max_tokens": 12, "messages": HELLO, **fields}
    return client.messages.create(**given, extra_body=extra)


def expected(oracle: LLM, prompt: str = RENDERED, **params: Any) -> Any:
    params = {"temperature": 0.0, "max_tokens": 12, **params}
    return oracle.generate(prompt, SamplingParams(**params))[0].outputs[0]
