"""From what a caller asks for to a request that can be queued: everything is checked here."""

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
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.engine.step.validation import (
    check_beams,
    check_length,
    check_priority,
    check_prompt,
    check_recall,
    check_salt,
    check_sparse_prefill,
    check_thinking,
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
    features: of the engine, for the compatibility table
    prefill:  sparse prefill of requests that say nothing
    """

    loaded: LoadedModel
    config: EngineConfig
    groups: LayerGroups
    features: Mapping[Feature, str]
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
        bad_words = checked_bad_words(params, self.loaded)
        check_thinking(params, spec.thinking, self.loaded)
        check_salt(spec.cache_salt)
        check_priority(spec.priority, config)
        method, sparse = self._prefill_method(spec), None
        assert config.max_model_len is not None, "the engine's limits are set"
        if asked := request_features(spec, compressor, method, config.max_model_len):
            refuse({**self.features, **asked})
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
        """The prompt's sparse-prefill method: the request's, else the engine's."""
        said = self.prefill if spec.sparse_prefill is None else spec.sparse_prefill
        return make_method(said) if isinstance(said, str) else said

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


def engine_features(config: EngineConfig, form: KVFormat, groups: LayerGroups) -> dict[Feature, str]:
    """Features of an engine and its model."""
    found = config.features() | format_features(form) | model_features(groups.facts)
    if groups.windows:
        found[Feature.WINDOW_TABLES] = repr(groups.model.name)
    if groups.model.states:
        found[Feature.RECURRENT] = repr(groups.model.name)
    if groups.trailing is not None:
        found[Feature.ALL_WINDOWS] = repr(groups.model.name)
    return found


def request_features(
    spec: RequestSpec, compressor: Compressor | None, method: SparsePrefill | None, max_model_len: int
) -> dict[Feature, str]:
    """Features of a request. compressor: what compresses it, or drafts for it; method: its sparse prefill"""
    asked = {
        Feature.CHUNK_REUSE: spec.chunks is not None,
        Feature.COMPRESS_AT: spec.compress_prompt_at is not None,
        Feature.DROPS: bool(spec.drop_spans),
        Feature.BEAM_SEARCH: spec.beams is not None,
        Feature.SEVERAL_OUTPUTS: spec.params.n > 1,
        Feature.PROMPT_LOGPROBS: spec.params.prompt_logprobs is not None,
        Feature.SCORING: spec.continuation is not None,
    }
    found = {feature: "" for feature, is_asked in asked.items() if is_asked}
    if method is not None:
        found[Feature.SPARSE_PREFILL] = method.name
        if not method.reads_all(max_model_len):
            found[Feature.SKIPS_BLOCKS] = method.name
    if compressor is None:
        return found
    return found | compression_features(compressor, scored=spec.continuation is not None)


def compression_features(compressor: Compressor, *, scored: bool) -> dict[Feature, str]:
    """Features of the compression of a request, or of its drafts. scored: its tokens are given, none is
    drawn"""
    policy, recall = compressor.policy, compressor.recall
    found = policy_features(policy)
    if compressor.config.verify:
        found[Feature.VERIFY] = "True"
    elif not policy.eviction_method.keeps_all:
        found[Feature.EVICTS] = policy.name
    if not scored:
        found[Feature.GENERATION] = ""
    if recall is not None:
        found[Feature.RECALL] = repr(recall.mode)
        if recall.between:
            found[Feature.RECALL_BETWEEN_PASSES] = repr(recall.mode)
    return found
