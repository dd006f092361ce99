"""Which length comes next and when the learning rate falls: numbers only, no torch."""

import random
from dataclasses import dataclass, field
from typing import Any

from kvreclaim.eval.chain import Kind

LENGTHS = (128, 192, 256, 384, 640, 1024, 1536, 2048)
JUDGED = (Kind.LOOKUP, Kind.FIRST, Kind.CARRY, Kind.RETURN, Kind.RESTORE)
ENOUGH = 0.95
LAST_ENOUGH = 0.98  # asked of the last length before the rate falls: exact match forgives nothing
SHORTER_SHARE = 0.25
WARMUP_STEPS = 50
DECAY_SHARE = 0.22
SMOOTHING = 0.9
MIN_STAGE_STEPS = 25


@dataclass
class Curriculum:
    """Lengthen the examples once the network reads the present ones, then let the rate fall to zero.

    max_steps: the fall begins in time to end here, whatever the accuracy
    """

    max_steps: int
    step: int = 0
    stage: int = 0
    stage_steps: int = 0
    decay_begin: int | None = None
    decay_end: int | None = None
    smoothed: dict[Kind, float] = field(default_factory=dict)

    def state_dict(self) -> dict[str, object]:
        """Numbers and strings only, so that a checkpoint loads without unpickling."""
        return vars(self) | {"smoothed": {kind.value: value for kind, value in self.smoothed.items()}}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Curriculum":
        """The inverse of state_dict."""
        return cls(**state | {"smoothed": {Kind(kind): value for kind, value in state["smoothed"].items()}})

    @property
    def num_tokens(self) -> int:
        """Length of the present stage."""
        return LENGTHS[self.stage]

    @property
    def finished(self) -> bool:
        """Whether the rate has reached zero."""
        return self.decay_end is not None and self.step >= self.decay_end

    def draw_length(self, rng: random.Random) -> int:
        """Return the next batch's length: the present one, or now and then a shorter one."""
        if self.stage and rng.random() < SHORTER_SHARE:
            return rng.choice(LENGTHS[: self.stage])
        return self.num_tokens

    def lr_scale(self) -> float:
        """Return the share of the full rate for the coming step: warm-up, constant, linear fall."""
        if self.decay_begin is None or self.decay_end is None:
            return min(1.0, (self.step + 1) / WARMUP_STEPS)
        return (self.decay_end - self.step) / (self.decay_end - self.decay_begin)

    def record(self, num_tokens: int, right: dict[Kind, float]) -> bool:
        """Count a step and its accuracies; return whether a new stage begins."""
        self.step += 1
        if num_tokens == self.num_tokens:
            self.stage_steps += 1
            for kind, share in right.items():
                last = self.smoothed.get(kind, 0.0)
                self.smoothed[kind] = SMOOTHING * last + (1 - SMOOTHING) * share
        is_last = self.stage == len(LENGTHS) - 1
        passed = self.stage_steps >= MIN_STAGE_STEPS and all(
            self.smoothed.get(kind, 0.0) > (LAST_ENOUGH if is_last else ENOUGH) for kind in JUDGED
        )
        if passed and not is_last:
            self.stage, self.stage_steps, self.smoothed = self.stage + 1, 0, {}
            return True
        if self.decay_begin is None and (passed or self.step >= (1 - DECAY_SHARE) * self.max_steps):
            self.decay_begin = self.step
            self.decay_end = round(self.step / (1 - DECAY_SHARE))
        return False
