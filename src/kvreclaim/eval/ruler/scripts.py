"""Runs RULER's scripts one after another: `python -m kvreclaim.eval.ruler.scripts < command_lines.json`.

They read sys.argv and seed global random numbers, so they need a process of their own. One process runs them
all, because importing transformers takes longer than their work. It prints a line after each; the scripts'
output goes to stderr.
"""

from __future__ import annotations

import faulthandler
import json
import runpy
import sys
from pathlib import Path

LIMIT_S = 600
"""Timeout in seconds: a script that finds no row short enough never ends."""


def main() -> None:
    ended = sys.stdout
    sys.stdout = sys.stderr
    for command in json.load(sys.stdin):
        sys.argv, sys.path[0] = command, str(Path(command[0]).parent)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        runpy.run_path(command[0], run_name="__main__")
        print("ended", file=ended, flush=True)
    faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main()
