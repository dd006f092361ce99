"""One server for the tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from running import Running, running_server

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
