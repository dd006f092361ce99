"""docs/api.md: every row of its table of calls works, and its tables name every field."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from running import MODEL, Running

from kvreclaim.options import settings_of
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.openai.chat import ChatRequest
from kvreclaim.server.openai.completions import CompletionRequest
from kvreclaim.server.responses.fields import ResponsesRequest

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
CALLS = re.findall(r"^\| (openai|anthropic) \| `(client\..*)` \|$", PAGE, re.MULTILINE)
NAMES: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "GO wind"}],
    "tools": [{"type": "function", "function": {"name": "wave", "description": "Says hello."}}],
}


def test_the_table_is_read():
    assert len(CALLS) > 12
    assert {client for client, _ in CALLS} == {"openai", "anthropic"}


@pytest.mark.parametrize(("library", "call"), CALLS)
def test_a_call(server: Running, library: str, call: str):
    client = {
        "openai": lambda: openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="any", max_retries=0),
        "anthropic": lambda: anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0),
    }[library]()
    with client:
        answer = eval(call, {"client": client, **NAMES})
        if ".stream(" in call:
            with answer as stream:
                assert list(stream)
        elif "stream=True" in call or "list()" in call:
            assert list(answer)
        else:
            assert answer


@pytest.mark.parametrize(("library", "call"), CALLS)
def test_a_call_of_the_asynchronous_client(server: Running, library: str, call: str):
    async def ask() -> Any:
        client = {
            "openai": lambda: openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="any"),
            "anthropic": lambda: anthropic.AsyncAnthropic(base_url=server.base_url, api_key="any"),
        }[library]()
        async with client:
            answer = eval(call, {"client": client, **NAMES})
            if ".stream(" in call:
                async with answer as stream:
                    return [event async for event in stream]
            if "list()" in call:
                return [model async for model in answer]
            answer = await answer
            return [chunk async for chunk in answer] if "stream=True" in call else answer

    assert asyncio.run(ask())


def test_every_field_stands_on_the_page():
    rows = re.findall(r"^\| (?:… )?(`.*?) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    models = (CompletionRequest, ChatRequest, ResponsesRequest)
    accepted = {name for model in models for name in model.model_fields}
    assert accepted - named == set()


DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
LIMIT = re.compile(r"(max|min|allowed)_.*|.*_timeout_s|client_kv_compression")
ELSEWHERE = {"shutdown_timeout_s"}
"""It limits no request: the section on stopping has it."""


def rows() -> dict[str, list[str]]:
    """The table's rows by option: default, reason, answer beyond it."""
    section = DOCS.read_text().split("## Limits")[1].split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `--")]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in lines}


def limits() -> dict[str, object]:
    """Options of the server that limit clients, by flag: their defaults."""
    found = {}
    for name, setting in settings_of(ServerConfig).items():
        if LIMIT.fullmatch(name) and name not in ELSEWHERE:
            flag = setting.spec.flags[0] if setting.spec.flags else f"--{name.replace('_', '-')}"
            found[f"--no-{flag[2:]}" if setting.default is True else flag] = setting.default
    return found


def test_every_limit_is_in_the_table():
    assert rows().keys() == limits().keys() | {"--max-model-len"}


@pytest.mark.parametrize("flag", limits())
def test_with_its_default_a_reason_and_an_answer(flag: str):
    shown, reason, over = rows()[flag]
    default = limits()[flag]
    if default is True:
        assert shown == "off"
    elif isinstance(default, (int, float)):
        assert float(shown.removesuffix(" s").replace(",", "")) == default
    else:
        assert shown[0].isalpha() or shown.startswith("256 KiB + 32 bytes"), "it depends on something"
    assert reason
    assert re.search(r"\b(4\d\d|503)\b|the same|the end of", over)
