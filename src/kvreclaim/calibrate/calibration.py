"""Calibration of query statistics from a text: the model's queries, summarised by compression."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvreclaim import corpora as texts
from kvreclaim.calibrate.trial import LEAST_TOKENS as LEAST_TRIAL
from kvreclaim.checks import require
from kvreclaim.compression.head_shares import FRACTIONS, SharesFit
from kvreclaim.compression.kvzap import UNITS, KVzapFit
from kvreclaim.compression.public_kvzap import read_kvzap
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.stats_builder import Clustering, StatsBuilder
from kvreclaim.compression.surrogate import SurrogateFit, needed, weighed
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.capture import NEAR, capture_queries, now
from kvreclaim.model.inputs import inputs_handed_out
from kvreclaim.model.loader import LoadedModel
from kvreclaim.model.projection import value_grams
from kvreclaim.ops.moving import on_device

PIECE_TOKENS = 1024
"""Length of a document that is repeated; a longer one is cut. More cost more per token and tell nothing
new."""
FITTED = {"linear": 0, "mlp": UNITS}
"""Forms of kvzap that calibration fits, by their hidden units."""
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
    check_known(tokens, loaded.tokenizer.unk_token_id, repr(loaded.facts.name), named)
    return documents


def check_known(tokens: Sequence[int], unknown_token: int | None, model: str, text: str) -> None:
    """Refuse a text in another language than the model's. Raises: InvalidArgumentError."""
    unknown = tokens.count(unknown_token) / max(1, len(tokens)) if unknown_token is not None else 0.0
    if unknown > MAX_UNKNOWN:
        raise InvalidArgumentError(
            f"{model} does not know {unknown:.0%} of the words of {text}; pass a text of its own language "
            "with --text."
        )


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


def pieces(documents: Sequence[Sequence[int]], size: int = PIECE_TOKENS) -> list[list[int]]:
    """Documents cut into parts of at most `size` tokens."""
    return [list(text[i : i + size]) for text in documents for i in range(0, len(text), size)]


@torch.inference_mode()
def calibrate(
    loaded: LoadedModel,
    documents: Sequence[Sequence[int]],
    *,
    num_centers: int = 16,
    seed: int = 0,
    shared_centers: bool = False,
    max_points: int | None = None,
    covariance: bool | None = None,
    surrogate: bool = True,
    kvzap: str | os.PathLike[str] | None = None,
    show_progress: bool = False,
) -> QueryStats:
    """Calibrate on one forward pass over the documents, each repeated once where the model's positions allow:
    statistics of the first copies' queries before rotation, a surrogate, and head shares.

    Serves triattention (moments), query_mixture (centres), expected_attention (covariance), surrogate, kvzap
    and shares. Only one layer's queries are held at a time, and where kvzap is fitted its hidden states.
    Source: arXiv 2604.04921 (moments); k-means with 15 rounds for the centres; compression/surrogate.py;
    compression/kvzap.py; compression/head_shares.py.

    num_centers, seed, shared_centers, max_points: see compression.Clustering
    covariance: None keeps it where it takes at most stats_builder.MAX_COVARIANCE_BYTES
    surrogate:  True cuts documents to half of what the model has positions for, so that they can be
                repeated (if they are long enough: capture.can_say_twice). If none can, and with False,
                surrogate and shares are left out
    kvzap:      "linear" or "mlp" fits weights of hidden states to the same documents; any other value is the
                path of published ones (public_kvzap.py)
    Raises: InvalidArgumentError; StatsMismatchError for published weights of another model.
    """
    fitted = kvzap in FITTED
    require(
        surrogate or not fitted,
        f"kvzap {kvzap} is fitted to repeated documents, which surrogate=False leaves out; leave one out.",
    )
    published = None if kvzap is None or fitted else read_kvzap(kvzap, loaded.facts)
    clustering = Clustering(num_centers, shared_centers, seed, max_points)
    builder = StatsBuilder(loaded.facts, clustering, covariance)
    learnt = _Learnt(loaded, FITTED[str(kvzap)] if fitted else None)
    if surrogate and all(documents):
        documents = pieces(documents, loaded.facts.max_position // 2)
    bar = tqdm(total=loaded.facts.num_layers, desc="calibrate", unit="layer", disable=not show_progress)

    def on_queries(layer: int, queries: Tensor) -> None:
        builder.add_layer(layer, queries)
        bar.update()

    firsts = list(accumulate(map(len, documents[:-1]), initial=0))
    is_latent = any(layer.latent for layer in loaded.facts.layers)
    on_keys = None if is_latent else partial(builder.add_keys, firsts=firsts)
    handed_out = inputs_handed_out(loaded.model) if fitted else nullcontext()
    with bar, on_device(loaded.facts.device), handed_out:
        capture_queries(
            loaded, documents, on_queries, on_keys=on_keys, on_reached=learnt.add if surrogate else None
        )
    stats = learnt.added_to(builder.build())
    return stats if published is None else stats.with_kvzap(published)


class _Learnt:
    """Results of repeated documents: a surrogate of a token's importance, head shares and, with kvzap_units,
    weights of hidden states (KVzapFit's units)."""

    def __init__(self, loaded: LoadedModel, kvzap_units: int | None) -> None:
        facts = loaded.facts
        self._grams = list(value_grams(loaded.model, facts))
        self._fit = SurrogateFit(facts)
        self._shares = SharesFit(facts)
        self._kvzap = None if kvzap_units is None else KVzapFit(facts, kvzap_units)

    def add(
        self,
        layer: int,
        document: int,
        keys: Tensor,
        values: Tensor,
        reached: Tensor,
        hidden: Tensor | None,
    ) -> None:
        """OnReached of capture_queries."""
        cut = now(keys.shape[1])
        worth = weighed(reached, values, self._grams[layer])
        self._fit.add(layer, keys[:, :cut], values[:, :cut], needed(worth, cut))
        ever = worth.amax(dim=0)
        self._shares.add(layer, document, ever)
        if self._kvzap is not None:
            assert hidden is not None, f"layer {layer} hands out nothing; the probe saw it do so"
            self._kvzap.add(layer, hidden, ever)

    def added_to(self, stats: QueryStats) -> QueryStats:
        """Add the results to the statistics. Without a repeated document, return them unchanged."""
        if self._shares.is_empty:
            require(
                self._kvzap is None,
                "kvzap is fitted to repeated documents, and none can be repeated: each needs more than "
                f"{2 * NEAR} tokens; pass longer ones.",
            )
            return stats
        surrogate, age = self._fit.build()
        sizes = {"features": self._fit.num_features, "ages": age.shape[-1], "fractions": FRACTIONS}
        stats = replace(
            stats,
            metadata=stats.metadata.model_copy(update=sizes),
            surrogate=surrogate,
            surrogate_age=age,
            head_shares=self._shares.build(),
        )
        return stats if self._kvzap is None else stats.with_kvzap(self._kvzap.build())
