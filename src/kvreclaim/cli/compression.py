"""The KV compression that a command line asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvreclaim import CompressionConfig

OPTIONS = {
    "kv_budget": "budget",
    "kv_compression_interval": "interval",
    "kv_compression_mode": "mode",
    "kv_compression_stats": "stats",
    "kv_sinks": "sinks",
    "kv_recent": "recent",
    "kv_protect_prompt": "protect_prompt",
}


def compression_of(given: dict[str, Any]) -> CompressionConfig | None:
    """What the options in OPTIONS say. Raises: InvalidArgumentError for settings without a policy."""
    from kvreclaim import CompressionConfig
    from kvreclaim.errors import InvalidArgumentError

    settings = {field: given[name] for name, field in OPTIONS.items() if given[name] is not None}
    if not settings["protect_prompt"]:
        del settings["protect_prompt"]
    if given["kv_compression"] is not None:
        return CompressionConfig(given["kv_compression"], **settings)
    if settings:
        raise InvalidArgumentError(
            f"{', '.join(settings)} set for the KV compression, but no policy is; "
            "add --kv-compression, for example --kv-compression query_mixture."
        )
    return None
