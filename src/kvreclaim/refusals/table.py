"""Which features do not work together, why, and what to do instead."""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.refusals.features import Feature as F
from kvreclaim.refusals.row import Group, Refusal, Texts

GROUPS: Mapping[Group, Texts] = {
    Group("full_cache_host_size", "full_cache_host_size is {host_cache}, but ", (F.HOST_CACHE,)): {
        F.WINDOW_TABLES: "layers of {window_tables} with sliding windows have block tables of their own, "
        "which host memory does not hold; start with disable_hybrid_kv_cache_manager=True, or leave the "
        "size out",
        F.OFFLOADING: "kv_offloading_size is {offloading}, and there are no tiers below a cache that is in "
        "host memory itself; leave one of them out",
    },
    Group("full_cache_host_size"): {
        (F.HOST_CACHE, F.SESSION): "sessions cannot be saved while full_cache_host_size is set; start "
        "without it",
    },
    Group("disable_hybrid_kv_cache_manager"): {
        (F.WINDOW_TABLES, F.SESSION): "sessions cannot be saved while layers with sliding windows have "
        "block tables of their own; start with disable_hybrid_kv_cache_manager=True",
    },
    Group("preemption_mode"): {
        (F.SWAP, F.NO_OFFLOADING): "preemption_mode is 'swap', but kv_offloading_size is 0: there is no host "
        "memory to move blocks to; give some GiB, or leave preemption_mode out",
    },
    Group("kv_offloading_disk_path"): {
        (F.DISK, F.NO_PREFIX_CACHE): "kv_offloading_disk_path is set, but enable_prefix_caching is off: the "
        "disk holds prefixes; switch it on, or leave the path out",
        (F.DISK, F.NO_OFFLOADING): "kv_offloading_disk_path is set, but kv_offloading_size is 0: blocks go "
        "to disk from host memory; give some GiB of that, too",
    },
    Group("verify", "verify is True, but ", (F.VERIFY,)): {
        (F.HOST_CACHE, F.KEEPS_BLOCKS): "policy {keeps_blocks} holds on the device as much as the full "
        "cache, which full_cache_host_size moves to the host; name one that frees blocks",
        (F.HOST_CACHE, F.TOKEN_SCORES): "policy {token_scores} keeps scores next to the slots of the full "
        "cache, which are in host memory; use another policy",
        (F.HOST_CACHE, F.RECURRENT): "full_cache_host_size gives compressed caches a pool of their own, and "
        "the recurrent states of {recurrent} belong to the full ones; leave one of them out",
        F.KEEPS_ALL: "policy {keeps_all} evicts nothing, so there is nothing to draft from; name one that "
        "does",
        F.CACHE_POSITIONS: "policy {cache_positions} turns keys to positions relative to the cache, where "
        "exact keys do not fit; keep the original positions",
        F.FUTURE_QUERIES: "policy {future_queries} needs the text to come, which is not known yet; use "
        "another policy",
        F.WINDOW_TABLES: "layers of {window_tables} with sliding windows have block tables of their own; "
        "start with disable_hybrid_kv_cache_manager",
        F.ALL_WINDOWS: "all layers of {all_windows} have sliding windows, so the full cache holds no more "
        "than these; leave verify out",
        F.SCORING: "a continuation to be scored is given; leave one of them out",
        F.BEAM_SEARCH: "a beam search is given; leave one of them out",
        F.COMPRESS_AT: "compress_prompt_at is given; leave one of them out",
        F.SKIPS_BLOCKS: "sparse_prefill is given; leave one of them out",
        F.CHUNK_REUSE: "a chunk is given; leave one of them out",
    },
    Group("batch_invariant", "batch_invariant is True, but ", (F.BATCH_INVARIANT,)): {
        F.RECURRENT: "the recurrent layers of {recurrent} sum a prompt in pieces that depend on the steps; "
        "leave it out",
        F.LATENT: "the products of {latent} with latents are torch's, which depend on the number of rows; "
        "leave it out",
        F.WINDOW_TABLES: "layers of {window_tables} with sliding windows have block tables of their own, "
        "which begin where a step has left them; start with disable_hybrid_kv_cache_manager=True",
        F.HOST_CACHE: "full_cache_host_size is {host_cache}, which attends in pieces that depend on the "
        "steps; leave one of them out",
        F.EVICTS: "policy {evicts} scores several sequences at once, and the last bits depend on the batch; "
        "send the request without compression, or start without batch_invariant",
        F.READS_SPARSELY: "policy {reads_sparsely} chooses the blocks it reads by scores of the whole "
        "batch; send the request without it, or start without batch_invariant",
        F.SPARSE_PREFILL: "sparse prefill {sparse_prefill} chooses blocks by the tiles of a step; compute "
        "prompts dense, or start without batch_invariant",
        F.CHUNK_REUSE: "a chunk is given, and what is reused of it depends on the cache; pass the prompt as "
        "one text, or start without batch_invariant",
    },
    Group("compression", "policy "): {
        (F.CACHE_POSITIONS, F.NOT_COMPACTED): "{cache_positions} takes a token's slot for its position, "
        "which works only if all heads keep equally many tokens and these move together; set its "
        "eviction_method to COMPACT",
        (F.UNEQUAL_HEADS, F.ATTENTION_MASS): "{unequal_heads} keeps unequal numbers of tokens per head, and "
        "attention mass needs equal ones; rank tokens by recent queries, statistics or keys instead",
        (F.UNEQUAL_HEADS, F.SHARED_WINDOWS): "{unequal_heads} keeps unequal numbers of tokens per head, "
        "which does not work in layers with a sliding window that share the others' block table, and "
        "{shared_windows} is one; use a policy with equal counts, such as query_mixture or snapkv, or, if "
        "other layers have full attention, start without disable_hybrid_kv_cache_manager and "
        "kv_offloading_size",
        (F.READS_SPARSELY, F.SHARED_WINDOWS): "{reads_sparsely} reads some blocks per head, which does not "
        "work in layers with a sliding window that share the others' block table, and {shared_windows} is "
        "one; use a policy with equal counts, such as query_mixture or snapkv, or, if other layers have "
        "full attention, start without disable_hybrid_kv_cache_manager and kv_offloading_size",
        (F.CACHE_POSITIONS, F.QUANTISED): "{cache_positions} turns keys to new positions at every pass, and "
        "in {quantised} each turn would round them anew; use positions=original, or kv_cache_dtype bf16, "
        "fp16 or fp32",
        (F.OUTPUT_PROJECTION, F.LATENT): "{output_projection} needs the output projection of each query "
        "head, as critical does to weigh values, and {latent} keeps one latent for all heads; use a policy "
        "without critical",
        (F.FUTURE_QUERIES, F.GENERATION): "{future_queries} needs the whole text, including the tokens to "
        "come; use LLM.score, which is given it, or another policy",
        (F.RECENT_QUERIES, F.CACHE_POSITIONS): "{cache_positions} needs queries at their positions, but "
        "turns keys to positions relative to the cache; keep the original positions",
        (F.FUTURE_QUERIES, F.CACHE_POSITIONS): "{cache_positions} needs queries at their positions, but "
        "turns keys to positions relative to the cache; keep the original positions",
        (F.CACHE_POSITIONS, F.WINDOW_TABLES): "{cache_positions} turns keys to positions relative to the "
        "cache, which layers with sliding windows in tables of their own do not follow; keep the original "
        "positions (positions=original), or start with disable_hybrid_kv_cache_manager",
        (F.READS_AGAIN, F.WINDOW_TABLES): "{reads_again} needs the prompt read again, which the layers with "
        "sliding windows no longer hold; use another policy, or start with disable_hybrid_kv_cache_manager",
        (F.READS_AGAIN, F.EVERY_PASS): "{reads_again} needs the prompt read again, and only a first pass at "
        "its end finds it whole; set prompt_only",
        (F.EVICTS, F.HOST_CACHE): "{evicts} keeps its survivors on the device, and full_cache_host_size is "
        "{host_cache}, which keeps caches in host memory; set verify=True, leave the compression out, or "
        "start without the size",
    },
    Group("options", "options belong to a policy, and ", (F.POLICY_OPTIONS,)): {
        F.MAX_LOSS: "max_loss is about the policy of the loss curve; leave one out",
    },
    Group(None, "options belong to a policy, and ", (F.POLICY_OPTIONS,)): {
        F.AUTO_POLICY: "policy is 'auto'; name one, or none",
    },
    Group(None): {
        (F.NEEDS_ROTATION, F.UNKNOWN_ROTATION): "policy {needs_rotation} needs the rotation of "
        "{unknown_rotation}, which is not known; use a policy that needs none, such as knorm or "
        "streaming_llm",
    },
    Group("sparse_prefill", features=(F.SPARSE_PREFILL,)): {
        F.SHARED_WINDOWS: "sparse prefill {sparse_prefill} reads blocks per head, which does not work in "
        "layers with a sliding window that share the others' block table, and {shared_windows} is one; "
        "compute prompts dense, or, if other layers have full attention, start without "
        "disable_hybrid_kv_cache_manager and kv_offloading_size",
        F.PROMPT_LOGPROBS: "prompt_logprobs is given, but sparse prefill {sparse_prefill} only approximates "
        "the hidden states; leave one of them out",
        F.HOST_CACHE: "sparse prefill {sparse_prefill} reads some blocks of the cache on the device, and "
        "full_cache_host_size is set, which brings whole layers from host memory; compute prompts dense, or "
        "start without the size",
    },
    Group(
        "prompt", "chunks cannot be reused out of place: ", (F.CHUNK_REUSE,), "pass the prompt as one text"
    ): {
        F.HOST_CACHE: "full_cache_host_size is set, and caches in host memory are read layer by layer",
        F.NO_PREFIX_CACHE: "the prefix cache holds them, and enable_prefix_caching is False",
        F.UNKNOWN_ROTATION: "the rotation of {unknown_rotation} is not known",
        F.WINDOW_TABLES: "{window_tables} has layers with sliding windows or chunks",
        F.RECURRENT: "the recurrent layers of {recurrent} need every token before, in order",
        F.WINDOWS: "{windows} has layers with sliding windows",
        F.ROTATED: "tokens in {rotated} would be rounded again at their new positions; use another "
        "kv_cache_dtype",
        F.RECENT_QUERIES: "policy {recent_queries} needs signals of every token, and reused ones are not "
        "computed",
        F.ATTENTION_MASS: "policy {attention_mass} needs signals of every token, and reused ones are not "
        "computed",
        F.TOKEN_SCORES: "policy {token_scores} needs signals of every token, and reused ones are not "
        "computed",
        F.COMPRESS_AT: "compress_prompt_at is given, and prompts that reuse nothing would find its result",
        F.PROMPT_LOGPROBS: "reused tokens are not computed and so have no prompt_logprobs",
        F.SKIPS_BLOCKS: "sparse prefill {skips_blocks} reads blocks of computed prompts; use "
        "sparse_prefill='dense'",
    },
    Group("drop_spans", "spans of the prompt are dropped (drop_spans, kv_drop), but ", (F.DROPS,)): {
        F.VERIFY: "the full cache checks the drafts of verify mode; leave one of them out",
        F.SKIPS_BLOCKS: "sparse prefill {skips_blocks} chooses among all blocks; use sparse_prefill='dense'",
        F.CHUNK_REUSE: "chunks are reused out of place; pass the prompt as one text",
        F.COMPRESS_AT: "compress_prompt_at keeps its result for requests that drop nothing; leave one of "
        "them out",
        F.READS_SPARSELY: "policy {reads_sparsely} knows blocks by their places; use another policy, or none",
        F.READS_AGAIN: "policy {reads_again} reads the whole prompt again; use another policy, or none",
        F.CACHE_POSITIONS: "policy {cache_positions} takes a token's slot for its position; keep the "
        "original positions",
        F.HOST_CACHE: "full_cache_host_size is {host_cache}, which keeps caches in host memory; start "
        "without the size",
        F.ALL_WINDOWS: "all layers of {all_windows} have sliding windows, which give old blocks back; leave "
        "it out",
    },
    Group("compress_prompt_at"): {
        (F.COMPRESS_AT, F.NO_EVICTION): "compress_prompt_at is {compress_at}, but the request's compression "
        "evicts nothing; give it a policy that does, or leave compress_prompt_at out",
    },
    Group("drop_at"): {
        (F.DROP_AT, F.NO_DROPS): "drop_at is {drop_at}, but there are no drop_spans; pass some, or leave it "
        "out",
    },
    Group("priority"): {
        (F.PRIORITY, F.FIRST_COME): "priority is {priority}, but scheduling_policy is fcfs, which runs "
        "requests as they come; leave it at 0 or start the engine with scheduling_policy='priority' or "
        "'cache'",
    },
    Group("stop"): {
        (F.STOP_STRINGS, F.NO_TOKENIZER): "stop strings need a tokenizer, and this model has none; pass "
        "stop_token_ids",
    },
    Group("bad_words"): {
        (F.BAD_WORDS, F.NO_TOKENIZER): "bad_words need a tokenizer, and this model has none; leave them out",
    },
    Group("structured_outputs", "structured_outputs ", (F.STRUCTURED_OUTPUTS,)): {
        F.NO_END: "needs an end-of-sequence token, and this model has none; leave it out",
        F.NO_TOKENIZER: "cannot be followed with this model's tokenizer, or without one; leave it out",
        F.BEAM_SEARCH: "cannot be combined with use_beam_search, which follows no grammar; leave one out",
        F.FORCED_CALLS: "does not go with a tool_choice that forces a call; leave one out",
        F.CONTINUED: "does not go with a message that is continued; leave one out",
    },
    Group("sampling", "sampling does not go with ", (F.SAMPLING,)): {
        F.BEAM_SEARCH: "use_beam_search, which draws no tokens; leave one out",
    },
    Group("kv_drop", "kv_drop is 'lossy', but ", (F.LOSSY_DROP,)): {
        F.CHUNK_REUSE: "documents are given, which are reused out of place; write 'exact', or leave one of "
        "them out",
    },
    Group("echo", features=(F.ECHO,)): {
        F.CHUNK_REUSE: "echo repeats a prompt, and documents are more than that; leave one out",
    },
    Group("truncation", features=(F.TRUNCATION,)): {
        F.CHUNK_REUSE: "truncation is 'auto', which does not go with documents; leave one out",
    },
    Group("retention", "retention is set, but ", (F.RETENTION,)): {
        F.NO_PREFIX_CACHE: "prefix caching is off here, so nothing is kept; leave it out",
    },
    Group("thinking_token_budget"): {
        (F.THINKING_BUDGET, F.UNKNOWN_REASONING): "thinking_token_budget is set, but nothing says how this "
        "model writes its reasoning (its chat template shows none, or no reasoning parser is on); leave it "
        "out",
        (F.THINKING_BUDGET, F.NO_REASONING): "thinking_token_budget does not go with {no_reasoning}; leave "
        "one out",
    },
    Group("prompt_logprobs"): {
        (F.SCORING, F.PROMPT_LOGPROBS): "prompt_logprobs is given, and LLM.score scores only the "
        "continuation; leave it out, or move all prompt tokens but the first into the continuation",
        (F.STREAM, F.PROMPT_LOGPROBS): "prompt_logprobs are not streamed; leave out stream or "
        "prompt_logprobs",
    },
    Group("compression", "policy ", (F.VLLM,), "inside vLLM use {vllm}"): {
        F.WHOLE_BLOCKS: "{whole_blocks!r} evicts whole blocks, and the scheduler cannot know which",
        F.READS_SPARSELY: "{reads_sparsely!r} reads some blocks only, and attention is vLLM's own",
        F.CACHE_POSITIONS: "{cache_positions!r} turns keys when they move, and positions are vLLM's own",
        F.ATTENTION_MASS: "{attention_mass!r} needs the attention that each token has received, which vLLM "
        "does not keep",
        F.OUTPUT_PROJECTION: "{output_projection!r} needs the weights of the output projection, which vLLM "
        "does not keep",
        F.FUTURE_QUERIES: "{future_queries!r} needs the queries still to come, which vLLM does not keep",
        F.READS_AGAIN: "{reads_again!r} needs the prompt once more, which vLLM does not keep",
    },
}
ROWS: tuple[Refusal, ...] = tuple(row for group, texts in GROUPS.items() for row in group.rows(texts))
UNTESTED: Mapping[F, tuple[F, ...]] = {
    F.SCORING: (F.BEAM_SEARCH, F.SEVERAL_OUTPUTS),
    F.PROMPT_LOGPROBS: (F.BEAM_SEARCH,),
}
"""Pairs that no test covers. A test opens one: it moves to tests/supported_pairs.txt."""
TABLE: tuple[Refusal, ...] = ROWS + tuple(
    Refusal((one, other), None, f"no test covers {one} together with {other}", "leave one of them out")
    for one, others in UNTESTED.items()
    for other in others
)
