"""Loading time of a model file, compared with llama.cpp, and its memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing

from rich.table import Table

from kvreclaim.bench.common import Columns, Row, alternate, sheet
from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.plans import LLAMACPP
from kvreclaim.bench.systems.llamacpp_peer import LlamaCpp
from kvreclaim.errors import InvalidArgumentError

OURS = """
import json, sys, time
import psutil, torch
from kvreclaim.engine.api.llm import LLM
torch.set_num_threads(int(sys.argv[3]))
process, started = psutil.Process(), time.perf_counter()
before = process.memory_info().rss
llm = LLM(sys.argv[1], dtype=sys.argv[2], num_blocks=16)
elapsed_s = time.perf_counter() - started
print(json.dumps({"load_s": elapsed_s, "resident_bytes": process.memory_info().rss - before}))
"""


def time_loading(plan: DecodePlan) -> list[Row]:
    """Alternate our loading and llama.cpp's, each in a new process with imports done; the fastest of
    plan.rounds. The file is in the page cache from the second round on."""

    def ours() -> Row:
        given = [str(plan.model), plan.dtype, str(plan.threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(plan.threads)}
        done = subprocess.run(
            [sys.executable, "-c", OURS, *given], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise InvalidArgumentError(f"{plan.model} cannot be loaded: {done.stderr.strip()[-500:]}")
        row: Row = json.loads(done.stdout.splitlines()[-1])
        return row

    def theirs() -> Row:
        name = "llamacpp"
        with closing(
            LlamaCpp(name, plan.setup, python=plan.llamacpp_python, cache_type=LLAMACPP[name])
        ) as system:
            return {key: system.process.facts[key] for key in ("load_s", "resident_bytes")}

    found = alternate({"kvreclaim": ours, "llama.cpp": theirs}, plan.rounds)
    return [
        {"system": name, **min(times, key=lambda row: float(row["load_s"])), "rounds": plan.rounds}
        for name, times in found.items()
    ]


def loading_table(rows: list[Row]) -> Table:
    columns: Columns = {
        "system": "{system}",
        "seconds": "{load_s:.2f}",
        "more memory, MB": lambda row: f"{row['resident_bytes'] / 1e6:,.0f}",
    }
    return sheet("loading", columns, rows)
