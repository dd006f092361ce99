"""Kernels run in Triton's interpreter on the CPU; with TRITON_INTERPRET=0 in the environment, on the GPU.

Triton reads the variable when a kernel is defined, its own library's (tl.sum, tl.max, ...) included, so
tests/conftest.py sets it before anything imports triton.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime.interpreter import InterpretedFunction

    from kvreclaim.ops.triton import support


if importlib.util.find_spec("triton") is not None and support.is_interpreted():
    from kvreclaim.ops.triton.attention_kernels import decode_kernel

    assert isinstance(decode_kernel, InterpretedFunction), (
        "kvreclaim.ops.triton was imported before TRITON_INTERPRET=1 was set; import it inside the test."
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu need compiled kernels."""
    if torch.cuda.is_available() and os.environ["TRITON_INTERPRET"] == "0":
        return
    reason = "needs a CUDA device and TRITON_INTERPRET=0"
    for item in items:
        if item.get_closest_marker("gpu") is not None and "triton" in item.path.parts:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def poisoned_outputs() -> Iterator[None]:
    """torch fills every new tensor with NaN (or the largest integer) while a test runs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
