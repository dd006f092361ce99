"""What does not go with snapshots of compressed requests, checked in the front end."""

from __future__ import annotations

from typing import Any

from kvreclaim.integrations.vllm.refusals.refusals import ConfigRefusal, kv_connector
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.settings.groups import layer_kinds
from kvreclaim.integrations.vllm.settings.options import Options

WHERE = ' beside "snapshots"'
REMEDY = 'remove it or "snapshots"'


def _events(config: Any) -> str | None:
    events = config.kv_events_config
    return "--kv-events-config" if events is not None and events.enable_kv_cache_events else None


CONFIG: tuple[ConfigRefusal, ...] = (
    ConfigRefusal(
        lambda _: None if family.find_family().snapshots else "this version of vLLM",
        "it is not tested",
        'use vLLM 0.32, or remove "snapshots"',
    ),
    ConfigRefusal(
        lambda config: None if config.cache_config.enable_prefix_caching else "--no-enable-prefix-caching",
        "snapshots are found by the hashes of prefix caching",
        REMEDY,
    ),
    ConfigRefusal(
        kv_connector,
        "what follows a snapshot would be stored as if it were exact",
        REMEDY,
    ),
    ConfigRefusal(
        lambda config: (kinds := layer_kinds(config.model_config)) and kinds.words,
        "a snapshot has no blocks of these layers",
        'remove "snapshots"',
    ),
    ConfigRefusal(_events, "events would name blocks that no earlier event announced", REMEDY),
    ConfigRefusal(
        lambda config: "--speculative-config" if config.speculative_config is not None else None,
        "it is not tested",
        REMEDY,
    ),
)


def refuse_config_with_snapshots(vllm_config: Any, options: Options) -> None:
    """Raises: InvalidArgumentError with the first reason found."""
    if options.snapshots:
        for row in CONFIG:
            row.check(vllm_config, WHERE)
