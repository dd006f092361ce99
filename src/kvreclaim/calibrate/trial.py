"""Trial of candidate policies on held-out documents, in the engine that serves them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from tqdm.auto import tqdm

from kvreclaim.calibrate.lookups import LookupDocument, Question
from kvreclaim.checks import require
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import (
    CANDIDATES,
    FORMATS,
    FRACTIONS,
    SHARES,
    FormatOutcome,
    Trial,
    TrialOutcome,
    TrialScore,
)
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import ScoreOutput
from kvreclaim.errors import InvalidArgumentError, KVReclaimError, UnsupportedModelError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.options import MAX_COUNT
from kvreclaim.schedule.budget.footprint import share_in_blocks

logger = logging.getLogger(__name__)

SINKS, RECENT, INTERVAL = 4, 64, 128
AT_ONCE = 4
"""Policies in one batch. Larger products are faster, but the pool holds all of their caches."""
STRETCH, REPEAT_EVERY = 32, 16
"""Tokens of a repeated stretch, and the inverse share of tokens in repeated stretches."""
ANSWERED = 0.5
"""Least share of an answer's tokens that the full cache must predict for its question to count."""
LEAST_TOKENS, MOST_TOKENS = 320, 2048
"""Bounds of a document's length. A tenth of a shorter one leaves no room after sinks and recent tokens; a
longer one adds little information."""


_Setting = tuple[str, float]
"""Policy and fraction."""
_ONCE, _AGAIN = "once", "again"
"""Kinds of continuations of prose; all other kinds are look-ups."""


@dataclass(frozen=True)
class _AnswerScore:
    """Score of one answer: nats below certainty, mean over its tokens; share of greedily predicted tokens."""

    nats: float
    right: float


_Row = tuple[int, list[_AnswerScore]]
"""Budget, and the answers' scores for each question of a document."""


def window(facts: ModelFacts) -> int:
    """Return the longest document of a trial in tokens: the model's positions less one repeated stretch."""
    return min(MOST_TOKENS, facts.max_position - STRETCH)


def num_tokens(document: LookupDocument, num_settings: int) -> int:
    """Return the tokens that a trial computes: the document once, its continuations under every setting."""
    return len(document.prompt) + num_settings * sum(
        len(each.question) + len(each.answer) for each in document.questions
    )


def prose_document(document: Sequence[int]) -> LookupDocument:
    """Cut prose for the trial: its first part is continued by the rest, or by repeated stretches."""
    require(
        len(document) >= LEAST_TOKENS,
        f"a trial needs documents of {LEAST_TOKENS} tokens and more; pass a longer text, or no trial.",
    )
    first = len(document) * 7 // 8
    prompt, rest = list(document[:first]), list(document[first:])
    starts = range(0, first, STRETCH * REPEAT_EVERY)
    again = [token for start in starts for token in prompt[start : start + STRETCH]]
    follows = ((_ONCE, rest), (_AGAIN, again))
    return LookupDocument("prose", prompt, [Question(kind, ids[:1], ids[1:]) for kind, ids in follows])


def try_candidates(
    llm: LLM,
    stats: QueryStats,
    documents: Sequence[LookupDocument],
    *,
    candidates: Sequence[str] = CANDIDATES,
    fractions: Sequence[float] = FRACTIONS,
    formats: Sequence[str] = FORMATS,
    show_progress: bool = False,
) -> Trial:
    """Compress each document under every candidate to every fraction, and score its continuations.

    The rest of the prose measures what the text itself needs. Questions on a look-up document, each scored
    alone by its answer's tokens, measure what later requests may need. A question counts if the full cache
    predicts at least half of its answer. If none counts, repeated stretches of the prose replace them.
    Passes run as in serving: at the document's end, and as the continuation grows.

    llm:        source of weights, KV format and kernels; the trial runs in an engine of its own
    stats:      statistics that the candidates read
    documents:  from prose_document, then from lookup_documents; stats must not be fitted to them
    candidates: policy specs; those that the model does not support are skipped
    fractions:  fractions of a document that stay, rounded down to blocks
    formats:    KV cache dtypes for a trial of the best candidate at equal bytes; those that the model does
                not support are skipped

    Raises: InvalidArgumentError without a document, or without a candidate that can run.
    """
    require(bool(documents), "a trial needs a document; pass one.")
    engine = _engine_for(llm, documents)
    served, refused = _served(engine, stats, candidates)
    require(bool(served), f"no candidate can run: {'; '.join(refused.values())}")
    full = [_full(engine, document) for document in documents]
    places = _counted(documents, full)
    full_score = _mean(places, full)
    if places["asked"]:  # repetition only replaces missing answers
        places[_AGAIN] = []
        documents = [
            replace(document, questions=[each for each in document.questions if each.kind != _AGAIN])
            for document in documents
        ]
    found: dict[_Setting, list[_Row]] = {}
    groups = [served[i : i + AT_ONCE] for i in range(0, len(served), AT_ONCE)]
    bar = tqdm(total=len(documents) * len(groups), desc="trial", disable=not show_progress)
    with bar:
        for document, group in itertools.product(documents, groups):
            left = [policy for policy in group if policy not in refused]
            configs = {
                (policy, fraction): _config(engine, document, policy, fraction, stats)
                for policy, fraction in itertools.product(left, fractions)
            }
            for setting, row in _tried(engine, document, configs, refused):
                found.setdefault(setting, []).append(row)
            bar.update()
    rows = {setting: row for setting, row in found.items() if setting[0] not in refused}
    require(bool(rows), f"no candidate could run: {'; '.join(refused.values())}")
    trial = Trial(
        documents=len(documents),
        tokens=sum(len(document.prompt) for document in documents),
        questions=len(places["asked"]),
        full=full_score,
        outcomes=tuple(
            TrialOutcome(policy=policy, fraction=fraction, budget=mean(budgets), **dict(_mean(places, own)))
            for (policy, fraction), row in rows.items()
            for budgets, own in [zip(*row, strict=True)]
        ),
        refused=refused,
    )
    bar = tqdm(formats, desc="formats", disable=not show_progress or not formats)
    tried = [
        outcome for form in bar for outcome in _in_format(llm, form, stats, documents, places, trial.best)
    ]
    return trial.model_copy(update={"formats": tuple(tried)})


def _in_format(
    llm: LLM,
    form: str,
    stats: QueryStats,
    documents: Sequence[LookupDocument],
    places: Mapping[str, Sequence[tuple[int, int]]],
    policy: str,
) -> list[FormatOutcome]:
    """Return the policy's outcomes with this KV cache dtype, with the settings of serving; none if the model
    does not support it."""
    refused: dict[str, str] = {}
    found: dict[_Setting, list[_Row]] = {}
    try:
        engine = _engine_for(llm, documents, kv_cache_dtype=form, stats=stats)
        for document in documents:
            _compute(engine, document)
            configs = {
                (policy, share): _served_config(engine, document, policy, share, stats) for share in SHARES
            }
            for setting, row in _tried(engine, document, configs, refused):
                found.setdefault(setting, []).append(row)
    except (InvalidArgumentError, UnsupportedModelError) as error:
        refused[policy] = str(error)
    if refused:
        logger.info("kv_cache_dtype %s is not tried: %s", form, refused[policy])
        return []
    outcomes = []
    for (_, share), rows in found.items():
        score = dict(_mean(places, [scores for _, scores in rows]))
        budget = mean(budget for budget, _ in rows)
        outcomes.append(FormatOutcome(kv_cache_dtype=form, share=share, budget=budget, **score))
    return outcomes


def _engine_for(llm: LLM, documents: Sequence[LookupDocument], **options: Any) -> LLM:
    """Return an engine that computes a document in one step, and holds it for a batch of candidates."""
    longest = max(
        len(document.prompt) + len(each.question) + len(each.answer)
        for document in documents
        for each in document.questions
    )
    return llm.sibling(
        num_blocks=2 * AT_ONCE * blocks_for(longest, llm.engine.memory.block_size),
        max_model_len=longest + 1,
        max_num_batched_tokens=max(longest, llm.engine.config.max_num_batched_tokens),
        enable_prefix_caching=True,
        spread_compression=False,
        disable_hybrid_kv_cache_manager=None,  # windows in tables of their own, as in serving
        **options,
    )


def _served(
    engine: LLM, stats: QueryStats, candidates: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the policies that the model can serve, without duplicates, and the errors of the others."""
    served, refused = [], {}
    for policy in dict.fromkeys(candidates):
        config = CompressionConfig(policy, stats=stats)
        try:
            engine.engine.factory.check_compression(engine.compressor(config), scored=True)
            served.append(policy)
        except (InvalidArgumentError, UnsupportedModelError) as error:
            refused[policy] = str(error)
    return tuple(served), refused


def _config(
    engine: LLM, document: LookupDocument, policy: str, fraction: float, stats: QueryStats
) -> CompressionConfig:
    budget = share_in_blocks(fraction, len(document.prompt), engine.engine.memory.block_size, SINKS)
    recent = min(RECENT, budget // 4)  # leaves most of the budget to the scores
    return CompressionConfig(policy, budget, INTERVAL, SINKS, recent, stats=stats)


def _served_config(
    engine: LLM, document: LookupDocument, policy: str, share: float, stats: QueryStats
) -> CompressionConfig:
    config = CompressionConfig(policy, MAX_COUNT, stats=stats, budget_share=share)
    block_size = engine.engine.memory.block_size
    return config.for_prompt(len(document.prompt), block_size, engine.compressors.density)


def _full(engine: LLM, document: LookupDocument) -> list[_AnswerScore]:
    """Score a document with the full cache."""
    _compute(engine, document)
    return _answer_scores(document, _score(engine, document, [None]))


def _compute(engine: LLM, document: LookupDocument) -> None:
    """Compute a document alone, so that all of its questions hit the prefix cache."""
    engine.score([document.prompt], [document.questions[0].question])


def _tried(
    engine: LLM,
    document: LookupDocument,
    configs: Mapping[_Setting, CompressionConfig],
    refused: dict[str, str],
) -> Iterator[tuple[_Setting, _Row]]:
    """Yield the outcome of each setting, all in one batch. Failing policies are added to `refused`."""
    try:
        outputs = _score(engine, document, list(configs.values()))
    except KVReclaimError as error:  # raised for one policy, before any request ran
        policies = dict.fromkeys(policy for policy, _ in configs)
        if len(policies) == 1:
            refused[next(iter(policies))] = str(error)
        else:
            for policy in policies:
                own = {setting: config for setting, config in configs.items() if setting[0] == policy}
                yield from _tried(engine, document, own, refused)
        return
    count = len(document.questions)
    for number, (setting, config) in enumerate(configs.items()):
        try:
            scores = _answer_scores(document, outputs[number * count : (number + 1) * count])
            yield setting, (config.budget, scores)
        except KVReclaimError as error:
            refused[setting[0]] = str(error)


def _score(
    engine: LLM, document: LookupDocument, configs: Sequence[CompressionConfig | None]
) -> list[ScoreOutput]:
    """Score all questions under each setting; they share the document's cache, compressed once."""
    requests = list(itertools.product(configs, document.questions))
    return engine.score(
        [
            {
                "prompt_token_ids": document.prompt + each.question,
                "compress_prompt_at": config and len(document.prompt),
            }
            for config, each in requests
        ],
        [each.answer for _, each in requests],
        [config for config, _ in requests],
    )


def _answer_scores(document: LookupDocument, outputs: Sequence[ScoreOutput]) -> list[_AnswerScore]:
    scores = []
    for each, output in zip(document.questions, outputs, strict=True):
        if output.error is not None:
            raise InvalidArgumentError(f"the trial failed: {output.error}")
        right = mean(float(a == b) for a, b in zip(output.predicted, each.answer, strict=True))
        scores.append(_AnswerScore(-mean(output.logprobs), right))
    return scores


def _counted(
    documents: Sequence[LookupDocument], full: Sequence[list[_AnswerScore]]
) -> dict[str, list[tuple[int, int]]]:
    """Return the indices of the scores that count: continuations, repetitions, and questions that the full
    cache answers."""
    places: dict[str, list[tuple[int, int]]] = {_ONCE: [], _AGAIN: [], "asked": []}
    for n, document in enumerate(documents):
        for m, each in enumerate(document.questions):
            if each.kind in places:
                places[each.kind].append((n, m))
            elif full[n][m].right >= ANSWERED:
                places["asked"].append((n, m))
    return places


def _mean(places: Mapping[str, Sequence[tuple[int, int]]], rows: Sequence[list[_AnswerScore]]) -> TrialScore:
    found: dict[str, float] = {}
    for name, own in places.items():
        if own:
            found[name] = mean(rows[n][m].nats for n, m in own)
            found[f"{name}_right"] = mean(rows[n][m].right for n, m in own)
    return TrialScore(**found)
