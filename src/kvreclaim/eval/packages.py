"""Packages of tasks, which are imported when a task needs them."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from kvreclaim.checks import require


def task_package(module: str, task: str, extra: str) -> Any:
    """The module of a package that an extra installs. Raises: InvalidArgumentError without it."""
    package = module.partition(".")[0]
    require(
        find_spec(package) is not None,
        f"task {task} needs the package {package}, which this environment lacks; run pip install "
        f"'kvreclaim[{extra}]'.",
    )
    return import_module(module)
