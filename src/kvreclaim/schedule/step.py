"""Values that describe a step: computations, copies, passes, and their results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

PreemptionReason = Literal["decode", "prefill", "itself", "fairness"]
"""Reasons of a preemption: another sequence's next token or prompt needed the blocks, it needed one itself
and was last in order, or its tenant was above its part while another waited."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence computes its tokens first .. first + num_tokens - 1.

    exact: by full attention over slots that are exact, too; otherwise never in the prefix index
    num_drafts: the last tokens, which are drafts; computing them shows how many are accepted
    """

    seq_id: int
    first: int
    num_tokens: int
    exact: bool = True
    num_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sequence has started or resumed, with these tokens found in the prefix index.

    num_loaded: of these, tokens loaded from the host
    resumed:    it continues where it was parked: nothing is recomputed
    snapshot:   id of the snapshot that it is a fork of; unparked: this was loaded for it
    """

    seq_id: int
    num_hit: int
    num_loaded: int = 0
    resumed: bool = False
    snapshot: int | None = None
    unparked: bool = False


@dataclass(frozen=True, slots=True)
class Preempted:
    """A sequence has lost its blocks and waits. parked: their content and its side state are kept"""

    seq_id: int
    reason: PreemptionReason
    parked: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The work of one step, in this order, each executed once.

    preempted: sequences with side state to drop, or to keep aside
    failed:    sequences that could not be scheduled, with the error: their requests end
    parked:    snapshots with side state to keep aside; dropped: to forget
    swap_out:  (block, host slot), moved first
    swap_in:   (host slot, block), moved next
    copies:    (source, target) blocks, copied together before anything is written; no block is both, and
               no source is allocated before the step is done
    fresh:     blocks taken for the rows, still empty
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

    computed: ids of the sequences with computed tokens and finite logits, in order
    tokens:   sampled tokens that the scheduler is to append
    num_accepted: tokens of a row that count, by seq_id; all of them where it has no entry
    """

    computed: tuple[int, ...]
    tokens: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    num_accepted: Mapping[int, int] = field(default_factory=dict)
