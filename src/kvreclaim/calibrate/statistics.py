"""Statistics of a model with a trial: what `kvreclaim calibrate` writes and policy auto reads."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvreclaim.calibrate import trial
from kvreclaim.calibrate.calibration import calibrate, held_out, pieces, read_documents
from kvreclaim.calibrate.held_out import read_pieces
from kvreclaim.calibrate.lookups import LookupDocument, lookup_documents
from kvreclaim.calibrate.settings import Measuring, Reading
from kvreclaim.checks import require
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import CANDIDATES, FORMATS, FRACTIONS, SHARES
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.capture import capture_queries
from kvreclaim.outputs import check_writable, writing

Say = Callable[[str], object]
logger = logging.getLogger(__name__)


def calibrate_at_start(llm: LLM, say: Say = logger.info) -> None:
    """Write llm.stats_file with the defaults of `kvreclaim calibrate`; for LLM(calibrate=...).

    Raises: InvalidArgumentError for a file that cannot be written, and what `measure` raises.
    """
    file = llm.stats_file
    check_keeps(file)
    say(f"{llm.loaded.facts.name} has no statistics and is calibrated now; {file} will keep them")
    stats = measure(llm, None, Reading(), asdict(Measuring()), say, show_progress=sys.stderr.isatty())
    with writing(file):
        stats.save(file)


def check_keeps(file: Path) -> None:
    """Refuse a cache directory that takes no file, before anything is measured. Raises:
    InvalidArgumentError."""
    try:
        check_writable(file)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f"statistics cannot be kept in {str(file.parent)!r}; set KVRECLAIM_HOME to a directory that can "
            "be written."
        ) from error


def measure(
    llm: LLM,
    text: str | os.PathLike[str] | None,
    reading: Reading,
    measuring: Mapping[str, Any],
    say: Say,
    *,
    show_progress: bool = True,
) -> QueryStats:
    """Calibrate statistics on one part of the text, and try candidates on another.

    llm:       an engine with llm.FOR_CALIBRATION
    text:      a file; None: text that every machine has
    measuring: arguments of `calibrate`
    say:       called with the estimated duration before the work starts

    Raises: InvalidArgumentError for a model without tokenizer, and a text that it does not know.
    """
    found = read_documents(
        llm.loaded, text, max_tokens=reading.max_tokens, context=trial.window(llm.loaded.facts)
    )
    rest, kept = held_out(found, reading.trial)
    tried = [document for text in kept for document in trial_documents(llm, text)]
    documents = pieces(rest)
    extra = ("shares(kvzap)",) if measuring.get("kvzap") else ()
    candidates = tuple(dict.fromkeys((*CANDIDATES, *extra, *reading.candidates)))
    require(
        not reading.curve or bool(tried),
        "a curve is of the policy that the trial finds best, and there is no trial; pass a longer text, or "
        "--trial above 0.",
        "curve",
    )
    read = read_pieces(found)
    add_curve = curve_of(llm, text, reading, read, say, show_progress=show_progress)
    _announce(llm, documents, tried, 1 + len(candidates) * len(FRACTIONS) + len(FORMATS) * len(SHARES), say)
    stats = calibrate(llm.loaded, documents, show_progress=show_progress, **measuring).with_read(read)
    if not tried:
        return stats
    best = trial.try_candidates(llm, stats, tried, candidates=candidates, show_progress=show_progress)
    return add_curve(stats.with_trial(best))


def curve_of(
    llm: LLM,
    text: str | os.PathLike[str] | None,
    reading: Reading,
    read: Collection[str] | None,
    say: Say,
    *,
    show_progress: bool = True,
) -> Callable[[QueryStats], QueryStats]:
    """Return a function that adds the loss curve of reading.curve to statistics. Documents are checked now.

    read: digests of the text that the statistics were fitted to; None: they do not record it
    Raises: errors of read_documents and curve_documents; the returned function those of measure_curve.
    """
    if not reading.curve:
        return lambda stats: stats
    from kvreclaim.calibrate.curve import curve_documents, measure_curve

    documents = curve_documents(llm, text, reading, read)

    def add(stats: QueryStats) -> QueryStats:
        num_tokens = sum(document.num_computed(llm.engine.config.block_size) for document in documents)
        formats = reading.curve_formats
        minutes = _minutes(llm, documents[0].prompt, len(formats) * num_tokens)
        say(f"{len(documents)} documents for the loss curve in {', '.join(formats)}: about {minutes} min")
        return stats.with_curve(measure_curve(llm, stats, documents, formats, show_progress=show_progress))

    return add


def trial_documents(llm: LLM, text: Sequence[int]) -> list[LookupDocument]:
    """Return a trial's text as prose, and with inserted facts."""
    prose = trial.prose_document(text)
    return [prose, *lookup_documents(llm.tokenizer, text, count=1, num_tokens=len(prose.prompt))]


def _announce(
    llm: LLM, documents: Sequence[list[int]], tried: Sequence[LookupDocument], num_settings: int, say: Say
) -> None:
    """Report an estimate of the duration."""
    fitted = sum(map(len, documents))
    tokens = 3 * fitted + sum(trial.num_tokens(document, num_settings) for document in tried)
    say(
        f"{fitted} tokens to fit to, {len(tried)} documents to try {num_settings} settings on: about "
        f"{_minutes(llm, documents[0], tokens)} min"
    )


def _minutes(llm: LLM, document: list[int], num_tokens: int) -> int:
    """An estimate for so many tokens, from one forward pass."""
    started = time.perf_counter()
    capture_queries(llm.loaded, [document], lambda *_: None)
    return max(1, math.ceil(num_tokens * (time.perf_counter() - started) / len(document) / 60))
