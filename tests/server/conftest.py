"""One server for the tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from bare_messages import TEMPLATE
from logged import Log
from running import Running, openai_client, running_server
from speaking import save_speaker

from kvreclaim import LLM


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """The demo model without keys. Leave it as it was found: other tests use it."""
    with running_server() as running:
        yield running


@pytest.fixture(scope="session")
def tiny_server(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    """A random model that answers in bytes, whose chat template writes roles. Leave it as it was found."""
    with running_server(LLM(tiny_dir("llama"), num_blocks=512)) as running:
        yield running


@pytest.fixture(scope="session")
def tiny_oracle(tiny_dir: Callable[[str], Path]) -> LLM:
    """The same model without a server."""
    return LLM(tiny_dir("llama"), num_blocks=512)


@pytest.fixture(scope="module")
def own(tiny_dir: Callable[[str], Path]) -> Iterator[Running]:
    """A template that shows all that it is given, and requests run by priority."""
    llm = LLM(tiny_dir("llama"), num_blocks=512, max_num_seqs=1, scheduling_policy="priority")
    with running_server(llm, chat_template=TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def speaker_dir(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The saved model whose output logit_bias determines, with the module's TEMPLATE."""
    return save_speaker(tmp_path_factory.mktemp("speaker"), request.module.TEMPLATE)


@pytest.fixture(scope="module")
def speaker(speaker_dir: Path) -> LLM:
    return LLM(speaker_dir, num_blocks=64)


@pytest.fixture
def client(tiny_server: Running) -> Iterator[openai.OpenAI]:
    """OpenAI's own of the tiny server."""
    with openai_client(tiny_server) as client:
        yield client


@pytest.fixture
def connect() -> Iterator[Callable[..., anthropic.Anthropic]]:
    """connect(server, ...) is Anthropic's client of a server, closed at the end of the test."""
    with ExitStack() as stack:

        def client(server: Running, **options: Any) -> anthropic.Anthropic:
            options = {"api_key": "any", "max_retries": 0, **options}
            return stack.enter_context(anthropic.Anthropic(base_url=server.base_url, **options))

        yield client


@pytest.fixture
def log() -> Iterator[Log]:
    """The lines that the server logs while the test runs."""
    with Log.attached() as log:
        yield log
