"""Limits that the caller left open, derived once from the model and the machine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import torch

from kvreclaim import speculation
from kvreclaim.checks import require
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.free_memory import free_host_memory_bytes
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.groups.state_slots import StateSizes, most_sequences
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.offload.plan.tiered_offload import NEVER, TieredOffload
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import kv_format
from kvreclaim.ops.groups import layer_groups
from kvreclaim.options import LARGEST
from kvreclaim.schedule.rates import Rates

logger = logging.getLogger(__name__)
MOST_WAIT_S = 10.0
"""Most seconds to wait for a disk that hangs."""
LOAD_WAIT_PER_TOKEN_S = 0.25 / 1000
SIGNAL_FRACTION = 0.2
"""Share of the free memory for signals of policies."""


def choose_limits(config: EngineConfig, facts: ModelFacts, spoken_for: int = 0) -> EngineConfig:
    """Set max_model_len, num_blocks and max_signal_bytes where they are None. A given max_signal_bytes is
    subtracted first. With full caches in host memory, max_model_len is at most the tokens that fit there.
    spoken_for: bytes that are reserved but not allocated yet

    Raises: InvalidArgumentError if max_model_len exceeds the model's limit, or memory does not suffice.
    """
    fraction = memory_fraction(config, facts.device)
    max_model_len = config.max_model_len or facts.max_position
    if max_model_len > facts.max_position:
        raise InvalidArgumentError(
            f"max_model_len is {max_model_len}, but {facts.name} was made for {facts.max_position} positions "
            "(beyond them its rotation would change or is untrained); lower max_model_len."
        )
    form, groups = kv_format(config.kv_cache_dtype, facts.dtype), layer_groups(facts, config)
    layers, size = groups.facts.layers, config.block_size
    block_bytes = form.bytes_per_block(layers, size)
    free = min(free_memory_bytes(facts.device), left_of_limit(config, facts.device))
    free = max(0, free - spoken_for)
    if config.full_cache_host_size:
        host_blocks = full_cache_blocks(config, block_bytes)
        if config.max_model_len is None:
            max_model_len = min(max_model_len, host_blocks * size)
        if facts.device.type == "cpu":
            free -= host_blocks * block_bytes
    kept_bytes = config.max_signal_bytes or 0
    num_blocks = config.num_blocks
    if facts.states:
        config = with_room_for_states(config, facts, free)
        kept_bytes += state_slots_of(config, facts).num_slots * facts.state_bytes
    if num_blocks is None:
        affordable = (int(free * fraction) - kept_bytes) // block_bytes
        chunk = min(config.max_num_batched_tokens, max_model_len)
        each = sum(window.most_blocks(max_model_len, chunk, size) for window in groups.windows)
        num_blocks = min(affordable, (blocks_for(max_model_len, size) + each) * config.max_num_seqs)
        if config.full_cache_host_size:
            num_blocks = max(1, num_blocks)
        if num_blocks < 1:
            raise InvalidArgumentError(
                f"kv_memory_fraction {fraction} of the free memory{_limit(config)} holds no block of "
                f"{block_bytes} bytes{_signals(kept_bytes)}; free some memory, raise the fraction or set "
                "num_blocks."
            )
    elif (needed := num_blocks * block_bytes + kept_bytes) > free:
        raise InvalidArgumentError(
            f"num_blocks is {num_blocks}, which takes {needed / 2**20:,.0f} MiB of K/V in {form.name}"
            f"{_signals(kept_bytes)}, but {free / 2**20:,.0f} MiB are free{_limit(config)}; lower "
            "it, or leave it out."
        )
    signal_bytes = config.max_signal_bytes
    if signal_bytes is None:
        left = free - num_blocks * block_bytes
        signal_bytes = max(0, min(int(free * SIGNAL_FRACTION), left))
    return replace(config, max_model_len=max_model_len, num_blocks=num_blocks, max_signal_bytes=signal_bytes)


def state_slots(config: EngineConfig, facts: ModelFacts) -> StateSizes | None:
    """Slots for the states of recurrent layers; None for a model without."""
    return state_slots_of(config, facts) if facts.states else None


def state_slots_of(config: EngineConfig, facts: ModelFacts) -> StateSizes:
    """Two for each running sequence, one more for each draft, one more where it may be parked in the step in
    which others begin, and the checkpoints."""
    each, checkpoints = _slots_of_each(config)
    return StateSizes.of(
        config.max_num_seqs, each, checkpoints, config.state_checkpoint_interval, _drafts_of_each(config)
    )


def _drafts_of_each(config: EngineConfig) -> int:
    drafts = speculation.from_json(config.speculative_config)
    return max(drafts.num_speculative_tokens if drafts else 0, config.state_drafts)


def _slots_of_each(config: EngineConfig) -> tuple[int, int | None]:
    """Slots that a running sequence takes, and those kept for prefix hits."""
    each = 2 + _drafts_of_each(config) + (config.kv_offloading_size > 0)
    return each, config.state_checkpoints if config.enable_prefix_caching else 0


def with_room_for_states(config: EngineConfig, facts: ModelFacts, free: int) -> EngineConfig:
    """Lower max_num_seqs to as many as have room for their states in half of what the cache may take.

    Raises: InvalidArgumentError if that is none.
    """
    fraction = memory_fraction(config, facts.device)
    room = int(free * fraction) // 2 // facts.state_bytes
    most = min(config.max_num_seqs, most_sequences(room, *_slots_of_each(config)))
    slots = state_slots_of(replace(config, max_num_seqs=1), facts).num_slots
    require(
        most > 0,
        f"a sequence of {facts.name} takes {slots} states of {facts.state_bytes / 2**20:,.1f} MiB, but half "
        f"of kv_memory_fraction {fraction} of the free memory holds {room}; free some "
        "memory, raise the fraction or lower state_checkpoints.",
    )
    if most < config.max_num_seqs:
        logger.warning(
            "max_num_seqs is %d instead of %d: a sequence's recurrent state takes %.1f MiB, and states get "
            "half of the cache's memory",
            most,
            config.max_num_seqs,
            facts.state_bytes / 2**20,
        )
    return replace(config, max_num_seqs=most)


def host_room(config: EngineConfig, facts: ModelFacts, bytes_per_block: int) -> tuple[int, int]:
    """Slots on the host: for blocks, and for states of recurrent layers behind prefixes. Without these, a
    model with such layers stores no prefixes there."""
    size, share = int(config.kv_offloading_size * 2**30), config.kv_offloading_state_fraction
    num_states = 0
    if facts.states and config.enable_prefix_caching and config.state_checkpoints != 0 and share:
        num_states = int(size * share) // facts.state_bytes
        if not num_states:
            logger.warning(
                "prefixes are not stored on the host: kv_offloading_state_fraction %g of kv_offloading_size "
                "%g GiB holds no state of %.1f MiB",
                share,
                config.kv_offloading_size,
                facts.state_bytes / 2**20,
            )
    num_slots = (size - num_states * facts.state_bytes) // bytes_per_block
    with_states = f" beside {num_states} states of recurrent layers" if num_states else ""
    require(
        num_slots > 0,
        f"kv_offloading_size is {config.kv_offloading_size} GiB, less than one block, which takes "
        f"{bytes_per_block} bytes{with_states}; raise it, or leave it out.",
        "kv_offloading_size",
    )
    return num_slots, num_states


def make_memory(
    config: EngineConfig,
    facts: ModelFacts,
    bytes_per_block: int,
    num_disk_slots: int,
    num_disk_states: int,
    rates: Rates,
    **others: Any,
) -> MemoryManager:
    """Make the memory manager, with host slots if kv_offloading_size is set, or with blocks in host memory if
    full_cache_host_size is. facts: of all layers; others: of MemoryManager."""
    assert config.num_blocks is not None, "choose_limits sets it"
    if config.full_cache_host_size:
        return MemoryManager(full_cache_blocks(config, bytes_per_block), config.block_size, **others)
    if not config.kv_offloading_size:
        return MemoryManager(config.num_blocks, config.block_size, **others)
    num_slots, num_states = host_room(config, facts, bytes_per_block)
    require(
        config.swap_space is None or config.swap_space <= config.kv_offloading_size,
        f"swap_space is {config.swap_space} GiB, more than kv_offloading_size, {config.kv_offloading_size}; "
        "lower it, or raise that.",
        "swap_space",
    )
    require(
        not facts.states or num_states > 0 or not num_disk_slots,
        "kv_offloading_disk_path is set, but the host keeps no states of recurrent layers, without which "
        "nothing could begin with what the disk holds; raise kv_offloading_state_fraction, "
        "kv_offloading_size or state_checkpoints, or leave the path out.",
        "kv_offloading_disk_path",
    )
    max_parked = num_slots // 2
    if config.swap_space is not None:
        max_parked = min(num_slots, int(config.swap_space * 2**30) // bytes_per_block)
    store_after = 2 if config.kv_offloading_write_policy == "write_through_selective" else 1
    if facts.states and not num_states:
        store_after = NEVER  # blocks on the host would be useless: the host keeps no states for them
    offload = partial(
        TieredOffload,
        num_host_slots=num_slots,
        max_parked=max_parked,
        host_eviction_policy=config.kv_offloading_eviction_policy,
        store_after=store_after,
        store_decoded=config.kv_offload_decode,
        num_host_states=num_states,
        num_disk_slots=num_disk_slots,
        num_disk_states=num_disk_states,
        disk_eviction_policy=config.kv_offloading_eviction_policy,
        disk_store_after=2 if config.kv_offloading_disk_write_policy == "write_through_selective" else 1,
        load_wait_s=load_wait(config),
        races=config.kv_load_policy == "race" and not facts.states,  # states don't follow
        load_is_worth=load_worth(config, bytes_per_block, facts.state_bytes, rates),
    )
    return MemoryManager(config.num_blocks, config.block_size, offload=offload, **others)


def full_cache_blocks(config: EngineConfig, bytes_per_block: int) -> int:
    """Return the blocks of full caches in host memory. Raises: InvalidArgumentError if there is no room for
    one, or less free memory."""
    field, num_bytes = "full_cache_host_size", int(config.full_cache_host_size * 2**30)
    require(
        num_bytes >= bytes_per_block,
        f"{field} is {config.full_cache_host_size} GiB, less than one block, which takes {bytes_per_block} "
        "bytes; raise it, or leave it out.",
        field,
    )
    free = free_host_memory_bytes()
    require(
        num_bytes <= free,
        f"{field} takes {num_bytes / 2**30:.2f} GiB of host memory, but only {free / 2**30:.2f} GiB are "
        "free; lower it.",
        field,
    )
    return num_bytes // bytes_per_block


def load_wait(config: EngineConfig) -> Callable[[int], float]:
    """Return num_tokens -> seconds that a request waits while they are read from disk."""
    if config.kv_load_policy == "wait_complete":
        return lambda _: MOST_WAIT_S
    if config.kv_load_policy == "timeout":
        return lambda num_tokens: config.kv_load_timeout + LOAD_WAIT_PER_TOKEN_S * num_tokens
    return lambda _: 0.0


def load_worth(
    config: EngineConfig, bytes_per_block: int, state_bytes: int, rates: Rates
) -> Callable[[int], bool]:
    """Return num_tokens -> whether they, and the state after them, are read from disk."""
    if config.kv_load_policy == "wait_complete":
        return lambda _: True
    size = config.block_size
    return lambda num_tokens: (
        rates.load_s(num_tokens // size * bytes_per_block + state_bytes) < rates.recompute_s(num_tokens, 0, 0)
    )


def prefix_worth(config: EngineConfig, rates: Rates) -> Callable[[int, int], bool]:
    """Return (num_bytes, num_tokens) -> whether a compressed prefix of this size is read from disk."""
    if config.kv_load_policy == "wait_complete":
        return lambda num_bytes, num_tokens: True
    return lambda num_bytes, num_tokens: rates.load_s(num_bytes) < rates.recompute_s(num_tokens, 0, 1)


def memory_fraction(config: EngineConfig, device: torch.device) -> float:
    """Return the share of free memory for the pool. A CPU's memory serves other programs, too."""
    return config.kv_memory_fraction or (0.9 if device.type == "cuda" else 0.5)


def _signals(num_bytes: int) -> str:
    return f" (with {num_bytes / 2**20:.1f} MiB for signals)" if num_bytes else ""


def _limit(config: EngineConfig) -> str:
    return f" under memory_limit {config.memory_limit:g} GiB" if config.memory_limit is not None else ""


def left_of_limit(config: EngineConfig, device: torch.device) -> int:
    """Return what memory_limit leaves beside what the process has allocated on the device."""
    if config.memory_limit is None:
        return LARGEST
    if device.type == "cuda":
        used = torch.cuda.memory_reserved(device)
    else:
        memory = psutil.Process().memory_info()
        used = memory.rss - getattr(memory, "shared", 0)  # without mapped files
    return int(config.memory_limit * (1 << 30)) - used


def free_memory_bytes(device: torch.device) -> int:
    """Return the free memory of the device (for a CPU: what this process may take of the machine's)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory_bytes()
