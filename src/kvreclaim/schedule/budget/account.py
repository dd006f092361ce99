"""Counters of compression for one sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class EvictionCounters:
    """What compression has done to one sequence: tokens evicted, blocks freed.

    num_evicted:   tokens that each head no longer attends to (equal in every head)
    prompt_slots:  leading live slots that held prompt tokens after the last pass (0 where heads differ)
    last_computed: logical length at the last pass
    blocks_freed, blocks_perfect, compactions: see RequestMetrics
    inherited_evicted: num_evicted at the fork, already counted by the parent
    num_dropped:   of num_evicted, tokens dropped by the caller; dropped_since: of these, since the last pass
    """

    num_evicted: int = 0
    prompt_slots: int = 0
    last_computed: int = 0
    blocks_freed: int = 0
    blocks_perfect: int = 0
    compactions: int = 0
    inherited_evicted: int = 0
    num_dropped: int = 0
    dropped_since: int = 0

    def fork(self) -> EvictionCounters:
        """Return a child's counters: the same evictions, own counts from zero."""
        gone = self.num_evicted
        return EvictionCounters(
            gone,
            self.prompt_slots,
            self.last_computed,
            inherited_evicted=gone,
            num_dropped=self.num_dropped,
            dropped_since=self.dropped_since,
        )

    def fork_as_prompt(self, *, uneven: bool) -> EvictionCounters:
        """Return the counters of a child with all tokens so far as its prompt."""
        child = self.fork()
        child.prompt_slots = 0 if uneven else self.last_computed - self.num_evicted + self.dropped_since
        return child

    def prompt_now(self, num_computed: int, num_prompt: int) -> int:
        """Return the leading live slots with prompt tokens, including those computed since the last pass."""
        since = min(num_prompt, num_computed) - min(num_prompt, self.last_computed)
        return self.prompt_slots + since - self.dropped_since

    @property
    def shift(self) -> int:
        """Position minus slot of tokens since the last pass, if none of these had been dropped."""
        return self.num_evicted - self.dropped_since
