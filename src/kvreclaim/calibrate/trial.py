"""Candidate policies on held-out documents, through the engine that will serve them."""

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

logger = logging.getLogger(__name__)

SINKS, RECENT, INTERVAL = 4, 64, 128
AT_ONCE = 4
"""Policies in one batch: larger products are faster ones, and the pool holds all of their caches."""
STRETCH, SAID_AGAIN = 32, 16
"""Tokens of a stretch that is said again, and one in how many tokens is in one."""
ANSWERED = 0.5
"""Share of an answer's tokens that the full cache says, of a question that counts."""
LEAST_TOKENS, MOST_TOKENS = 320, 2048
"""Bounds of a document's length: a tenth of less has no room beside sinks and recent tokens, and more tells
little more."""


_Setting = tuple[str, float]
"""Policy and fraction."""
_ONCE, _AGAIN = "once", "again"
"""Kinds of what follows prose; all others are kinds of look-ups."""


@dataclass(frozen=True)
class _Said:
    """Score of one answer: nats below certainty, mean over its tokens; share that the model said itself."""

    nats: float
    right: float


_Row = tuple[int, list[_Said]]
"""Budget, and what was said to each question of a document."""


def window(facts: ModelFacts) -> int:
    """Tokens of a document of a trial at most: what the model has positions for, with what is said again."""
    return min(MOST_TOKENS, facts.max_position - STRETCH)


def num_tokens(document: LookupDocument, num_settings: int) -> int:
    """Tokens that a trial computes for a document: the document once, what follows it under every setting."""
    return len(document.prompt) + num_settings * sum(
        len(each.question) + len(each.answer) for each in document.questions
    )


def prose_document(document: Sequence[int]) -> LookupDocument:
    """A document of prose cut for the trial: behind its first part it goes on, or is said again."""
    require(
        len(document) >= LEAST_TOKENS,
        f"a trial needs documents of {LEAST_TOKENS} tokens and more; pass a longer text, or no trial.",
    )
    first = len(document) * 7 // 8
    prompt, rest = list(document[:first]), list(document[first:])
    starts = range(0, first, STRETCH * SAID_AGAIN)
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
    """Compress each document under every candidate to every fraction, and score what follows it.

    Prose goes on: that asks what the text itself needs. Each question of a look-up document is asked alone,
    and its answer's tokens are scored: that asks what anyone may ask of it. A question counts if the full
    cache says at least half of them. If it answers none, stretches of the prose are said again instead.
    Passes run as in serving: at the document's end, and as what follows grows.

    llm:        its weights, KV format and kernels are used, in an engine of the trial's own
    stats:      that the candidates read
    documents:  of prose_document and, after it, of lookup_documents; nothing in stats was fitted to them
    candidates: policies as they are written everywhere; those that the model cannot have are left out
    fractions:  of a document, rounded to blocks
    formats:    KV cache dtypes in which the best candidate is then tried at equal bytes; those that the model
                cannot have are left out

    Raises: InvalidArgumentError without a document, or without a candidate that can run.
    """
    require(bool(documents), "a trial needs a document; pass one.")
    engine = _engine_for(llm, documents)
    served, refused = _served(engine, stats, candidates)
    require(bool(served), f"no candidate can run: {'; '.join(refused.values())}")
    full = [_full(engine, document) for document in documents]
    places = _counted(documents, full)
    full_score = _mean(places, full)
    if places["asked"]:  # repetition only stands in for answers
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
            settings = list(itertools.product(left, fractions))
            for setting, row in _tried(engine, document, settings, stats, refused):
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
            TrialOutcome(policy=policy, fraction=fraction, budget=mean(budgets), **dict(_mean(places, said)))
            for (policy, fraction), row in rows.items()
            for budgets, said in [zip(*row, strict=True)]
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
    """Outcomes of the policy over a cache in this KV cache dtype; none where the model cannot have it."""
    refused: dict[str, str] = {}
    found: dict[_Setting, list[_Row]] = {}
    try:
        engine = _engine_for(llm, documents, kv_cache_dtype=form, stats=stats)
        for document in documents:
            _compute(engine, document)
            settings = [(policy, share) for share in SHARES]
            for setting, row in _tried(engine, document, settings, stats, refused):
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
    """Big enough that a document is computed in one step, and that a batch of candidates finds it there."""
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
    """The policies that the model can serve, each once, and why not the others."""
    served, refused = [], {}
    for policy in dict.fromkeys(candidates):
        config = CompressionConfig(policy, stats=stats)
        try:
            engine.engine.factory.check_compression(engine.compressor(config), scored=True)
            served.append(policy)
        except (InvalidArgumentError, UnsupportedModelError) as error:
            refused[policy] = str(error)
    return tuple(served), refused


def _budget(engine: LLM, document: LookupDocument, fraction: float) -> int:
    block, density = engine.engine.memory.block_size, float(engine.compressors.density)
    return max(round(len(document.prompt) * fraction * density / block), 1) * block


def _config(policy: str, budget: int, stats: QueryStats) -> CompressionConfig:
    recent = min(RECENT, budget // 4)  # of a budget that is mostly recent tokens no score chooses much
    return CompressionConfig(policy, budget, INTERVAL, SINKS, recent, stats=stats)


def _full(engine: LLM, document: LookupDocument) -> list[_Said]:
    """What the full cache says."""
    _compute(engine, document)
    return _said(document, _score(engine, document, [None]))


def _compute(engine: LLM, document: LookupDocument) -> None:
    """Compute a document alone, so that all its questions find it."""
    engine.score([document.prompt], [document.questions[0].question])


def _tried(
    engine: LLM,
    document: LookupDocument,
    settings: Sequence[_Setting],
    stats: QueryStats,
    refused: dict[str, str],
) -> Iterator[tuple[_Setting, _Row]]:
    """Outcome of each setting, all in one batch; refused gets policies that fail, and why."""
    budgets = [_budget(engine, document, fraction) for _, fraction in settings]
    policies = [policy for policy, _ in settings]
    try:
        outputs = _score(engine, document, list(map(_config, policies, budgets, itertools.repeat(stats))))
    except KVReclaimError as error:  # of one of them, before anything has run
        alone = {name: [setting for setting in settings if setting[0] == name] for name in policies}
        if len(alone) == 1:
            refused[policies[0]] = str(error)
        else:
            for own in alone.values():
                yield from _tried(engine, document, own, stats, refused)
        return
    count = len(document.questions)
    for number, (setting, budget) in enumerate(zip(settings, budgets, strict=True)):
        try:
            yield setting, (budget, _said(document, outputs[number * count : (number + 1) * count]))
        except KVReclaimError as error:
            refused[setting[0]] = str(error)


def _score(
    engine: LLM, document: LookupDocument, configs: Sequence[CompressionConfig | None]
) -> list[ScoreOutput]:
    """Score all questions under each setting; they share the document's cache, compressed once."""
    asked = list(itertools.product(configs, document.questions))
    return engine.score(
        [
            {
                "prompt_token_ids": document.prompt + each.question,
                "compress_prompt_at": config and len(document.prompt),
            }
            for config, each in asked
        ],
        [each.answer for _, each in asked],
        [config for config, _ in asked],
    )


def _said(document: LookupDocument, outputs: Sequence[ScoreOutput]) -> list[_Said]:
    said = []
    for each, output in zip(document.questions, outputs, strict=True):
        if output.error is not None:
            raise InvalidArgumentError(f"the trial failed: {output.error}")
        right = mean(float(a == b) for a, b in zip(output.predicted, each.answer, strict=True))
        said.append(_Said(-mean(output.logprobs), right))
    return said


def _counted(
    documents: Sequence[LookupDocument], full: Sequence[list[_Said]]
) -> dict[str, list[tuple[int, int]]]:
    """Where the answers stand that count: of going on, of saying again, and of the questions that the full
    cache answers."""
    places: dict[str, list[tuple[int, int]]] = {_ONCE: [], _AGAIN: [], "asked": []}
    for n, document in enumerate(documents):
        for m, each in enumerate(document.questions):
            if each.kind in places:
                places[each.kind].append((n, m))
            elif full[n][m].right >= ANSWERED:
                places["asked"].append((n, m))
    return places


def _mean(places: Mapping[str, Sequence[tuple[int, int]]], said: Sequence[list[_Said]]) -> TrialScore:
    found: dict[str, float] = {}
    for name, own in places.items():
        if own:
            found[name] = mean(said[n][m].nats for n, m in own)
            found[f"{name}_right"] = mean(said[n][m].right for n, m in own)
    return TrialScore(**found)
