"""The header of a report."""

from __future__ import annotations

from typing import Any

from kvreclaim.eval.report import ReportHeader


def header(**fields: Any) -> ReportHeader:
    """The header of a run on a CPU, with these fields instead of its own."""
    own = {
        "command": "kvreclaim eval",
        "version": "0",
        "model": "m",
        "fingerprint": "f",
        "dtype": "float32",
        "device": "cpu",
        "kernels": "kernels: reference",
        "block_size": 16,
        "kv_bytes_per_token": 1536,
        "interval": 128,
        "sinks": 4,
        "recent": 64,
        "protect_prompt": False,
        "mode": None,
        "seeds": [0, 1],
        "num_examples": 4,
        "tasks": {"recall": {"num_tokens": 2048}},
    }
    return ReportHeader(**{**own, **fields})
