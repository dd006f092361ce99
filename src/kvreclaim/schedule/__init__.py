"""The scheduler: which sequences and passes run, in which blocks. Integers only; the clock is passed in."""

from kvreclaim.schedule.budget.account import Account
from kvreclaim.schedule.budget.compaction import Pass
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.scheduler import Scheduler
from kvreclaim.schedule.sequence import ScheduledSequence, Status
from kvreclaim.schedule.step import Admitted, Preempted, Row, StepDone, StepPlan

__all__ = [
    "Account",
    "Admitted",
    "EvictionMethod",
    "Footprint",
    "Pass",
    "Preempted",
    "Row",
    "ScheduledSequence",
    "Scheduler",
    "Status",
    "StepDone",
    "StepPlan",
]
