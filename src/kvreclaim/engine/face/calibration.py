"""From a text to query statistics: the model shows its queries, compression summarises them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvreclaim import texts
from kvreclaim.checks import check_int
from kvreclaim.compression import Clustering, QueryStats, StatsBuilder
from kvreclaim.compression.head_shares import FRACTIONS, SharesFit
from kvreclaim.compression.surrogate import SurrogateFit
from kvreclaim.engine.face.trial import LEAST_TOKENS as LEAST_TRIAL
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.capture import NEAR, capture_queries, say_twice
from kvreclaim.model.loader import LoadedModel

SURROGATE_PIECES, SURROGATE_TOKENS = 16, 1024
LEAST_TOKENS = 2 * NEAR
MAX_UNKNOWN = 0.1
"""Share of unknown words above which a text is in another language than the model's."""


def read_documents(
    loaded: LoadedModel, path: str | os.PathLike[str] | None, *, max_tokens: int, context: int
) -> list[list[int]]:
    """Cut a UTF-8 text file into token windows of at most `context` tokens, or of the model's limit, until
    max_tokens are reached. A line that holds only "---" begins a new document. None: text that every machine
    has (texts.prose).

    Raises: InvalidArgumentError if the file is missing, not text or empty, or the model does not know it.
    """
    if loaded.tokenizer is None:
        raise InvalidArgumentError(f"{loaded.facts.name} has no tokenizer; it cannot read a text file.")
    context = min(context, loaded.facts.max_position)
    documents: list[list[int]] = []
    left = max_tokens
    for part in re.split(r"^---(?:\n|$)", _text(path), flags=re.MULTILINE):
        tokens = loaded.tokenizer.encode(part.removesuffix("\n"))[:left] if left else []
        documents += [tokens[i : i + context] for i in range(0, len(tokens), context)]
        left -= len(tokens)
    named = "the text" if path is None else f"calibration text {os.fspath(path)!r}"
    if not documents:
        raise InvalidArgumentError(f"{named} is empty; pass coherent text.")
    tokens = [token for document in documents for token in document]
    unknown = tokens.count(loaded.tokenizer.unk_token_id) / len(tokens)
    if unknown > MAX_UNKNOWN:
        raise InvalidArgumentError(
            f"{loaded.facts.name!r} does not know {unknown:.0%} of the words of {named}; pass a text of "
            "its own language with --text."
        )
    return documents


def _text(path: str | os.PathLike[str] | None) -> str:
    if path is None:
        return texts.prose().calibration
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"calibration text {os.fspath(path)!r} cannot be read: {error}."
        ) from error


def held_out(documents: Sequence[list[int]], count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Documents to fit to, and up to `count` for a trial, evenly among those that are long enough for one; at
    most every third of these."""
    fit = [n for n, document in enumerate(documents) if len(document) >= LEAST_TRIAL]
    count = min(count, len(fit) // 3)
    chosen = {fit[(2 * i + 1) * len(fit) // (2 * count)] for i in range(count)}
    rest = [document for n, document in enumerate(documents) if n not in chosen]
    return rest, [documents[n] for n in sorted(chosen)]


@torch.inference_mode()
def calibrate(
    loaded: LoadedModel,
    documents: Sequence[Sequence[int]],
    *,
    num_centers: int = 16,
    seed: int = 0,
    shared_centers: bool = False,
    min_weight: float = 0.0,
    min_distance: float = 0.0,
    covariance: bool | None = None,
    surrogate: int | None = None,
    show_progress: bool = False,
) -> QueryStats:
    """Statistics of the pre-RoPE queries of one forward pass over the documents, and the surrogate and the
    shares of heads of one over pieces of them, each said twice.

    Serves triattention (moments), query_mixture (centres), expected_attention (covariance) and surrogate.
    Only one layer's queries are held at a time. Source: arXiv 2604.04921 (moments); k-means with 15 rounds
    for the centres; compression/surrogate.py.

    num_centers, seed, shared_centers, min_weight, min_distance: see compression.Clustering
    covariance: None keeps it where it takes at most stats_builder.MAX_COVARIANCE_BYTES
    surrogate:  pieces of at most SURROGATE_TOKENS tokens that it is fitted to, evenly over the documents;
                0: it and the shares of heads are left out. None: SURROGATE_PIECES, where a document is long
                enough
    Raises: InvalidArgumentError.
    """
    clustering = Clustering(num_centers, shared_centers, seed, min_weight, min_distance)
    if surrogate is not None:
        check_int("surrogate", surrogate, 0)
    builder = StatsBuilder(loaded.facts, clustering, covariance)
    bar = tqdm(total=loaded.facts.num_layers, desc="calibrate", unit="layer", disable=not show_progress)

    def on_queries(layer: int, queries: Tensor) -> None:
        builder.add_layer(layer, queries)
        bar.update()

    with bar:
        capture_queries(loaded, [list(document) for document in documents], on_queries)
    stats = builder.build()
    if surrogate == 0:
        return stats
    pieces = _pieces(loaded, documents)
    if not pieces and surrogate is None:
        return stats
    return _with_surrogate(loaded, stats, pieces, surrogate or SURROGATE_PIECES, show_progress)


def _pieces(loaded: LoadedModel, documents: Sequence[Sequence[int]]) -> list[list[int]]:
    """Those that can be said twice and are long enough for it to be worth it."""
    size = min(SURROGATE_TOKENS, loaded.facts.max_position // 2)
    found = (list(text[i : i + size]) for text in documents for i in range(0, len(text), size))
    return [piece for piece in found if len(piece) > LEAST_TOKENS]


def _with_surrogate(
    loaded: LoadedModel, stats: QueryStats, pieces: list[list[int]], count: int, show_progress: bool
) -> QueryStats:
    """The statistics with a surrogate and shares of heads, from `count` of the pieces or all there are."""
    if not pieces:
        raise InvalidArgumentError(
            f"no document has more than {LEAST_TOKENS} tokens, and a surrogate is fitted to nothing shorter; "
            "pass a longer text, or surrogate=0 to leave it out."
        )
    chosen = [pieces[i * len(pieces) // count] for i in range(count)] if count < len(pieces) else pieces
    fit, shares = SurrogateFit(loaded.facts), SharesFit(loaded.facts)

    def on_reached(layer: int, keys: Tensor, values: Tensor, reached: Tensor) -> None:
        fit.add(layer, keys, values, reached)
        shares.add(layer, reached)

    for piece in tqdm(chosen, desc="said twice", unit="piece", disable=not show_progress):
        say_twice(loaded, piece, on_reached)
    metadata = stats.metadata.model_copy(update={"features": fit.num_features, "fractions": FRACTIONS})
    return replace(stats, metadata=metadata, surrogate=fit.build(), head_shares=shares.build())
