"""From a text to query statistics: the model shows its queries, compression summarises them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvreclaim.compression import Clustering, QueryStats, StatsBuilder
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.capture import capture_queries
from kvreclaim.model.loader import LoadedModel


def read_documents(
    loaded: LoadedModel, path: str | os.PathLike[str], *, max_tokens: int, context: int | None = None
) -> list[list[int]]:
    """Cut a UTF-8 text file into token windows of at most `context` tokens (None: the model's limit,
    at most 8,192), until max_tokens are reached. A line that holds only "---" begins a new document.

    Raises: InvalidArgumentError if the file is missing, not text, or empty.
    """
    if loaded.tokenizer is None:
        raise InvalidArgumentError(f"{loaded.facts.name} has no tokenizer; it cannot read a text file.")
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"calibration text {os.fspath(path)!r} cannot be read: {error}."
        ) from error
    context = min(context or 8192, loaded.facts.max_position)
    documents: list[list[int]] = []
    left = max_tokens
    for part in re.split(r"^---(?:\n|$)", text, flags=re.MULTILINE):
        tokens = loaded.tokenizer.encode(part.removesuffix("\n"))[:left] if left else []
        documents += [tokens[i : i + context] for i in range(0, len(tokens), context)]
        left -= len(tokens)
    if not documents:
        raise InvalidArgumentError(f"calibration text {os.fspath(path)!r} is empty; pass coherent text.")
    return documents


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
    show_progress: bool = False,
) -> QueryStats:
    """Statistics of the pre-RoPE queries of one forward pass over the documents.

    Serves triattention (moments), query_mixture (centres) and expected_attention (covariance). Only one
    layer's queries are held at a time. Source: arXiv 2604.04921 (moments); k-means with 15 rounds for the
    centres.

    num_centers, seed, shared_centers, min_weight, min_distance: see compression.Clustering
    covariance: None keeps it where it takes at most stats_builder.MAX_COVARIANCE_BYTES
    """
    clustering = Clustering(num_centers, shared_centers, seed, min_weight, min_distance)
    builder = StatsBuilder(loaded.facts, clustering, covariance)
    bar = tqdm(total=loaded.facts.num_layers, desc="calibrate", unit="layer", disable=not show_progress)

    def on_queries(layer: int, queries: Tensor) -> None:
        builder.add_layer(layer, queries)
        bar.update()

    with bar:
        capture_queries(loaded, [list(document) for document in documents], on_queries)
    return builder.build()
