"""Check for configured options. Imports nothing, so an unused plugin costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

KEY: Final = "kv_compression"
"""Key in additional_config and in a request's extra_args."""
VARIABLE: Final = "KVRECLAIM_VLLM"
"""Environment variable with the plugin's options."""
CENTRED: Final = "centred_keys"
"""Key in additional_config of centred and scaled keys."""


def is_enabled(additional_config: object, environ: Mapping[str, str]) -> bool:
    """Return whether compression is configured."""
    return VARIABLE in environ or (isinstance(additional_config, Mapping) and KEY in additional_config)


def has_centred_keys(additional_config: object) -> bool:
    """Return whether keys are centred and scaled before they are stored."""
    return isinstance(additional_config, Mapping) and additional_config.get(CENTRED, False) is not False
