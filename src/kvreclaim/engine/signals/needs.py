"""Signals that policies need, for which sequences, and their bytes."""

from __future__ import annotations

import torch

from kvreclaim.compression.compressor import Compressor, needs_of
from kvreclaim.compression.policy import Signal
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.engine.request.request import Sequence
from kvreclaim.engine.request.verify import Verify
from kvreclaim.ops.facts import ModelFacts

WATCHED = frozenset({Signal.RECENT_QUERIES, Signal.ATTENTION_MASS, Signal.TOKEN_SCORES})
"""Signals that every step updates."""


def signal_bytes(compressor: Compressor, facts: ModelFacts, num_slots: int, block_size: int) -> int:
    """Return the bytes of signals of one sequence of num_slots slots. Scores of tokens belong to blocks, not
    to sequences (slot_scores.score_bytes).

    Recent queries: window x L x H x D in the model's dtype. Attention mass: L x K x slots in fp32. Digests:
    2 x L x K x D for each full block, in the dtype in which keys are gathered, counted as fp32. A store has
    at most twice the rows, and twice the slots or blocks of the longest row, that were ever needed at once.
    """
    layer, needs, found = facts.layers[0], compressor.policy.needs, 0
    if Signal.RECENT_QUERIES in needs:
        found += compressor.policy.query_window * layer.num_heads * layer.head_dim * facts.dtype.itemsize
    if Signal.ATTENTION_MASS in needs:
        found += layer.num_kv_heads * num_slots * torch.float32.itemsize
    if compressor.eviction_method.sparse_reads:
        found += 2 * layer.num_kv_heads * layer.head_dim * (num_slots // block_size) * torch.float32.itemsize
    return facts.num_layers * found


def is_watched(seq: Sequence) -> bool:
    """Return whether every step updates the sequence's signals. Without a further pass it need not. Scores of
    tokens are an exception, because prefix hits on its blocks rely on them."""
    compressor = seq.request.compressor
    if compressor is None:
        return False
    needs = compressor.needs
    if not needs & WATCHED:
        return False
    if Signal.TOKEN_SCORES in needs:
        return True
    over = seq.num_prompt <= compressor.budget or seq.account.last_computed > 0
    return not (compressor.policy.prompt_only and over)


def follow_from_queries(compressor: Compressor | None) -> bool:
    """Return whether the signals that a step adds for a request follow from its queries and the cache."""
    return compressor is None or Signal.TOKEN_SCORES not in compressor.needs


def keeps_queries(compressor: Compressor) -> bool:
    """Whether decode steps are replayed with their queries handed out for requests with this compressor."""
    watched = compressor.needs & WATCHED and not compressor.policy.prompt_only
    return bool(watched) and not compressor.config.verify and follow_from_queries(compressor)


def feeds_companion(verify: Verify | None) -> bool:
    """Return whether the policy of a companion keeps signals of every step of its target."""
    return verify is not None and bool(verify.compressor.needs & WATCHED)


def window_of(seq: Sequence) -> int:
    assert seq.request.compressor is not None, f"sequence {seq.seq_id} has no compression"
    return seq.request.compressor.policy.query_window


def chunk_salt(salt: str | None) -> str:
    """Return the salt of requests that may reuse a chunk that was computed alone."""
    return f"\x00chunk\x00{'' if salt is None else f'={salt}'}"


def prefix_salt(
    salt: str | None, compressor: Compressor | None, sparse_prefill: SparsePrefill | None = None
) -> str | None:
    """Return the salt of requests that may share prefix blocks: those with the same caller's salt, the same
    prefill and, for scores of tokens, the same weights, because blocks of other requests have no such scores.
    Salts of blocks that are not exact begin with NUL, which no caller's salt does."""
    if sparse_prefill is not None:
        salt = f"\x00{sparse_prefill.namespace}\x00{'' if salt is None else f'={salt}'}"
    if Signal.TOKEN_SCORES not in needs_of(compressor):
        return salt
    assert compressor is not None
    return f"\x00{compressor.weights_digest}{'' if salt is None else f' {salt}'}"
