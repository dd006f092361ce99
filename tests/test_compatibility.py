"""The table of refusals: every row is raised, the docs print it, and each pair is refused or has a test."""

from __future__ import annotations

import itertools
import re
import runpy
from pathlib import Path

import pytest
from supported import supported_pairs

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.refusals import TABLE, Feature, refuse
from kvreclaim.refusals.features import Kind

NAMES = {feature: f"<{feature.name}>" for feature in Feature}
TESTS = Path(__file__).parent
POLICIES = "query_mixture|knorm|snapkv|h2o|surrogate|random|streaming_llm|tova|r_kv"
WORDS = {
    Feature.VERIFY: "verify",
    Feature.SPARSE_PREFILL: "sparse_prefill",
    Feature.CHUNK_REUSE: "chunk",
    Feature.COMPRESS_AT: "compress_prompt_at|compressed_prefix",
    Feature.DROPS: "drop_spans",
    Feature.BEAM_SEARCH: "beam",
    Feature.SEVERAL_OUTPUTS: r"\bn=|\"n\"",
    Feature.PROMPT_LOGPROBS: "prompt_logprobs",
    Feature.SCORING: r"score\(|continuation",
    Feature.SESSION: "session",
    Feature.PROTECT_PROMPT: "protect_prompt",
    Feature.EVICTS: POLICIES,
    Feature.READS_SPARSELY: "quest",
    Feature.WHOLE_BLOCKS: "paged_eviction",
    Feature.UNEQUAL_HEADS: "shares|ada_kv|pyramidkv",
    Feature.CACHE_POSITIONS: "positions=cache",
    Feature.PROMPT_ONLY: "kvzip|when=prefill|prompt_only",
    Feature.TOKEN_SCORES: "kvzap",
    Feature.ATTENTION_MASS: "h2o",
    Feature.RECENT_QUERIES: "snapkv|r_kv|tova",
    Feature.FUTURE_QUERIES: "oracle",
    Feature.READS_AGAIN: "kvzip",
    Feature.OUTPUT_PROJECTION: "critical",
    Feature.HOST_CACHE: "full_cache_host_size|on_host",
    Feature.OFFLOADING: "kv_offloading_size",
    Feature.DISK: "kv_offloading_disk_path",
    Feature.DRAFTS: "speculative_config",
    Feature.BATCH_INVARIANT: "batch_invariant",
    Feature.QUANTISED: "kv_cache_dtype|int8",
    Feature.VLLM: "vllm",
    Feature.WINDOW_TABLES: "gemma|ministral|gpt-oss|llama4",
    Feature.SHARED_WINDOWS: "mistral|disable_hybrid_kv_cache_manager",
    Feature.RECURRENT: "qwen3-next|lfm2|falcon-h1|hybrid",
    Feature.LATENT: "deepseek",
}
"""What a test that covers a feature mentions, as a regular expression."""
IMPLIED: dict[Feature, set[Feature]] = {
    Feature.COMPRESS_AT: {Feature.EVICTS},
    Feature.PROTECT_PROMPT: {Feature.EVICTS},
    Feature.SPARSE_PREFILL: {Feature.SKIPS_BLOCKS},
    Feature.READS_SPARSELY: {Feature.NOT_COMPACTED, Feature.KEEPS_BLOCKS, Feature.NO_EVICTION},
    Feature.WHOLE_BLOCKS: {Feature.NOT_COMPACTED},
    Feature.UNEQUAL_HEADS: {Feature.NOT_COMPACTED},
    Feature.READS_AGAIN: {Feature.PROMPT_ONLY},
    Feature.SHARED_WINDOWS: {Feature.WINDOWS},
    Feature.FUTURE_QUERIES: {Feature.SCORING},
    Feature.BEAM_SEARCH: {Feature.GENERATION},
    Feature.SEVERAL_OUTPUTS: {Feature.GENERATION},
    Feature.DISK: {Feature.OFFLOADING},
}
"""States and features that are on whenever a feature is."""


def can_meet(one: Feature, other: Feature) -> bool:
    """Whether a caller can combine two features. Those of one policy or model come together, the plugin has
    an engine of its own, and a session holds what an engine has cached."""
    kinds = {one.kind, other.kind}
    if kinds & {Kind.STATE, Kind.FIELD}:
        return False
    if Kind.PLUGIN in kinds:
        return Kind.POLICY in kinds
    if Kind.SESSION in kinds:
        return bool(kinds & {Kind.ENGINE, Kind.MODEL})
    return len(kinds) == 2 or kinds <= {Kind.REQUEST, Kind.ENGINE}


def is_refused(pair: frozenset[Feature]) -> bool:
    on = pair.union(*(IMPLIED.get(each, set()) for each in pair))
    if Feature.VERIFY not in pair and any(each.kind is Kind.POLICY for each in pair):
        on |= {Feature.EVICTS}
    return any(on >= set(row.features) for row in TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(f.name for f in row.features))
def test_a_row_refuses_its_features_and_nothing_less(row):
    on = {feature: NAMES[feature] for feature in row.features}
    with pytest.raises(InvalidArgumentError) as refusal:
        refuse(on)
    message = str(refusal.value)
    assert refusal.value.field == row.field
    assert message == row.message.format_map({f.name.lower(): NAMES[f] for f in row.features})
    assert message.endswith(".")
    assert not {"{", "}"} & set(message)
    for feature in row.features:
        refuse({other: text for other, text in on.items() if other is not feature})
        refuse(on | {feature: None})
        refuse(on | {feature: False})


def test_every_feature_is_in_a_row_or_a_pair_and_no_row_is_there_twice():
    in_rows = {feature for row in TABLE for feature in row.features}
    assert in_rows.union(*supported_pairs()) == set(Feature)
    assert len({frozenset(row.features) for row in TABLE}) == len(TABLE)


def test_every_pair_is_refused_or_has_a_test():
    pairs = {frozenset(pair) for pair in itertools.combinations(Feature, 2) if can_meet(*pair)}
    refused, tried = set(filter(is_refused, pairs)), set(supported_pairs())
    assert {f"{a.name} {b.name}" for a, b in pairs - refused - tried} == set()
    assert {f"{a.name} {b.name}" for a, b in tried & refused} == set()
    assert tried <= pairs


@pytest.mark.parametrize("file", sorted(set(supported_pairs().values())))
def test_the_test_of_a_pair_mentions_both(file):
    text = (TESTS / file).read_text(encoding="utf-8").lower()
    features = set().union(*(pair for pair, each in supported_pairs().items() if each == file))
    assert {feature.name for feature in features if not re.search(WORDS[feature], text)} == set()


def test_the_page_is_the_table():
    script = runpy.run_path(str(TESTS.parent / "scripts" / "docs.py"))
    assert script["COMPATIBILITY"].read_text() == script["compatibility_page"]()
