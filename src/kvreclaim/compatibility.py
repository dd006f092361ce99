"""Which features do not work together, and why: one table for engine, server, CLI, planner, vLLM and docs.

Callers say which features are on, each with what a message calls it; `refuse` raises for the first row of
the table whose features are all on. scripts/compatibility_page.py writes docs/compatibility.md from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from kvreclaim.errors import InvalidArgumentError


class Feature(StrEnum):
    """A feature of a request, an engine or a model. Braces in a message stand for the policy that has it, the
    option's value or the model's name."""

    # a request
    VERIFY = "verify mode"
    RECALL = "recall"
    RECALL_BETWEEN_PASSES = "recall between passes"
    SPARSE_PREFILL = "sparse prefill"
    SKIPS_BLOCKS = "sparse prefill that skips blocks"
    CHUNK_REUSE = "chunk reuse"
    COMPRESS_AT = "compress_prompt_at"
    DROPS = "drop_spans"
    BEAM_SEARCH = "beam search"
    SEVERAL_OUTPUTS = "n > 1"
    PROMPT_LOGPROBS = "prompt_logprobs"
    SCORING = "scoring a continuation"
    GENERATION = "generating tokens"
    SESSION = "saved sessions"
    PROTECT_PROMPT = "protect_prompt"
    # its policy
    EVICTS = "a policy that evicts"
    KEEPS_ALL = "a policy that keeps all tokens (`full`)"
    KEEPS_BLOCKS = "a policy that frees no blocks"
    READS_SPARSELY = "a policy that reads some blocks (`quest`)"
    WHOLE_BLOCKS = "a policy that evicts whole blocks (`paged_eviction`)"
    UNEQUAL_HEADS = "a policy with unequal heads (`shares`, `ada_kv`, `pyramidkv`)"
    NOT_COMPACTED = "a policy that does not compact equal heads"
    CACHE_POSITIONS = "a policy with positions relative to the cache (`streaming_llm(positions=cache)`)"
    PROMPT_ONLY = "a policy for the prompt alone (`kvzip`, `snapkv(when=prefill)`)"
    EVERY_PASS = "a policy that compresses while decoding"
    TOKEN_SCORES = "a policy that scores tokens as they are computed (`kvzap`)"
    ATTENTION_MASS = "a policy that sums attention (`h2o`)"
    RECENT_QUERIES = "a policy that looks at recent queries (`snapkv`, `r_kv`, `tova`)"
    FUTURE_QUERIES = "a policy that needs the text to come (`oracle`)"
    READS_AGAIN = "a policy that reads the prompt again (`kvzip`)"
    OUTPUT_PROJECTION = "a policy that needs the output projection (`critical`)"
    # the engine
    HOST_CACHE = "full_cache_host_size"
    OFFLOADING = "kv_offloading_size"
    RECALL_SIZE = "kv_recall_size"
    DISK = "kv_offloading_disk_path"
    NO_PREFIX_CACHE = "enable_prefix_caching=False"
    DRAFTS = "speculative_config"
    ROTATED = "a rotated KV format"
    QUANTISED = "a quantised KV format"
    VLLM = "the vLLM plugin"
    # the model
    WINDOW_TABLES = "sliding windows with block tables of their own"
    SHARED_WINDOWS = "sliding windows in the block table of all layers"
    WINDOWS = "sliding windows or chunked attention"
    ALL_WINDOWS = "sliding windows in all layers"
    RECURRENT = "recurrent layers (hybrid models)"
    LATENT = "latent attention (MLA)"
    UNEQUAL_LAYERS = "layers with unequal heads"
    UNKNOWN_ROTATION = "an unknown rotary embedding"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Features that do not work together.

    message: {feature} in it is what the caller calls it; reason: the part of it that rows do not share
    """

    features: tuple[Feature, ...]
    field: str
    message: str
    reason: str = ""


F = Feature


def refuse(on: Mapping[Feature, str]) -> None:
    """Raise InvalidArgumentError for the first row of the table whose features are all on."""
    for row in TABLE:
        if all(feature in on for feature in row.features):
            said = {feature.name.lower(): text for feature, text in on.items()}
            raise InvalidArgumentError(row.message.format_map(said), field=row.field)


def _rows(field: str, template: str, *rows: tuple[tuple[Feature, ...], str]) -> tuple[Refusal, ...]:
    """Rows whose messages share a frame; `*` in it is the row's own reason and remedy."""
    return tuple(Refusal(features, field, template.replace("*", why), why) for features, why in rows)


TABLE: tuple[Refusal, ...] = (
    *_rows(
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
    *_rows(
        "verify",
        "verify is True, but *.",
        (
            (F.VERIFY, F.HOST_CACHE, F.KEEPS_BLOCKS),
            "policy {keeps_blocks} holds on the device as much as the full cache, which full_cache_host_size "
            "moves to the host; name one that gives blocks back",
        ),
        (
            (F.VERIFY, F.HOST_CACHE, F.TOKEN_SCORES),
            "policy {token_scores} keeps scores beside the slots of the full cache, which are in host "
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
    *_rows(
        "compression",
        "policy *.",
        (
            (F.CACHE_POSITIONS, F.NOT_COMPACTED),
            "{cache_positions} takes a token's slot for its position, which works only if all heads keep "
            "equally many tokens and these move together; set its eviction_method to COMPACT",
        ),
        (
            (F.UNEQUAL_HEADS, F.ATTENTION_MASS),
            "{unequal_heads} keeps unequal numbers of tokens per head, and attention mass needs equal ones; "
            "rank tokens by recent queries, statistics or keys instead",
        ),
        (
            (F.UNEQUAL_HEADS, F.SHARED_WINDOWS),
            "{unequal_heads} keeps unequal numbers of tokens per head, which does not work in layers with a "
            "sliding window that share the others' block table, and {shared_windows} is one; use a policy "
            "with equal counts, such as query_mixture or snapkv, or, if other layers have full attention, "
            "start without disable_hybrid_kv_cache_manager and kv_offloading_size",
        ),
        (
            (F.READS_SPARSELY, F.SHARED_WINDOWS),
            "{reads_sparsely} reads some blocks per head, which does not work in layers with a sliding "
            "window that share the others' block table, and {shared_windows} is one; use a policy with equal "
            "counts, such as query_mixture or snapkv, or, if other layers have full attention, start without "
            "disable_hybrid_kv_cache_manager and kv_offloading_size",
        ),
        (
            (F.CACHE_POSITIONS, F.QUANTISED),
            "{cache_positions} turns keys to new positions at every pass, and in {quantised} each turn would "
            "round them anew; use positions=original, or kv_cache_dtype bf16, fp16 or fp32",
        ),
        (
            (F.OUTPUT_PROJECTION, F.LATENT),
            "{output_projection} needs the output projection of each query head, as critical does to weigh "
            "values, and {latent} keeps one latent for all heads; use a policy without critical",
        ),
        (
            (F.FUTURE_QUERIES, F.GENERATION),
            "{future_queries} needs the whole text, including the tokens to come; use LLM.score, which is "
            "given it, or another policy",
        ),
        *(
            (
                (signal, F.CACHE_POSITIONS),
                "{cache_positions} needs queries at their positions, but turns keys to positions relative to "
                "the cache; keep the original positions",
            )
            for signal in (F.RECENT_QUERIES, F.FUTURE_QUERIES)
        ),
        (
            (F.CACHE_POSITIONS, F.WINDOW_TABLES),
            "{cache_positions} turns keys to positions relative to the cache, which layers with sliding "
            "windows in tables of their own do not follow; keep the original positions (positions=original), "
            "or start with disable_hybrid_kv_cache_manager",
        ),
        (
            (F.READS_AGAIN, F.WINDOW_TABLES),
            "{reads_again} needs the prompt read again, which the layers with sliding windows no longer "
            "hold; use another policy, or start with disable_hybrid_kv_cache_manager",
        ),
        (
            (F.READS_AGAIN, F.EVERY_PASS),
            "{reads_again} needs the prompt read again, and only a first pass at its end finds it whole; set "
            "prompt_only",
        ),
        (
            (F.EVICTS, F.HOST_CACHE),
            "{evicts} keeps its survivors on the device, and full_cache_host_size is {host_cache}, which "
            "keeps caches in host memory; set verify=True, leave the compression out, or start "
            "without the size",
        ),
    ),
    *_rows(
        "compression",
        "recall {recall} is refused: *.",
        (
            (F.RECALL, F.NOT_COMPACTED),
            "policy {not_compacted} does not move equally many tokens per head together; use one that does",
        ),
        (
            (F.RECALL, F.CACHE_POSITIONS),
            "policy {cache_positions} turns keys to their slots, and a page has no slots; use "
            "positions=original",
        ),
        (
            (F.RECALL, F.PROMPT_ONLY),
            "policy {prompt_only} compresses only the prompt, so no later pass weighs what came back; use "
            "when=always, or another policy",
        ),
        (
            (F.RECALL, F.TOKEN_SCORES),
            "policy {token_scores} keeps scores by slot, which do not follow tokens to the host; use "
            "surrogate",
        ),
        (
            (F.RECALL, F.WINDOWS),
            "{windows} has layers with sliding windows, whose tokens never come back; leave recall out",
        ),
        ((F.RECALL, F.LATENT), "{latent} caches latents, which have no digests; leave recall out"),
        (
            (F.RECALL, F.UNEQUAL_LAYERS),
            "{unequal_layers} has layers with different KV heads; leave recall out",
        ),
        (
            (F.RECALL, F.DRAFTS),
            "several drafts are computed at once, but each token has its own pages; start without "
            "speculative_config",
        ),
        (
            (F.RECALL, F.COMPRESS_AT),
            "compress_prompt_at keeps its result for other requests without cold pages; leave it out",
        ),
    ),
    *_rows(
        "compression",
        "recall {recall_between_passes} is refused: *.",
        *(
            (
                (F.RECALL_BETWEEN_PASSES, shares),
                "pages that come back between passes would be written into blocks that outputs share; use "
                "recall pass, or n=1 without beams",
            )
            for shares in (F.SEVERAL_OUTPUTS, F.BEAM_SEARCH)
        ),
    ),
    Refusal(
        (F.RECALL, F.VERIFY),
        "recall",
        "verify is set beside recall, but a cache that only drafts has no cold pages; leave one out.",
    ),
    Refusal(
        (F.RECALL, F.PROTECT_PROMPT),
        "recall",
        "protect_prompt protects the leading slots, but recalled tokens come later; leave it or recall out.",
    ),
    *_rows(
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
    *_rows(
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
        ((F.CHUNK_REUSE, F.ROTATED), "keys in {rotated} cannot be turned; use another kv_cache_dtype"),
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
    *_rows(
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
    *_rows(
        "compression",
        "policy *; inside vLLM use {vllm}.",
        (
            (F.VLLM, F.WHOLE_BLOCKS),
            "{whole_blocks!r} evicts whole blocks, and the scheduler cannot know which",
        ),
        (
            (F.VLLM, F.READS_SPARSELY),
            "{reads_sparsely!r} reads some blocks only, and attention is vLLM's own",
        ),
        (
            (F.VLLM, F.CACHE_POSITIONS),
            "{cache_positions!r} turns keys when they move, and positions are vLLM's own",
        ),
        *(
            ((F.VLLM, signal), f"{{{signal.name.lower()}!r}} needs {what}, which vLLM does not keep")
            for signal, what in (
                (F.ATTENTION_MASS, "the attention that each token has received"),
                (F.OUTPUT_PROJECTION, "the weights of the output projection"),
                (F.FUTURE_QUERIES, "the queries still to come"),
                (F.READS_AGAIN, "the prompt once more"),
            )
        ),
    ),
)
