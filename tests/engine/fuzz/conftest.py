"""One machine for all tests of the folder; between two of them its odd policies are unknown again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from machine import running_machine

    with running_machine(tmp_path_factory.mktemp("fuzz")) as machine:
        yield machine


@pytest.fixture(scope="module")
def oracle(machine):
    from alone import Oracle

    return Oracle(machine)
