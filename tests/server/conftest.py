"""One server for the tests that need nothing special of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from running import Running, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    """The demo model without keys. Leave it as it was found: other tests use it."""
    with running_server() as running:
        yield running
