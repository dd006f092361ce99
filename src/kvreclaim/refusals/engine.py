"""Exclusions of an engine's options, and of verify mode."""

from __future__ import annotations

from kvreclaim.refusals.features import Feature as F
from kvreclaim.refusals.features import Refusal, rows

ENGINE: tuple[Refusal, ...] = (
    *rows(
        "full_cache_host_size",
        "full_cache_host_size is {host_cache}, but *.",
        (
            (F.HOST_CACHE, F.WINDOW_TABLES),
            "layers of {window_tables} with sliding windows have block tables of their own, which host "
            "memory does not hold; start with disable_hybrid_kv_cache_manager=True, or leave the size out",
        ),
        (
            (F.HOST_CACHE, F.OFFLOADING),
            "kv_offloading_size is {offloading}, and there are no tiers below a cache that is in host "
            "memory itself; leave one of them out",
        ),
    ),
    Refusal(
        (F.HOST_CACHE, F.RECALL_SIZE),
        "kv_recall_size",
        "full_cache_host_size is {host_cache}, kv_recall_size {recall_size}, but a cache in host "
        "memory loses nothing that could be recalled; leave one out.",
    ),
    Refusal(
        (F.HOST_CACHE, F.SESSION),
        "full_cache_host_size",
        "sessions cannot be saved while full_cache_host_size is set; start without it.",
    ),
    Refusal(
        (F.WINDOW_TABLES, F.SESSION),
        "disable_hybrid_kv_cache_manager",
        "sessions cannot be saved while layers with sliding windows have block tables of their own; start "
        "with disable_hybrid_kv_cache_manager=True.",
    ),
    Refusal(
        (F.DISK, F.NO_PREFIX_CACHE),
        "kv_offloading_disk_path",
        "kv_offloading_disk_path is set, but enable_prefix_caching is off: the disk holds prefixes; switch "
        "it on, or leave the path out.",
    ),
    *rows(
        "verify",
        "verify is True, but *.",
        (
            (F.VERIFY, F.HOST_CACHE, F.KEEPS_BLOCKS),
            "policy {keeps_blocks} holds on the device as much as the full cache, which full_cache_host_size "
            "moves to the host; name one that frees blocks",
        ),
        (
            (F.VERIFY, F.HOST_CACHE, F.TOKEN_SCORES),
            "policy {token_scores} keeps scores next to the slots of the full cache, which are in host "
            "memory; use another policy",
        ),
        (
            (F.VERIFY, F.HOST_CACHE, F.RECURRENT),
            "full_cache_host_size gives compressed caches a pool of their own, and the recurrent states of "
            "{recurrent} belong to the full ones; leave one of them out",
        ),
        (
            (F.VERIFY, F.KEEPS_ALL),
            "policy {keeps_all} evicts nothing, so there is nothing to draft from; name one that does",
        ),
        (
            (F.VERIFY, F.CACHE_POSITIONS),
            "policy {cache_positions} turns keys to positions relative to the cache, where exact keys do not "
            "fit; keep the original positions",
        ),
        (
            (F.VERIFY, F.FUTURE_QUERIES),
            "policy {future_queries} needs the text to come, which is not known yet; use another policy",
        ),
        (
            (F.VERIFY, F.WINDOW_TABLES),
            "layers of {window_tables} with sliding windows have block tables of their own; start with "
            "disable_hybrid_kv_cache_manager",
        ),
        (
            (F.VERIFY, F.ALL_WINDOWS),
            "all layers of {all_windows} have sliding windows, so the full cache holds no more than these; "
            "leave verify out",
        ),
        ((F.VERIFY, F.SCORING), "a continuation to be scored is given; leave one of them out"),
        ((F.VERIFY, F.BEAM_SEARCH), "a beam search is given; leave one of them out"),
        ((F.VERIFY, F.COMPRESS_AT), "compress_prompt_at is given; leave one of them out"),
        ((F.VERIFY, F.SKIPS_BLOCKS), "sparse_prefill is given; leave one of them out"),
        ((F.VERIFY, F.CHUNK_REUSE), "a chunk is given; leave one of them out"),
    ),
)
