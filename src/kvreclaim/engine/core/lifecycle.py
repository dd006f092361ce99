"""How requests and their sequences begin and end, whatever ends them; a mistake stays with its request."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvreclaim.config import EngineConfig
from kvreclaim.engine.answer.detokenizer import Detokenizer
from kvreclaim.engine.core.outputs import EngineTotals, FinishReason
from kvreclaim.engine.core.request import Request, Sequence
from kvreclaim.engine.core.scheduler import Listener, Scheduler
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.prefix.keys import BlockKeys
from kvreclaim.model.loader import LoadedModel

logger = logging.getLogger(__name__)


class Lifecycle:
    """The requests in flight. What a sequence holds is given back here and nowhere else.

    requests: by id, those with a sequence that has not ended
    touched:  by id, those that got tokens or ended since the engine last emptied it
    """

    def __init__(
        self, loaded: LoadedModel, config: EngineConfig, memory: MemoryManager, signals: Signals
    ) -> None:
        self.loaded = loaded
        self.memory = memory
        self.signals = signals
        self.totals = EngineTotals()
        self.requests: dict[str, Request] = {}
        self.touched: dict[str, Request] = {}
        listener = Listener(freed=signals.drop, failed=self._scheduling_failed)
        self.scheduler = Scheduler(config, memory, self.totals, listener)
        self._seq_ids = itertools.count()

    def begin(self, request: Request, token_ids: list[int]) -> None:
        """Queue the request with its first sequence."""
        keys = self.memory.keys(token_ids, request.params.cache_salt)
        seq = self._new_sequence(request, 0, token_ids, keys)
        seq.waits_for_fork = request.params.n > 1
        self.requests[request.request_id] = request
        self.scheduler.add(seq)

    def fork(self, parent: Sequence) -> list[Sequence]:
        """The siblings of a prompt that has just been computed; they share all its blocks."""
        parent.waits_for_fork = False
        request = parent.request
        children = []
        for index in range(1, request.params.n):
            token_ids = list(parent.token_ids)
            child = self._new_sequence(request, index, token_ids, parent.keys.fork(token_ids))
            child.num_computed = parent.num_computed
            child.state = parent.state.fork()
            self.memory.fork(parent.seq_id, child.seq_id, child.keys)
            self.scheduler.running.append(child)
            self.signals.fork(parent.seq_id, child.seq_id)
            children.append(child)
        return children

    @contextmanager
    def contained(self, request: Request, doing: str) -> Iterator[None]:
        """Whatever is raised within ends this request alone. doing: for the log, e.g. "compressing"."""
        try:
            yield
        except Exception as error:
            self.fail(request, error, doing)

    def fail(self, request: Request, error: Exception, doing: str) -> None:
        """End a request with reason "error"; the log says which one and where, and nothing of its text."""
        logger.error("%s request %s failed", doing, request.request_id, exc_info=error)
        request.error = f"{type(error).__name__}: {error}"
        self.end_request(request, "error")

    def end_request(self, request: Request, reason: FinishReason) -> None:
        """End its sequences that have not ended."""
        for seq in request.sequences:
            if seq.finish_reason is None:
                self.end(seq, reason)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """Return its blocks; the request leaves with its last sequence."""
        request = seq.request
        if seq.detokenizer is not None and reason != "error":
            try:
                seq.detokenizer.finish()
            except Exception as error:
                self.fail(request, error, "ending the text of")
                return
        seq.finish_reason = reason
        self.touched[request.request_id] = request
        self.totals.finished[reason] = self.totals.finished.get(reason, 0) + 1
        if request.finished:
            request.metrics.e2e_s = time.perf_counter() - request.arrival_s
            self.requests.pop(request.request_id, None)
        try:
            self.scheduler.remove(seq)
        except Exception:
            logger.exception("returning the blocks of request %s failed", request.request_id)

    def _scheduling_failed(self, seq: Sequence, error: Exception) -> None:
        self.fail(seq.request, error, "scheduling")

    def _new_sequence(self, request: Request, index: int, token_ids: list[int], keys: BlockKeys) -> Sequence:
        params, tokenizer = request.params, self.loaded.tokenizer
        generator = None
        if params.temperature > 0:
            generator = torch.Generator().manual_seed((request.seed * 65_537 + index) % 2**63)
        detokenizer = Detokenizer(tokenizer, params.stop_strings) if tokenizer is not None else None
        seq = Sequence(next(self._seq_ids), request, index, token_ids, keys, generator, detokenizer)
        request.sequences.append(seq)
        return seq
