"""Who runs next. Integers only; the memory manager is asked before it is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvreclaim.config import EngineConfig
from kvreclaim.engine.admission import Lengths, slots_needed
from kvreclaim.engine.due import decode_cap, first_compaction, tokens_until_compaction
from kvreclaim.engine.request import Sequence
from kvreclaim.engine.signals import first_hit_limit
from kvreclaim.memory.manager import Growth, MemoryManager


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A sequence that computes its next num_tokens known tokens in this step."""

    seq: Sequence
    num_tokens: int
    growth: Growth


class Scheduler:
    """First come, first served; decodes before prefill chunks; the last to come is preempted first.

    A preempted sequence loses its blocks, keeps its tokens and waits in front of all others.

    on_free: told the id of a sequence that has just lost its blocks
    """

    def __init__(
        self, config: EngineConfig, memory: MemoryManager, on_free: Callable[[int], None] = lambda _: None
    ) -> None:
        self.config = config
        self.memory = memory
        self._on_free = on_free
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence wherever it is and return its blocks."""
        if seq in self.running:
            self._free(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def schedule(self) -> list[Scheduled]:
        """The sequences of the next step, room for their tokens included. Empty: nothing can run."""
        chosen: dict[int, Scheduled] = {}
        budget = self.config.max_num_batched_tokens
        preempted = False
        for seq in sorted(self.running, key=_is_prefill):
            if budget == 0:
                break
            if seq not in self.running:
                continue
            num_tokens = self._chunk(seq, budget)
            while not self.memory.can_grow(seq.seq_id, num_tokens):
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                dropped = chosen.pop(victim.seq_id, None)
                budget += dropped.num_tokens if dropped else 0
                if victim is seq:
                    break
            if seq in self.running:
                chosen[seq.seq_id] = Scheduled(seq, num_tokens, self.memory.grow(seq.seq_id, num_tokens))
                budget -= num_tokens
        if not preempted:
            self._admit(chosen, budget)
        return list(chosen.values())

    def _chunk(self, seq: Sequence, budget: int) -> int:
        limit = tokens_until_compaction(seq, self.config.max_num_batched_tokens)
        return min(seq.num_uncomputed, budget, limit)

    def _admit(self, chosen: dict[int, Scheduled], budget: int) -> None:
        seats = sum(seq.seats for seq in self.running)
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if seats + seq.seats > self.config.max_num_seqs:
                return
            most_hit, most_held = self._limits(seq)
            salt = seq.request.params.cache_salt
            match = self.memory.match_prefix(seq.token_ids, cache_salt=salt, max_tokens=most_hit)
            needed = max(1, most_held - match.num_tokens) + self._known_growth()
            if not self.memory.can_admit(match, needed):
                return
            self.waiting.popleft()
            self.memory.admit(seq.seq_id, match, token_ids=seq.token_ids, cache_salt=salt)
            seq.num_computed = match.num_tokens
            if not seq.request.cached_tokens_known:
                seq.request.metrics.num_cached_tokens = match.num_tokens
                seq.request.cached_tokens_known = True
            self.running.append(seq)
            seats += seq.seats
            num_tokens = self._chunk(seq, budget)
            chosen[seq.seq_id] = Scheduled(seq, num_tokens, self.memory.grow(seq.seq_id, num_tokens))
            budget -= num_tokens

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
        compressor = seq.request.compressor
        if compressor is None or not compressor.evicts:
            return hit, known
        first = first_compaction(compressor, seq.num_prompt, self.config.max_num_batched_tokens)
        hit = hit if first is None else min(hit, first_hit_limit(compressor, first))
        return hit, slots_needed(Lengths(seq.num_prompt, known), compressor, self.config)

    def _free(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.memory.free(seq.seq_id)
        self._on_free(seq.seq_id)

    def _preempt(self, seq: Sequence) -> None:
        self._free(seq)
        seq.reset()
        seq.request.metrics.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)


def _is_prefill(seq: Sequence) -> bool:
    return seq.num_uncomputed > 1
