"""What a step does, in the terms that its time depends on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Load:
    """A step.

    num_tokens:    that are computed
    num_seqs:      that compute some
    kv_tokens:     keys that decoding sequences read, summed up
    prefill_pairs: (query, key) pairs of prompts, summed up
    decodes:       sequences that compute their newest token alone
    """

    num_tokens: int = 0
    num_seqs: int = 0
    kv_tokens: int = 0
    prefill_pairs: float = 0.0
    decodes: int = 0


class StepTime(Protocol):
    """Seconds. With only the keys that are read differing, a step's time is affine in them."""

    def step_s(self, load: Load) -> float:
        """Of a step."""
        ...

    def pass_s(self, num_tokens: int, kept: int) -> float:
        """Of compressing a sequence of num_tokens live tokens to `kept`."""
        ...

    def move_s(self, num_blocks: int) -> float:
        """Of moving blocks between device and host."""
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """base + token·T + beyond·max(0, T − knee) + kv·keys + pair·pairs + seq·sequences; the rest is per pass,
    per block. All in seconds."""

    base: float
    token: float = 0.0
    kv: float = 0.0
    pair: float = 0.0
    seq: float = 0.0
    beyond: float = 0.0
    knee: int = 128
    compaction: float = 0.0
    move: float = 0.0

    def step_s(self, load: Load) -> float:
        more = load.num_tokens - self.knee
        return (
            self.base
            + self.token * load.num_tokens
            + (self.beyond * more if more > 0 else 0.0)
            + self.kv * load.kv_tokens
            + self.pair * load.prefill_pairs
            + self.seq * load.num_seqs
        )

    def pass_s(self, num_tokens: int, kept: int) -> float:
        return self.compaction

    def move_s(self, num_blocks: int) -> float:
        return self.move * num_blocks
