"""Compression of a request's KV cache: its own settings within the operator's limits."""

from __future__ import annotations

import dataclasses

from kvreclaim.checks import require
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression_settings import AUTO
from kvreclaim.engine.features.snapshots.feature import SnapshotUse
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.errors import KVReclaimError
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import KVCompression


def compression_of(given: KVCompression, served: ServedModel, limits: ServerConfig) -> CompressionConfig:
    """Fill in absent settings from the server's own, if they are for the same policy, and always its
    statistics. Raises: ApiError 400."""
    if not limits.client_kv_compression:
        raise ApiError(
            400, "kv_compression is the operator's to choose here; leave it out.", "kv_compression"
        )
    own = served.compression
    fields = given.model_dump(exclude_none=True)
    try:
        if fields.get("policy", AUTO if own is None else own.policy) == AUTO:
            fields["policy"] = served.auto.named()
        if "budget" in fields:
            fields = {"auto_budget": None, "max_loss": None, "content": None} | fields
        elif "max_loss" in fields:
            fields["budget"] = None
        if own is None:
            settings = CompressionConfig(**fields)
        elif fields.get("policy", own.policy) == own.policy:
            settings = dataclasses.replace(own, **fields)
        else:
            settings = CompressionConfig(**fields, stats=own.stats)
        check_limits(settings, own, limits)
    except KVReclaimError as error:
        raise ApiError(400, f"kv_compression: {error}", "kv_compression") from error
    return settings


def check_limits(config: CompressionConfig, own: CompressionConfig | None, limits: ServerConfig) -> None:
    """Check all of a request's compression but its budget, because it slows all requests of a batch. The
    server's own is never refused. Raises: InvalidArgumentError."""
    policy = config.make_policy()
    least, most, window = (
        limits.min_kv_compression_interval,
        limits.max_kv_budget,
        limits.max_kv_query_window,
    )
    keeps_all = True  # the server's default
    if own is not None:
        chosen = own.make_policy()
        keeps_all = own.verify or not chosen.eviction_method.evicts
        least, window = min(least, own.interval), max(window, chosen.query_window)
        most = most if most is None or own.is_of_prompt else max(most, own.budget)
    require(
        config.interval >= least or policy.prompt_only or not policy.eviction_method.evicts,
        f"interval is {config.interval} tokens, but this server allows no interval below {least}; "
        f"ask for {least} or more.",
    )
    require(
        policy.query_window <= window,
        f"policy {config.policy!r} looks back on {policy.query_window} queries, but this server keeps "
        f"{window} at most; ask for a window of {window} or less.",
    )
    require(
        most is None or keeps_all or (policy.eviction_method.evicts and not config.verify),
        f"{'verify' if config.verify else 'policy ' + repr(config.policy)} keeps every token, but this "
        f"server keeps {most} at most; ask for a policy that evicts, with a budget of {most} or less.",
    )


def check_budget(prompt: RequestSpec, served: ServedModel, most: int) -> None:
    """Check the budget that a request's compression gives its prompt: at most `most` tokens, or what the
    server's own gives it. Raises: ApiError 400."""
    config, own = prompt.compression, served.compression
    if config is None:
        return
    snapshots = prompt.option(SnapshotUse)
    length = (snapshots and snapshots.compress_prompt_at) or len(prompt.prompt_token_ids)
    budget = config.for_prompt(length, served.block_size, served.density).budget
    if own is not None and (own.max_loss is None or _loses_as_much(config, own)):
        most = max(most, own.for_prompt(length, served.block_size, served.density).budget)
    given = f"budget is {budget} tokens"
    if config.budget_share is not None:
        given = f"budget is {100 * config.budget_share:.4g}%, {budget} tokens of this prompt"
    if config.max_loss is not None:
        given = "max_loss may keep every token"
    if budget > most:
        raise ApiError(
            400,
            f"kv_compression: {given}, but this server keeps {most} at most; ask for {most} or less.",
            "kv_compression",
        )


def _loses_as_much(config: CompressionConfig, own: CompressionConfig) -> bool:
    """Whether max_loss keeps no more than the server's own."""
    assert own.max_loss is not None, "check_budget has checked it"
    lost = config.max_loss is not None and config.max_loss >= own.max_loss
    return lost and own.content in (None, config.content)
