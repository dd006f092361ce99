"""Limits that the caller left open, derived once from the model and the machine."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.kv_cache import bytes_per_block


def choose_limits(config: EngineConfig, facts: ModelFacts) -> EngineConfig:
    """Set max_model_len and num_blocks where they are None.

    Raises: InvalidArgumentError if max_model_len exceeds the model's limit, or memory does not suffice.
    """
    max_model_len = config.max_model_len or facts.max_position
    if max_model_len > facts.max_position:
        raise InvalidArgumentError(
            f"max_model_len is {max_model_len}, but {facts.name} was made for {facts.max_position} positions "
            "(beyond them its rotation would change or is untrained); lower max_model_len."
        )
    num_blocks = config.num_blocks
    block_bytes = bytes_per_block(facts.layers, config.block_size, facts.dtype)
    if num_blocks is not None and num_blocks * block_bytes > free_memory_bytes(facts.device):
        raise InvalidArgumentError(
            f"num_blocks is {num_blocks}, which takes {num_blocks * block_bytes / 2**30:.1f} GiB of K/V, but "
            f"{free_memory_bytes(facts.device) / 2**30:.1f} GiB are free; lower it, or leave it out."
        )
    if num_blocks is None:
        affordable = int(free_memory_bytes(facts.device) * config.kv_memory_fraction) // block_bytes
        useful = -(-max_model_len // config.block_size) * config.max_num_seqs
        num_blocks = min(affordable, useful)
        if num_blocks < 1:
            raise InvalidArgumentError(
                f"kv_memory_fraction {config.kv_memory_fraction} of the free memory holds no block of "
                f"{block_bytes} bytes; free some memory, raise the fraction or set num_blocks."
            )
    return replace(config, max_model_len=max_model_len, num_blocks=num_blocks)


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free now on the device (for a CPU: the machine's)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)
