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

PASS_SEMANTICS = 2
"""To be raised when a pass with the same settings keeps something else, or leaves it elsewhere."""


VERSION = version("kvreclaim")


def recipe_of(compressor: Compressor | None, footprint: Footprint) -> str:
    """Everything that decides, in this engine, what is left of given tokens. The offset is not in it: it
    moves passes behind the prompt only; nor are compress_prompt_at and keep_at: they are the number of the
    tokens; nor what the caller drops: the key says it."""
    told: dict[str, object] = {"semantics": PASS_SEMANTICS, "version": VERSION}
    if compressor is not None:
        policy = compressor.policy
        told |= {
            "policy": f"{type(policy).__module__} {policy.name} {policy!r}",
            "mode": str(compressor.mode.value),
            "statistics": compressor.stats_digest,
        }
        if compressor.config.policy_object is not None:  # a class of the same name may differ elsewhere
            told["class"] = f"class at {id(type(policy)):#x}"
    common = replace(footprint, offset=0, compress_prompt_at=0, keep_at=0, shareable_until=None, drops=None)
    told |= {
        "footprint": {
            **asdict(common),
            "eviction_method": footprint.eviction_method.value,
        },
    }
    return json.dumps(told, sort_keys=True)


def snapshot_key(
    token_ids: Sequence[int], salt: str | None, compressor: Compressor | None, footprint: Footprint
) -> SnapshotKey:
    """The key of what a pass behind these tokens leaves of them, or dropping spans does."""
    recipe, drops = recipe_of(compressor, footprint), footprint.drops
    is_lasting = drops is None and " at 0x" not in recipe
    spans = () if drops is None else drops.spans
    return SnapshotKey(salt, recipe, array("q", token_ids).tobytes(), is_lasting=is_lasting, drops=spans)
