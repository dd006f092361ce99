"""Which files of the package run while something is done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import kvreclaim

PACKAGE = Path(kvreclaim.__file__).parent
OFF = (
    "chunks.py",
    "compression",
    "engine/attend/cell_tables.py",
    "engine/attend/chunks.py",
    "engine/attend/prefill.py",
    "engine/attend/reads.py",
    "engine/attend/split.py",
    "engine/attend/streamed.py",
    "engine/attend/windows.py",
    "engine/compact",
    "engine/execute/graphs.py",
    "engine/extension.py",
    "engine/features",
    "engine/offload",
    "engine/sampling/beam_search.py",
    "engine/signals",
    "engine/speculative",
    "engine/request/verify.py",
    "memory/groups/window.py",
    "memory/windows",
    "offload",
    "schedule/budget/ledger.py",
    "schedule/companions.py",
    "schedule/disk_prefixes.py",
    "schedule/fair_share.py",
    "schedule/preemption.py",
    "schedule/snapshots.py",
    "server/anthropic",
    "server/shared/compression.py",
    "server/openai/documents.py",
    "server/admin/tracing.py",
)
"""Files and rooms of features that a plain request does not use."""


class Tracer:
    """Notes the files that run, in threads that begin later too, while `recording`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        path = frame.f_code.co_filename
        if self.is_on and event == "call" and path.startswith(f"{PACKAGE}/"):
            self.files.add(path[len(f"{PACKAGE}/") :])

    @contextmanager
    def recording(self) -> Iterator[set[str]]:
        """The files that run inside the block, once it has ended."""
        self.files, self.is_on = set(), True
        try:
            yield self.files
        finally:
            self.is_on = False


@contextmanager
def traced() -> Iterator[Tracer]:
    """A tracer of this thread, and of those that begin inside the block."""
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        yield tracer
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def off(files: set[str]) -> list[str]:
    """Files of features that are off."""
    return [name for name in sorted(files) if name.startswith(OFF)]
