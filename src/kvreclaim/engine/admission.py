"""What a request must satisfy before it is queued: each refusal names the limit and the remedy."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.compression import Compressor
from kvreclaim.config import EngineConfig, SamplingParams
from kvreclaim.engine.compression import decode_cap, prompt_cap
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError
from kvreclaim.model.loader import LoadedModel


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of the prompt, and of everything known or to come."""

    prompt: int
    known: int


def check_prompt(
    tokens: list[int], params: SamplingParams, config: EngineConfig, loaded: LoadedModel
) -> None:
    """Raise InvalidArgumentError for tokens and parameters that this model or engine cannot take."""
    if not tokens:
        raise InvalidArgumentError("the prompt has no tokens; pass at least one.")
    wrong = [t for t in tokens if type(t) is not int or not 0 <= t < loaded.vocab_size]
    if wrong:
        raise InvalidArgumentError(
            f"the prompt holds token id {wrong[0]!r}; ids are integers from 0 to {loaded.vocab_size - 1}."
        )
    beyond = [t for t in params.stop_token_ids or () if t >= loaded.vocab_size]
    if beyond:
        raise InvalidArgumentError(
            f"stop_token_ids holds {beyond[0]}; the model's ids end at {loaded.vocab_size - 1}; remove it."
        )
    if params.n > config.max_num_seqs:
        raise InvalidArgumentError(
            f"n is {params.n}, but max_num_seqs allows {config.max_num_seqs} sequences at once; "
            "lower n or raise max_num_seqs."
        )
    if params.stop_strings and loaded.tokenizer is None:
        raise InvalidArgumentError(
            "stop strings need a tokenizer, which this model has not; pass stop_token_ids."
        )


def check_length(lengths: Lengths, compressor: Compressor | None, config: EngineConfig) -> None:
    """Raise RequestTooLongError if the request can never run."""
    num_tokens = lengths.known
    assert config.max_model_len is not None, "the engine's limits are set"
    if num_tokens >= config.max_model_len:
        raise RequestTooLongError(
            f"the prompt has {num_tokens} tokens, but max_model_len is {config.max_model_len} (prompt and "
            "output together); shorten the prompt or raise max_model_len."
        )
    capacity = _capacity(config)
    held = slots_needed(Lengths(lengths.prompt, num_tokens + 1), compressor, config)
    if held > capacity:
        remedy = (
            "lower the budget, the interval or max_num_batched_tokens, or raise num_blocks"
            if compressor is not None and compressor.compacts
            else "shorten the prompt, raise num_blocks, or compress with a budget"
        )
        raise RequestTooLongError(
            f"the prompt of {num_tokens} tokens needs {held} slots, but the pool holds {capacity} "
            f"({config.num_blocks} blocks of {config.block_size}); {remedy}."
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
    if slots_needed(Lengths(lengths.prompt, limit), compressor, config) > _capacity(config):
        limit = _capacity(config)
    return limit


def slots_needed(lengths: Lengths, compressor: Compressor | None, config: EngineConfig) -> int:
    """Slots that a sequence holds at most on its way to these lengths."""
    if compressor is None or not compressor.compacts or not compressor.evicts:
        return lengths.known
    in_prompt = min(lengths.prompt, prompt_cap(compressor, config.max_num_batched_tokens))
    return max(in_prompt, min(lengths.known, decode_cap(compressor)))


def _capacity(config: EngineConfig) -> int:
    assert config.num_blocks is not None, "the engine's limits are set"
    return config.num_blocks * config.block_size
