"""A step as values: what is to be computed, copied, compressed, and what has been."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PreemptionReason = Literal["decode", "prefill", "itself", "fairness"]
"""A sequence gave its blocks back for the next token of another, for another's prompt, because it needed one
and was last in line itself, or because its tenant held more than its part and another one waited."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence computes its tokens first .. first + num_tokens - 1.

    exact: by full attention over slots of which this holds, too; else they never enter the prefix index
    num_drafts: the last ones that are only guessed: how many of them stand is found out by computing them
    """

    seq_id: int
    first: int
    num_tokens: int
    exact: bool = True
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence has begun, or begun anew, with so many tokens found in the prefix index.

    num_loaded: of these, tokens that come from the host
    resumed:    it goes on where it was parked: nothing of it is computed again
    snapshot:   id of the snapshot that it is a fork of; unparked: this has come back for it
    """

    seq_id: int
    num_hit: int
    num_loaded: int = 0
    resumed: bool = False
    snapshot: int | None = None
    unparked: bool = False


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence has lost its blocks and waits. parked: what they held is kept, and its side state."""

    seq_id: int
    reason: PreemptionReason
    parked: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, in this order; whoever executes it does each thing once.

    preempted: sequences whose side state is to be dropped, or kept aside
    failed:    sequences that could not be scheduled, with the error: their requests end
    parked:    snapshots whose side state is to be kept aside; dropped: to be forgotten
    swap_out:  (block, host slot), moved before all else
    swap_in:   (host slot, block), moved next
    copies:    (source, target) blocks, copied together before anything is written; no block is both, and
               no source is handed out before the step is done
    fresh:     blocks that have been taken for the rows and hold nothing yet
    rows:      computed in one forward pass, in this order
    """

    rows: tuple[Row, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    fresh: tuple[int, ...] = ()
    admitted: tuple[Admitted, ...] = ()
    preempted: tuple[Preempted, ...] = ()
    failed: tuple[tuple[int, Exception], ...] = ()
    parked: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class StepDone:
    """The results of a plan's rows.

    computed: ids of the sequences whose tokens were computed and whose logits are numbers, in their order
    tokens:   what was drawn, for those whose tokens the scheduler is to append itself
    stand:    of rows with drafts, the leading tokens that the sequence has come to; all of the others stand
    """

    computed: tuple[int, ...]
    tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stand: Mapping[int, int] = field(default_factory=dict)
