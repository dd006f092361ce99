"""`kvreclaim serve` whose engine halts when every answer has so many tokens, until a file exists: none ends
by itself. Another file says how many answers have come so far.

python serve_halting.py GO HALTED NUM_TOKENS serve --port 0 ...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from kvreclaim.cli.main import app
from kvreclaim.engine.face.async_engine import AsyncEngine
from kvreclaim.server import run

go, halted, num_tokens = Path(sys.argv.pop(1)), Path(sys.argv.pop(1)), int(sys.argv.pop(1))
step = AsyncEngine._step


def step_or_wait(self: AsyncEngine, engine: Any) -> None:
    outputs = [seq for request in engine.requests.values() for seq in request.sequences]
    if go.exists() or any(seq.num_generated < num_tokens for seq in outputs):
        step(self, engine)
    else:
        halted.write_text(str(len(outputs)))
        time.sleep(0.002)


AsyncEngine._step = step_or_wait  # type: ignore[method-assign]
run.LAST_BYTES_S = 300  # a machine that is busy writes and reads late
app()
