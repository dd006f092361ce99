"""Which length and tasks come next and when the learning rate falls: numbers only, no torch."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from demo_model.batches import HEAVY_KINDS
from kvreclaim.eval.example import TokenKind

LENGTHS = (128, 192, 256, 384, 640, 1024, 1536, 2048, 3072, 4096)
LEAVE_AT = (0.10, 0.15, 0.19, 0.24, 0.29, 0.35, 0.41, 0.48, 0.57)  # share of the budget
JUDGED = HEAVY_KINDS | {TokenKind.FIRST, TokenKind.MARK}
ENOUGH = 0.95
LAST_ENOUGH = 0.99  # asked of the last length before the rate falls: exact match forgives nothing
SHORTER_SHARE = 0.3
LEAST_WEIGHT = 0.08  # of a task that has no errors left; an error share comes on top
MOST_WEIGHT = 0.25  # however much a task errs, the others must not be forgotten
WARMUP_STEPS = 50
DECAY_SHARE = 0.6
SMOOTHING = 0.9
MIN_STAGE_STEPS = 25

Right = dict[tuple[str, TokenKind], float]
"""(task, kind) -> share of right guesses."""


@dataclass
class Curriculum:
    """Lengthen the examples once the network reads the present ones, then let the rate fall to zero.

    `used` is the share of the budget (tokens or time) that is spent: a stage is left at the latest when
    its share of it is, and the fall begins in time to end with it.
    """

    tasks: Sequence[str]
    step: int = 0
    stage: int = 0
    stage_steps: int = 0
    used: float = 0.0
    decay_begin: float | None = None
    decay_end: float = 1.0
    smoothed: Right = field(default_factory=dict)

    def state_dict(self) -> dict[str, object]:
        """Numbers and strings only, so that a checkpoint loads without unpickling."""
        smoothed = [(task, kind.value, value) for (task, kind), value in self.smoothed.items()]
        return vars(self) | {"tasks": list(self.tasks), "smoothed": smoothed}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Curriculum":
        """The inverse of state_dict."""
        return cls(
            **state | {"smoothed": {(task, TokenKind(kind)): v for task, kind, v in state["smoothed"]}}
        )

    @property
    def num_tokens(self) -> int:
        """Length of the present stage."""
        return LENGTHS[self.stage]

    @property
    def finished(self) -> bool:
        """Whether the rate has reached zero."""
        return self.used >= (1.0 if self.decay_begin is None else self.decay_end)

    def draw_length(self, rng: random.Random) -> int:
        """Return the next batch's length: the present one, or now and then a shorter one."""
        if self.stage and rng.random() < SHORTER_SHARE:
            return rng.choice(LENGTHS[: self.stage])
        return self.num_tokens

    def draw_tasks(self, rng: random.Random, num: int) -> list[str]:
        """Return a task for each row of a batch, more often one that still errs."""
        weights = [min(MOST_WEIGHT, LEAST_WEIGHT + 1 - self.worst(task)) for task in self.tasks]
        return rng.choices(self.tasks, weights, k=num)

    def worst(self, task: str) -> float:
        """Return a task's share of right guesses of its worst judged kind; 0 before the first."""
        shares = [v for (name, kind), v in self.smoothed.items() if name == task and kind in JUDGED]
        return min(shares, default=0.0)

    def lr_scale(self) -> float:
        """Return the share of the full rate for the coming step: warm-up, constant, linear fall."""
        if self.decay_begin is None:
            return min(1.0, (self.step + 1) / WARMUP_STEPS)
        return max(0.0, (self.decay_end - self.used) / (self.decay_end - self.decay_begin))

    def record(self, num_tokens: int, right: Right, used: float) -> bool:
        """Count a step and its accuracies; return whether a new stage begins."""
        self.step += 1
        self.used = used
        if num_tokens == self.num_tokens:
            self.stage_steps += 1
            for key, share in right.items():
                last = self.smoothed.get(key, 0.0)
                self.smoothed[key] = SMOOTHING * last + (1 - SMOOTHING) * share
        is_last = self.stage == len(LENGTHS) - 1
        enough = LAST_ENOUGH if is_last else ENOUGH
        passed = self.stage_steps >= MIN_STAGE_STEPS and all(self.worst(task) > enough for task in self.tasks)
        if not is_last and (passed or used >= LEAVE_AT[self.stage]):
            self.stage, self.stage_steps = self.stage + 1, 0
            self.smoothed = {key: ENOUGH * value for key, value in self.smoothed.items()}
            return True
        if self.decay_begin is None and (passed or used >= 1 - DECAY_SHARE):
            self.decay_begin = used
            self.decay_end = min(1.0, used / (1 - DECAY_SHARE))
        return False
