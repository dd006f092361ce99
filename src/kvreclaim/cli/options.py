"""Options that several commands share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim.cli.takes import Takes
from kvreclaim.config import CompressionSettings, EngineConfig
from kvreclaim.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvreclaim import CompressionConfig

ENGINE, SAMPLING, COMPRESSION = "engine", "sampling", "KV compression"

ModelOption = Annotated[
    str | None, typer.Option(help="Local directory or hub id; the demo model where none is named.")
]
DType = Annotated[str, typer.Option(rich_help_panel=ENGINE, help="auto, float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(rich_help_panel=ENGINE, help="auto, cpu or cuda.")]


def compression_of(policy: str | None = None, **settings: Any) -> CompressionConfig | None:
    """None without a policy. Raises: InvalidArgumentError for settings without one."""
    from kvreclaim import CompressionConfig

    if policy is not None:
        return CompressionConfig(policy, **settings)
    if settings:
        raise InvalidArgumentError(
            f"{', '.join(settings)} set for the KV compression, but no policy is; "
            "add --kv-compression, for example --kv-compression query_mixture."
        )
    return None


Compression = Takes(config=CompressionSettings, panel=COMPRESSION, unset=True, build=compression_of)
KVCacheDType = Takes(config=EngineConfig, panel=ENGINE, only=("kv_cache_dtype",))
