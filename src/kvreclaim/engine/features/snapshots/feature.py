"""Compressed prefixes for later requests: of a prompt (compress_prompt_at), of a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.request import Sequence as Seq
from kvreclaim.engine.request.snapshot_recipe import snapshot_key
from kvreclaim.engine.request.spec import RequestSpec, compressing_prompt
from kvreclaim.engine.signals.needs import prefix_salt
from kvreclaim.engine.step.engine import Engine
from kvreclaim.refusals import Feature
from kvreclaim.schedule import EvictionMethod, Footprint

MOST_OPENING = 16
"""Most tokens that a chat template writes to open an answer."""


@dataclass(frozen=True, slots=True)
class SnapshotUse:
    """The compressed prefixes that a request keeps and begins with.

    compress_prompt_at: n: compress the first n prompt tokens at once, and keep the result for requests with
                  the same tokens, compression and n
    conversation_snapshots: whether the request begins with the compressed prefix of earlier turns of its
                  conversation, and keeps its own for the next turn; None: the engine's default
    is_rewritten: whether the next turn's prompt may have the answer in other tokens; if so, the compressed
                  prompt is kept as well
    """

    compress_prompt_at: int | None = None
    conversation_snapshots: bool | None = None
    is_rewritten: bool = False


class PromptSnapshots(RequestFeature):
    """Sets the snapshots that a sequence begins with and keeps. `Engine.snapshots` stores them."""

    option = SnapshotUse
    prompt_keys: ClassVar = {"compress_prompt_at": object, "conversation_snapshots": bool}
    usage: ClassVar = {"snapshot_tokens": attrgetter("num_snapshot_tokens")}
    measured: ClassVar = {"conversation_snapshots": (None, False)}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_default = engine.config.conversation_snapshots

    @classmethod
    def http_fields(cls) -> dict[str, tuple[Any, Any]]:
        from pydantic import Field

        at = Field(None, ge=1, le=(1 << 31) - 1)
        return {"compress_prompt_at": (int | None, at), "conversation_snapshots": (bool | None, None)}

    def conditions(self, spec: RequestSpec) -> Mapping[Feature, object]:
        option = spec.option(SnapshotUse)
        return {Feature.COMPRESS_AT: option is not None and option.compress_prompt_at is not None}

    def claim(self, draft: RequestDraft) -> None:
        option, num_prompt = draft.spec.option(SnapshotUse), len(draft.spec.prompt_token_ids)
        if option is not None and (at := option.compress_prompt_at) is not None:
            draft.footprint = compressing_prompt(draft.footprint, at, draft.compressor, num_prompt)

    def begin(self, seq: Seq) -> None:
        request, at = seq.request, seq.footprint.compress_prompt_at
        option = request.spec.option(SnapshotUse) or SnapshotUse()
        has_turns = self._has_turns(request, option, seq.footprint)
        if not at and not has_turns:
            return
        _ = self._engine.snapshots  # creates the store
        salt = prefix_salt(request.spec.cache_salt, None, request.sparse_prefill)
        if has_turns and option.is_rewritten:
            least = 0 if seq.footprint.drops is None else seq.footprint.drops.at
            seq.footprint = replace(seq.footprint, keep_at=max(least, seq.num_prompt - MOST_OPENING))
        if at:
            tokens = request.prompt_token_ids[:at]
            seq.snapshot_key = snapshot_key(tokens, salt, request.compressor, seq.footprint)
        if has_turns:
            known = snapshot_key(request.prompt_token_ids[:-1], salt, request.compressor, seq.footprint)
            seq.lineage = replace(known, has_past=True)

    def _has_turns(self, request: Request, option: SnapshotUse, footprint: Footprint) -> bool:
        """Return whether a request uses and keeps snapshots of its conversation. It must evict tokens
        repeatedly or drop spans, and compute its whole prompt with dense attention."""
        is_enabled, config = option.conversation_snapshots, self._engine.config
        if is_enabled is None:
            is_enabled = config.conversation_snapshots and request.scores is None
        only_drops = footprint.drops is not None and footprint.eviction_method is EvictionMethod.KEEP
        special = (request.beams, request.reuse, request.parent, request.sparse_prefill)
        return (
            is_enabled
            and config.enable_prefix_caching
            and self._engine.scheduler.snapshots.max_blocks > 0
            and (footprint.bounded or only_drops)
            and all(each is None for each in special)
        )


def rewritten(spec: RequestSpec) -> RequestSpec:
    """Return the request as one of which the next turn may repeat the answer in other tokens."""
    return spec.having(replace(spec.option(SnapshotUse) or SnapshotUse(), is_rewritten=True))
