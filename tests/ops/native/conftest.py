"""Fixtures for instruction sets, threads, poisoned outputs; without the extension nothing is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvreclaim.ops import native

if native.unavailable_reason() is not None:
    collect_ignore_glob = ["test_*.py"]


CONTAINED = {"avx512": "avx512vnni", "avx512vnni": "avx512bf16"}
ISAS = tuple(name for name in native.supported_isas() if CONTAINED.get(name) not in native.supported_isas())
"""The values have the keys' loops and more; test_native_format_attention.py and csrc/tests run all."""


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this CPU in turn."""
    native.force_isa(request.param)
    yield request.param
    native.force_isa(native.supported_isas()[0])


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """torch fills every new tensor with NaN (or the largest integer) while a test runs."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
