"""The scheduler: plans sequences, passes and blocks. No tensors."""

from kvreclaim.schedule.budget.account import EvictionCounters
from kvreclaim.schedule.budget.compaction import Pass
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.scheduler import Scheduler
from kvreclaim.schedule.sequence import ScheduledSequence, Status
from kvreclaim.schedule.step import Admitted, Preempted, Row, StepDone, StepPlan

__all__ = [
    "Admitted",
    "EvictionCounters",
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
