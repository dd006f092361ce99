"""Small tensors on their way to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def move(x: Tensor, device: torch.device) -> Tensor:
    """x on a device; what is copied from the CPU to a GPU takes its turn there, and nobody waits for it.

    A plain copy makes the host wait until the GPU has done all that was asked of it before.
    """
    if device.type != "cuda" or x.device.type != "cpu":
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)
