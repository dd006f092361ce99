"""Which features of the compatibility table an engine and a request have."""

from __future__ import annotations

from kvreclaim.compatibility import Feature
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.compression.refusals import format_features, model_features, policy_features
from kvreclaim.config import EngineConfig
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.groups import LayerGroups


def engine_features(config: EngineConfig, form: KVFormat, groups: LayerGroups) -> dict[Feature, str]:
    """Features of an engine and its model."""
    found = config.features() | format_features(form) | model_features(groups.facts)
    if groups.windows:
        found[Feature.WINDOW_TABLES] = repr(groups.model.name)
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
