"""Reuses chunks of a prompt that were computed once, alone, at other positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import ClassVar

from kvreclaim.chunks import ChunkReuse, Chunks
from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.features.chunks.prompts import ChunkedPrompts
from kvreclaim.engine.request.chunk_reuse import Reuse
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.request import Sequence as Seq
from kvreclaim.engine.request.spec import RequestSpec, footprint_of
from kvreclaim.engine.step.engine import Engine
from kvreclaim.engine.step.request_factory import check_length
from kvreclaim.refusals import Feature
from kvreclaim.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TrialChunks(Chunks):
    """Chunks of a prompt that is computed to try their reuse; `trial` takes the scores."""

    trial: Reuse | None = None


class ReusedChunks(RequestFeature):
    """The option is where a prompt's chunks are; a request with chunks is queued when they are computed."""

    option = Chunks
    is_made = True  # from the pieces of a prompt
    prompt_keys: ClassVar = {"chunk_reuse": ChunkReuse}
    usage: ClassVar = {"reused_tokens": attrgetter("num_reused_tokens")}
    measured: ClassVar = {"chunks": (None,)}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @cached_property
    def prompts(self) -> ChunkedPrompts:
        """Computes chunks and brings them, from the first request on that has some."""
        engine, facts = self._engine, self._engine.groups.facts
        chunked = ChunkedPrompts(
            engine.loaded, facts, engine.cache, engine.backend, engine.lifecycle, self._add_child
        )
        return engine.extensions.add(chunked)

    def conditions(self, spec: RequestSpec) -> Mapping[Feature, object]:
        return {Feature.CHUNK_REUSE: not isinstance(spec.option(Chunks), TrialChunks)}

    def claim(self, draft: RequestDraft) -> None:
        chunks, prompt, config = draft.spec.option(Chunks), draft.spec.prompt_token_ids, self._engine.limits
        assert chunks is not None, "the feature is on"
        if isinstance(chunks, TrialChunks):
            reuse = chunks.trial
        else:
            reuse = self.prompts.reuse_of(list(prompt), chunks, draft.spec.cache_salt)
            draft.queued = reuse is None
        if reuse is None:
            return
        if chunks.reuse.tries and not draft.queued:
            whole = footprint_of(None, config, prompt, self._engine.groups)
            check_length(len(prompt), len(prompt), whole, config, policy="full")
        draft.state[Reuse] = reuse
        draft.footprint = replace(draft.footprint, shareable_until=reuse.sources[0].start)

    def begin(self, seq: Seq) -> None:
        chunks = seq.request.spec.option(Chunks)
        if seq.request.reuse is not None and chunks is not None and not isinstance(chunks, TrialChunks):
            self.prompts.begin(seq.request, chunks.reuse)

    def report(self, request: Request, metrics: RequestMetrics) -> None:
        if request.reuse is not None:
            metrics.num_reused_tokens = int((~request.reuse.anew).sum())
            metrics.num_gone_tokens = request.reuse.num_gone

    def _add_child(
        self, name: str, tokens: list[int], params: SamplingParams, parent: Request, trial: Reuse | None
    ) -> Request:
        """Queue a request that another one waits for, with the same priority and tenant."""
        spec = RequestSpec(
            request_id=name,
            prompt_token_ids=tokens,
            params=params,
            priority=parent.spec.priority,
            tenant=parent.spec.tenant,
            cache_salt=parent.spec.cache_salt,
            options={} if trial is None else {Chunks: TrialChunks((), trial=trial)},
        )
        child = self._engine.add(spec, parent=parent)
        parent.children.append(child)
        return child
