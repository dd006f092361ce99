"""Drafts of speculative decoding and the passes of a request: integers only, nothing of vLLM.

vLLM counts drafts as computed when it schedules their verification, and rolls back rejected ones when it has
the step's output. A pass counts verified tokens only, and is due at the same length as without drafts. With
synchronous scheduling, nothing is in flight when a pass is decided; drafts are cut so that no step verifies
beyond it. With asynchronous scheduling, one step is in flight, and its drafts may be rolled back. So no draft
reaches the pass at all: the step that reaches it has only one certain token, and the drafts before it are
verified by the time this step is in flight. Blocks at the end of a table that were allocated for rejected
drafts stay in place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

BY_TOKENS = ("ngram",)
"""Methods whose drafts come from the tokens alone."""
WITH_LAYERS = ("draft_model", "eagle", "eagle3", "mtp")
"""Methods of drafters with layers of their own, which share the target's block tables."""


class Drafting(Protocol):
    """spec_token_ids: drafts that the next step verifies, behind the tokens that are certain.
    num_output_placeholders: tokens that the step in flight may generate."""

    num_computed_tokens: int
    num_tokens: int
    num_output_placeholders: int
    spec_token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Drafts:
    """The drafts of an engine.

    most:  of a request at once: those verified, as many that a drafter with layers of its own writes behind
           them, and as many that the step in flight verifies
    ahead: whether a step is scheduled while the one before it is in flight
    """

    most: int = 0
    ahead: bool = False

    def cut(self, request: Drafting, until: int) -> None:
        """Leave the request the drafts that its next step may verify, `until` tokens before its pass."""
        certain = request.num_tokens + request.num_output_placeholders - request.num_computed_tokens
        request.spec_token_ids = request.spec_token_ids[: max(0, until - certain - self.ahead)]


NO_DRAFTS = Drafts()


def drafts_of(vllm_config: Any) -> Drafts:
    """The drafts that an engine of this configuration makes."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return NO_DRAFTS
    writes, ahead = speculative.method not in BY_TOKENS, bool(vllm_config.scheduler_config.async_scheduling)
    return Drafts(int(speculative.num_speculative_tokens) * (1 + writes + ahead), ahead)
