"""The compiled module: whether it is there, and which instruction set it runs."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kvreclaim.errors import InvalidArgumentError

# torch comes first: its OpenMP runtime is loaded by then, and the extension joins that one team of threads.
_module: Any = None
_reason: str | None = None
try:
    _module = importlib.import_module("kvreclaim._native")
except ImportError as error:
    _reason = f"the native extension is not there ({error}); reinstall with a C++ compiler"

ISA_VARIABLE = "KVRECLAIM_ISA"
KERNELS: Any = _module
"""The extension module, for code that runs only where it is there; None elsewhere."""


def unavailable_reason() -> str | None:
    """Why no native kernel can run on this installation; None if they can."""
    return _reason


def native() -> Any:
    """Return the extension module. Raises: InvalidArgumentError if it is not there."""
    if _module is None:
        raise InvalidArgumentError(f"kernels is 'native', but {_reason}; pass kernels='reference'.")
    return _module


def supported_isas() -> tuple[str, ...]:
    """Instruction sets that this CPU runs, best first; empty without the extension."""
    return tuple(_module.supported_isas()) if _module is not None else ()


def force_isa(name: str) -> None:
    """Run one instruction set's kernels from now on, in the whole process.

    Raises: InvalidArgumentError if this CPU does not have it.
    """
    if not native().set_isa(name):
        raise InvalidArgumentError(
            f"instruction set is {name!r}; this CPU runs {', '.join(supported_isas())}; "
            f"choose one of these, or leave {ISA_VARIABLE} unset for the best."
        )


def describe() -> str:
    """E.g. "native (avx512, 2 threads)"."""
    return f"native ({native().isa()}, {torch.get_num_threads()} threads)"


@contextmanager
def torch_alone() -> Iterator[None]:
    """torch on the calling thread only, kernels on as many as before, while other programs hold cores.

    torch's loops wait for every thread, whether it has a core or not; for small ones that is most of a step.
    """
    if _module is None or not _module.lacks_cores():
        yield
        return
    threads = torch.get_num_threads()
    _module.set_max_threads(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        _module.set_max_threads(0)


if _module is not None and os.environ.get(ISA_VARIABLE):
    force_isa(os.environ[ISA_VARIABLE])
