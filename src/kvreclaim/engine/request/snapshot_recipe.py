"""How a compressed prefix was made, as text that says the same in every process."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import version

from kvreclaim.compression.compressor import Compressor
from kvreclaim.config import EngineConfig
from kvreclaim.engine.request.request import Request
from kvreclaim.schedule import EvictionMethod, Footprint
from kvreclaim.schedule.snapshot_key import SnapshotKey

MOST_OPENING = 16
"""Tokens that a chat template writes at most to open an answer."""
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


def has_snapshots(request: Request, footprint: Footprint, config: EngineConfig, max_blocks: int) -> bool:
    """Whether a request that asks for it goes on from what earlier turns of its conversation have kept, and
    keeps it: one that evicts tokens again and again, or drops some, and of whose prompt every token is
    computed as any other. max_blocks: of all snapshots"""
    special = (request.beams, request.reuse, request.parent, request.sparse_prefill)
    return (
        config.enable_prefix_caching
        and max_blocks > 0
        and (footprint.bounded or _only_drops(footprint))
        and footprint.recall is None
        and all(each is None for each in special)
    )


def _only_drops(footprint: Footprint) -> bool:
    return footprint.drops is not None and footprint.eviction_method is EvictionMethod.KEEP


def snapshot_key(
    token_ids: Sequence[int], salt: str | None, compressor: Compressor | None, footprint: Footprint
) -> SnapshotKey:
    """The key of what a pass behind these tokens leaves of them, or dropping spans does."""
    recipe, drops = recipe_of(compressor, footprint), footprint.drops
    is_lasting = drops is None and " at 0x" not in recipe
    spans = () if drops is None else drops.spans
    return SnapshotKey(salt, recipe, array("q", token_ids).tobytes(), is_lasting=is_lasting, drops=spans)
