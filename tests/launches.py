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
    *("detach_", "item", "is_nonzero", "_unsafe_view"),
}
"""Operations of torch that launch nothing, besides those that return a view."""

WAITS = {
    *(Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.nonzero, torch.nonzero, torch.unique, Tensor.unique),
    *(Tensor.__bool__, Tensor.__int__, Tensor.__float__, Tensor.__index__, torch.equal, Tensor.equal),
    *(torch.masked_select, Tensor.masked_select, torch.bincount, Tensor.bincount),
}
"""Calls that read a tensor on the host, or need its contents to know the shape of their result."""
REPEATS = {torch.repeat_interleave, Tensor.repeat_interleave}
"""Wait without output_size, where the repeats are a tensor."""


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
        may_be_view = any(
            r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns
        )
        result = func(*args, **(kwargs or {}))
        is_empty = isinstance(result, Tensor) and not result.numel()
        is_view = may_be_view and not (isinstance(result, Tensor) and _is_copy(result, args))
        if not (is_view or is_empty or name in NO_KERNEL):
            self.found.torch[name] += 1
        return result


def _is_copy(result: Tensor, args: Any) -> bool:
    """Whether an operation that returns a view where it can (reshape, contiguous, to) has copied."""
    given = [arg for arg in args if isinstance(arg, Tensor)]
    return all(arg.untyped_storage().data_ptr() != result.untyped_storage().data_ptr() for arg in given)


class _Waits(TorchFunctionMode):
    def __init__(self, found: Launches) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_of_host(args, kwargs):
            with torch.utils._python_dispatch._disable_current_modes():
                return _as_of_host(func(*args, **kwargs))
        found = func(*args, **kwargs)
        if name := _waits(func, args, kwargs):
            self.found.waits[name] += 1
        if func is Tensor.cpu:
            return _as_of_host(found.detach())
        is_same = any(found is arg for arg in args) and func is Tensor.to
        return found.detach() if is_same else found  # no mark of the host stays on what is on the device


def _waits(func: Any, args: Any, kwargs: Any) -> str | None:
    """How a call makes the host wait for the device, if it does."""
    if func is Tensor.__getitem__:
        return "mask" if _has_mask(args[1]) else None
    if func in REPEATS:
        repeats = kwargs.get("repeats", args[1] if len(args) > 1 else 1)
        return "repeat_interleave" if isinstance(repeats, Tensor) and "output_size" not in kwargs else None
    if func is Tensor.to:
        return "to" if getattr(args[0], "of_host", False) and not kwargs.get("non_blocking") else None
    is_upload = func is torch.tensor and kwargs.get("device") is not None
    return func.__name__ if func in WAITS or is_upload else None


def _is_of_host(args: Any, kwargs: Any) -> bool:
    """Whether a call reads only tensors of the host, or none, and names no device for its result."""
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return not any(
        isinstance(leaf, torch.device) or (isinstance(leaf, Tensor) and not getattr(leaf, "of_host", False))
        for leaf in leaves
    )


def _as_of_host(found: Any) -> Any:
    """The result of a call, each tensor in it marked: it lies on the host, whatever the device is."""
    for leaf in torch.utils._pytree.tree_leaves(found):
        if isinstance(leaf, Tensor):
            leaf.of_host = True  # type: ignore[attr-defined]
    return found


def _has_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype is torch.bool for part in parts)


@contextmanager
def counted() -> Iterator[Launches]:
    """Count what runs in this context, on the device. What is made there without a device, or of numpy's
    arrays, lies on the host: its operations are not counted, but its way to the device is a wait unless the
    copy does not block. What was made before counts as the device's."""
    found, launch, from_numpy = Launches(), GridExecutor.__call__, torch.from_numpy

    def call(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        found.triton[self.fn.__name__] += 1
        with torch._C.DisableTorchFunction(), torch.utils._python_dispatch._disable_current_modes():
            return launch(self, *args, **kwargs)  # the interpreter computes with tensors

    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "__call__", call))
        stack.enter_context(patch.object(torch, "from_numpy", lambda x: _as_of_host(from_numpy(x))))
        stack.enter_context(_Waits(found))
        stack.enter_context(_Operations(found))
        yield found
