"""Candidate policies on held-out documents, through the engine that will serve them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from tqdm.auto import tqdm

from kvreclaim.checks import require
from kvreclaim.compression import CompressionConfig, QueryStats
from kvreclaim.compression.trial import CANDIDATES, FRACTIONS, Outcome, Said, Trial
from kvreclaim.engine.core.outputs import ScoreOutput
from kvreclaim.engine.face.llm import LLM
from kvreclaim.errors import InvalidArgumentError, KVReclaimError, UnsupportedModelError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.facts import ModelFacts

FULL = "full"
SINKS, RECENT, INTERVAL = 4, 64, 128
STRETCH, SAID_AGAIN = 64, 4
"""Tokens of a stretch that is said again, and one in how many tokens is in one."""
LEAST_TOKENS, MOST_TOKENS = 320, 2304
"""Of a document: a tenth of less has no room beside sinks and recent tokens, and more tells little more."""


@dataclass(frozen=True)
class _Case:
    """A document cut for the trial: `prompt` stands in the cache, then it goes on, or is said again."""

    prompt: list[int]
    once: list[int]
    again: list[int]


def window(facts: ModelFacts) -> int:
    """Tokens of a document of a trial at most: what the model has positions for, with what is said again."""
    return min(MOST_TOKENS, (facts.max_position - STRETCH) * 32 // 35)


def num_tokens(length: int, num_settings: int) -> int:
    """That a trial computes of a document: it once, what follows it under every setting."""
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
    said: dict[tuple[str, float], list[Said]] = {}
    budgets: dict[tuple[str, float], list[int]] = {}
    settings = [(FULL, 1.0), *((policy, fraction) for policy in served for fraction in fractions)]
    bar = tqdm(total=len(cases) * len(settings), desc="trial", disable=not show_progress)
    with bar:
        for case, (policy, fraction) in itertools.product(cases, settings):
            bar.update()
            if policy in refused:
                continue
            budget = _budget(engine, case, fraction)
            try:
                found = _score(engine, case, None if policy == FULL else _config(policy, budget, stats))
            except KVReclaimError as error:
                if policy == FULL:
                    raise
                refused[policy] = str(error)
                continue
            said.setdefault((policy, fraction), []).append(found)
            budgets.setdefault((policy, fraction), []).append(budget)
    said = {key: found for key, found in said.items() if key[0] not in refused}
    require(len(said) > 1, f"no candidate could run: {'; '.join(refused.values())}")
    means = {key: _mean(found) for key, found in said.items()}
    return Trial(
        documents=len(cases),
        tokens=sum(len(case.prompt) for case in cases),
        full=means.pop(settings[0]),
        outcomes=tuple(
            Outcome(policy=policy, fraction=fraction, budget=mean(budgets[policy, fraction]), **dict(found))
            for (policy, fraction), found in means.items()
        ),
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
    """Big enough that a document is computed in one step and then found by every candidate."""
    longest = max(len(case.prompt) + max(len(case.once), len(case.again)) for case in cases)
    return llm.sibling(
        num_blocks=4 * blocks_for(longest, llm.engine.memory.block_size),
        max_model_len=longest + 1,
        max_num_batched_tokens=max(longest, llm.engine.config.max_num_batched_tokens),
        enable_prefix_caching=True,
        spread_compression=False,
    )


def _served(
    engine: LLM, stats: QueryStats, candidates: Sequence[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Those that the model can have, each once, and why not the others."""
    served, refused = [], {}
    for policy in dict.fromkeys(candidates):
        config = CompressionConfig(policy, stats=stats)
        try:
            engine.engine.signals.check(engine.compressor(config), scored=True)
            served.append(policy)
        except (InvalidArgumentError, UnsupportedModelError) as error:
            refused[policy] = str(error)
    return tuple(served), refused


def _budget(engine: LLM, case: _Case, fraction: float) -> int:
    block = engine.engine.memory.block_size
    return max(round(len(case.prompt) * fraction / block), 1) * block


def _config(policy: str, budget: int, stats: QueryStats) -> CompressionConfig:
    recent = min(RECENT, (budget - SINKS) // 2)
    return CompressionConfig(policy, budget, INTERVAL, SINKS, recent, stats=stats)


def _score(engine: LLM, case: _Case, config: CompressionConfig | None) -> Said:
    once, again = engine.score([case.prompt] * 2, [case.once, case.again], config)
    for output in (once, again):
        if output.error is not None:
            raise InvalidArgumentError(f"the trial failed: {output.error}")
    return Said(
        once=_nats(once),
        once_right=_right(once, case.once),
        again=_nats(again),
        again_right=_right(again, case.again),
    )


def _nats(output: ScoreOutput) -> float:
    return -mean(output.logprobs)


def _right(output: ScoreOutput, tokens: list[int]) -> float:
    return mean(float(a == b) for a, b in zip(output.predicted, tokens, strict=True))


def _mean(said: Sequence[Said]) -> Said:
    return Said(**{name: mean(getattr(one, name) for one in said) for name in Said.model_fields})
