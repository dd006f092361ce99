"""Candidate policies on held-out documents, through the engine that will serve them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from tqdm.auto import tqdm

from kvreclaim.checks import require
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import CANDIDATES, FRACTIONS, Trial, TrialOutcome, TrialScore
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import ScoreOutput
from kvreclaim.errors import InvalidArgumentError, KVReclaimError, UnsupportedModelError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.facts import ModelFacts

SINKS, RECENT, INTERVAL = 4, 64, 128
AT_ONCE = 4
"""Policies in one batch: larger products are faster ones, and the pool holds all of their caches."""
STRETCH, SAID_AGAIN = 32, 8
"""Tokens of a stretch that is said again, and one in how many tokens is in one."""
LEAST_TOKENS, MOST_TOKENS = 320, 2048
"""Bounds of a document's length: a tenth of less has no room beside sinks and recent tokens, and more tells
little more."""


_Setting = tuple[str, float]
"""Policy and fraction."""


@dataclass(frozen=True)
class _Case:
    """A document cut for the trial: `prompt` stands in the cache, then it goes on, or is said again."""

    prompt: list[int]
    once: list[int]
    again: list[int]


def window(facts: ModelFacts) -> int:
    """Tokens of a document of a trial at most: what the model has positions for, with what is said again."""
    return min(MOST_TOKENS, facts.max_position - STRETCH)


def num_tokens(length: int, num_settings: int) -> int:
    """Tokens that a trial computes for a document: the document once, what follows it under every setting."""
    case = _cut([0] * length)
    return len(case.prompt) + num_settings * (len(case.once) + len(case.again))


def try_candidates(
    llm: LLM,
    stats: QueryStats,
    documents: Sequence[Sequence[int]],
    *,
    candidates: Sequence[str] = CANDIDATES,
    fractions: Sequence[float] = FRACTIONS,
    show_progress: bool = False,
) -> Trial:
    """Compress each document's first part under every candidate to every fraction, and score what follows.

    What follows are the document's last eighth and, apart from it, stretches of the first part said again,
    evenly over it: the one asks what the text itself needs, the other what anyone may ask of it. Passes run
    as in serving: at the prompt's end, and as the continuation grows.

    llm:        its weights, KV format and kernels are used, in an engine of the trial's own
    stats:      that the candidates read
    documents:  token ids that nothing in stats was fitted to
    candidates: policies as they are written everywhere; those that the model cannot have are left out
    fractions:  of the first part, rounded to blocks

    Raises: InvalidArgumentError without a document that is long enough, or without a candidate that can run.
    """
    cases = [_cut(list(document)) for document in documents]
    require(
        bool(documents) and min(map(len, documents)) >= LEAST_TOKENS,
        f"a trial needs documents of {LEAST_TOKENS} tokens and more; pass a longer text, or no trial.",
    )
    engine = _engine_for(llm, cases)
    served, refused = _served(engine, stats, candidates)
    require(bool(served), f"no candidate can run: {'; '.join(refused.values())}")
    full: list[TrialScore] = []
    found: dict[_Setting, list[tuple[int, TrialScore]]] = {}
    groups = [served[i : i + AT_ONCE] for i in range(0, len(served), AT_ONCE)]
    bar = tqdm(total=len(cases) * len(groups), desc="trial", disable=not show_progress)
    with bar:
        for case in cases:
            full.append(_full(engine, case))
            for group in groups:
                left = [policy for policy in group if policy not in refused]
                settings = list(itertools.product(left, fractions))
                for setting, row in _tried(engine, case, settings, stats, refused):
                    found.setdefault(setting, []).append(row)
                bar.update()
    rows = {setting: row for setting, row in found.items() if setting[0] not in refused}
    require(bool(rows), f"no candidate could run: {'; '.join(refused.values())}")
    return Trial(
        documents=len(cases),
        tokens=sum(len(case.prompt) for case in cases),
        full=_mean(full),
        outcomes=tuple(_outcome(setting, row) for setting, row in rows.items()),
        refused=refused,
    )


def _cut(document: list[int]) -> _Case:
    first = len(document) * 7 // 8
    prompt = document[:first]
    return _Case(prompt, document[first:], list(_stretches(prompt)))


def _stretches(prompt: list[int]) -> Iterator[int]:
    for start in range(0, len(prompt), STRETCH * SAID_AGAIN):
        yield from prompt[start : start + STRETCH]


def _engine_for(llm: LLM, cases: Sequence[_Case]) -> LLM:
    """Big enough that a document is computed in one step, and that a batch of candidates finds it there."""
    longest = max(len(case.prompt) + max(len(case.once), len(case.again)) for case in cases)
    return llm.sibling(
        num_blocks=2 * AT_ONCE * blocks_for(longest, llm.engine.memory.block_size),
        max_model_len=longest + 1,
        max_num_batched_tokens=max(longest, llm.engine.config.max_num_batched_tokens),
        enable_prefix_caching=True,
        spread_compression=False,
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


def _budget(engine: LLM, case: _Case, fraction: float) -> int:
    block = engine.engine.memory.block_size
    return max(round(len(case.prompt) * fraction / block), 1) * block


def _config(policy: str, budget: int, stats: QueryStats) -> CompressionConfig:
    recent = min(RECENT, budget // 4)  # of a budget that is mostly recent tokens no score chooses much
    return CompressionConfig(policy, budget, INTERVAL, SINKS, recent, stats=stats)


def _full(engine: LLM, case: _Case) -> TrialScore:
    """Scores of continuations in the full cache. The document is computed alone, so that all find it."""
    engine.score([case.prompt], [case.once[:1]])
    return _said(case, *_score(engine, case, [None]))


def _tried(
    engine: LLM, case: _Case, settings: Sequence[_Setting], stats: QueryStats, refused: dict[str, str]
) -> Iterator[tuple[_Setting, tuple[int, TrialScore]]]:
    """Budget and outcome of each setting, all in one batch; refused gets policies that fail, and why."""
    budgets = [_budget(engine, case, fraction) for _, fraction in settings]
    policies = [policy for policy, _ in settings]
    try:
        outputs = _score(engine, case, list(map(_config, policies, budgets, itertools.repeat(stats))))
    except KVReclaimError as error:  # of one of them, before anything has run
        alone = {name: [setting for setting in settings if setting[0] == name] for name in policies}
        if len(alone) == 1:
            refused[policies[0]] = str(error)
        else:
            for own in alone.values():
                yield from _tried(engine, case, own, stats, refused)
        return
    for setting, budget, once, again in zip(settings, budgets, outputs[::2], outputs[1::2], strict=True):
        try:
            yield setting, (budget, _said(case, once, again))
        except KVReclaimError as error:
            refused[setting[0]] = str(error)


def _score(engine: LLM, case: _Case, configs: Sequence[CompressionConfig | None]) -> list[ScoreOutput]:
    """Score the document going on, and said again, under each setting."""
    count = len(configs)
    asked = [config for config in configs for _ in range(2)]
    return engine.score([case.prompt] * (2 * count), [case.once, case.again] * count, asked)


def _said(case: _Case, once: ScoreOutput, again: ScoreOutput) -> TrialScore:
    for output in (once, again):
        if output.error is not None:
            raise InvalidArgumentError(f"the trial failed: {output.error}")
    return TrialScore(
        once=_nats(once),
        once_right=_right(once, case.once),
        again=_nats(again),
        again_right=_right(again, case.again),
    )


def _outcome(setting: _Setting, rows: Sequence[tuple[int, TrialScore]]) -> TrialOutcome:
    (policy, fraction), (budgets, said) = setting, zip(*rows, strict=True)
    return TrialOutcome(policy=policy, fraction=fraction, budget=mean(budgets), **dict(_mean(said)))


def _nats(output: ScoreOutput) -> float:
    return -mean(output.logprobs)


def _right(output: ScoreOutput, tokens: list[int]) -> float:
    return mean(float(a == b) for a, b in zip(output.predicted, tokens, strict=True))


def _mean(said: Sequence[TrialScore]) -> TrialScore:
    return TrialScore(**{name: mean(getattr(one, name) for one in said) for name in TrialScore.model_fields})
