"""Makes requests that can be queued from specifications; all checks of a request are here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from kvreclaim.beams import BeamSearchParams
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.compression.prefill.registry import make_method
from kvreclaim.compression.refusals import format_features, model_features, policy_features
from kvreclaim.config import EngineConfig
from kvreclaim.engine.compact.recalls import Recalls
from kvreclaim.engine.request.chunk_reuse import Reuse
from kvreclaim.engine.request.footprints import footprint_of
from kvreclaim.engine.request.request import Beams, Request, Scores
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.request.verify import Verify
from kvreclaim.engine.sampling.beam_search import BeamSearch
from kvreclaim.engine.sampling.thinking import closing_ids
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.engine.step.validation import (
    check_beams,
    check_length,
    check_prompt,
    check_recall,
    check_salt_and_priority,
    check_sparse_prefill,
    checked_bad_words,
    checked_drops,
    output_limit,
)
from kvreclaim.engine.step.verified import divided, verify_of
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.refusals import Feature, refuse
from kvreclaim.schedule import Footprint

UNSEEDED = 1 << 40
"""Seeds of requests that bring none begin here, where no caller's seed is expected."""


@dataclass(frozen=True, slots=True, eq=False)
class NewRequest:
    """A request that has been checked. tokens: of its prompt, and of a continuation to be scored"""

    request: Request
    tokens: list[int]
    footprint: Footprint


@dataclass(frozen=True, slots=True, eq=False)
class RequestFactory:
    """Makes requests for one engine, or refuses them; nothing else has changed then.

    config:   its limits are those of a request
    features: of the engine, for the table of refusals
    prefill:  sparse prefill of requests without their own
    """

    loaded: LoadedModel
    config: EngineConfig
    groups: LayerGroups
    features: Mapping[Feature, object]
    signals: Signals
    recalls: Recalls | None
    prefill: SparsePrefill | None

    def make(
        self,
        spec: RequestSpec,
        compressor: Compressor | None,
        number: int,
        reuse_of: Callable[[], Reuse | None],
        parent: Request | None,
    ) -> NewRequest:
        """A request. number: of those that the engine has had; reuse_of: what of its chunks is reused.

        Raises: InvalidArgumentError, RequestTooLongError.
        """
        config, params, prompt = self.config, spec.params, spec.prompt_token_ids
        tokens = prompt + (spec.continuation or []) if prompt else []
        lengths = len(prompt), len(tokens) - (spec.continuation is not None)  # its last token is not computed
        check_prompt(tokens, params, config, self.loaded)
        check_salt_and_priority(spec.cache_salt, spec.priority)
        method, sparse = self._prefill_method(spec), None
        assert config.max_model_len is not None, "the engine's limits are set"
        refuse({**self.features, **request_features(spec, compressor, method, config.max_model_len)})
        bad_words = checked_bad_words(params, self.loaded)
        if params.thinking_token_budget is not None and spec.thinking is not None:
            closing_ids(spec.thinking, self.loaded.tokenizer)
        if method is not None:
            sparse = check_sparse_prefill(method, config, self.groups.facts)
            method = None if sparse is None else method
        verified, compressor = (None, None) if compressor is None else divided(compressor)
        verify = None if verified is None else self._verify(spec, verified, len(tokens))
        footprint = footprint_of(compressor, config, prompt, spec.compress_prompt_at, self.groups, sparse)
        if (drops := checked_drops(spec)) is not None:
            footprint = footprint.dropping(drops)
        if (reuse := reuse_of()) is not None:
            footprint = replace(footprint, shareable_until=reuse.sources[0].start)
        policy = "full" if compressor is None else compressor.policy.name
        check_length(*lengths, footprint, config, policy=policy)
        if compressor is not None:
            self.signals.check(compressor)
            check_recall(compressor, config, self.recalls)
        max_len = output_limit(
            *lengths, params.max_tokens, footprint, config, may_end_early=spec.may_end_early
        )
        beams = None if spec.beams is None else self._beams(spec.beams, prompt, max_len, footprint)
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
            beams=beams,
            sparse_prefill=method,
            reuse=reuse,
            verify=verify,
            bad_words=bad_words,
            parent=parent,
            scores=scores,
            prompt_logprobs=[None] if params.prompt_logprobs is not None else None,
        )
        return NewRequest(request, list(tokens), footprint)

    def check_compression(self, compressor: Compressor, *, scored: bool) -> None:
        """Raise InvalidArgumentError where this engine cannot serve the compression. scored: its text is
        given whole"""
        refuse({**self.features, **compression_features(compressor, scored=scored)})
        self.signals.check(compressor)

    def _prefill_method(self, spec: RequestSpec) -> SparsePrefill | None:
        """Return the request's method of sparse prefill, else the engine's."""
        method = self.prefill if spec.sparse_prefill is None else spec.sparse_prefill
        return make_method(method) if isinstance(method, str) else method

    def _verify(self, spec: RequestSpec, verified: Compressor, num_tokens: int) -> Verify:
        """Settings of verify mode for the request. Raises: InvalidArgumentError."""
        most = num_tokens + (spec.params.max_tokens or 0)
        verify = verify_of(verified, self.groups, self.config, spec.prompt_token_ids, most)
        self.signals.check(verified)
        return verify

    def _beams(
        self, params: BeamSearchParams, prompt: list[int], max_len: int, footprint: Footprint
    ) -> Beams:
        """The request's beam search. Raises: InvalidArgumentError, RequestTooLongError."""
        eos = frozenset() if params.ignore_eos else self.loaded.eos_token_ids
        search = BeamSearch(params, max_len - len(prompt), eos)
        check_beams(search, len(prompt), footprint, self.config, self.loaded.vocab_size)
        return Beams(search)


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
    }
    return config.features() | format_features(form) | model_features(groups.facts) | own


def request_features(
    spec: RequestSpec, compressor: Compressor | None, method: SparsePrefill | None, max_model_len: int
) -> dict[Feature, object]:
    """Return features of a request; None and False: off.

    compressor: of the request or of its drafts; method: its sparse prefill
    """
    params = spec.params
    own: dict[Feature, object] = {
        Feature.CHUNK_REUSE: spec.chunks is not None,
        Feature.COMPRESS_AT: spec.compress_prompt_at is not None,
        Feature.DROPS: bool(spec.drop_spans),
        Feature.DROP_AT: spec.drop_at,
        Feature.NO_DROPS: not spec.drop_spans,
        Feature.BEAM_SEARCH: spec.beams is not None,
        Feature.SEVERAL_OUTPUTS: params.n > 1,
        Feature.PROMPT_LOGPROBS: params.prompt_logprobs is not None,
        Feature.SCORING: spec.continuation is not None,
        Feature.PRIORITY: spec.priority or None,
        Feature.STOP_STRINGS: bool(params.stop_strings),
        Feature.BAD_WORDS: bool(params.bad_words),
        Feature.THINKING_BUDGET: params.thinking_token_budget is not None,
        Feature.UNKNOWN_REASONING: spec.thinking is None,
        Feature.SPARSE_PREFILL: None if method is None else method.name,
        Feature.SKIPS_BLOCKS: None if method is None or method.reads_all(max_model_len) else method.name,
    }
    if compressor is None:
        return own
    return own | compression_features(compressor, scored=spec.continuation is not None)


def compression_features(compressor: Compressor, *, scored: bool) -> dict[Feature, object]:
    """Return features of the compression of a request, or of its drafts; None and False: off.

    scored: whether all tokens are given, so that none is generated
    """
    policy, recall, config = compressor.policy, compressor.recall, compressor.config
    mode = None if recall is None else repr(recall.mode)
    return policy_features(policy) | {
        Feature.VERIFY: config.verify,
        Feature.EVICTS: None if config.verify or policy.eviction_method.keeps_all else policy.name,
        Feature.PROTECT_PROMPT: config.protect_prompt,
        Feature.GENERATION: not scored,
        Feature.RECALL: mode,
        Feature.RECALL_BETWEEN_PASSES: mode if recall is not None and recall.between else None,
    }
