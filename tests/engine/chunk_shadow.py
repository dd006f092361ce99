"""An oracle of prompts with chunks: transformers' layers over dense keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvreclaim.engine.request.chunk_reuse import ReusedChunk
from kvreclaim.ops.dense import attend_rows, probabilities


class Mixed:
    """Tokens that are computed attend to themselves and to what was computed before, at the places where it
    stands.

    seen: by layer, [tokens] attention that the tokens from query_start on give, summed over heads and these
    """

    def __init__(self, num_tokens: int, query_start: int | None = None) -> None:
        self.num_tokens, self.query_start = num_tokens, query_start
        self.rows, self.first = torch.arange(0), 0
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.seen: dict[int, torch.Tensor] = {}

    def attend(self, call):
        if call.layer not in self.kept:
            shapes = [(self.num_tokens, *x.shape[1:]) for x in (call.k, call.v)]
            self.kept[call.layer] = tuple(torch.zeros(shape) for shape in shapes)
        for kept, new in zip(self.kept[call.layer], (call.k, call.v), strict=True):
            kept[self.rows] = new
        k, v = (x.transpose(0, 1)[None] for x in self.kept[call.layer])
        columns = torch.arange(self.num_tokens)
        mask = (columns <= self.rows[:, None]) & (columns >= self.first)
        if self.query_start is not None:
            queries = self.rows >= self.query_start
            weights = probabilities(call.q[None, queries], k, mask[None, None, queries], call.softmax)
            self.seen[call.layer] = weights.sum((0, 1, 2))
        return attend_rows(call.q[None], k, v, mask[None, None], call.softmax)[0]

    def run(self, model, ids: Sequence[int], places: Iterable[int], first: int = 0) -> torch.Tensor:
        """The logits of tokens that are computed at these places; they see nothing before `first`."""
        self.rows, self.first = torch.tensor(list(places)), first
        given = torch.tensor(ids)[self.rows]
        places = self.rows[None]
        return model(
            input_ids=given[None], position_ids=places, use_cache=False, logits_to_keep=0, kv_batch=self
        ).logits[0]

    def take(self, other: Mixed, span: slice) -> None:
        """Take over the keys and values of another at these places."""
        for layer, theirs in other.kept.items():
            if layer not in self.kept:
                self.kept[layer] = tuple(torch.zeros_like(x) for x in theirs)
            for kept, new in zip(self.kept[layer], theirs, strict=True):
                kept[span] = new[span]


def with_chunks(
    model, ids: list[int], sources: Sequence[ReusedChunk], query_start: int | None = None
) -> Mixed:
    """Each chunk computed alone, behind what leads it, with both where they would stand."""
    mixed = Mixed(len(ids), query_start)
    for source in sources:
        alone, text = Mixed(len(ids)), list(ids)
        text[source.origin : source.start] = ids[: source.lead]
        alone.run(model, text, range(source.origin, source.stop), first=source.origin)
        mixed.take(alone, slice(source.start, source.stop))
    return mixed


@torch.inference_mode()
def shadow_logits(model, ids: list[int], sources: Sequence[ReusedChunk], anew: np.ndarray) -> torch.Tensor:
    """[computed tokens, V], of a text whose first tokens are a prompt with chunks."""
    places = [*np.flatnonzero(anew), *range(len(anew), len(ids))]
    return with_chunks(model, ids, sources).run(model, ids, places)
