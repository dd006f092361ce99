"""Small tensors on their way to a device without a wait of the host, and back with one; the current device of
a thread.

A plain copy makes the host wait until the GPU has finished all work that was queued before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(x: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """x on a device. A copy only where it is needed: what lies there already is shared."""
    source = _staged(x, device)
    return source.to(device, non_blocking=source.device.type == "cpu")  # else its bytes may not have come yet


def fetch(tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """float64 copies on the host of tensors of any shapes: one wait for the device of the first."""
    device = tensors[0].device
    if len(tensors) == 1:
        return [tensors[0].cpu().double().numpy()]
    flat = torch.cat([to_device(x, device).double().flatten() for x in tensors]).cpu().numpy()
    parts = np.split(flat, np.cumsum([x.numel() for x in tensors])[:-1])
    return [part.reshape(tuple(x.shape)) for part, x in zip(parts, tensors, strict=True)]


def fill(target: Tensor, values: np.ndarray) -> None:
    """Write the values into a tensor of their shape; they may change at once."""
    target.copy_(_staged(values, target.device), non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make a GPU the thread's current device, on which Triton launches, graphs are captured and streams are
    made. Nothing for a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _staged(x: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """x where a GPU can fetch it by itself; a copy, if it has to go to one."""
    source = torch.from_numpy(x) if isinstance(x, np.ndarray) else x
    return source.pin_memory() if device.type == "cuda" and source.device.type == "cpu" else source
