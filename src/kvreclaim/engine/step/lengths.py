"""How long sequences may get: by max_model_len, and by what the whole pool holds of one."""

from __future__ import annotations

import logging

from kvreclaim.checks import require
from kvreclaim.config import EngineConfig
from kvreclaim.errors import RequestTooLongError
from kvreclaim.schedule.budget.check import check_blocks
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.budget.lengths import excess_slots, longest_sequence

logger = logging.getLogger(__name__)


def bounded_by_pool(footprint: Footprint, config: EngineConfig, *, said: int | None, longest: int) -> int:
    """The length up to which every sequence of this footprint is served, which the log says if the pool makes
    it less than the model's.

    said: max_model_len as the caller gave it; longest: the model's

    Raises: InvalidArgumentError if the pool cannot hold what was said, or not a single token.
    """
    assert config.num_blocks is not None, "the engine's limits are set"
    wanted = longest if said is None else said
    held = longest_sequence(None, wanted, footprint, config.num_blocks)
    if held < wanted:
        lacks = _lacks(excess_slots(wanted, wanted, footprint, config.num_blocks), footprint, config)
        to_do = _remedies(footprint, config)
        lower = f"lower it to {held}, or leave it out and have what the pool holds of each request, or "
        require(
            said is None and held > 0,
            f"max_model_len is {wanted}, and one sequence of that length may need {lacks}; "
            f"{lower if held else ''}{' or '.join(to_do)}.",
            "max_model_len",
        )
        logger.warning(
            "max_model_len is %d, not %d, the model's: one sequence of that length may need %s; to have "
            "more, %s.",
            held,
            wanted,
            lacks,
            " or ".join(to_do),
        )
    return held


def check_length(
    num_prompt: int, known: int, footprint: Footprint, config: EngineConfig, *, policy: str
) -> None:
    """Raise RequestTooLongError if the request can never run, InvalidArgumentError if its way of compressing
    does not go with the size of the blocks.

    num_prompt, known: tokens of the prompt, and of everything that is given; policy: its name
    """
    if not footprint.eviction_method.keeps_all:
        check_blocks(footprint, policy)
    assert config.max_model_len is not None, "the engine's limits are set"
    assert config.num_blocks is not None, "the engine's limits are set"
    if known >= config.max_model_len:
        is_hosts = (
            config.full_cache_host_size and config.max_model_len == config.num_blocks * config.block_size
        )
        raise RequestTooLongError(
            f"the prompt has {known} tokens, but max_model_len is {config.max_model_len} (prompt and "
            "output together); shorten the prompt or raise "
            f"{'full_cache_host_size, which holds no more' if is_hosts else 'max_model_len'}.",
            field="prompt",
        )
    excess = excess_slots(num_prompt, known + 1, footprint, config.num_blocks)
    if excess > 0:
        raise RequestTooLongError(
            f"the prompt of {known} tokens needs {_lacks(excess, footprint, config)}; shorten the prompt, or "
            f"{' or '.join(_remedies(footprint, config))}.",
            field="prompt",
        )


def output_limit(
    num_prompt: int,
    known: int,
    max_tokens: int | None,
    footprint: Footprint,
    config: EngineConfig,
    *,
    may_end_early: bool,
) -> int:
    """Tokens, prompt included, at which outputs end with reason "length": max_tokens or max_model_len,
    whichever comes first; without max_tokens, or where outputs may end early, what the whole pool can hold of
    one sequence, if that is less.

    Raises: RequestTooLongError if the pool cannot hold max_tokens.
    """
    assert config.max_model_len is not None, "the engine's limits are set"
    assert config.num_blocks is not None, "the engine's limits are set"
    limit = config.max_model_len if max_tokens is None else min(config.max_model_len, known + max_tokens)
    held = longest_sequence(num_prompt, limit, footprint, config.num_blocks)
    if held < limit and max_tokens is not None and not may_end_early:
        lacks = _lacks(excess_slots(num_prompt, limit, footprint, config.num_blocks), footprint, config)
        raise RequestTooLongError(
            f"max_tokens is {max_tokens}, which with the prompt of {known} tokens needs {lacks}; lower "
            f"max_tokens to {held - known}, shorten the prompt, or "
            f"{' or '.join(_remedies(footprint, config))}.",
            field="max_tokens",
        )
    return held


def _lacks(excess: int, footprint: Footprint, config: EngineConfig) -> str:
    """Say how many blocks are needed and how many there are."""
    assert config.num_blocks is not None, "the engine's limits are set"
    capacity = config.num_blocks * config.block_size
    windows = ", which windows take some of" if footprint.windows else ""
    return (
        f"{capacity + excess} slots, but the pool holds {capacity} ({config.num_blocks} blocks of "
        f"{config.block_size}{windows})"
    )


def _remedies(footprint: Footprint, config: EngineConfig) -> tuple[str, ...]:
    """Remedies that let the pool hold longer sequences."""
    if config.full_cache_host_size:
        return ("raise full_cache_host_size",)
    more = "raise num_blocks or kv_memory_fraction"
    if footprint.bounded:
        return ("lower the budget, the interval or max_num_batched_tokens", more)
    return (more, "compress with a budget")
