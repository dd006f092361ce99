"""The worker on CPUs. vLLM's own has to be the first module of its workers that a process imports."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from kvreclaim.integrations.vllm.entry.centring import CentringHooks
from kvreclaim.integrations.vllm.entry.worker_hooks import WorkerHooks


class ReclaimCPUWorker(WorkerHooks, CPUWorker):
    """vLLM's worker on a CPU, with compression."""


class CentringCPUWorker(CentringHooks, CPUWorker):
    """vLLM's worker on a CPU, with centred keys and without compression."""
