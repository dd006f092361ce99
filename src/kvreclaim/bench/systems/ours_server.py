"""`kvreclaim serve` in a process of its own."""

from __future__ import annotations

import os
import sys

from kvreclaim.bench.plans import ServePlan
from kvreclaim.bench.systems.server_process import HOST, ServerProcess, free_port

NAME = "measured"
PROGRAM = "from kvreclaim.cli.main import app; app()"


class KvreclaimServer(ServerProcess):
    """The model of a plan, without prefix caching."""

    def __init__(self, plan: ServePlan) -> None:
        port = free_port()
        options = {
            "model": plan.model,
            "served-model-name": NAME,
            "host": HOST,
            "port": port,
            "dtype": plan.dtype,
            "threads": plan.threads,
            "num-gpu-blocks-override": plan.num_blocks,
            "max-num-seqs": max(plan.streams),
            "quantized-activations": plan.activations,
            "log-format": "text",
        }
        if (compression := plan.policy(plan.compress)) is not None:
            options |= {
                "kv-compression": compression.policy,
                "kv-budget": compression.budget,
                "kv-compression-interval": compression.interval,
                "kv-recent": compression.recent,
            }
        command = [sys.executable, "-c", PROGRAM, "serve", "--no-enable-prefix-caching"]
        command += [] if plan.spread_compression else ["--no-spread-compression"]
        command += [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command += [] if plan.engine_process else ["--no-engine-process"]
        super().__init__(
            "kvreclaim serve", command, os.environ | {"OMP_NUM_THREADS": str(plan.threads)}, port
        )
