"""Makes requests that can be queued from specifications; all checks of a request are here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.refusals import format_features, model_features, policy_features
from kvreclaim.config import EngineConfig
from kvreclaim.engine.compact.recalls import Recalls
from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.request.footprints import footprint_of
from kvreclaim.engine.request.request import Request, Scores
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.request.verify import Verify
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.engine.step.validation import (
    check_length,
    check_prompt,
    check_recall,
    check_salt_and_priority,
    checked_bad_words,
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
    recalls: Recalls | None
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
        features = tuple(each for each in self.features if each.is_on(spec, is_child=parent is not None))
        refuse({**self.engine, **request_conditions(spec, compressor, features)})
        bad_words = checked_bad_words(params, self.loaded)
        verified, compressor = (None, None) if compressor is None else divided(compressor)
        verify = None if verified is None else self._verify(spec, verified, len(tokens))
        draft = RequestDraft(spec, compressor, footprint_of(compressor, config, prompt, self.groups))
        for feature in features:
            feature.claim(draft)
        footprint = draft.footprint
        policy = "full" if compressor is None else compressor.policy.name
        check_length(*lengths, footprint, config, policy=policy)
        if compressor is not None:
            self.signals.check(compressor)
            check_recall(compressor, config, self.recalls)
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
            before_passes=tuple(each for each in features if each.acts_before_passes),
            state=draft.state,
            verify=verify,
            bad_words=bad_words,
            parent=parent,
            scores=scores,
            prompt_logprobs=[None] if params.prompt_logprobs is not None else None,
        )
        return NewRequest(request, list(tokens), footprint, draft.queued)

    def check_compression(self, compressor: Compressor, *, scored: bool) -> None:
        """Raise InvalidArgumentError where this engine cannot serve the compression. scored: its text is
        given whole"""
        refuse({**self.engine, **compression_features(compressor, scored=scored)})
        self.signals.check(compressor)

    def _verify(self, spec: RequestSpec, verified: Compressor, num_tokens: int) -> Verify:
        """Settings of verify mode for the request. Raises: InvalidArgumentError."""
        most = num_tokens + (spec.params.max_tokens or 0)
        verify = verify_of(verified, self.groups, self.config, spec.prompt_token_ids, most)
        self.signals.check(verified)
        return verify


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
