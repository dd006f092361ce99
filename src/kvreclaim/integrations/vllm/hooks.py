"""The functions of vLLM that are wrapped, and the rule: without the option each does what it did before.

Two are wrapped in every process that has the plugin (making the configuration, sizing the pool), two more in
the front end once compression is asked for (metrics, a request's own settings). Nothing else of vLLM is
replaced: the scheduler and the workers are subclasses that the configuration names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

from kvreclaim.integrations.vllm.asking import KEY, is_asked_for
from kvreclaim.integrations.vllm.wrapping import wrap

logger = logging.getLogger("vllm.kvreclaim")


def install() -> None:
    """Wrap what every process needs. Imports no module of vLLM's workers: their order matters."""
    from vllm.engine import arg_utils

    from kvreclaim.integrations.vllm import family, pool_check

    wrap(arg_utils.EngineArgs, "create_engine_config", _configuring)
    if family.is_known():  # refused otherwise, if we are asked for
        pool_check.install()


def _configuring(original: Callable[..., Any]) -> Callable[..., Any]:
    """EngineArgs.create_engine_config: every front end makes its configuration here."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        if is_asked_for(config.additional_config, os.environ):
            configure(config)
        return config

    return create_engine_config


def configure(config: Any) -> None:
    """Have a VllmConfig that asks for compression name our scheduler and workers. Idempotent.

    Raises: UnsupportedVllmError, InvalidArgumentError, UnsupportedModelError.
    """
    from kvreclaim.integrations.vllm import family, signatures
    from kvreclaim.integrations.vllm.config_refusals import refuse_config
    from kvreclaim.integrations.vllm.options import Options

    signatures.check_front()
    front = family.module("front")
    options = Options.find(config.additional_config, os.environ)
    assert options is not None
    refuse_config(config)
    # What came by the environment reaches every process; the caller's own object stays as it is.
    config.additional_config = {**config.additional_config, KEY: options.as_json()}
    front.take_over(config)
    front.install_front_end()
    logger.info("%s", front.describe(config))
