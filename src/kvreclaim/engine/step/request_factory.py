"""Makes requests that can be queued from specifications, and checks them. Each error names the limit and
the remedy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from kvreclaim.checks import check_text, is_int, require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.refusals import format_features, model_features, policy_features
from kvreclaim.config import EngineConfig
from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.request.request import Request, Scores
from kvreclaim.engine.request.spec import RequestSpec, footprint_of
from kvreclaim.engine.sampling.sampler import word_ids
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.errors import InvalidArgumentError, RequestTooLongError
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.refusals import Feature, refuse
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule.budget.footprint import Footprint, check_blocks, excess_slots, longest_sequence

logger = logging.getLogger(__name__)
UNSEEDED = 1 << 40
"""Seeds of requests that bring none begin here, where no caller's seed is expected."""


def check_prompt(
    tokens: list[int], params: SamplingParams, config: EngineConfig, loaded: LoadedModel
) -> None:
    """Raise InvalidArgumentError for tokens and parameters beyond the limits of the model or the engine."""
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


def checked_bad_words(params: SamplingParams, loaded: LoadedModel) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of bad_words. Raises: InvalidArgumentError for a word without tokens."""
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words or ():
        assert loaded.tokenizer is not None, "bad_words without a tokenizer are refused before"
        check_text("a text of bad_words", word, "bad_words")
        ids = word_ids(word, loaded.tokenizer)
        require(
            bool(ids) and max(map(max, ids)) < loaded.vocab_size,
            f"bad_words has {word!r}, for which the model has no tokens; remove it.",
            "bad_words",
        )
        found.update(dict.fromkeys(ids))
    return tuple(found)


def check_salt_and_priority(cache_salt: str | None, priority: object) -> None:
    """Raise InvalidArgumentError for a cache salt that is no text or holds NUL, or a priority that is no
    integer."""
    require(
        is_int(priority), f"priority is {priority!r}; it must be an integer, lower runs first.", "priority"
    )
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


def bounded_by_pool(footprint: Footprint, config: EngineConfig, *, given: int | None, longest: int) -> int:
    """Return the length up to which every sequence of this footprint is served. A length below the model's is
    logged.

    given: the caller's max_model_len; longest: the model's

    Raises: InvalidArgumentError if the pool cannot hold the given length, or not a single token.
    """
    assert config.num_blocks is not None, "the engine's limits are set"
    length = longest if given is None else given
    held = longest_sequence(None, length, footprint, config.num_blocks)
    if held < length:
        lacks = _lacks(excess_slots(length, length, footprint, config.num_blocks), footprint, config)
        to_do = _remedies(footprint, config)
        lower = f"lower it to {held}, or leave it out and have what the pool holds of each request, or "
        require(
            given is None and held > 0,
            f"max_model_len is {length}, and one sequence of that length may need {lacks}; "
            f"{lower if held else ''}{' or '.join(to_do)}.",
            "max_model_len",
        )
        logger.warning(
            "max_model_len is %d, not %d, the model's: one sequence of that length may need %s; to have "
            "more, %s.",
            held,
            length,
            lacks,
            " or ".join(to_do),
        )
    return held


def check_length(
    num_prompt: int, known: int, footprint: Footprint, config: EngineConfig, *, policy: str
) -> None:
    """Raise RequestTooLongError for a request that can never run, InvalidArgumentError for a compression that
    does not fit the size of the blocks.

    num_prompt, known: tokens of the prompt, and of prompt and continuation; policy: its name
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
    whichever comes first. Without max_tokens, or where outputs may end early, the limit is at most what the
    whole pool holds of one sequence.

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
    """Describe the slots that are needed and those that the pool has."""
    assert config.num_blocks is not None, "the engine's limits are set"
    capacity = config.num_blocks * config.block_size
    windows = ", which windows take some of" if footprint.windows else ""
    return (
        f"{capacity + excess} slots, but the pool holds {capacity} ({config.num_blocks} blocks of "
        f"{config.block_size}{windows})"
    )


def _remedies(footprint: Footprint, config: EngineConfig) -> tuple[str, ...]:
    """Return remedies that let the pool hold longer sequences."""
    if config.full_cache_host_size:
        return ("raise full_cache_host_size",)
    more = "raise num_blocks or kv_memory_fraction"
    if footprint.bounded:
        return ("lower the budget, the interval or max_num_batched_tokens", more)
    return (more, "compress with a budget")


@dataclass(frozen=True, slots=True, eq=False)
class NewRequest:
    """A checked request. tokens: its prompt and a continuation to be scored; queued: at once"""

    request: Request
    tokens: list[int]
    footprint: Footprint
    queued: bool


@dataclass(frozen=True, slots=True, eq=False)
class RequestFactory:
    """Makes requests for one engine, or refuses them; nothing else has changed then.

    config:   its limits are those of a request
    engine:   features of the engine, for the table of refusals
    features: that requests may have, in the order in which a request passes them
    """

    loaded: LoadedModel
    config: EngineConfig
    groups: LayerGroups
    engine: Mapping[Feature, object]
    signals: Signals
    features: tuple[RequestFeature, ...]

    def make(
        self, spec: RequestSpec, compressor: Compressor | None, number: int, parent: Request | None
    ) -> NewRequest:
        """A request. number: of requests that the engine has had

        Raises: InvalidArgumentError, RequestTooLongError.
        """
        config, params, prompt = self.config, spec.params, spec.prompt_token_ids
        tokens = prompt + (spec.continuation or []) if prompt else []
        lengths = len(prompt), len(tokens) - (spec.continuation is not None)  # its last token is not computed
        check_prompt(tokens, params, config, self.loaded)
        check_salt_and_priority(spec.cache_salt, spec.priority)
        features = tuple(each for each in self.features if has_feature(spec, each, parent, compressor))
        own = request_conditions(spec, compressor, features)
        if not all(value is None or value is False for value in own.values()):
            refuse({**self.engine, **own})  # without own ones the start has checked the engine's
        bad_words = checked_bad_words(params, self.loaded)
        whole = footprint_of(compressor, config, prompt, self.groups)
        draft = RequestDraft(spec, compressor, whole, bad_words)
        for feature in features:
            feature.claim(draft)
        footprint, compressor = draft.footprint, draft.compressor
        policy = "full" if compressor is None else compressor.policy.name
        check_length(*lengths, footprint, config, policy=policy)
        if compressor is not None:
            self.signals.check(compressor)
        max_len = output_limit(
            *lengths, params.max_tokens, footprint, config, may_end_early=spec.may_end_early
        )
        for feature in features:
            feature.limited(draft, max_len)
        seed = UNSEEDED + config.seed * 1_000_003 + number if params.seed is None else params.seed
        scores = None
        if spec.continuation is not None:
            count = len(spec.continuation)
            scores = Scores([-1] * count, [float("nan")] * count)
        request = Request(
            spec,
            compressor,
            max_len,
            seed,
            features=features,
            before_passes=tuple(each for each in features if each.overrides("before_pass")),
            state=draft.state,
            bad_words=bad_words,
            parent=parent,
            scores=scores,
            prompt_logprobs=[None] if params.prompt_logprobs is not None else None,
        )
        return NewRequest(request, list(tokens), footprint, draft.queued)

    def preparations(self, spec: RequestSpec) -> list[Callable[[], None]]:
        """Return slow work of features before a request is added; call it from any thread. It may raise an
        InvalidArgumentError."""
        features = (each for each in self.features if has_feature(spec, each) and each.overrides("prepare"))
        return [partial(each.prepare, spec) for each in features]

    def check_compression(self, compressor: Compressor, *, scored: bool) -> None:
        """Raise InvalidArgumentError where this engine cannot serve the compression. scored: its text is
        given whole"""
        refuse({**self.engine, **compression_features(compressor, scored=scored)})
        self.signals.check(compressor)


def engine_features(
    config: EngineConfig, loaded: LoadedModel, form: KVFormat, groups: LayerGroups
) -> dict[Feature, object]:
    """Return features of an engine and its model; None and False: off."""
    name = repr(groups.model.name)
    own = {
        Feature.WINDOW_TABLES: name if groups.windows else None,
        Feature.RECURRENT: name if groups.model.states else None,
        Feature.ALL_WINDOWS: name if groups.trailing is not None else None,
        Feature.NO_TOKENIZER: loaded.tokenizer is None,
        Feature.NO_END: not loaded.eos_token_ids,
    }
    return config.features() | format_features(form) | model_features(groups.facts) | own


def has_feature(
    spec: RequestSpec,
    feature: RequestFeature,
    parent: Request | None = None,
    compressor: Compressor | None = None,
) -> bool:
    """Return whether a request has the feature. parent: another request, which needs its result"""
    if spec.option(feature.option) is not None or (feature.is_default and parent is None):
        return True
    if feature.setting is not None and compressor is not None and getattr(compressor.config, feature.setting):
        return True
    return feature.parameter is not None and getattr(spec.params, feature.parameter) is not None


def request_conditions(
    spec: RequestSpec, compressor: Compressor | None, features: tuple[RequestFeature, ...]
) -> dict[Feature, object]:
    """Return conditions of a request for the table of refusals; None and False: off. compressor: of the
    request or of its drafts"""
    params = spec.params
    own: dict[Feature, object] = {
        Feature.SEVERAL_OUTPUTS: params.n > 1,
        Feature.PROMPT_LOGPROBS: params.prompt_logprobs is not None,
        Feature.SCORING: spec.continuation is not None,
        Feature.PRIORITY: spec.priority or None,
        Feature.STOP_STRINGS: bool(params.stop_strings),
        Feature.BAD_WORDS: bool(params.bad_words),
    }
    for each in features:
        own |= each.conditions(spec)
    if compressor is None:
        return own
    return own | compression_features(compressor, scored=spec.continuation is not None)


def compression_features(compressor: Compressor, *, scored: bool) -> dict[Feature, object]:
    """Return features of the compression of a request, or of its drafts; None and False: off.

    scored: whether all tokens are given, so that none is generated
    """
    policy, config = compressor.policy, compressor.config
    return policy_features(policy) | {
        Feature.VERIFY: config.verify,
        Feature.EVICTS: None if config.verify or policy.eviction_method.keeps_all else policy.name,
        Feature.PROTECT_PROMPT: config.protect_prompt,
        Feature.GENERATION: not scored,
    }
