"""Drafts of speculative decoding and the passes of a request: integers only, nothing of vLLM.

vLLM counts drafts as computed when it schedules their verification, and takes back those that are rejected
once the step's output is there. Scheduled synchronously, which is all that is allowed here, nothing is in
flight when a pass is decided: it counts verified tokens alone. A pass falls at the length at which it would
fall without drafts, because drafts are cut so that no step verifies beyond it; blocks at the end of a table
that were taken for rejected drafts stay where they are.
"""

from __future__ import annotations

from typing import Any, Protocol

BY_TOKENS = ("ngram",)
"""Methods whose drafts come from the tokens alone."""
WITH_LAYERS = ("draft_model", "eagle")
"""Methods of drafters with layers of their own, which share the target's block tables."""


class Drafting(Protocol):
    """spec_token_ids: drafts that the next step verifies, behind the tokens that are certain."""

    num_computed_tokens: int
    num_tokens: int
    spec_token_ids: list[int]


def num_drafts(vllm_config: Any) -> int:
    """Drafts of a request in one step at most: those verified, and as many that a drafter with layers of its
    own writes behind them."""
    speculative = vllm_config.speculative_config
    if speculative is None:
        return 0
    each = int(speculative.num_speculative_tokens)
    return each if speculative.method in BY_TOKENS else 2 * each


def cut_drafts(request: Drafting, until: int) -> None:
    """Leave the request the drafts with which its next step computes at most `until` tokens."""
    certain = request.num_tokens - request.num_computed_tokens
    request.spec_token_ids = request.spec_token_ids[: max(0, until - certain)]
