"""Optional features of the engine: offload, recall, chunk reuse, drafts, verification.

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
    """What a sequence was to begin with is not there: it begins without."""


class Extension:
    """A feature that overrides the methods it needs; these do nothing.

    A HitLostError of admitted lets the sequence wait again. What else admitted, forked, compressed or
    processed raises ends the request with reason "error". expand, attend and attended are tried
    again for each sequence of the step alone, and end the request for which they fail. prepare ends all
    requests of the step. A failure of ending or released is logged. The other methods must not raise.

    rank: extensions are called from the lowest to the highest
    """

    rank: ClassVar[int] = 0

    def begin_step(self) -> None:
        """Before a step is scheduled. May queue requests."""

    def added(self) -> None:
        """A request has been queued."""

    def idle(self) -> bool:
        """Nothing can run. Whether the extension has waited for something that may change that."""
        return False

    def preempted(self, seq: Seq, *, parked: bool) -> None:
        """The plan takes a sequence's blocks. parked: their content will be kept."""

    def planned(self, plan: StepPlan) -> None:
        """A step has been planned; its victims are known, and nobody has begun yet."""

    def admitted(self, seq: Seq, begun: Admitted) -> None:
        """The plan lets a sequence begin, or go on where it was parked."""

    def begun(self, plan: StepPlan) -> None:
        """All that the plan admits have begun."""

    def prepare(self, plan: StepPlan) -> None:
        """Once for each plan, before its blocks are copied or written. May move blocks."""

    def expand(self, step: list[Scheduled]) -> list[Scheduled]:
        """Before a forward pass: the runs of tokens to compute, at least one for each item, in their order. A
        pass that fails is tried again from here."""
        return step

    def attend(self, runs: list[Scheduled], batch: AttentionBatch | None) -> Sequence[AttentionHook]:
        """Return what sees each layer's attention call, after its keys were written and before it attends.
        batch: None where the cache lies in host memory."""
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
        """Behind the step: set draft_ids of sequences for the next one."""

    def end_step(self, stats: StepStats) -> None:
        """The step's figures."""

    def forked(self, parent: Seq, child: Seq) -> None:
        """A child begins with all that its parent has."""

    def lost(self, seq: Seq) -> None:
        """Drop the state of a parked sequence: it may not have arrived, and is computed again."""

    def unmoved(self, plan: StepPlan) -> None:
        """Preparing the plan's blocks has failed: nobody knows what they hold."""

    def invalidated(self, seq: Seq) -> None:
        """Forget what a sequence's blocks hold: it may be wrong, and nobody may find it any more."""

    def ending(self, seq: Seq) -> None:
        """A sequence ends, not by an error, and holds its blocks for the last time."""

    def reset(self, seq_id: int) -> None:
        """Nothing of a sequence is kept: it is computed again from its tokens."""

    def released(self, seq_id: int) -> None:
        """A sequence has ended, or is gone for good."""

    def describe(self) -> str:
        """For the line that the engine logs at its start; empty: nothing."""
        return ""

    def close(self) -> None:
        """The engine ends."""


class Extensions:
    """The extensions of one engine, `ordered` by their ranks; shared by all who call them."""

    def __init__(self) -> None:
        self.ordered: tuple[Extension, ...] = ()

    def add(self, extension: E) -> E:
        """Take an extension in, at the place of its rank."""
        self.ordered = tuple(sorted((*self.ordered, extension), key=lambda each: each.rank))
        return extension
