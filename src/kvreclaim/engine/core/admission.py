"""What a request must satisfy before it is queued: each refusal names the limit and the remedy."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.checks import is_int
from kvreclaim.compression import Compressor
from kvreclaim.config import EngineConfig, SamplingParams
from kvreclaim.engine.core.due import decode_cap, prompt_cap
from kvreclaim.engine.ways.reads import least_blocks
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError
from kvreclaim.model.loader import LoadedModel
from kvreclaim.schedule.way import Way


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the prompt, and of everything known or to come."""

    prompt: int
    known: int


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
    beyond = [t for t in params.stop_token_ids or () if t >= loaded.vocab_size]
    if beyond:
        raise InvalidArgumentError(
            f"stop_token_ids holds {beyond[0]}; the model's ids end at {loaded.vocab_size - 1}; remove it.",
            field="stop_token_ids",
        )
    foreign = [t for t in params.logit_bias or () if t >= loaded.vocab_size]
    if foreign:
        raise InvalidArgumentError(
            f"logit_bias holds token {foreign[0]}; the model's ids end at {loaded.vocab_size - 1}; "
            "remove it.",
            field="logit_bias",
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


def check_priority(priority: int, config: EngineConfig) -> None:
    """Raise InvalidArgumentError for a priority that is no integer, or that nothing would go by."""
    if not is_int(priority):
        raise InvalidArgumentError(
            f"priority is {priority!r}; it must be an integer, lower runs first.", field="priority"
        )
    if priority and config.scheduling_policy != "priority":
        raise InvalidArgumentError(
            f"priority is {priority}, but scheduling_policy is {config.scheduling_policy}, which runs "
            "requests as they come; leave it at 0 or start the engine with scheduling_policy='priority'.",
            field="priority",
        )


def _check_compression(compressor: Compressor | None, config: EngineConfig) -> None:
    """Raise InvalidArgumentError for a way of compressing that these blocks cannot serve."""
    if compressor is None:
        return
    settings, size, name = compressor.config, config.block_size, compressor.policy.name
    problem = None
    if compressor.way is Way.CELLS and compressor.budget % size:
        problem = (
            f"budget is {compressor.budget} tokens, but {name} keeps unequal numbers per head, which are "
            f"counted in blocks of {size}; pass a multiple, such as {-(-compressor.budget // size) * size}"
        )
    elif compressor.way is Way.CELLS and compressor.interval < size:
        problem = (
            f"interval is {compressor.interval} tokens, but under {name} heads trade whole blocks of {size}, "
            f"and would have none to trade after the first pass; raise the interval to at least {size}"
        )
    least = _least_budget(compressor, size)
    if compressor.budget < least:
        problem = (
            f"budget is {compressor.budget} tokens, but {name} goes by whole blocks of {size}, and those of "
            f"{settings.sinks} sinks and {settings.recent} recent tokens may take {least}; raise the budget "
            f"to {least}, or lower recent or block_size"
        )
    if problem is not None:
        raise InvalidArgumentError(f"{problem}.", field="compression")


def _least_budget(compressor: Compressor, size: int) -> int:
    """Tokens in the blocks that may not go, or are always read, at the worst place of the newest token."""
    sinks, recent = compressor.config.sinks, compressor.config.recent
    if compressor.way is Way.READS:
        return least_blocks(compressor, size) * size
    return -(-sinks // size) * size + recent + size - 1 if compressor.way is Way.BLOCKS else 0


def check_length(lengths: Lengths, compressor: Compressor | None, config: EngineConfig) -> None:
    """Raise RequestTooLongError if the request can never run, InvalidArgumentError if its way of compressing
    does not go with the size of the blocks."""
    _check_compression(compressor, config)
    num_tokens = lengths.known
    assert config.max_model_len is not None, "the engine's limits are set"
    if num_tokens >= config.max_model_len:
        raise RequestTooLongError(
            f"the prompt has {num_tokens} tokens, but max_model_len is {config.max_model_len} (prompt and "
            "output together); shorten the prompt or raise max_model_len.",
            field="prompt",
        )
    capacity = _capacity(config)
    held = slots_needed(Lengths(lengths.prompt, num_tokens + 1), compressor, config)
    if held > capacity:
        remedy = (
            "lower the budget, the interval or max_num_batched_tokens, or raise num_blocks"
            if compressor is not None and compressor.bounded
            else "shorten the prompt, raise num_blocks, or compress with a budget"
        )
        raise RequestTooLongError(
            f"the prompt of {num_tokens} tokens needs {held} slots, but the pool holds {capacity} "
            f"({config.num_blocks} blocks of {config.block_size}); {remedy}.",
            field="prompt",
        )


def output_limit(
    lengths: Lengths, params: SamplingParams, compressor: Compressor | None, config: EngineConfig
) -> int:
    """Tokens, prompt included, at which outputs end with reason "length": max_tokens, max_model_len, or
    what the whole pool can hold of one sequence, whichever comes first."""
    assert config.max_model_len is not None, "the engine's limits are set"
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, lengths.known + params.max_tokens)
    excess = slots_needed(Lengths(lengths.prompt, limit), compressor, config) - _capacity(config)
    if excess <= 0:
        return limit
    return _capacity(config) if compressor is not None and compressor.bounded else limit - excess


def slots_needed(lengths: Lengths, compressor: Compressor | None, config: EngineConfig) -> int:
    """Slots that a sequence holds at most on its way to these lengths."""
    if compressor is None or not compressor.way.reclaims:
        return lengths.known
    if compressor.prompt_only:
        dropped = max(0, lengths.prompt - compressor.budget)
        return max(lengths.prompt, lengths.known - dropped)
    in_prompt = min(lengths.prompt, prompt_cap(compressor, config.max_num_batched_tokens))
    return max(in_prompt, min(lengths.known, decode_cap(compressor)))


def _capacity(config: EngineConfig) -> int:
    assert config.num_blocks is not None, "the engine's limits are set"
    return config.num_blocks * config.block_size
