"""How a compressed prefix was made, as text that says the same in every process."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version

from kvreclaim.compression.compressor import Compressor
from kvreclaim.schedule import Footprint
from kvreclaim.schedule.snapshot_key import SnapshotKey

PASS_SEMANTICS = 1
"""To be raised when a pass with the same settings keeps something else, or leaves it elsewhere."""


VERSION = version("kvreclaim")


def recipe_of(compressor: Compressor, footprint: Footprint) -> str:
    """Everything that decides, in this engine, what is left of given tokens at footprint.compress_prompt_at.
    The offset is not in it: it moves passes behind the prompt only."""
    policy = compressor.policy
    told = {
        "semantics": PASS_SEMANTICS,
        "version": VERSION,
        "policy": f"{type(policy).__module__} {policy.name} {policy!r}",
        "mode": str(compressor.mode.value),
        "statistics": compressor.stats_digest,
        "footprint": {
            **asdict(replace(footprint, offset=0)),
            "eviction_method": footprint.eviction_method.value,
        },
    }
    return json.dumps(told, sort_keys=True)


def snapshot_key(
    token_ids: Sequence[int], salt: str | None, compressor: Compressor, footprint: Footprint
) -> SnapshotKey:
    """The key of what a pass at footprint.compress_prompt_at leaves of these tokens."""
    recipe = recipe_of(compressor, footprint)
    tokens = array("q", token_ids[: footprint.compress_prompt_at]).tobytes()
    return SnapshotKey(salt, recipe, tokens, is_lasting=" at 0x" not in recipe)
