"""Exclusions of batch_invariant: computations with sums that depend on the steps."""

from __future__ import annotations

from kvreclaim.refusals.features import Feature as F
from kvreclaim.refusals.features import rows

BATCH_INVARIANCE = rows(
    "batch_invariant",
    "batch_invariant is True, but *.",
    (
        (F.BATCH_INVARIANT, F.RECURRENT),
        "the recurrent layers of {recurrent} sum a prompt in pieces that depend on the steps; leave it out",
    ),
    (
        (F.BATCH_INVARIANT, F.LATENT),
        "the products of {latent} with latents are torch's, which depend on the number of rows; leave it out",
    ),
    (
        (F.BATCH_INVARIANT, F.WINDOW_TABLES),
        "layers of {window_tables} with sliding windows have block tables of their own, which begin where a "
        "step has left them; start with disable_hybrid_kv_cache_manager=True",
    ),
    (
        (F.BATCH_INVARIANT, F.HOST_CACHE),
        "full_cache_host_size is {host_cache}, which attends in pieces that depend on the steps; leave one "
        "of them out",
    ),
    (
        (F.BATCH_INVARIANT, F.EVICTS),
        "policy {evicts} scores several sequences at once, and the last bits depend on the batch; send "
        "the request without compression, or start without batch_invariant",
    ),
    (
        (F.BATCH_INVARIANT, F.READS_SPARSELY),
        "policy {reads_sparsely} chooses the blocks it reads by scores of the whole batch; send the request "
        "without it, or start without batch_invariant",
    ),
    (
        (F.BATCH_INVARIANT, F.SPARSE_PREFILL),
        "sparse prefill {sparse_prefill} chooses blocks by the tiles of a step; compute prompts dense, or "
        "start without batch_invariant",
    ),
    (
        (F.BATCH_INVARIANT, F.CHUNK_REUSE),
        "a chunk is given, and what is reused of it depends on the cache; pass the prompt as one text, or "
        "start without batch_invariant",
    ),
)
