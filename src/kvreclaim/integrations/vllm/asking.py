"""Where compression is asked for. Imports nothing, so that who does not ask pays nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KEY: Final = "kv_compression"
"""In additional_config and in a request's extra_args."""
VARIABLE: Final = "KVRECLAIM_VLLM"
"""The environment variable that asks for the plugin."""


def is_asked_for(additional_config: object, environ: Mapping[str, str]) -> bool:
    """Whether compression is asked for."""
    return VARIABLE in environ or (isinstance(additional_config, Mapping) and KEY in additional_config)
