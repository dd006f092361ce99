"""Who runs, which blocks, which passes: integers only, the clock passed in."""

from kvreclaim.schedule.account import Account
from kvreclaim.schedule.footprint import Footprint
from kvreclaim.schedule.scheduler import Scheduler
from kvreclaim.schedule.sequence import Sequence, Status
from kvreclaim.schedule.step import Admitted, Pass, Preempted, Row, StepDone, StepPlan
from kvreclaim.schedule.way import Way

__all__ = [
    "Account",
    "Admitted",
    "Footprint",
    "Pass",
    "Preempted",
    "Row",
    "Scheduler",
    "Sequence",
    "Status",
    "StepDone",
    "StepPlan",
    "Way",
]
