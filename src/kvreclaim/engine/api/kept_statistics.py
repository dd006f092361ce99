"""Where calibration keeps the statistics of a model."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from kvreclaim.model.loader import LoadedModel
from kvreclaim.model_paths import stats_home

SAMPLED = 1024
"""First numbers of each weight that name a model: fine-tuned models of one architecture share all else."""


def kept_statistics(loaded: LoadedModel) -> Path:
    """The file in the cache directory, named by the model's fingerprint and a sample of its weights."""
    digest = hashlib.sha256(loaded.facts.fingerprint.encode())
    weights = [*loaded.model.named_parameters(), *loaded.model.named_buffers()]
    for name, weight in sorted(weights, key=lambda named: named[0]):
        first = weight.detach().flatten()[:SAMPLED].cpu()
        digest.update(name.encode() + first.view(torch.uint8).numpy().tobytes())
    return stats_home() / f"{digest.hexdigest()}.safetensors"
