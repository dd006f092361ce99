"""The entry point `vllm.general_plugins`, which vLLM calls in each process before it is configured.

Without the option each wrapped function does what it did before. Two are wrapped in every process that has
the plugin (making the configuration, sizing the pool), two more in the front end once compression is enabled
(metrics, the settings of a request). Nothing else of vLLM is replaced: the scheduler and the workers are
subclasses that the configuration names, and so are the attention layers of a model with centred keys.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from kvreclaim.integrations.vllm.settings.enabled import CENTRED, KEY, has_centred_keys, is_enabled
from kvreclaim.integrations.vllm.settings.patching import wrap

logger = logging.getLogger("vllm.kvreclaim")


def register() -> None:
    """Wrap the two functions that make compression an option. Idempotent.

    Imports no module of vLLM's workers: their order matters. An exception here would end a vLLM without
    compression, so names that another version lacks are left to the check that runs once it is enabled.
    """
    from vllm.engine import arg_utils

    from kvreclaim.integrations.vllm.settings import family

    wrap(arg_utils.EngineArgs, "create_engine_config", _configuring)
    if family.is_known():  # otherwise refused once compression is enabled
        _relax_pool_check()


def _relax_pool_check() -> None:
    """Lower the blocks that vLLM's check at start counts for a compressed request. If that check is missing,
    the check of signatures refuses once compression is enabled."""
    from kvreclaim.integrations.vllm.settings import family

    check = family.find_family().pool_check
    module = import_module(check.module)
    if hasattr(module, check.needed):
        wrap(module, check.needed, lambda original: _relaxed(original, module, check.per_block))


def _relaxed(original: Callable[..., Any], module: Any, per_block: str) -> Callable[..., Any]:
    """A compressed request never holds more than its budget, interval and one chunk."""
    from kvreclaim.integrations.vllm.settings import family

    def max_memory_usage_bytes(*args: Any) -> Any:
        needed = original(*args)
        vllm_config, kv_cache_groups = args[-2:]
        if not is_enabled(vllm_config.additional_config, {}):
            return needed
        capped_bytes = family.module("front").capped_bytes
        return capped_bytes(needed, vllm_config, kv_cache_groups, lambda: getattr(module, per_block)(*args))

    return max_memory_usage_bytes


def _configuring(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap EngineArgs.create_engine_config, which makes the configuration of every front end."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        if is_enabled(config.additional_config, os.environ):
            configure(config)
        if has_centred_keys(config.additional_config):
            configure_centring(config)
        return config

    return create_engine_config


def configure(config: Any) -> None:
    """Name our scheduler and workers in a VllmConfig with compression. Idempotent.

    Raises: UnsupportedVllmError, InvalidArgumentError, UnsupportedModelError.
    """
    from kvreclaim.integrations.vllm.refusals import signatures, table
    from kvreclaim.integrations.vllm.settings import family
    from kvreclaim.integrations.vllm.settings.max_loss import check_cache_dtype
    from kvreclaim.integrations.vllm.settings.model_statistics import ModelToLoad, find_statistics
    from kvreclaim.integrations.vllm.settings.options import Options

    signatures.check_front()
    front = family.module("front")
    table.refuse_config(config)

    def look(make: bool) -> str | None:
        return find_statistics(ModelToLoad.of_config(config), make)

    serves = partial(table.refuse_signals, config)
    options = Options.find(config.additional_config, os.environ, look, serves)
    assert options is not None
    table.refuse_snapshots(config, options)
    check_cache_dtype(options.settings, config)
    # Options of the environment reach every process; the caller's object stays as it is.
    config.additional_config = {**config.additional_config, KEY: options.as_json()}
    front.take_over(config)
    front.install_front_end()
    logger.info("%s", front.describe(config))


def configure_centring(config: Any) -> None:
    """Name a worker that centres keys in a VllmConfig with centred keys. Idempotent.

    Raises: UnsupportedVllmError, InvalidArgumentError, UnsupportedModelError, StatsMismatchError.
    """
    from kvreclaim.integrations.vllm.refusals import signatures
    from kvreclaim.integrations.vllm.refusals.centred_keys import configure_centred_keys
    from kvreclaim.integrations.vllm.settings import family

    signatures.check_front()
    configure_centred_keys(config)
    if not is_enabled(config.additional_config, {}):
        family.module("front").take_over_worker(config)
    source = config.additional_config[CENTRED]
    logger.info(
        "kvreclaim: keys are centred and scaled before they are stored, by %s",
        "the model's weights" if source is True else f"the statistics {source}",
    )
