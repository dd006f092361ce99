"""Who runs next. Integers only; the memory manager is asked before it is told."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field

from kvreclaim.config import EngineConfig
from kvreclaim.engine.core.admission import Lengths, slots_needed
from kvreclaim.engine.core.due import decode_cap, first_compaction, tokens_until_compaction
from kvreclaim.engine.core.outputs import EngineTotals, PreemptionReason
from kvreclaim.engine.core.request import Sequence
from kvreclaim.engine.signals.signals import first_hit_limit
from kvreclaim.memory.manager import Growth, MemoryManager

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A sequence that computes its next num_tokens known tokens in this step."""

    seq: Sequence
    num_tokens: int
    growth: Growth


@dataclass(slots=True, eq=False)
class _Step:
    """A step in the making. budget: tokens that may still be added; lost: ids of preempted sequences."""

    budget: int
    chosen: dict[int, Scheduled] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def add(self, item: Scheduled) -> None:
        self.chosen[item.seq.seq_id] = item
        self.budget -= item.num_tokens

    def lose(self, seq: Sequence) -> None:
        self.lost.add(seq.seq_id)
        dropped = self.chosen.pop(seq.seq_id, None)
        self.budget += dropped.num_tokens if dropped else 0


@dataclass(frozen=True, slots=True)
class Listener:
    """Who is told what the scheduler does to a sequence.

    freed:  its id; it has just lost its blocks
    failed: scheduling it raised this error; its request must be ended
    """

    freed: Callable[[int], None]
    failed: Callable[[Sequence, Exception], None]


class Scheduler:
    """Decodes before prefill chunks; who comes first among them, and who is preempted, says the policy.

    fcfs:     by arrival. The last one admitted is preempted first.
    priority: by priority, the lowest number first, then by arrival. The last in this order is preempted
              first, when a running sequence needs blocks. Who waits preempts nobody, however important: it
              is admitted before all less important ones as soon as there is room (as in vLLM).

    A preempted sequence loses its blocks, keeps its tokens and waits in front of all others of its priority.
    """

    def __init__(
        self, config: EngineConfig, memory: MemoryManager, totals: EngineTotals, listener: Listener
    ) -> None:
        self.config = config
        self.memory = memory
        self.totals = totals
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._listener = listener
        self._by_priority = config.scheduling_policy == "priority"

    def add(self, seq: Sequence) -> None:
        if self._by_priority:
            insort(self.waiting, seq, key=_rank)
        else:
            self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence wherever it is and return its blocks."""
        if seq in self.running:
            self._free(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def schedule(self) -> list[Scheduled]:
        """The sequences of the next step, room for their tokens included. Empty: nothing can run."""
        step = _Step(self.config.max_num_batched_tokens)
        for seq in sorted(self.running, key=self._turn):
            if step.budget == 0:
                break
            if seq.seq_id not in step.lost and seq.finish_reason is None:
                try:
                    self._continue(seq, step)
                except Exception as error:
                    self._listener.failed(seq, error)
        while not step.lost and step.budget > 0 and self.waiting:
            seq = self.waiting[0]
            try:
                if not self._admit(seq, step):
                    break
            except Exception as error:
                self._listener.failed(seq, error)
        return [item for item in step.chosen.values() if item.seq.finish_reason is None]

    def _turn(self, seq: Sequence) -> tuple[bool, tuple[int, ...]]:
        """Its place in the order in which running sequences take tokens of a step."""
        return _is_prefill(seq), _rank(seq) if self._by_priority else ()

    def _continue(self, seq: Sequence, step: _Step) -> None:
        """Let a running sequence compute its next tokens, at the expense of others if it must be."""
        num_tokens = self._chunk(seq, step.budget)
        while not self.memory.can_grow(seq.seq_id, num_tokens):
            victim = max(self.running, key=_rank) if self._by_priority else self.running[-1]
            step.lose(victim)
            self._preempt(victim, seq)
            if victim is seq:
                return
        step.add(Scheduled(seq, num_tokens, self.memory.grow(seq.seq_id, num_tokens)))

    def _chunk(self, seq: Sequence, budget: int) -> int:
        limit = tokens_until_compaction(seq, self.config.max_num_batched_tokens)
        return min(seq.num_uncomputed, budget, limit)

    def _admit(self, seq: Sequence, step: _Step) -> bool:
        """Let the first that waits begin. Returns: whether there was room."""
        if sum(other.seats for other in self.running) + seq.seats > self.config.max_num_seqs:
            return False
        request = seq.request
        most_hit, most_held = self._limits(seq)
        match = self.memory.match_prefix(seq.keys, max_tokens=most_hit)
        needed = max(1, most_held - match.num_tokens) + self._known_growth()
        if not self.memory.can_admit(match, needed):
            return False
        self.memory.admit(seq.seq_id, match, priority=request.priority)
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.num_computed = match.num_tokens
        if not request.cached_tokens_known:
            request.metrics.num_cached_tokens = match.num_tokens
            request.cached_tokens_known = True
        num_tokens = self._chunk(seq, step.budget)
        step.add(Scheduled(seq, num_tokens, self.memory.grow(seq.seq_id, num_tokens)))
        return True

    def _known_growth(self) -> int:
        """Slots that running sequences will still take and whose number is known: up to the next pass of
        those whose blocks then come back. Admitting into them would only preempt somebody soon."""
        size = self.memory.block_size
        growth = 0
        for seq in self.running:
            compressor = seq.request.compressor
            if compressor is not None and compressor.bounded:
                peak = min(seq.request.max_len, decode_cap(compressor))
                held = len(self.memory.table(seq.seq_id).block_ids)
                growth += max(0, -(-peak // size) - held) * size
        return growth

    def _limits(self, seq: Sequence) -> tuple[int, int]:
        """(tokens that a prefix hit may cover, slots to hold before decoding begins anew)."""
        known = len(seq.token_ids)
        hit = known if seq.request.scores is None else seq.num_prompt - 1
        if seq.request.lacks_prompt_logprobs:
            hit = 0
        compressor = seq.request.compressor
        if compressor is None or not compressor.way.evicts:
            return hit, known
        first = first_compaction(compressor, seq.num_prompt, self.config.max_num_batched_tokens)
        hit = hit if first is None else min(hit, first_hit_limit(compressor, first))
        return hit, slots_needed(Lengths(seq.num_prompt, known), compressor, self.config)

    def _free(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.memory.free(seq.seq_id)
        self._listener.freed(seq.seq_id)

    def _preempt(self, victim: Sequence, needy: Sequence) -> None:
        """Take a sequence's blocks for one that needs some, itself maybe."""
        reason: PreemptionReason = "prefill" if _is_prefill(needy) else "decode"
        if victim is needy:
            reason = "itself"
        logger.info(
            "request %s (output %d, priority %d) is preempted for request %s (priority %d), reason %s: "
            "%d of %d blocks in use, %d tokens to compute again",
            victim.request.request_id,
            victim.index,
            victim.request.priority,
            needy.request.request_id,
            needy.request.priority,
            reason,
            self.memory.pool.num_in_use,
            self.memory.pool.num_blocks,
            victim.num_computed,
        )
        self._free(victim)
        victim.reset()
        victim.request.metrics.preemptions += 1
        self.totals.preemptions[reason] += 1
        if self._by_priority:
            insort(self.waiting, victim, key=_rank)
        else:
            self.waiting.insert(0, victim)


def _rank(seq: Sequence) -> tuple[int, ...]:
    """Its place by importance and arrival; the outputs of a request stand together."""
    return *seq.request.rank, seq.index


def _is_prefill(seq: Sequence) -> bool:
    return seq.num_uncomputed > 1
