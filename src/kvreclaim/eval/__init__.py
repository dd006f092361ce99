"""Evaluation tasks, and the comparison of policies at equal bytes."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvreclaim.eval.compare import evaluate as evaluate
    from kvreclaim.eval.plan import EvalPlan as EvalPlan
    from kvreclaim.eval.plan import TaskOptions as TaskOptions
    from kvreclaim.eval.report import EvalReport as EvalReport
    from kvreclaim.eval.report import EvalRow as EvalRow
    from kvreclaim.eval.task import Answer as Answer
    from kvreclaim.eval.task import Item as Item
    from kvreclaim.eval.task import Metric as Metric
    from kvreclaim.eval.task import Task as Task
    from kvreclaim.eval.task import TaskScore as TaskScore

_HOMES = {
    "Answer": "task",
    "EvalPlan": "plan",
    "EvalReport": "report",
    "EvalRow": "report",
    "Item": "task",
    "Metric": "task",
    "Task": "task",
    "TaskOptions": "plan",
    "TaskScore": "task",
    "evaluate": "compare",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    """Import modules that need torch on first use: the demo's generators load without it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvreclaim.eval' has no attribute {name!r}")
    return getattr(import_module(f"kvreclaim.eval.{_HOMES[name]}"), name)
