"""Optional features of the engine: offload, chunk reuse, drafts, verification.

An engine calls its extensions at fixed points of a step, in the order of their rank. An engine without a
feature has no extension for it and runs none of its code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from torch import Tensor

from kvreclaim.engine.request.outputs import StepStats
from kvreclaim.engine.request.request import Scheduled
from kvreclaim.engine.request.request import Sequence as Seq
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.schedule.budget.compaction import Pass
from kvreclaim.schedule.step import Admitted, StepPlan

AttentionHook = Callable[[AttentionCall], None]
E = TypeVar("E", bound="Extension")


class HitLostError(Exception):
    """The prefix hit of a sequence is missing, so the sequence begins without it."""


class Extension:
    """A feature that overrides the methods it needs. The default methods do nothing.

    A HitLostError of admitted returns the sequence to the queue. Other errors of admitted, forked, compressed
    and processed end the request with reason "error". expand, attend and attended are retried for each
    sequence of the step alone, and end the request for which they fail. An error of prepare ends all requests
    of the step. A failure of ending or released is logged. The other methods must not raise.

    rank: extensions are called from the lowest to the highest
    """

    rank: ClassVar[int] = 0

    def begin_step(self) -> None:
        """Called before a step is scheduled. May queue requests."""

    def added(self) -> None:
        """A request has been queued."""

    def idle(self) -> bool:
        """Called when nothing can run. Return whether the extension has waited for an event that may help."""
        return False

    def preempted(self, seq: Seq, *, parked: bool) -> None:
        """The plan takes a sequence's blocks. parked: their content will be kept."""

    def planned(self, plan: StepPlan) -> None:
        """A step has been planned. Its victims are known, and no sequence has begun yet."""

    def admitted(self, seq: Seq, begun: Admitted) -> None:
        """The plan admits a sequence, which begins or resumes after parking."""

    def begun(self, plan: StepPlan) -> None:
        """All admitted sequences of the plan have begun."""

    def prepare(self, plan: StepPlan) -> None:
        """Called once per plan, before its blocks are copied or written. May move blocks."""

    def expand(self, step: list[Scheduled]) -> list[Scheduled]:
        """Return the runs of tokens that a forward pass computes, at least one per item, in their order. A
        failed pass is retried from here."""
        return step

    def attend(self, runs: list[Scheduled], batch: AttentionBatch | None) -> Sequence[AttentionHook]:
        """Return hooks for each layer's attention call, after its keys are written and before it attends.
        batch: None for a cache in host memory."""
        return ()

    def attended(self, step: list[Scheduled]) -> None:
        """All layers have been computed."""

    def abandoned(self) -> None:
        """The forward pass has failed."""

    def computed(self, sequences: list[Seq]) -> None:
        """The step's tokens have been committed; none has been drawn yet."""

    def compressed(self, seq: Seq, done: Pass[int], kept: Tensor | HeadRows) -> None:
        """A pass over a sequence has been run. kept: the slots that stay, as in CompactionResult."""

    def processed(self, seq: Seq) -> None:
        """A sequence's tokens have been drawn and its pass, if one was due, has been run."""

    def propose(self, running: Sequence[Seq]) -> None:
        """Set draft_ids of sequences for the next step, at the end of a step."""

    def end_step(self, stats: StepStats) -> None:
        """The step has ended with these figures."""

    def forked(self, parent: Seq, child: Seq) -> None:
        """A child has been forked, and begins with its parent's tokens and state."""

    def lost(self, seq: Seq) -> None:
        """Drop the state of a parked sequence: its transfer may have failed, so it is recomputed."""

    def unmoved(self, plan: StepPlan) -> None:
        """Preparing the plan's blocks has failed, so their contents are unknown."""

    def invalidated(self, seq: Seq) -> None:
        """Forget the contents of a sequence's blocks, which may be wrong, so that no request finds them."""

    def ending(self, seq: Seq) -> None:
        """A sequence is about to end without an error. It still holds its blocks."""

    def reset(self, seq_id: int) -> None:
        """Drop all state of a sequence, which is recomputed from its tokens."""

    def released(self, seq_id: int) -> None:
        """A sequence has ended."""

    def describe(self) -> str:
        """Return the extension's part of the engine's log line at the start; empty: nothing."""
        return ""

    def close(self) -> None:
        """The engine ends."""


class Extensions:
    """The extensions of one engine, `ordered` by their ranks. All callers share this object."""

    def __init__(self) -> None:
        self.ordered: tuple[Extension, ...] = ()

    def add(self, extension: E) -> E:
        """Insert an extension by its rank."""
        self.ordered = tuple(sorted((*self.ordered, extension), key=lambda each: each.rank))
        return extension
