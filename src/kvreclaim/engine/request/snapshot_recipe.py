"""The recipe of a compressed prefix: its settings as text, equal in every process."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version

from kvreclaim.compression.compressor import Compressor
from kvreclaim.schedule import Footprint
from kvreclaim.schedule.snapshot_key import SnapshotKey

PASS_SEMANTICS = 2
"""Raise it when a pass with the same settings keeps other tokens, or leaves them in other slots."""


VERSION = version("kvreclaim")


def recipe_of(compressor: Compressor | None, footprint: Footprint) -> str:
    """Return all settings that determine what a pass leaves of given tokens. The offset is left out, because
    it moves only passes after the prompt. So are compress_prompt_at and keep_at, which are the number of
    tokens, and dropped spans, which the key holds."""
    recipe: dict[str, object] = {"semantics": PASS_SEMANTICS, "version": VERSION}
    if compressor is not None:
        policy = compressor.policy
        recipe |= {
            "policy": f"{type(policy).__module__} {policy.name} {policy!r}",
            "mode": str(compressor.mode.value),
            "statistics": compressor.stats_digest,
        }
        if compressor.config.policy_object is not None:  # a class of the same name may differ elsewhere
            recipe["class"] = f"class at {id(type(policy)):#x}"
    common = replace(footprint, offset=0, compress_prompt_at=0, keep_at=0, shareable_until=None, drops=None)
    recipe |= {
        "footprint": {
            **asdict(common),
            "eviction_method": footprint.eviction_method.value,
        },
    }
    return json.dumps(recipe, sort_keys=True)


def snapshot_key(
    token_ids: Sequence[int], salt: str | None, compressor: Compressor | None, footprint: Footprint
) -> SnapshotKey:
    """Return the key of the tokens left by a pass after these tokens, or by dropping spans."""
    recipe, drops = recipe_of(compressor, footprint), footprint.drops
    is_lasting = drops is None and " at 0x" not in recipe
    spans = () if drops is None else drops.spans
    return SnapshotKey(salt, recipe, array("q", token_ids).tobytes(), is_lasting=is_lasting, drops=spans)
