"""The loss of one policy over budgets and KV cache dtypes, on documents of several lengths and contents."""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from tqdm.auto import tqdm

from kvreclaim.calibrate.calibration import read_documents
from kvreclaim.calibrate.held_out import unread, windows
from kvreclaim.calibrate.lookups import lookup_documents
from kvreclaim.calibrate.settings import Reading
from kvreclaim.checks import require
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.loss_curve import CONTINUED, LossCell, LossCurve
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import FORMATS
from kvreclaim.compression_settings import AUTO, CONTENTS
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import ScoreOutput
from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.memory.blocks import blocks_for

logger = logging.getLogger(__name__)

PROSE, LOOKUPS = CONTENTS
PER_KIND = 2
"""Questions per kind of fact."""
STEPS = 8
"""Budgets are multiples of one STEPS-th of a document."""


@dataclass(frozen=True)
class CurveDocument:
    """prompt: tokens cached at compression; answers: ranges in the continuation, each scored whole"""

    content: str
    prompt: list[int]
    continuation: list[int]
    answers: list[range]

    def num_computed(self, block_size: int) -> int:
        """Return the number of computed tokens: the prompt once, the continuation under each budget."""
        count = 1 + len(budgets(len(self.prompt), block_size))
        return len(self.prompt) + count * len(self.continuation)


def budgets(num_tokens: int, block_size: int) -> list[int]:
    """Return ascending budgets in whole blocks that exceed the default sinks and recent tokens."""
    default = CompressionConfig("full")
    steps = {num_tokens * n // STEPS // block_size * block_size for n in range(1, STEPS)}
    return sorted(budget for budget in steps if budget > default.sinks + default.recent)


def curve_documents(
    llm: LLM, path: str | os.PathLike[str] | None, reading: Reading, read: Collection[str] | None = None
) -> list[CurveDocument]:
    """Return documents of each content and length from the text's end, without text that calibration read.

    read: digests of that text (held_out.read_pieces); None, as in statistics that record none, is refused

    Raises: InvalidArgumentError for a text that is too short, and lengths that do not fit the model or a
    budget.
    """
    if read is None:
        raise InvalidArgumentError(
            "the statistics do not record which text they were fitted to, so no text is known to be new to "
            "them; leave --stats out, which calibrates again and adds the curve.",
            field="curve",
        )
    found = read_documents(llm.loaded, path, max_tokens=sys.maxsize, context=sys.maxsize)
    stretches, count = unread(list(itertools.chain.from_iterable(found)), read), reading.curve_documents
    block_size, most = llm.engine.config.block_size, llm.loaded.facts.max_position
    documents: list[CurveDocument] = []
    for length in reading.curve:
        size = length + CONTINUED
        require(
            bool(budgets(length, block_size)) and size < most,
            f"curve has documents of {length} tokens, which must leave room for a budget beside sinks and "
            f"recent tokens, and for {CONTINUED} tokens more below the model's limit of {most}; "
            "change the length.",
            "curve",
        )
        texts = windows(stretches, size)
        require(
            len(texts) >= count,
            f"curve needs {count} documents of {size} tokens that calibration has not read, and the text has "
            f"{len(texts)}; pass another or a longer text with --text, or shorter lengths.",
            "curve",
        )
        texts = texts[-count:]
        for text in texts:
            answers = [range(i, i + 1) for i in range(CONTINUED)]
            documents.append(CurveDocument(PROSE, list(text[:length]), list(text[length:]), answers))
        documents += _lookups(llm, texts, length)
    return documents


def _lookups(llm: LLM, texts: Sequence[Sequence[int]], length: int) -> list[CurveDocument]:
    documents = []
    for seed, text in enumerate(texts):
        (made,) = lookup_documents(llm.tokenizer, text, count=1, num_tokens=length, seed=seed, asked=PER_KIND)
        continuation: list[int] = []
        answers: list[range] = []
        for each in made.questions:
            continuation += each.question
            answers.append(range(len(continuation), len(continuation) + len(each.answer)))
            continuation += each.answer
        documents.append(CurveDocument(LOOKUPS, made.prompt, continuation, answers))
    return documents


def measure_curve(
    llm: LLM,
    stats: QueryStats,
    documents: Sequence[CurveDocument],
    formats: Sequence[str] = FORMATS,
    *,
    show_progress: bool = False,
) -> LossCurve:
    """Score each document's continuation with the full cache, and under the policy auto at each budget.

    Compression uses the default settings. Passes run as in serving: at the prompt's end, and as the
    continuation grows.

    formats: KV cache dtypes other than the model's own; those that the model does not support are skipped

    Raises: InvalidArgumentError where the statistics hold no trial, or a request fails.
    """
    policy = CompressionConfig(stats=stats).resolved(stats, stats.metadata.model_name).policy
    places: dict[tuple[str, int], list[int]] = {}
    for index, document in enumerate(documents):
        places.setdefault((document.content, len(document.prompt)), []).append(index)
    cells: list[LossCell] = []
    whole: list[float] = []
    for form in dict.fromkeys((AUTO, *formats)):
        try:
            engine = _engine_for(llm, documents, kv_cache_dtype=form, stats=stats)
            bar = tqdm(documents, desc=f"curve in {form}", unit="document", disable=not show_progress)
            rows = [_measured(engine, document, policy, stats) for document in bar]
        except (InvalidArgumentError, UnsupportedModelError) as error:
            if form == AUTO:
                raise
            logger.warning("no loss is measured in kv_cache_dtype %s: %s", form, error)
            continue
        whole = whole or [row[-1] for row in rows]
        for (content, length), own in places.items():
            sizes = (*budgets(length, engine.engine.config.block_size), length)
            cells.append(
                LossCell(
                    content=content,
                    num_tokens=length,
                    right=mean(whole[i] for i in own),
                    kv_cache_dtype=form,
                    density=float(engine.compressors.density),
                    budgets=sizes[:-1] if form == AUTO else sizes,
                    losses=tuple(_losses(whole[i], rows[i][:-1] if form == AUTO else rows[i]) for i in own),
                )
            )
    return LossCurve(policy=policy, cells=tuple(cells))


def _losses(whole: float, row: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(0.0, whole - right) for right in row)


def _engine_for(llm: LLM, documents: Sequence[CurveDocument], **options: Any) -> LLM:
    """Big enough that all budgets of a document run at once and find it in the prefix cache."""
    longest = max(len(document.prompt) + len(document.continuation) for document in documents)
    block_size = llm.engine.config.block_size
    return llm.sibling(
        num_blocks=(STEPS + 2) * blocks_for(longest, block_size),
        max_model_len=longest + 1,
        enable_prefix_caching=True,
        **options,
    )


def _measured(engine: LLM, document: CurveDocument, policy: str, stats: QueryStats) -> list[float]:
    """Probability of an answer at each budget and, last, with all tokens."""
    sizes = budgets(len(document.prompt), engine.engine.config.block_size)
    engine.score([document.prompt], [document.continuation[:1]])  # alone, so that all find it
    configs = [*(CompressionConfig(policy, size, stats=stats) for size in sizes), None]
    count = len(configs)
    outputs = engine.score([document.prompt] * count, [document.continuation] * count, configs)
    return [_right(document, output) for output in outputs]


def _right(document: CurveDocument, output: ScoreOutput) -> float:
    """Mean probability of an answer: the share of right ones to expect at temperature 1."""
    if output.error is not None:
        raise InvalidArgumentError(f"the curve failed: {output.error}")
    return mean(math.exp(sum(output.logprobs[i] for i in answer)) for answer in document.answers)
