"""The KV memory that a request may hold under its compression."""

from __future__ import annotations

from array import array
from dataclasses import replace
from zlib import crc32

from kvreclaim.checks import check_int, require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.signal_needs import window_of
from kvreclaim.config import EngineConfig
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.refusals import Feature, refuse
from kvreclaim.schedule.budget.footprint import Footprint


def footprint_of(
    compressor: Compressor | None,
    config: EngineConfig,
    prompt: list[int],
    groups: LayerGroups | None = None,
) -> Footprint:
    """The footprint of a request in this engine.

    With spread_compression its due points are shifted by less than the interval, by a hash of its prompt: a
    function of the request alone, so that a preempted one makes the same choices again.
    """
    plain = Footprint(block_size=config.block_size, max_chunk=config.max_num_batched_tokens)
    if groups is not None:
        plain = replace(plain, windows=groups.windows, trailing=groups.trailing)
    if compressor is None:
        return plain
    settings, recall, least = compressor.config, compressor.recall, config.block_size
    window = window_of(compressor.policy) if compressor.eviction_method.evicts else 1
    if recall is not None:  # the recent tokens must not reach the recalled ones, nor a window's queries
        least = max(least, settings.recent, compressor.policy.query_window)
        if window is not None and recall.needs_queries:
            window = max(window, recall.every)
    choices = max(1, settings.interval - least + 1) if config.spread_compression else 1
    return replace(
        settings.footprint(plain),
        window=window,
        offset=crc32(array("q", prompt).tobytes()) % choices,
    )


def compressing_prompt(
    footprint: Footprint, at: int, compressor: Compressor | None, num_prompt: int
) -> Footprint:
    """Return the footprint of a request with its first `at` tokens compressed at once.

    Raises: InvalidArgumentError.
    """
    check_int("compress_prompt_at", at, 1)
    evicts = compressor is not None and compressor.eviction_method.evicts
    refuse({Feature.COMPRESS_AT: at, Feature.NO_EVICTION: not evicts})
    require(
        at < num_prompt,
        f"compress_prompt_at is {at}, but the prompt has {num_prompt} tokens; "
        "lower it, so that at least one token follows.",
        "compress_prompt_at",
    )
    return replace(footprint, compress_prompt_at=at)
