"""The worker on GPUs."""

from __future__ import annotations

from vllm.v1.worker.gpu_worker import Worker

from kvreclaim.integrations.vllm.entry.centring import CentringHooks
from kvreclaim.integrations.vllm.entry.worker_hooks import WorkerHooks


class ReclaimWorker(WorkerHooks, Worker):
    """vLLM's worker on a GPU, with compression."""


class CentringWorker(CentringHooks, Worker):
    """vLLM's worker on a GPU, with centred keys and without compression."""
