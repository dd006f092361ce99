"""The file of a model's statistics where none is named, and the KV cache dtype that they find best."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from kvreclaim.compression.config import CompressionConfig, StatsSource
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.stats_metadata import RECALIBRATE
from kvreclaim.compression.trial import Trial
from kvreclaim.compression_settings import AUTO
from kvreclaim.config import EngineConfig
from kvreclaim.errors import StatsMismatchError
from kvreclaim.model.loader import LoadedModel
from kvreclaim.model_paths import statistics_beside, stats_home
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import kv_format, plain_format

logger = logging.getLogger(__name__)

SAMPLED = 1024
"""Leading numbers of each weight that identify a model, as fine-tuned models share the architecture."""


def statistics_file(model: str | os.PathLike[str], loaded: LoadedModel) -> Path:
    """Return the file next to the weights, or the one that calibration keeps in the cache directory.

    Under hf_overrides the file next to the weights counts only if it was measured with them.
    """
    file = statistics_beside(model)
    if file.is_file() and (not loaded.facts.overridden or _fits(file, loaded)):
        return file
    return kept_statistics(loaded)


def _fits(file: Path, loaded: LoadedModel) -> bool:
    try:
        QueryStats.load(file).check_model(loaded.facts)
    except StatsMismatchError:
        return False
    return True


def kept_statistics(loaded: LoadedModel) -> Path:
    """The file in the cache directory, named by the model's fingerprint, its config and a sample of its
    weights."""
    digest = hashlib.sha256(loaded.facts.fingerprint.encode())
    digest.update(json.dumps(loaded.facts.config).encode())
    weights = [*loaded.model.named_parameters(), *loaded.model.named_buffers()]
    for name, weight in sorted(weights, key=lambda named: named[0]):
        first = weight.detach().flatten()[:SAMPLED].cpu()
        digest.update(name.encode() + first.view(torch.uint8).numpy().tobytes())
    return stats_home() / f"{digest.hexdigest()}.safetensors"


def stats_source(config: CompressionConfig | None, stats_file: Path) -> StatsSource | None:
    """The statistics that a compression names, else the model's file if there is one."""
    if config is not None and config.stats is not None:
        return config.stats
    return stats_file if stats_file.is_file() else None


def in_best_format(
    config: EngineConfig, compression: CompressionConfig | None, stats: StatsSource | None, facts: ModelFacts
) -> EngineConfig:
    """The config with the KV cache dtype that suits `compression` best, if kv_cache_dtype is left to choose.

    With a share of the bytes and policy auto it is the one that lost least in the trial at the nearest
    measured share, or a wider one in which a full cache fits in the share. With max_loss it is the one in
    which the loss curve's budgets take the fewest bytes. With verify it is left alone: the full cache that
    verifies is the model's own.

    Raises: InvalidArgumentError, StatsMismatchError for statistics that cannot be read.
    """
    if compression is None or stats is None or config.kv_cache_dtype != AUTO or compression.verify:
        return config
    if compression.max_loss is None and (compression.policy != AUTO or compression.budget_share is None):
        return config
    found = (stats if isinstance(stats, QueryStats) else QueryStats.load(stats)).metadata
    form, why = None, ""
    if compression.budget_share is not None and found.trial is not None:
        form, why = _format_of_share(found.trial, compression.budget_share, facts)
        if form is None:
            _warn_of_no_trial(plain_format(facts.dtype).name)
    if compression.max_loss is not None and found.curve is not None:
        form, share = found.curve.best_format(compression.max_loss, compression.content)
        why = f"which keeps max_loss {compression.max_loss:g} in the fewest bytes, {share:.0%} of a prompt's"
    if form is None or form == AUTO:
        return config
    logger.info("kv_cache_dtype is %s, %s; name one to keep it", form, why)
    return replace(config, kv_cache_dtype=form)


@cache
def _warn_of_no_trial(own: str) -> None:
    """Log once in a process that a share keeps the model's dtype."""
    text = "kv_cache_dtype stays %s: the statistics hold no trial of formats; %s, or name a format"
    logger.warning(text, own, RECALIBRATE)


def _format_of_share(trial: Trial, share: float, facts: ModelFacts) -> tuple[str | None, str]:
    """Return the KV cache dtype for a share of the bytes, and the reason; None if formats were not tried."""
    if not trial.formats:
        return None, ""
    own = plain_format(facts.dtype)
    names = {outcome.kv_cache_dtype for outcome in trial.formats}
    densities = {name: kv_format(name, facts.dtype).density(own, facts.layers) for name in names}
    whole = trial.whole_format_at(share, densities)
    if whole is not None:
        return whole, f"in which a full cache fits in {100 * share:.4g}% of its bytes in the model's dtype"
    measured = trial.measured_share(share)
    return trial.format_at(share), f"which lost least in the trial at {100 * measured:.4g}% of the bytes"
