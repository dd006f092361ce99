"""Memory that a compression pass takes at a time."""

from __future__ import annotations

import torch

SHARE = 8
"""A pass takes at most one part in so many of a GPU's free memory."""


def working_bytes(device: torch.device, least: int) -> int:
    """Return `least`, on a GPU a share of the free memory if that is more: fewer, larger launches."""
    return max(least, torch.cuda.mem_get_info(device)[0] // SHARE) if device.type == "cuda" else least
