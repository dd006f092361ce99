"""Tasks, and the comparison of policies on them at equal bytes."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvreclaim.eval.compare import evaluate
    from kvreclaim.eval.plan import EvalPlan
    from kvreclaim.eval.report import EvalReport, EvalRow
    from kvreclaim.eval.task import Answer, Item, Metric, Outcome, Task
    from kvreclaim.eval.tasks import TaskOptions

_HOMES = {
    "Answer": "task",
    "EvalPlan": "plan",
    "EvalReport": "report",
    "EvalRow": "report",
    "Item": "task",
    "Metric": "task",
    "Outcome": "task",
    "Task": "task",
    "TaskOptions": "tasks",
    "evaluate": "compare",
}
__all__ = [
    "Answer",
    "EvalPlan",
    "EvalReport",
    "EvalRow",
    "Item",
    "Metric",
    "Outcome",
    "Task",
    "TaskOptions",
    "evaluate",
]


def __getattr__(name: str) -> object:
    """Import what needs torch when it is asked for: the demo's generators load without it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvreclaim.eval' has no attribute {name!r}")
    return getattr(import_module(f"kvreclaim.eval.{_HOMES[name]}"), name)
