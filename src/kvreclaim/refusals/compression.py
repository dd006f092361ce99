"""Exclusions of policies, of recall, and of policies inside vLLM."""

from __future__ import annotations

from kvreclaim.refusals.features import Feature as F
from kvreclaim.refusals.features import Refusal, rows

COMPRESSION: tuple[Refusal, ...] = (
    *rows(
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
    *rows(
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
    *rows(
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
        "verify is set with recall, but a cache that only drafts has no cold pages; leave one out.",
    ),
    Refusal(
        (F.RECALL, F.PROTECT_PROMPT),
        "recall",
        "protect_prompt protects the leading slots, but recalled tokens come later; leave it or recall out.",
    ),
)
IN_VLLM: tuple[Refusal, ...] = (
    *rows(
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
