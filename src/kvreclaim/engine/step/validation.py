"""Checks of a request before it is queued, and of its length; each refusal names the limit and the remedy."""

from __future__ import annotations

import logging

from kvreclaim.checks import check_text, is_int, require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.config import EngineConfig
from kvreclaim.engine.compact.recalls import Recalls
from kvreclaim.engine.sampling.processors import word_ids
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError
from kvreclaim.model.loader import LoadedModel
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule.budget.check import check_blocks
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.budget.lengths import excess_slots, longest_sequence

logger = logging.getLogger(__name__)


def check_prompt(
    tokens: list[int], params: SamplingParams, config: EngineConfig, loaded: LoadedModel
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
    if params.stop_strings and loaded.tokenizer is None:
        raise InvalidArgumentError(
            "stop strings need a tokenizer, and this model has none; pass stop_token_ids.",
            field="stop",
        )


def checked_bad_words(params: SamplingParams, loaded: LoadedModel) -> tuple[tuple[int, ...], ...]:
    """The token ids of bad_words. Raises: InvalidArgumentError for a word that the model cannot write."""
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        if loaded.tokenizer is None:
            raise InvalidArgumentError(
                "bad_words need a tokenizer, and this model has none; leave them out.", field="bad_words"
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
        "cache_salt holds the character NUL, which is reserved; remove it.",
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


def check_recall(compressor: Compressor, config: EngineConfig, recalls: Recalls | None) -> None:
    """Raise InvalidArgumentError where the host has no room for what this compression evicts."""
    if (recall := compressor.recall) is None:
        return
    problem = None
    if recalls is None:
        problem = "kv_recall_size is 0, so there is no host memory for evicted tokens; start with some GiB"
    elif recalls.least_rows(recall.blocks) > recalls.pool.num_rows:
        problem = (
            f"kv_recall_size {config.kv_recall_size} GiB holds {recalls.pool.num_rows} pages, and one "
            f"sequence needs {recalls.least_rows(recall.blocks)}; raise it"
        )
    if problem is not None:
        raise InvalidArgumentError(f"recall {recall.mode!r} is refused: {problem}.", field="compression")


def bounded_by_pool(footprint: Footprint, config: EngineConfig, *, said: int | None, longest: int) -> int:
    """The length up to which every sequence of this footprint is served, which the log says if the pool makes
    it less than the model's.

    said: max_model_len as the caller gave it; longest: the model's

    Raises: InvalidArgumentError if the pool cannot hold what was said, or not a single token.
    """
    assert config.num_blocks is not None, "the engine's limits are set"
    wanted = longest if said is None else said
    held = longest_sequence(None, wanted, footprint, config.num_blocks)
    if held < wanted:
        lacks = _lacks(excess_slots(wanted, wanted, footprint, config.num_blocks), footprint, config)
        to_do = _remedies(footprint, config)
        lower = f"lower it to {held}, or leave it out and have what the pool holds of each request, or "
        require(
            said is None and held > 0,
            f"max_model_len is {wanted}, and one sequence of that length may need {lacks}; "
            f"{lower if held else ''}{' or '.join(to_do)}.",
            "max_model_len",
        )
        logger.warning(
            "max_model_len is %d, not %d, the model's: one sequence of that length may need %s; to have "
            "more, %s.",
            held,
            wanted,
            lacks,
            " or ".join(to_do),
        )
    return held


def check_length(
    num_prompt: int, known: int, footprint: Footprint, config: EngineConfig, *, policy: str
) -> None:
    """Raise RequestTooLongError if the request can never run, InvalidArgumentError if its way of compressing
    does not go with the size of the blocks.

    num_prompt, known: tokens of the prompt, and of everything that is given; policy: its name
    """
    if not footprint.eviction_method.keeps_all:
        check_blocks(footprint, policy)
    assert config.max_model_len is not None, "the engine's limits are set"
    assert config.num_blocks is not None, "the engine's limits are set"
    if known >= config.max_model_len:
        is_hosts = (
            config.full_cache_host_size and config.max_model_len == config.num_blocks * config.block_size
        )
        raise RequestTooLongError(
            f"the prompt has {known} tokens, but max_model_len is {config.max_model_len} (prompt and "
            "output together); shorten the prompt or raise "
            f"{'full_cache_host_size, which holds no more' if is_hosts else 'max_model_len'}.",
            field="prompt",
        )
    excess = excess_slots(num_prompt, known + 1, footprint, config.num_blocks)
    if excess > 0:
        raise RequestTooLongError(
            f"the prompt of {known} tokens needs {_lacks(excess, footprint, config)}; shorten the prompt, or "
            f"{' or '.join(_remedies(footprint, config))}.",
            field="prompt",
        )


def output_limit(
    num_prompt: int,
    known: int,
    max_tokens: int | None,
    footprint: Footprint,
    config: EngineConfig,
    *,
    may_end_early: bool,
) -> int:
    """Tokens, prompt included, at which outputs end with reason "length": max_tokens or max_model_len,
    whichever comes first; without max_tokens, or where outputs may end early, what the whole pool can hold of
    one sequence, if that is less.

    Raises: RequestTooLongError if the pool cannot hold max_tokens.
    """
    assert config.max_model_len is not None, "the engine's limits are set"
    assert config.num_blocks is not None, "the engine's limits are set"
    limit = config.max_model_len if max_tokens is None else min(config.max_model_len, known + max_tokens)
    held = longest_sequence(num_prompt, limit, footprint, config.num_blocks)
    if held < limit and max_tokens is not None and not may_end_early:
        lacks = _lacks(excess_slots(num_prompt, limit, footprint, config.num_blocks), footprint, config)
        raise RequestTooLongError(
            f"max_tokens is {max_tokens}, which with the prompt of {known} tokens needs {lacks}; lower "
            f"max_tokens to {held - known}, shorten the prompt, or "
            f"{' or '.join(_remedies(footprint, config))}.",
            field="max_tokens",
        )
    return held


def _lacks(excess: int, footprint: Footprint, config: EngineConfig) -> str:
    """Say how many blocks are needed and how many there are."""
    assert config.num_blocks is not None, "the engine's limits are set"
    capacity = config.num_blocks * config.block_size
    windows = ", which windows take some of" if footprint.windows else ""
    return (
        f"{capacity + excess} slots, but the pool holds {capacity} ({config.num_blocks} blocks of "
        f"{config.block_size}{windows})"
    )


def _remedies(footprint: Footprint, config: EngineConfig) -> tuple[str, ...]:
    """Remedies that let the pool hold longer sequences."""
    if config.full_cache_host_size:
        return ("raise full_cache_host_size",)
    more = "raise num_blocks or kv_memory_fraction"
    if footprint.bounded:
        return ("lower the budget, the interval or max_num_batched_tokens", more)
    return (more, "compress with a budget")
