"""Computes the chunks of a prompt before it is queued, and chooses which of their tokens to recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from kvreclaim.checks import require
from kvreclaim.chunks import ChunkReuse, Chunks
from kvreclaim.engine.attend.chunks import AttentionProbe, ChunkLoader, expanded, has_chunks
from kvreclaim.engine.extension import AttentionHook, Extension
from kvreclaim.engine.lifecycle.lifecycle import Lifecycle
from kvreclaim.engine.request.chunk_reuse import Reuse, ReusedChunk
from kvreclaim.engine.request.request import Request, Scheduled
from kvreclaim.engine.signals.needs import chunk_salt
from kvreclaim.model.capture import call_of_layer
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.rope import rotate
from kvreclaim.sampling_params import SamplingParams

LATE = (0.6, 0.85)
"""Depths, as shares of the layers, between which a question's attention tells what it needs."""
BEFORE = SamplingParams(temperature=0.0, max_tokens=1)
PROOF = 96
OFF = 1e-4


def squared_change(old: Tensor, new: Tensor) -> np.ndarray:
    """[T] fp32: the sum of squares by which values [T, K, Dv] change, as CacheBlend ranks tokens."""
    return (new.float() - old.float()).square().sum((1, 2)).cpu().numpy()


def prove_turning(loaded: LoadedModel, facts: ModelFacts) -> None:
    """Keys of the first layer depend on a token and its place alone: those of a text that stands behind
    another must be those of the text alone, turned.

    Raises: InvalidArgumentError where they are not: the rotation is not what the model does.
    """
    draws = torch.Generator().manual_seed(1)
    before, text = (torch.randint(loaded.vocab_size, (n,), generator=draws).tolist() for n in (83, PROOF))
    there = call_of_layer(loaded, before + text, 0).k[len(before) :]
    alone = call_of_layer(loaded, text, 0).k.transpose(0, 1)
    layout = facts.layers[0].rope
    assert layout is not None, "refused where no rotation is known"
    turned = rotate(alone, torch.full((len(text),), len(before), device=alone.device), layout)
    off = float((turned.transpose(0, 1).float() - there.float()).abs().max() / there.float().abs().max())
    most = max(OFF, 4 * torch.finfo(there.dtype).eps)
    require(
        off <= most,
        f"chunks cannot be reused out of place: rotated keys of {facts.name!r} are off by {off:.2g} of "
        f"what the model computes, and {most:.2g} is allowed; pass the prompt as one text.",
        "prompt",
    )


class ChunkedPrompts(Extension):
    """Computes the chunks of requests, each alone, before it queues the requests, which reuse them.

    add: queues a request for another one: (request id, tokens, params, parent, reuse or None)
    """

    rank = 10

    def __init__(
        self,
        loaded: LoadedModel,
        facts: ModelFacts,
        cache: KVCache,
        backend: Backend,
        lifecycle: Lifecycle,
        add: Callable[[str, list[int], SamplingParams, Request, Reuse | None], Request],
    ) -> None:
        self.loaded, self.facts, self.cache, self.backend = loaded, facts, cache, backend
        self.memory, self.lifecycle, self.add = lifecycle.memory, lifecycle, add
        self._bringer = ChunkLoader(self.memory, cache, backend, facts)
        self._scout: AttentionProbe | None = None
        self._making: list[tuple[Request, Iterator[None]]] = []
        self._is_proven = False

    def reuse_of(self, tokens: list[int], chunks: Chunks, salt: str | None) -> Reuse | None:
        """Return the parts of a prompt that can be reused, or None. The first chunk is served by the prefix
        cache instead. A chunk of a block or less has no whole block after its first token.

        Raises: InvalidArgumentError for a model with keys that cannot be rotated.
        """
        chunks.check(len(tokens))
        size = self.memory.block_size
        spans = [(a, b) for a, b in chunks.spans if a > 0 and b - a > size]
        if not spans or chunks.reuse.select == "all":
            return None
        if not self._is_proven:
            prove_turning(self.loaded, self.facts)
            self._is_proven = True
        lead, salt = min(chunks.reuse.lead, chunks.spans[0][0]), chunk_salt(salt)
        anew = np.ones(len(tokens), dtype=bool)
        for a, b in spans:
            anew[a : a - lead + (lead + b - a - 1) // size * size] = False
        sources = (
            ReusedChunk(a, b, lead, self.memory.keys(tokens[:lead] + tokens[a:b], salt)) for a, b in spans
        )
        return Reuse(tuple(sources), anew)

    def begin(self, request: Request, how: ChunkReuse) -> None:
        """Compute the missing chunks of a request, which is queued in a later step."""
        self._making.append((request, self._made(request, how)))

    def begin_step(self) -> None:
        """Continue requests with finished chunks, and queue those with all of them."""
        waiting = []
        for request, steps in self._making:
            with self.lifecycle.contained(request, "preparing the chunks of"):
                if self._waits(request, steps):
                    waiting.append((request, steps))
        self._making = waiting

    def expand(self, step: list[Scheduled]) -> list[Scheduled]:
        """Copy the tokens that the step reuses, and split the others into runs."""
        self._scout = None
        reusing = [item for item in step if has_chunks(item)]
        for item in reusing:
            self._bringer.bring(item)
        return expanded(step) if reusing else step

    def attend(self, runs: list[Scheduled], batch: AttentionBatch | None) -> list[AttentionHook]:
        if batch is None or not any(has_chunks(item) for item in runs):
            return []
        self._scout = AttentionProbe(runs, batch, self.cache, self.backend)
        return [self._scout.see] if self._scout else []

    def attended(self, step: list[Scheduled]) -> None:
        if self._scout is not None:
            self._scout.commit()
        for item in filter(has_chunks, step):
            self._bringer.bring_last(item)

    def _waits(self, request: Request, steps: Iterator[None]) -> bool:
        """Go on with it as far as it goes."""
        while not request.finished and all(child.finished for child in request.children):
            for child in request.children:
                if child.error is not None:
                    raise RuntimeError(f"a chunk could not be computed: {child.error}")
            request.children.clear()
            if next(steps, self) is self:
                self.lifecycle.queue(request)
                return False
        return not request.finished

    def _made(self, request: Request, how: ChunkReuse) -> Iterator[None]:
        """Wherever it pauses, the request's children have to end first."""
        reuse, tokens = request.reuse, request.prompt_token_ids
        assert reuse is not None, f"request {request.request_id} reuses nothing"
        for number, source in enumerate(reuse.sources):
            missing = (source.stop - source.origin - 1) // self.memory.block_size
            match = self.memory.match_prefix(source.keys)
            self.memory.prefix.refresh(match)
            if len(match.entries) < missing:
                name = f"{request.request_id}/chunk-{number}"
                self.add(name, alone(tokens, source), BEFORE, request, None)
        yield
        yield from self._choose(request, reuse, how)
        for source in reuse.sources:  # what the trial has left free goes first
            self.memory.prefix.refresh(self.memory.match_prefix(source.keys))

    def _choose(self, request: Request, reuse: Reuse, how: ChunkReuse) -> Iterator[None]:
        """Mark what is computed anew though it could be reused. It may pause once, for a trial."""
        tokens = request.prompt_token_ids
        places = np.flatnonzero(~reuse.anew)
        count = round(how.share * len(places))
        if how.select == "none" or not count:
            return
        into = reuse.offsets[places]
        if how.select == "random":
            chosen = np.random.default_rng(how.seed).choice(places, count, replace=False)
        elif how.select == "first":
            chosen = places[np.argsort(into, kind="stable")[:count]]
        else:
            scores = np.ones(len(tokens), np.float32)
            if how.select in ("change", "deviation"):
                scores *= self._deviations(tokens, reuse)
            if how.tries:
                trial = Reuse(reuse.sources, reuse.anew.copy(), np.zeros(len(tokens), np.float32), self._late)
                self.add(f"{request.request_id}/trial", tokens, BEFORE, request, trial)
                yield
                assert trial.scores is not None
                scores *= trial.scores if how.select == "question" else np.sqrt(trial.scores)
                scores[reuse.offsets < how.first] = np.inf
            scores = scores[places]
            chosen = places[np.argsort(-scores, kind="stable")[:count]]
        reuse.anew[chosen] = True

    @property
    def _late(self) -> range:
        first, stop = (int(depth * self.facts.num_layers) for depth in LATE)
        return range(first, max(first + 1, stop))

    def _deviations(self, tokens: list[int], reuse: Reuse) -> np.ndarray:
        """[tokens] fp32: sum of squares by which the values of the second layer change."""
        layer = min(1, self.facts.num_layers - 1)
        whole = call_of_layer(self.loaded, tokens, layer).v
        found = np.zeros(len(tokens), dtype=np.float32)
        for source in reuse.sources:
            span = slice(source.start, source.stop)
            old = call_of_layer(self.loaded, alone(tokens, source), layer).v[source.lead :]
            found[span] = squared_change(old, whole[span])
        return found


def alone(tokens: list[int], source: ReusedChunk) -> list[int]:
    """The text that a chunk of a prompt is computed in."""
    return tokens[: source.lead] + tokens[source.start : source.stop]
