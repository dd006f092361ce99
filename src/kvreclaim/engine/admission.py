"""What a request must satisfy before it is queued: each refusal names the limit and the remedy."""

from __future__ import annotations

from kvreclaim.compression import Compressor
from kvreclaim.config import EngineConfig, SamplingParams
from kvreclaim.engine.compression import prompt_cap
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError
from kvreclaim.model.loader import LoadedModel


def check_prompt(
    tokens: list[int],
    params: SamplingParams,
    compressor: Compressor | None,
    config: EngineConfig,
    loaded: LoadedModel,
) -> None:
    """Raise InvalidArgumentError or RequestTooLongError if the request can never run."""
    if not tokens:
        raise InvalidArgumentError("the prompt has no tokens; pass at least one.")
    wrong = next((t for t in tokens if type(t) is not int or not 0 <= t < loaded.vocab_size), None)
    if wrong is not None:
        raise InvalidArgumentError(
            f"the prompt holds token id {wrong!r}; ids are integers from 0 to {loaded.vocab_size - 1}."
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
    _check_length(len(tokens), compressor, config)


def _check_length(num_tokens: int, compressor: Compressor | None, config: EngineConfig) -> None:
    assert config.max_model_len is not None, "the engine's limits are set"
    if num_tokens >= config.max_model_len:
        raise RequestTooLongError(
            f"the prompt has {num_tokens} tokens, but max_model_len is {config.max_model_len} (prompt and "
            "output together); shorten the prompt or raise max_model_len."
        )
    capacity = _capacity(config)
    held = slots_needed(num_tokens + 1, compressor, config)
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
    num_tokens: int, params: SamplingParams, compressor: Compressor | None, config: EngineConfig
) -> int:
    """Tokens, prompt included, at which outputs end with reason "length"."""
    assert config.max_model_len is not None, "the engine's limits are set"
    limit = config.max_model_len
    if params.max_tokens is not None:
        limit = min(limit, num_tokens + params.max_tokens)
    if slots_needed(limit, compressor, config) > _capacity(config):
        limit = _capacity(config)
    return limit


def slots_needed(num_tokens: int, compressor: Compressor | None, config: EngineConfig) -> int:
    """Slots that a sequence of this logical length has to hold at its largest."""
    if compressor is None or not compressor.compacts or not compressor.evicts:
        return num_tokens
    return min(num_tokens, prompt_cap(compressor, config.max_num_batched_tokens))


def _capacity(config: EngineConfig) -> int:
    assert config.num_blocks is not None, "the engine's limits are set"
    return config.num_blocks * config.block_size
