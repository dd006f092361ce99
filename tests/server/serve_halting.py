"""`kvreclaim serve` whose engine halts when every answer has so many tokens, until a file exists: none ends
by itself. Another file has the number of answers that have come so far.

python serve_halting.py GO HALTED NUM_TOKENS serve --port 0 ...
python serve_halting.py GO HALTED NUM_TOKENS child FD
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from kvreclaim.cli.main import app
from kvreclaim.engine.serving import core_process, started
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.server.entry import run

paths = sys.argv[1:4]
go, halted, num_tokens = Path(paths[0]), Path(paths[1]), int(paths[2])
del sys.argv[1:4]
step = EngineCore.step


def step_or_wait(self: EngineCore) -> None:
    outputs = [seq for request in self.engine.requests.values() for seq in request.sequences]
    if go.exists() or any(seq.num_generated < num_tokens for seq in outputs):
        step(self)
    else:
        halted.write_text(str(len(outputs)))
        time.sleep(0.002)


EngineCore.step = step_or_wait  # type: ignore[method-assign]
started.PROGRAM = (__file__, *paths, "child")
run.LAST_BYTES_S = 300  # a machine that is busy writes and reads late
if sys.argv[1] == "child":
    del sys.argv[1]
    core_process.main()
    os._exit(0)
app()
