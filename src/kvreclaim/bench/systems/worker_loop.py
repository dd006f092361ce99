"""A script for the interpreter of a peer's environment: `worker_loop.py MODULE:CLASS`, a module in this
folder and its class, with the commands as methods.

One JSON object per line: commands on standard input, answers on a private copy of standard output (the peer's
output goes to standard error). Imports nothing of kvreclaim.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module, _, name = sys.argv[1].partition(":")
    worker = getattr(importlib.import_module(module), name)()
    for line in sys.stdin:
        command = json.loads(line)
        name = command.pop("command")
        try:
            answer = getattr(worker, name)(**command)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
