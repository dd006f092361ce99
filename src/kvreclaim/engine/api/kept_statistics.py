"""The file of a model's statistics where none is named."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch

from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import StatsMismatchError
from kvreclaim.model.loader import LoadedModel
from kvreclaim.model_paths import statistics_beside, stats_home

SAMPLED = 1024
"""First numbers of each weight that name a model: fine-tuned models of one architecture share all else."""


def statistics_file(model: str | os.PathLike[str], loaded: LoadedModel) -> Path:
    """Return the file beside the weights, or the one that calibration keeps in the cache directory.

    Under hf_overrides the file beside the weights counts only if it was measured with them.
    """
    beside = statistics_beside(model)
    if beside.is_file() and (not loaded.facts.overridden or _fits(beside, loaded)):
        return beside
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
