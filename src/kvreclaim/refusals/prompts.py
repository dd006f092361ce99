"""Exclusions of sparse prefill, chunk reuse, dropped spans and scoring."""

from __future__ import annotations

from kvreclaim.refusals.features import Feature as F
from kvreclaim.refusals.features import Refusal, rows

PROMPTS: tuple[Refusal, ...] = (
    *rows(
        "sparse_prefill",
        "*.",
        (
            (F.SPARSE_PREFILL, F.SHARED_WINDOWS),
            "sparse prefill {sparse_prefill} reads blocks per head, which does not work in layers with a "
            "sliding window that share the others' block table, and {shared_windows} is one; compute prompts "
            "dense, or, if other layers have full attention, start without disable_hybrid_kv_cache_manager "
            "and kv_offloading_size",
        ),
        (
            (F.SPARSE_PREFILL, F.PROMPT_LOGPROBS),
            "prompt_logprobs is given, but sparse prefill {sparse_prefill} only approximates the hidden "
            "states; leave one of them out",
        ),
        (
            (F.SPARSE_PREFILL, F.HOST_CACHE),
            "sparse prefill {sparse_prefill} reads some blocks of the cache on the device, and "
            "full_cache_host_size is set, which brings whole layers from host memory; compute prompts "
            "dense, or start without the size",
        ),
    ),
    *rows(
        "prompt",
        "chunks cannot be reused out of place: *; pass the prompt as one text.",
        (
            (F.CHUNK_REUSE, F.HOST_CACHE),
            "full_cache_host_size is set, and caches in host memory are read layer by layer",
        ),
        (
            (F.CHUNK_REUSE, F.NO_PREFIX_CACHE),
            "the prefix cache holds them, and enable_prefix_caching is False",
        ),
        ((F.CHUNK_REUSE, F.UNKNOWN_ROTATION), "the rotation of {unknown_rotation} is not known"),
        ((F.CHUNK_REUSE, F.WINDOW_TABLES), "{window_tables} has layers with sliding windows or chunks"),
        (
            (F.CHUNK_REUSE, F.RECURRENT),
            "the recurrent layers of {recurrent} need every token before, in order",
        ),
        ((F.CHUNK_REUSE, F.WINDOWS), "{windows} has layers with sliding windows"),
        (
            (F.CHUNK_REUSE, F.ROTATED),
            "tokens in {rotated} would be rounded again at their new positions; use another kv_cache_dtype",
        ),
        *(
            (
                (F.CHUNK_REUSE, signal),
                f"policy {{{signal.name.lower()}}} needs signals of every token, and reused ones are not "
                "computed",
            )
            for signal in (F.RECENT_QUERIES, F.ATTENTION_MASS, F.TOKEN_SCORES)
        ),
        (
            (F.CHUNK_REUSE, F.RECALL),
            "recall needs the queries of every token, and reused tokens are not computed",
        ),
        (
            (F.CHUNK_REUSE, F.COMPRESS_AT),
            "compress_prompt_at is given, and prompts that reuse nothing would find its result",
        ),
        (
            (F.CHUNK_REUSE, F.PROMPT_LOGPROBS),
            "reused tokens are not computed and so have no prompt_logprobs",
        ),
        (
            (F.CHUNK_REUSE, F.SKIPS_BLOCKS),
            "sparse prefill {skips_blocks} reads blocks of computed prompts; use sparse_prefill='dense'",
        ),
    ),
    *rows(
        "drop_spans",
        "spans of the prompt are dropped (drop_spans, kv_drop), but *.",
        (
            (F.DROPS, F.VERIFY),
            "the full cache checks the drafts of verify mode; leave one of them out",
        ),
        ((F.DROPS, F.RECALL), "recall brings tokens back; leave one of them out"),
        (
            (F.DROPS, F.SKIPS_BLOCKS),
            "sparse prefill {skips_blocks} chooses among all blocks; use sparse_prefill='dense'",
        ),
        ((F.DROPS, F.CHUNK_REUSE), "chunks are reused out of place; pass the prompt as one text"),
        (
            (F.DROPS, F.COMPRESS_AT),
            "compress_prompt_at keeps its result for requests that drop nothing; leave one of them out",
        ),
        (
            (F.DROPS, F.READS_SPARSELY),
            "policy {reads_sparsely} knows blocks by their places; use another policy, or none",
        ),
        (
            (F.DROPS, F.READS_AGAIN),
            "policy {reads_again} reads the whole prompt again; use another policy, or none",
        ),
        (
            (F.DROPS, F.CACHE_POSITIONS),
            "policy {cache_positions} takes a token's slot for its position; keep the original positions",
        ),
        (
            (F.DROPS, F.HOST_CACHE),
            "full_cache_host_size is {host_cache}, which keeps caches in host memory; start without the size",
        ),
        (
            (F.DROPS, F.ALL_WINDOWS),
            "all layers of {all_windows} have sliding windows, which give old blocks back; leave it out",
        ),
    ),
    Refusal(
        (F.SCORING, F.PROMPT_LOGPROBS),
        "prompt_logprobs",
        "prompt_logprobs is given, and LLM.score scores only the continuation; leave it out, or move all "
        "prompt tokens but the first into the continuation.",
    ),
)
