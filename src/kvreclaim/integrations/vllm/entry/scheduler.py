"""The schedulers that the configuration names: vLLM's two, with compression before each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvreclaim.integrations.vllm.settings import family

if TYPE_CHECKING:
    from kvreclaim.integrations.vllm.v0_32.scheduler_side import SchedulerHooks
else:
    SchedulerHooks = family.module("scheduler").SchedulerHooks


class ReclaimScheduler(SchedulerHooks, Scheduler):
    """Synchronous."""


class AsyncReclaimScheduler(SchedulerHooks, AsyncScheduler):
    """Asynchronous: a step is scheduled while the one before runs."""
