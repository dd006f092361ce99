"""`python -m kvreclaim.integrations.vllm.entry.calibrating`: statistics of the model that vLLM will load.

A process of its own frees all memory of calibration, on every device, when it ends. It reads JSON: arguments
of LLM, and whether it may calibrate. It prints to stderr how long that takes, and ends stdout with a line of
JSON: the file (null: there is none), or the error.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

from kvreclaim.calibrate.statistics import calibrate_at_start
from kvreclaim.engine.api.llm import FOR_CALIBRATION, LLM
from kvreclaim.errors import KVReclaimError


def main() -> int:
    try:
        answer = {"file": _statistics(json.load(sys.stdin))}
    except KVReclaimError as error:
        answer = {"error": str(error)}
    print(f"\n{json.dumps(answer)}")
    return 0


def _statistics(arguments: dict[str, Any]) -> str | None:
    """The file that our own engine would read for this model."""
    log = partial(print, "kvreclaim:", file=sys.stderr, flush=True)
    calibrate = partial(calibrate_at_start, say=log) if arguments.pop("calibrate") else None
    file = LLM(**arguments, **FOR_CALIBRATION, calibrate=calibrate).stats_file
    return os.path.abspath(file) if file.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
