"""What a request must satisfy before it is queued: each refusal names the limit and the remedy."""

from __future__ import annotations

from kvreclaim.checks import check_text, is_int, require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.compression.signal_needs import needs_of
from kvreclaim.config import EngineConfig, SamplingParams
from kvreclaim.engine.compact.recalls import Recalls
from kvreclaim.engine.sampling.beam_search import BeamSearch
from kvreclaim.engine.sampling.processors import word_ids
from kvreclaim.engine.signals.needs import WATCHED
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.budget.lengths import most_blocks
from kvreclaim.schedule.budget.sparse import SparseRows


def check_prompt(
    tokens: list[int],
    params: SamplingParams,
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    scored: bool = False,
) -> None:
    """Raise InvalidArgumentError for tokens and parameters that this model or engine cannot take."""
    if not tokens:
        raise InvalidArgumentError("the prompt has no tokens; pass at least one.", field="prompt")
    wrong = [t for t in tokens if type(t) is not int or not 0 <= t < loaded.vocab_size]
    if wrong:
        raise InvalidArgumentError(
            f"the prompt holds token id {wrong[0]!r}; ids are integers from 0 to {loaded.vocab_size - 1}.",
            field="prompt",
        )
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if beyond := [t for t in getattr(params, name) or () if t >= loaded.vocab_size]:
            raise InvalidArgumentError(
                f"{name} holds token {beyond[0]}; the model's ids end at {loaded.vocab_size - 1}; remove it.",
                field=name,
            )
    if params.n > config.max_num_seqs:
        raise InvalidArgumentError(
            f"n is {params.n}, but max_num_seqs allows {config.max_num_seqs} sequences at once; "
            "lower n or raise max_num_seqs.",
            field="n",
        )
    if scored and params.prompt_logprobs is not None:
        raise InvalidArgumentError(
            "prompt_logprobs is given for a continuation that is scored; leave it out, or move the prompt's "
            "tokens but the first into the continuation.",
            field="prompt_logprobs",
        )
    if params.stop_strings and loaded.tokenizer is None:
        raise InvalidArgumentError(
            "stop strings need a tokenizer, which this model has not; pass stop_token_ids.",
            field="stop",
        )


def checked_bad_words(params: SamplingParams, loaded: LoadedModel) -> tuple[tuple[int, ...], ...]:
    """The token ids of bad_words. Raises: InvalidArgumentError for a word that the model cannot write."""
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        if loaded.tokenizer is None:
            raise InvalidArgumentError(
                "bad_words need a tokenizer, which this model has not; leave them out.", field="bad_words"
            )
        check_text("a text of bad_words", word, "bad_words")
        ids = word_ids(word, loaded.tokenizer)
        require(
            bool(ids) and max(map(max, ids)) < loaded.vocab_size,
            f"bad_words has {word!r}, for which the model has no tokens; remove it.",
            "bad_words",
        )
        found.update(dict.fromkeys(ids))
    return tuple(found)


def check_salt(cache_salt: str | None) -> None:
    """Raise InvalidArgumentError for a cache salt that is no text, or that holds what sets caches apart."""
    require(
        cache_salt is None or isinstance(cache_salt, str),
        f"cache_salt is {cache_salt!r}; pass a string or None.",
        "cache_salt",
    )
    require(
        "\x00" not in (cache_salt or ""),
        "cache_salt holds the character NUL, which sets apart what is not computed exactly; drop it.",
        "cache_salt",
    )


def check_priority(priority: int, config: EngineConfig) -> None:
    """Raise InvalidArgumentError for a priority that is no integer, or that nothing would go by."""
    if not is_int(priority):
        raise InvalidArgumentError(
            f"priority is {priority!r}; it must be an integer, lower runs first.", field="priority"
        )
    if priority and config.scheduling_policy == "fcfs":
        raise InvalidArgumentError(
            f"priority is {priority}, but scheduling_policy is {config.scheduling_policy}, which runs "
            "requests as they come; leave it at 0 or start the engine with scheduling_policy='priority' or "
            "'cache'.",
            field="priority",
        )


def check_sparse_prefill(
    method: SparsePrefill,
    compressor: Compressor | None,
    params: SamplingParams,
    config: EngineConfig,
    facts: ModelFacts,
) -> SparseRows | None:
    """What the schedule has to know of the method; None where it leaves out nothing.

    Raises: InvalidArgumentError where it does not go with the model, the engine's limits, or what else the
        request asks for.
    """
    where = "sparse_prefill"
    odd = [n for n, layer in zip(facts.ids, facts.layers, strict=True) if layer.softmax.window is not None]
    if odd:
        raise InvalidArgumentError(
            f"sparse prefill {method.name} reads blocks per head, which is not served for layers with a "
            f"sliding window that share the others' block table, and layer {odd[0]} of {facts.name!r} is "
            "one; compute prompts dense, or, if other layers have full attention, start without "
            "disable_hybrid_kv_cache_manager and kv_offloading_size.",
            field=where,
        )
    if params.prompt_logprobs is not None:
        raise InvalidArgumentError(
            f"prompt_logprobs is given, but sparse prefill {method.name} only approximates what they are "
            "computed from; leave one of them out.",
            field=where,
        )
    if compressor is not None and not compressor.eviction_method.shortens:
        raise InvalidArgumentError(
            f"policy {compressor.policy.name} hides evicted tokens in place, which sparse prefill "
            f"{method.name} does not look at; use a policy that moves tokens together, or compute prompts "
            "dense.",
            field=where,
        )
    method.check(facts, config.block_size)
    assert config.max_model_len is not None, "the engine's limits are set"
    if method.reads_all(config.max_model_len):
        return None
    rows = method.sparse_rows(facts.layers[0], config.block_size)
    least = rows.span + config.max_num_seqs
    require(
        config.max_num_batched_tokens >= least,
        f"sparse prefill {method.name} decides on {rows.span} tokens at once, and max_num_batched_tokens "
        f"{config.max_num_batched_tokens} may leave fewer beside {config.max_num_seqs} running sequences; "
        f"raise it to {least}, or lower max_num_seqs.",
        where,
    )
    return rows


def check_recall(
    compressor: Compressor | None,
    params: SamplingParams,
    config: EngineConfig,
    recalls: Recalls | None,
    compress_at: int | None,
    searches: bool,
) -> None:
    """Raise InvalidArgumentError where what a compression evicts cannot come back in this engine."""
    if compressor is None or (recall := compressor.recall) is None:
        return
    problem = None
    if recalls is None:
        problem = "kv_recall_size is 0, so there is no host memory for evicted tokens; start with some GiB"
    elif recalls.least_rows(recall.blocks) > recalls.pool.num_rows:
        problem = (
            f"kv_recall_size {config.kv_recall_size} GiB holds {recalls.pool.num_rows} pages, and one "
            f"sequence needs {recalls.least_rows(recall.blocks)}; raise it"
        )
    elif config.speculative_config is not None:
        problem = "drafts are computed several at once, and each token has pages of its own; start without "
        problem += "speculative_config"
    elif compress_at is not None:
        problem = "what compress_at leaves is kept for others without its cold pages; leave compress_at out"
    elif recall.between and (params.n > 1 or searches):
        problem = (
            "pages that come back between passes would be written into blocks that outputs share; use recall "
            "pass, or n=1 without beams"
        )
    if problem is not None:
        raise InvalidArgumentError(f"recall {recall.mode!r} is refused: {problem}.", field="compression")


def check_reuse(
    compressor: Compressor | None,
    params: SamplingParams,
    method: SparsePrefill | None,
    groups: LayerGroups,
    form: KVFormat,
    config: EngineConfig,
    compress_at: int | None,
) -> None:
    """Raise InvalidArgumentError where chunks cannot be reused out of place."""
    facts, problem = groups.facts, None
    if not config.enable_prefix_caching:
        problem = "they are kept in the prefix cache, and enable_prefix_caching is False"
    elif facts.rope_problem is not None or any(layer.rope is None for layer in facts.layers):
        problem = f"the rotation of {facts.name!r} is not known ({facts.rope_problem})"
    elif groups.windows or any(layer.softmax.window is not None for layer in facts.layers):
        problem = f"{facts.name!r} has layers with sliding windows or chunks"
    elif form.has_open_blocks or form.is_rotated:
        problem = f"keys in {form.name} cannot be turned; use another kv_cache_dtype"
    elif compressor is not None and needs_of(compressor) & WATCHED:
        problem = (
            f"policy {compressor.policy.name} needs signals of every token, and reused ones are not computed"
        )
    elif compressor is not None and compressor.recall is not None:
        problem = "recall goes by the queries of every token, and reused ones are not computed"
    elif compress_at is not None:
        problem = "compress_at is given, and what it leaves would be found by prompts that reuse nothing"
    elif params.prompt_logprobs is not None:
        problem = "prompt_logprobs of tokens that are not computed are not known"
    elif method is not None:
        problem = f"sparse prefill {method.name} reads blocks of computed prompts; use sparse_prefill='dense'"
    if problem is not None:
        raise InvalidArgumentError(
            f"chunks cannot be reused out of place: {problem}; pass the prompt as one text.", field="prompt"
        )


def check_beams(
    search: BeamSearch, num_prompt: int, footprint: Footprint, config: EngineConfig, vocab_size: int
) -> None:
    """Raise InvalidArgumentError or RequestTooLongError for a beam search that can never run to its end: all
    its beams run at once."""
    width = search.params.beam_width
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        require(
            width <= getattr(config, name),
            f"beam_width is {width}, but {name} is {getattr(config, name)}, and all beams run at once; lower "
            f"beam_width or raise {name}.",
            "beam_width",
        )
    candidates = search.num_candidates(width, len(search.eos))
    require(
        candidates <= width * vocab_size,
        f"beam_width is {width}: its steps choose from {candidates} candidates, but the vocabulary has "
        f"{vocab_size} tokens a beam; use a model with more, or ignore_eos.",
        "beam_width",
    )
    assert config.num_blocks is not None, "the engine's limits are set"
    needed = most_blocks(width, num_prompt, num_prompt + search.max_tokens, footprint)
    if needed > config.num_blocks:
        raise RequestTooLongError(
            f"{width} beams of a prompt of {num_prompt} tokens and {search.max_tokens} more need {needed} "
            f"blocks, but the pool has {config.num_blocks}; lower beam_width or max_tokens, shorten the "
            f"prompt, or raise {'full_cache_host_size' if config.full_cache_host_size else 'num_blocks'}.",
            field="beam_width",
        )
