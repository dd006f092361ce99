"""`kvreclaim serve` whose engine halts at a step of every answer, until a file exists: none ends by itself.

python serve_halting.py FILE NUM_TOKENS serve --port 0 ...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from kvreclaim.cli.main import app
from kvreclaim.engine.face.async_engine import AsyncEngine
from kvreclaim.server import run

go, num_tokens = Path(sys.argv.pop(1)), int(sys.argv.pop(1))
step = AsyncEngine._step


def step_or_wait(self: AsyncEngine, engine: Any) -> None:
    outputs = [seq for request in engine.requests.values() for seq in request.sequences]
    if go.exists() or any(seq.num_generated < num_tokens for seq in outputs):
        step(self, engine)
    else:
        time.sleep(0.002)


AsyncEngine._step = step_or_wait  # type: ignore[method-assign]
run.LAST_BYTES_S = 300  # a machine that is busy writes and reads late
app()
