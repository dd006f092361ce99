"""GPU work counted on the CPU: kernels that torch and Triton launch, and waits of the host for a result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

NO_KERNEL = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "alias"),
    *("lift_fresh", "is_pinned", "_local_scalar_dense", "resolve_conj", "resolve_neg"),
}
"""Operations of torch that launch nothing, besides those that return a view."""

WAITS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.nonzero, torch.nonzero, torch.unique),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.unique),
    *(torch.masked_select, Tensor.masked_select),
}
"""Calls that read a tensor on the host, or need its contents to know the shape of their result."""


@dataclass(slots=True, eq=False)
class Launches:
    """Counts by name: operations of torch that compute, launches of Triton kernels, waits of the host."""

    torch: Counter[str] = field(default_factory=Counter)
    triton: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Kernels launched."""
        return self.torch.total() + self.triton.total()


class _Operations(TorchDispatchMode):
    def __init__(self, found: Launches) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and name not in NO_KERNEL:
            self.found.torch[name] += 1
        return func(*args, **(kwargs or {}))


class _Waits(TorchFunctionMode):
    def __init__(self, found: Launches) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is Tensor.__getitem__ and _has_mask(args[1])
        if func in WAITS or by_mask:
            self.found.waits["mask" if by_mask else func.__name__] += 1
        return func(*args, **(kwargs or {}))


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in parts)


@contextmanager
def counted() -> Iterator[Launches]:
    """Count what runs in this context. Tensors that the code under test reads on the host because they lie
    there (not on the device) are counted, too: keep those in numpy."""
    found, launch = Launches(), GridExecutor.__call__

    def call(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        found.triton[self.fn.__name__] += 1
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return launch(self, *args, **kwargs)  # the interpreter computes with tensors

    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "__call__", call))
        stack.enter_context(_Waits(found))
        stack.enter_context(_Operations(found))
        yield found
